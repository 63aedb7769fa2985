"""HF weights into Megatron's model and out of it, exactly, whatever the parallel layout.

Both directions follow the rules of ``vime.models.weight_map``. Loading needs no communication: each rank reads the rows
and columns of its own shards, of its own layers and experts. Exporting is collective and brings everything to rank 0.
"""

from __future__ import annotations

import itertools
import re
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from vime.errors import UserError
from vime.models import HfTensor, ModelShape, WeightRule, hf_tensors, weight_map
from vime.models.hf_folder import HfWeights, check_replaceable, export_plan, read_carried, write_hf_folder
from vime.training.gathering import gather

_LOCAL_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_LOCAL_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")


def hf_plan(shape: ModelShape, dtype: torch.dtype) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    """Name, shape and dtype of everything that ``hf_weights`` yields, in its order, for a model in ``dtype``."""
    return [(t.name, t.shape, getattr(torch, t.dtype) if t.dtype else dtype) for t in hf_tensors(shape)]


@torch.no_grad()
def load_hf_weights(
    model_chunks: Sequence[Any], shape: ModelShape, hf_dir: Path | str, *, untouched: Collection[str] = ()
) -> None:
    """Copies the weights of an HF folder into the local shards; exact unless the parameter's dtype is narrower.

    Run it before the optimizer is built, which copies its fp32 main weights from the parameters.

    Args:
        untouched: Megatron names of parameters to leave as they are, e.g. a critic's ``output_layer.weight``.

    Raises:
        UserError: the folder's tensors are not those of the architecture, or the layout cannot be cut that way.
    """
    parameters = global_parameters(model_chunks)
    _check_layout(shape)
    _check_covered(parameters, shape, untouched)
    with HfWeights(Path(hf_dir)) as weights:
        weights.check_model(shape)
        for rule in weight_map(shape):
            for name in (rule.megatron, *rule.copies):
                if name in parameters and name not in untouched:
                    parts = [_read_shard(weights, tensor, rule, parameters[name]) for tensor in rule.hf]
                    parameters[name].copy_(rule.op.merge(parts))


