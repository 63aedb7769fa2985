"""HF weights into Megatron's model and out of it, exactly, whatever the tensor and pipeline parallel layout.

Both directions follow the rules of ``vime.models.weight_map``. Loading needs no communication: each rank reads the rows
and columns of its own shard. Exporting is collective and moves one HF tensor at a time to rank 0.
"""

from __future__ import annotations

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
from vime.models import HfTensor, ModelShape, WeightRule, weight_map
from vime.models.hf_folder import HfWeights, check_replaceable, write_hf_folder

_LOCAL_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")


def hf_plan(shape: ModelShape, dtype: torch.dtype) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    """Name, shape and dtype of everything that ``hf_weights`` yields, in its order."""
    return [(tensor.name, tensor.shape, dtype) for tensor in _hf_tensors(shape)]


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
        ignorable = ["lm_head.weight"] if shape.tie_word_embeddings else []
        weights.check(_hf_tensors(shape), ignorable=ignorable)
        for rule in weight_map(shape):
            for name in (rule.megatron, *rule.copies):
                if name in parameters and name not in untouched:
                    parts = [_read_shard(weights, tensor, rule, parameters[name]) for tensor in rule.hf]
                    parameters[name].copy_(rule.op.merge(parts))


@torch.no_grad()
def hf_weights(model_chunks: Sequence[Any], shape: ModelShape) -> Iterator[tuple[str, Tensor]]:
    """Yields every tensor under its HF name, whole and in the parameters' dtype, on global rank 0.

    Collective: all ranks must run it to its end (``drain``), though the others get no items. Without parallelism the
    tensors are views of the live parameters, so copy what must outlive the next training step.
    """
    if parallel_state.get_data_parallel_rank(with_context_parallel=True) != 0:
        return  # the first replica has everything
    parameters = global_parameters(model_chunks)
    owners = _owners(parameters)
    some_parameter = next(iter(parameters.values()))
    for rule in weight_map(shape):
        parameter = parameters.get(rule.megatron)
        mine = owners[rule.megatron] == parallel_state.get_pipeline_model_parallel_rank()
        pieces = rule.op.split(parameter.detach()) if mine and parameter is not None else (None,) * len(rule.hf)
        for tensor, piece in zip(rule.hf, pieces, strict=True):
            whole = None if piece is None else _gather_shards(piece, tensor, rule)
            whole = _to_first_stage(whole, tensor, owners[rule.megatron], like=some_parameter)
            if whole is not None:
                yield tensor.name, whole


def drain(weights: Iterator[tuple[str, Tensor]]) -> None:
    """Runs a collective iterator to its end on the ranks that get nothing from it."""
    deque(weights, maxlen=0)


def save_hf(directory: Path | str, model_chunks: Sequence[Any], shape: ModelShape, origin_hf_dir: Path | str) -> None:
    """Writes a folder that transformers and vLLM load: weights, config.json and the tokenizer of ``origin_hf_dir``.

    Collective. ``shape.vocab_size`` rows of the embedding are kept; the others are Megatron's padding.

    Raises:
        UserError: ``directory`` holds something else (on every rank alike, if all see the same file system).
    """
    directory, origin = Path(directory), Path(origin_hf_dir)
    check_replaceable(directory, origin)
    weights = hf_weights(model_chunks, shape)
    if dist.get_rank() == 0:
        dtype = next(iter(global_parameters(model_chunks).values())).dtype
        name = str(dtype).removeprefix("torch.")
        write_hf_folder(directory, origin=origin, plan=_hf_tensors(shape), tensors=weights, dtype=name)
    else:
        drain(weights)
    dist.barrier()


def global_parameters(model_chunks: Sequence[Any]) -> dict[str, torch.nn.Parameter]:
    """The parameters of this rank by their names in the whole model, where layers are numbered over all stages."""
    found: dict[str, torch.nn.Parameter] = {}
    for chunk in model_chunks:
        model = unwrap(chunk)
        layer_numbers = [layer.layer_number - 1 for layer in model.decoder.layers]
        for name, parameter in model.named_parameters():
            found[_global_name(name, layer_numbers)] = parameter
    return found


def unwrap(chunk: Any) -> Any:
    """The GPTModel inside Megatron's wrappers for gradients and mixed precision."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def _global_name(name: str, layer_numbers: Sequence[int]) -> str:
    return _LOCAL_LAYER.sub(lambda match: f"decoder.layers.{layer_numbers[int(match[1])]}.", name)


def _hf_tensors(shape: ModelShape) -> list[HfTensor]:
    return [tensor for rule in weight_map(shape) for tensor in rule.hf]


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
    """What this tensor-parallel rank holds of an HF tensor; zeros where the vocabulary is padded."""
    if rule.tp_dim is None:
        return weights.read(tensor.name)
    rank = parallel_state.get_tensor_model_parallel_rank()
    size = parallel_state.get_tensor_model_parallel_world_size()
    length = tensor.shape[rule.tp_dim]
    piece = parameter.shape[0] if rule.vocabulary else length // size
    start, stop = (min(edge, length) for edge in (rank * piece, (rank + 1) * piece))
    part = weights.read(tensor.name, rule.tp_dim, start, stop)
    if rule.vocabulary:
        part = torch.nn.functional.pad(part, (0, 0, 0, piece - part.shape[0]))
    return part


def _owners(parameters: Mapping[str, Tensor]) -> dict[str, int]:
    """The first pipeline stage that has each parameter."""
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    names: list[list[str]] = [list(parameters)]
    if stages > 1:
        names = [[] for _ in range(stages)]
        dist.all_gather_object(names, list(parameters), group=parallel_state.get_pipeline_model_parallel_group())
    owners: dict[str, int] = {}
    for stage, of_stage in enumerate(names):
        for name in of_stage:
            owners.setdefault(name, stage)
    return owners


def _gather_shards(piece: Tensor, tensor: HfTensor, rule: WeightRule) -> Tensor | None:
    """The whole HF tensor on the first tensor-parallel rank, None on the others."""
    size = parallel_state.get_tensor_model_parallel_world_size()
    first = parallel_state.get_tensor_model_parallel_rank() == 0
    whole = piece
    if size > 1 and rule.tp_dim is not None:
        group = parallel_state.get_tensor_model_parallel_group()
        piece = piece.contiguous()
        pieces = [torch.empty_like(piece) for _ in range(size)] if first else None
        dist.gather(piece, pieces, dst=parallel_state.get_tensor_model_parallel_src_rank(), group=group)
        if pieces is not None:
            whole = torch.cat(pieces, dim=rule.tp_dim)
    if not first:
        return None
    return whole[: tensor.shape[0]] if rule.vocabulary else whole


def _to_first_stage(whole: Tensor | None, tensor: HfTensor, owner: int, *, like: Tensor) -> Tensor | None:
    """Moves a tensor from the first tensor-parallel rank of its stage to that of stage 0, where it is returned."""
    stage = parallel_state.get_pipeline_model_parallel_rank()
    if owner == 0 or parallel_state.get_tensor_model_parallel_rank() != 0:
        return whole
    group = parallel_state.get_pipeline_model_parallel_group()
    if stage == owner:
        assert whole is not None
        dist.send(whole.contiguous(), dst=parallel_state.get_pipeline_model_parallel_first_rank(), group=group)
    elif stage == 0:
        received = like.new_empty(tensor.shape)
        dist.recv(received, src=dist.get_process_group_ranks(group)[owner], group=group)
        return received
    return None
