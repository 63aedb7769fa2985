"""Patches that let megatron-core 0.16.1 run where there is no CUDA. Megatron asks for CUDA by name in many places.

Each patch says why it is there and where upstream needs it. The tests compare every ``Site`` with the installed
Megatron, so an upgrade that moves or removes one of them makes a test fail, and the patch is looked at again.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist

__all__ = ["PATCHES", "Patch", "Site", "apply_patches"]

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Site:
    """A line of megatron-core that needs the patch."""

    file: str  # relative to megatron/core
    line: int
    text: str  # what stands there

    @property
    def module(self) -> str:
        return "megatron.core." + self.file.removesuffix(".py").replace("/", ".")


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """One change to torch, with its reason."""

    reason: str
    sites: tuple[Site, ...]
    apply: Callable[[], None]


def _current_device_is_cpu() -> None:
    torch.cuda.current_device = lambda: CPU  # type: ignore[assignment,return-value]


def _synchronize_does_nothing() -> None:
    torch.cuda.synchronize = lambda device=None: None


def _random_state_is_the_cpu_one() -> None:
    from torch.cuda import random as cuda_random

    replacements: dict[str, Callable[..., Any]] = {
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "manual_seed": lambda seed: torch.default_generator.manual_seed(seed),
    }
    for name, replacement in replacements.items():
        setattr(torch.cuda, name, replacement)
        setattr(cuda_random, name, replacement)


def _megatron_random_state_is_the_cpu_one() -> None:
    from megatron.core.tensor_parallel import random as megatron_random

    def get_state(device: Any = None, clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(new_state: torch.Tensor, device: Any = None, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    megatron_random._get_cuda_rng_state = get_state
    megatron_random._set_cuda_rng_state = set_state


class _TorchWithoutCuda(types.ModuleType):
    """What some modules of Megatron see as ``torch``: tensors that they ask for on CUDA are made on the CPU.

    The factories of torch itself must stay as they are: transformers looks for them and, without a word, leaves
    buffers uninitialised when they have been replaced.
    """

    FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "empty_like")

    def __init__(self) -> None:
        super().__init__("torch")
        for name in self.FACTORIES:
            setattr(self, name, _on_cpu(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _factories_make_cpu_tensors() -> None:
    substitute = _TorchWithoutCuda()
    for site in FACTORY_SITES:
        importlib.import_module(site.module).torch = substitute  # type: ignore[attr-defined]


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") == "cuda":
            kwargs["device"] = CPU
        return factory(*args, **kwargs)

    return make


def _tensor_cuda_stays() -> None:
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]


def _tensor_type_answers_megatron_with_cuda() -> None:
    """Only Megatron gets that answer, as the only one who compares it with ``torch.cuda.FloatTensor``."""
    honest = torch.Tensor.type

    @functools.wraps(honest)
    def answer(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = honest(self, *args, **kwargs)
        if args or kwargs or not _caller_is_megatron():
            return result
        return result.replace("torch.", "torch.cuda.", 1)

    torch.Tensor.type = answer  # type: ignore[method-assign,assignment]


def _caller_is_megatron() -> bool:
    frame = inspect.currentframe()
    caller = frame.f_back.f_back if frame is not None and frame.f_back is not None else None
    return caller is not None and str(caller.f_globals.get("__name__")).startswith("megatron.")


def _dispatcher_needs_no_stream() -> None:
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher as Dispatcher

    def to_host(self: Any, point: str, tokens_per_expert: torch.Tensor | None = None) -> torch.Tensor | None:
        for name in ("input_splits", "output_splits"):
            if isinstance(splits := getattr(self, name), torch.Tensor):
                setattr(self, name, splits.tolist())
        return tokens_per_expert

    Dispatcher.cuda_dtoh_stream = "none is needed"
    Dispatcher._maybe_dtoh_and_synchronize = to_host


def _uneven_parts_are_gathered_and_scattered() -> None:
    from megatron.core.tensor_parallel import mappings

    gather, scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gather_uneven(part: torch.Tensor, group: Any, output_split_sizes: Any = None, *rest: Any) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1:
            return cast(torch.Tensor, gather(part, group, output_split_sizes, *rest))
        padded = part.new_zeros(max(output_split_sizes), *part.shape[1:])
        padded[: len(part)] = part
        received = [torch.empty_like(padded) for _ in output_split_sizes]
        dist.all_gather(received, padded, group=group)
        return torch.cat([whole[:rows] for whole, rows in zip(received, output_split_sizes, strict=True)])

    def scatter_uneven(whole: torch.Tensor, group: Any, input_split_sizes: Any = None, *rest: Any) -> torch.Tensor:
        if input_split_sizes is None or group.size() == 1:
            return cast(torch.Tensor, scatter(whole, group, input_split_sizes, *rest))
        total = whole.clone()
        dist.all_reduce(total, group=group)
        return cast(torch.Tensor, total.split(input_split_sizes)[group.rank()].clone())  # type: ignore[no-untyped-call]

    mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim = gather_uneven, scatter_uneven


FACTORY_SITES = (
    Site("optimizer/clip_grads.py", 103, "device='cuda'"),
    Site("utils.py", 1207, 'device="cuda"'),
    Site("optimizer/grad_scaler.py", 15, "device='cuda'"),
    Site("optimizer/optimizer.py", 481, "device='cuda'"),
    Site("pipeline_parallel/schedules.py", 596, 'device="cuda"'),
    Site("dist_checkpointing/exchange_utils.py", 104, 'device="cuda"'),
    Site("dist_checkpointing/strategies/state_dict_saver.py", 204, "device='cuda'"),
)

PATCHES = (
    Patch(
        reason="gradient buffers and communication buffers are made on torch.cuda.current_device()",
        sites=(
            Site("distributed/param_and_grad_buffer.py", 806, "device=torch.cuda.current_device(),"),
            Site("tensor_parallel/layers.py", 552, "device=torch.cuda.current_device()"),
            Site("tensor_parallel/mappings.py", 141, "device=torch.cuda.current_device()"),
            Site("pipeline_parallel/p2p_communication.py", 321, "device=torch.cuda.current_device(),"),
            Site("dist_checkpointing/strategies/state_dict_saver.py", 252, "device=torch.cuda.current_device()"),
        ),
        apply=_current_device_is_cpu,
    ),
    Patch(
        reason="checkpoints and pipeline communication wait for the device",
        sites=(
            Site("dist_checkpointing/strategies/filesystem_async.py", 230, "torch.cuda.synchronize()"),
            Site("pipeline_parallel/p2p_communication.py", 398, "torch.cuda.synchronize()"),
        ),
        apply=_synchronize_does_nothing,
    ),
    Patch(
        reason="the tracker of random states reads and writes those of CUDA",
        sites=(Site("tensor_parallel/random.py", 235, "torch.cuda.get_rng_state()"),),
        apply=_random_state_is_the_cpu_one,
    ),
    Patch(
        reason="forking a random state reads torch.cuda.default_generators, which is empty",
        sites=(
            Site("tensor_parallel/random.py", 66, "torch.cuda.default_generators[idx]"),
            Site("models/common/embeddings/language_model_embedding.py", 145, "get_cuda_rng_tracker().fork()"),
        ),
        apply=_megatron_random_state_is_the_cpu_one,
    ),
    Patch(
        reason='scalars that cross ranks are made with device="cuda"',
        sites=FACTORY_SITES,
        apply=_factories_make_cpu_tensors,
    ),
    Patch(
        reason="the distributed optimizer moves shards to the device before it gathers them",
        sites=(Site("optimizer/distrib_optimizer.py", 1089, "send_tensor.cuda()"),),
        apply=_tensor_cuda_stays,
    ),
    Patch(
        reason="the optimizers tell dtypes apart by the names of CUDA's tensor types",
        sites=(
            Site("optimizer/clip_grads.py", 167, "== 'torch.cuda.FloatTensor'"),
            Site("optimizer/distrib_optimizer.py", 361, "'torch.cuda.BFloat16Tensor'"),
            Site("optimizer/optimizer.py", 671, "'torch.cuda.BFloat16Tensor'"),
        ),
        apply=_tensor_type_answers_megatron_with_cuda,
    ),
    Patch(
        reason="tokens are dispatched to experts by counts that a CUDA stream copies to the host; on a CPU they stay "
        "tensors, which all_to_all_single does not take",
        sites=(
            Site("transformer/moe/token_dispatcher.py", 445, "torch.cuda.Stream()"),
            Site("transformer/moe/token_dispatcher.py", 871, "torch.cuda.current_stream()"),
            Site("transformer/moe/moe_utils.py", 1093, "tensor.is_cuda"),
        ),
        apply=_dispatcher_needs_no_stream,
    ),
    Patch(
        reason="gloo gathers and scatters only parts of equal size, and experts that are cut over ranks get others",
        sites=(
            Site("tensor_parallel/mappings.py", 150, "torch.distributed.all_gather(output_tensor_list"),
            Site("tensor_parallel/mappings.py", 193, "torch.distributed.reduce_scatter(output, input_tensor_list"),
        ),
        apply=_uneven_parts_are_gathered_and_scattered,
    ),
)


@functools.cache
def apply_patches() -> None:
    """Applies every patch, once in a process."""
    for patch in PATCHES:
        patch.apply()