@torch.no_grad()
def hf_weights(
    model_chunks: Sequence[Any], shape: ModelShape, rules: Sequence[WeightRule] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yields every tensor under its HF name, whole and in the dtype that the model has it in, on global rank 0.

    Collective: all ranks must run it to its end (``drain``), though the others get no items. Without parallelism the
    tensors are views of the live parameters, so copy what must outlive the next training step.

    Args:
        rules: of what to yield, the same on all ranks; the whole model unless they are given.
    """
    parameters = global_parameters(model_chunks)
    experts = 0 if shape.moe is None else shape.moe.num_experts
    yield from gather(parameters, rules or weight_map(shape), experts, dtype_of(model_chunks))


def drain(weights: Iterator[tuple[str, Tensor]]) -> None:
    """Runs a collective iterator to its end on the ranks that get nothing from it."""
    deque(weights, maxlen=0)


def save_hf(directory: Path | str, model_chunks: Sequence[Any], shape: ModelShape, origin_hf_dir: Path | str) -> None:
    """Writes a folder that transformers and vLLM load: weights, config.json and the tokenizer of ``origin_hf_dir``.

    Collective. ``shape.vocab_size`` rows of the embedding are kept; the others are Megatron's padding. Layers that are
    not trained come from ``origin_hf_dir``.

    Raises:
        UserError: ``directory`` holds something else (on every rank alike, if all see the same file system).
    """
    directory, origin = Path(directory), Path(origin_hf_dir)
    check_replaceable(directory, origin)
    rules, carried = export_plan(origin, shape)
    weights = hf_weights(model_chunks, shape, rules)
    if dist.get_rank() == 0:
        name = str(dtype_of(model_chunks)).removeprefix("torch.")
        plan = [*(tensor for rule in rules for tensor in rule.hf), *carried]
        tensors = itertools.chain(weights, read_carried(origin, carried))
        write_hf_folder(directory, origin=origin, plan=plan, tensors=tensors, dtype=name)
    else:
        drain(weights)
    dist.barrier()


def dtype_of(model_chunks: Sequence[Any]) -> torch.dtype:
    """The dtype of the model's parameters."""
    dtype: torch.dtype = next(model_chunks[0].parameters()).dtype
    return dtype


def global_parameters(model_chunks: Sequence[Any]) -> dict[str, Tensor]:
    """The parameters and saved buffers of this rank by their names in the whole model.

    There, layers are numbered over all pipeline stages and experts over all expert-parallel ranks.
    """
    found: dict[str, Tensor] = {}
    for chunk in model_chunks:
        model = unwrap(chunk)
        layer_numbers = [layer.layer_number - 1 for layer in model.decoder.layers]
        first_expert = _first_expert(model.config.num_moe_experts)
        for name, tensor in itertools.chain(model.named_parameters(), _saved_buffers(model)):
            found[_global_name(name, layer_numbers, first_expert)] = tensor
    return found


def _first_expert(num_experts: int | None) -> int:
    """The number of the first expert on this rank."""
    ranks: int = parallel_state.get_expert_model_parallel_world_size()
    rank: int = parallel_state.get_expert_model_parallel_rank()
    return (num_experts or 0) // ranks * rank


def _saved_buffers(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield name, buffer


def unwrap(chunk: Any) -> Any:
    """The GPTModel inside Megatron's wrappers for gradients and mixed precision."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def _global_name(name: str, layer_numbers: Sequence[int], first_expert: int) -> str:
    name = _LOCAL_LAYER.sub(lambda match: f"decoder.layers.{layer_numbers[int(match[1])]}.", name)
    return _LOCAL_EXPERT.sub(lambda match: f".local_experts.{first_expert + int(match[1])}.", name)


def _check_covered(parameters: Mapping[str, Tensor], shape: ModelShape, untouched: Collection[str]) -> None:
    known = {name for rule in weight_map(shape) for name in (rule.megatron, *rule.copies)}
    unknown = sorted(parameters.keys() - known - set(untouched))
    assert not unknown, f"parameters of the Megatron model that no rule of {shape.architecture} covers: {unknown}"


def _check_layout(shape: ModelShape) -> None:
    size = parallel_state.get_tensor_model_parallel_world_size()
    if shape.num_query_groups % size:
        raise UserError(
            f"--tensor-model-parallel-size {size} must divide the model's {shape.num_query_groups} key/value heads"
        )


def _read_shard(weights: HfWeights, tensor: HfTensor, rule: WeightRule, parameter: Tensor) -> Tensor:
    """What this rank holds of an HF tensor; zeros where the vocabulary is padded."""
    if rule.tp_dim is None:
        return weights.read(tensor.name)
    if rule.expert is None:
        rank = parallel_state.get_tensor_model_parallel_rank()
        size = parallel_state.get_tensor_model_parallel_world_size()
    else:
        rank = parallel_state.get_expert_tensor_parallel_rank()
        size = parallel_state.get_expert_tensor_parallel_world_size()
    if rule.vocabulary:
        return _read_vocabulary(weights, tensor, parameter.shape[0], rank)
    edges = rule.shard_edges(tensor, rank, size)
    return torch.cat([weights.read(tensor.name, rule.tp_dim, start, stop) for start, stop in edges], dim=rule.tp_dim)


def _read_vocabulary(weights: HfWeights, tensor: HfTensor, rows: int, rank: int) -> Tensor:
    start, stop = (min(edge, tensor.shape[0]) for edge in (rank * rows, (rank + 1) * rows))
    part = weights.read(tensor.name, 0, start, stop)
    return torch.nn.functional.pad(part, (0, 0, 0, rows - part.shape[0]))
