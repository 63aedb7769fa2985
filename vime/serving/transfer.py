"""What runs inside vLLM's workers: our weight transfer backend "vime".

A worker imports this module because the engine is started with ``--worker-extension-cls``; the import registers the
backend. One update is: announce the plan (checked against the served model before anything is touched), start, one or
more buckets, finish. Finishing proves that the model computes with what was sent.

Written for vLLM 0.32; ``tests/serving`` fails where a later version no longer fits.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from vime.platform import current as platform
from vime.serving.guard import die_with_parent
from vime.weights.expected import ExpectedWeights
from vime.weights.plan import PlanMismatch, TensorSpec, WeightPlan
from vime.weights.shm import open_shared, view

BACKEND = "vime"
PROBED_COLUMNS = 2  # of each matrix, after each update; other ones each time

logger = logging.getLogger("vllm.vime")  # a child of vLLM's own logger, so that it shows in the engine's log


class WeightsDidNotArrive(RuntimeError):
    """After an update the model computes with other values than were sent."""


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """The plan of the updates to come, as ``WeightPlan.to_json`` gives it."""

    plan: list[list[Any]]


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Tensors ``first`` up to ``last`` of the announced plan are at their places in the buffer ``path``.

    The buffer must not change before the update is finished.
    """

    digest: str
    path: str
    first: int
    last: int


@dataclass
class Update:
    """One update under way."""

    sent: dict[str, Tensor] = field(default_factory=dict)  # views of the sender's memory, by name
    loaded: set[str] = field(default_factory=set)  # parameters of the model, by vLLM's names


class VimeTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """Loads weights from a buffer that the trainer shares."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._plan: WeightPlan | None = None
        self._update: Update | None = None
        self._broken = ""
        self._parameters = {name for name, _ in model.named_parameters()}
        self._updates = 0
        self._opened: tuple[str, int, Tensor] | None = None
        unlink_shared_memory()

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Takes a plan. Raises PlanMismatch if the served model expects another one."""
        plan = WeightPlan.from_json(init_info.plan)
        dtype = str(self.model_config.dtype).removeprefix("torch.")
        ExpectedWeights.of_folder(Path(self.model_config.model), dtype).check(plan)
        self._plan = plan

    def start_weight_update(self) -> None:
        """Touches nothing yet, so that an update which is refused leaves the old weights in place."""
        if self._broken:
            raise RuntimeError(f"this engine holds half-loaded weights and must be restarted: {self._broken}")
        if self._plan is None:
            raise RuntimeError("a plan must be announced before a weight update")
        self._update = Update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Like the base class's, which waits for an accelerator even where there is none."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Loads one bucket."""
        plan, update = self._plan, self._update
        assert plan is not None and update is not None, "vLLM calls this only after start_weight_update"
        if update_info.digest != plan.digest:
            raise PlanMismatch("the update follows another plan than the announced one")
        data = self._open(update_info.path, plan.total_bytes)
        specs = plan.tensors[update_info.first : update_info.last]
        self._broken = "an update was not finished"
        if not update.sent:
            forget_expert_kernels(self.model)
            initialize_layerwise_reload(self.model)
        update.sent |= {spec.name: view(data, spec) for spec in specs}  # the proof reads them in the end
        update.loaded |= self.model.load_weights(self._on_device(data, specs)) or set()

    def _open(self, path: str, size: int) -> Tensor:
        """The sender's memory; mapped, and locked for copies to the device, when it is another than the last."""
        if self._opened is None or self._opened[:2] != (path, size):
            data = open_shared(path, size)
            platform().pin(data, read_only=True)
            self._opened = path, size, data
        return self._opened[2]

    def _on_device(self, data: Tensor, specs: Sequence[TensorSpec]) -> Iterator[tuple[str, Tensor]]:
        """The tensors of a bucket where the model is: one copy of all of them, which each process then cuts."""
        if self.device.type == "cpu":
            return ((spec.name, view(data, spec)) for spec in specs)
        start, last = specs[0].offset, specs[-1]
        here = data[start : last.offset + last.nbytes].to(self.device, non_blocking=True)
        return ((spec.name, view(here, dataclasses.replace(spec, offset=spec.offset - start))) for spec in specs)

    def finish_weight_update(self) -> None:
        """Makes the loaded weights those that the model computes with, and proves it.

        Raises:
            PlanMismatch: tensors of the plan were not sent, or parameters of the model not loaded.
            WeightsDidNotArrive: the model computes with something else.
        """
        plan, update = self._plan, self._update
        assert plan is not None and update is not None, "vLLM calls this only after start_weight_update"
        self._check_complete(plan, update)
        finalize_layerwise_reload(self.model, self.model_config)
        refresh_tied_head(self.model)
        self._verify(update)
        self._update = None
        self._broken = ""
        self._updates += 1

    def _check_complete(self, plan: WeightPlan, update: Update) -> None:
        unsent = [spec.name for spec in plan.tensors if spec.name not in update.sent]
        if unsent:
            raise PlanMismatch(f"{len(unsent)} tensors of the plan were not sent, the first is {unsent[0]}")
        unloaded = sorted(self._parameters - update.loaded)
        if unloaded and self.model_config.quantization is None:
            raise PlanMismatch(f"nothing of the plan went into {len(unloaded)} parameters, the first is {unloaded[0]}")

    def _verify(self, update: Update) -> None:
        names: set[str] = set()
        for what, sources, computed, sent in readings(self.model, update.sent, seed=self._updates):
            if not torch.equal(without_subnormals(computed), without_subnormals(sent.to(computed.dtype))):
                raise WeightsDidNotArrive(f"{what} does not compute with what was sent (or it is not finite)")
            names.update(sources)
        logger.info("weight update: the model computes with what was sent, %d of %d", len(names), len(update.sent))

    def shutdown(self) -> None:
        self._plan = self._update = None


def unlink_shared_memory() -> None:
    """Takes the names of the memory through which the processes of a CPU engine talk; vLLM would leave it behind.

    By the time that there is a model every process has mapped it, and it is gone with the last of them.
    """
    for group in (get_tp_group(), get_pp_group()):
        channel: Any = getattr(group.device_communicator, "dist_module", None)
        if hasattr(channel, "group_name"):
            Path(f"/dev/shm/{channel.group_name}_{group.rank_in_group}").unlink(missing_ok=True)


def forget_expert_kernels(model: nn.Module) -> None:
    """Has experts packed anew.

    On a CPU, vLLM packs the weights of experts where it makes their kernel, which it does once. After a layer-wise
    reload the old kernel would take unpacked weights for packed ones, and compute something else without any error.
    """
    if not current_platform.is_cpu():
        return
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod):
            method.moe_kernel = None


def refresh_tied_head(model: nn.Module) -> None:
    """Packs the embedding anew for its use as the output layer.

    On a CPU, vLLM keeps a packed copy of a matrix for multiplication. A layer-wise reload repacks every linear layer,
    but an embedding that is also the output layer only gets its values copied, and the packed copy stays as it was: the
    model then goes on with the old output layer, without any error.
    """
    if not current_platform.is_cpu():
        return
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


Reading = tuple[str, Sequence[str], Tensor, Tensor]
"""(what was read, names of the tensors sent for it, what the model computes with, what was sent)."""


def readings(model: nn.Module, sent: dict[str, Tensor], seed: int) -> Iterator[Reading]:
    """Reads some of every weight back out of the model, the way that the forward pass uses it.

    A matrix times a unit vector is one of its columns, exactly, in any dtype: so even weights which exist only in
    packed form can be compared bit by bit. Vectors (norms, biases) are compared whole. Other modules are left out.
    """
    packed: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    for path, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            sources = _sources(f"{path}.{leaf}", packed, sent)
            if parameter.dim() == 1 and parameter.numel() and sources:
                yield f"{path}.{leaf}", sources, parameter.data.cpu(), torch.cat(_own_parts(module, sources, sent))
        if _multiplies(module):
            sources = _sources(f"{path}.weight", packed, sent)
            if sources:
                yield _column_reading(path, module, sources, _own_parts(module, sources, sent), seed)


def _own_parts(module: nn.Module, sources: Sequence[str], sent: dict[str, Tensor]) -> list[Tensor]:
    """What this process holds of the tensors sent for a module: all of them, or its share under tensor parallelism."""
    tensors = [sent[name] for name in sources]
    if isinstance(module, VocabParallelEmbedding):
        own = module.shard_indices
        return [tensor[own.org_vocab_start_index : own.org_vocab_end_index] for tensor in tensors]
    if isinstance(module, RowParallelLinear):
        return [t if t.dim() == 1 else _share(t, module.tp_rank, module.tp_size, dim=1) for t in tensors]
    if isinstance(module, ColumnParallelLinear):
        # one key/value head may belong to several processes
        replicas = [1] + [getattr(module, "num_kv_head_replicas", 1)] * (len(tensors) - 1)
        pairs = zip(tensors, replicas, strict=True)
        return [_share(t, module.tp_rank // r, module.tp_size // r, dim=0) for t, r in pairs]
    return tensors


def _share(tensor: Tensor, rank: int, size: int, *, dim: int) -> Tensor:
    length = tensor.shape[dim] // size
    return tensor.narrow(dim, rank * length, length)


def without_subnormals(values: Tensor) -> Tensor:
    """Values too small for a normal number as 0, which is how bfloat16 products of CPUs (VDPBF16PS) read them."""
    return values.masked_fill(values.abs() < torch.finfo(values.dtype).tiny, 0)


def _multiplies(module: nn.Module) -> bool:
    method = getattr(module, "quant_method", None)
    if isinstance(module, LinearBase):
        return isinstance(method, UnquantizedLinearMethod)
    return isinstance(module, VocabParallelEmbedding) and hasattr(module, "weight") and module.weight.dim() == 2


def _column_reading(path: str, module: Any, sources: list[str], parts: list[Tensor], seed: int) -> Reading:
    width = parts[0].shape[1]
    columns = [(7919 * seed + 104729 * i) % width for i in range(PROBED_COLUMNS)]
    expected = torch.cat([part[:, columns] for part in parts]).T  # [PROBED_COLUMNS, rows]
    unit = torch.zeros(PROBED_COLUMNS, width, dtype=expected.dtype, device=next(module.parameters()).device)
    unit[range(PROBED_COLUMNS), columns] = 1
    with torch.inference_mode():
        computed = module.quant_method.apply(module, unit, None)
    return f"{path}.weight", sources, computed[:, : expected.shape[1]].cpu(), expected


def _sources(name: str, packed: dict[str, list[str]], sent: dict[str, Tensor]) -> list[str]:
    """The tensors sent for a parameter of the model; none if it has another name there than in the folder."""
    path, _, leaf = name.rpartition(".")
    parent, _, module = path.rpartition(".")
    parts = [".".join(filter(None, (parent, part, leaf))) for part in packed.get(module, [module])]
    if parts == ["lm_head.weight"] and parts[0] not in sent:
        parts = ["model.embed_tokens.weight"]  # tied
    return parts if all(part in sent for part in parts) else []


class VimeWorkerExtension:
    """Mixed into vLLM's worker class; it is here for the import of this module."""


die_with_parent()  # vLLM's engine core would live on without its API server
if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, VimeTransferEngine)
