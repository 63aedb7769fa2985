"""Megatron's part of a checkpoint: weights, optimizer, learning-rate schedule and random states.

In torch_dist format any parallel layout can load what any other saved; random states only return under the layout that
they are from. On the same layout a resumed run goes on bit for bit. ``vime.training.torch_checkpoint`` has the format
"torch"; which of them a checkpoint has is seen when it is loaded.

Megatron's own writer starts a manager process and forks writers, which hangs for ever when one dies and does not go
with Ray's actors or CUDA. Here each rank writes its own file, in its own process, by torch's plain writer; the format
is the same.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as torch_save

from vime.errors import UserError, check_same_model
from vime.files import read_json_object
from vime.models.torch_dist import METADATA, fused_norm_name, read_metadata
from vime.platform.megatron_objects import load_plain_objects
from vime.training.optimizer_kind import allocate_moments, check_kind, is_distributed
from vime.training.optimizer_parts import parts_of, plain_values, state_of
from vime.training.rank_state import layout, model_keys, random_states, set_random_states
from vime.training.safe_load import damaged, safe_load
from vime.training.torch_checkpoint import is_torch_checkpoint, load_torch, save_torch
from vime.training.weights_io import unwrap

__all__ = ["Loaded", "load_megatron", "load_weights", "save_megatron", "weights_of"]

DISTRIBUTED = "distributed_optimizer"  # in the note on the content

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What a checkpoint had besides the weights."""

    optimizer: bool
    random_states: bool


def save_megatron(
    directory: Path | str,
    model_chunks: Sequence[Any],
    optimizer: Any | None = None,
    scheduler: Any | None = None,
    *,
    ckpt_format: Literal["torch_dist", "torch"] = "torch_dist",
) -> None:
    """Writes a checkpoint into an existing empty folder. Collective; returns when all ranks' data is on the disk.

    Args:
        optimizer: Megatron's optimizer; None leaves it out, as ``--no-save-optim`` and converted weights do.
        scheduler: Megatron's OptimizerParamScheduler.
    """
    if ckpt_format == "torch":
        save_torch(Path(directory), model_chunks, optimizer, scheduler)
        return
    state = _model_state(model_chunks)
    if optimizer is not None:
        state["optimizer"] = _optimizer_state(optimizer, state, model_chunks, is_loading=False)
    if scheduler is not None:
        state["scheduler"] = scheduler.state_dict()
    state["random_states"] = _sharded_random_states()
    replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
    content = {"layout": layout(), "optimizer": optimizer is not None, "scheduler": scheduler is not None}
    if optimizer is not None:
        content[DISTRIBUTED] = is_distributed(optimizer)
    dist_checkpointing.save(
        state, str(directory), FullyParallelSaveStrategyWrapper(_PlainSave(), replicas), content_metadata=content
    )


def load_megatron(
    directory: Path | str, model_chunks: Sequence[Any], optimizer: Any | None = None, scheduler: Any | None = None
) -> Loaded:
    """Restores all that ``save_megatron`` saved, as far as it was saved and is wanted. Collective.

    Without optimizer state in the checkpoint the optimizer starts anew from the loaded weights, with a warning.

    Raises:
        UserError: it is not a checkpoint, or one of another model or of the other kind of optimizer, or in torch format
            and of another layout.
    """
    if is_torch_checkpoint(Path(directory)):
        has_optimizer, has_random_states = load_torch(Path(directory), model_chunks, optimizer, scheduler)
        _load_optimizer(None if has_optimizer else optimizer, None, directory)
        return Loaded(optimizer=has_optimizer, random_states=has_random_states)
    content = _content(Path(directory))
    has_optimizer = optimizer is not None and content.get("optimizer", False)
    if has_optimizer:
        check_kind(directory, content.get(DISTRIBUTED), optimizer)
    state = _wanted_state(Path(directory), model_chunks)
    if has_optimizer:
        state["optimizer"] = _optimizer_state(optimizer, state, model_chunks, is_loading=True)
    plain = plain_values(state["optimizer"]) if has_optimizer and _has_experts(model_chunks) else None
    same_layout = content.get("layout") == layout()
    if same_layout:
        state["random_states"] = _sharded_random_states()
    loaded = _read(Path(directory), state)
    _load_model_state(model_chunks, loaded)
    if plain is not None:
        loaded["optimizer"] = state_of(optimizer, loaded["optimizer"], plain)
    _load_optimizer(optimizer, loaded.get("optimizer") if has_optimizer else None, directory)
    if scheduler is not None and content.get("scheduler", False):
        scheduler.load_state_dict(loaded["scheduler"])
    if same_layout:
        set_random_states(loaded["random_states"])
    return Loaded(optimizer=has_optimizer, random_states=same_layout)


def load_weights(directory: Path | str, model_chunks: Sequence[Any], *, optional: Collection[str] = ()) -> None:
    """Only the weights of a checkpoint of ours or of Megatron's, converted to the parameters' dtype. Collective.

    Run it before the optimizer is built, which copies its fp32 main weights from the parameters.

    Args:
        optional: parameters that stay as they are where the checkpoint has none of that name, e.g. a critic's head.

    Raises:
        UserError: it is not a checkpoint, or one of another model, or in torch format and of another layout.
    """
    if is_torch_checkpoint(Path(directory)):
        load_torch(Path(directory), model_chunks, weights_only=True, optional=optional)
        return
    _content(Path(directory))
    state = _wanted_state(Path(directory), model_chunks, optional)
    _load_model_state(model_chunks, _read(Path(directory), state), optional)


def weights_of(directory: Path | str) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of every tensor in a torch_dist checkpoint; needs no process group."""
    _content(Path(directory))
    there = dist_checkpointing.load_tensors_metadata(str(directory))
    return {key: (tuple(tensor.global_shape), tensor.dtype) for key, tensor in there.items()}


class _PlainSave(SaveShardedStrategy):  # type: ignore[misc]
    """Writes Megatron's sharded tensors with torch's own writer, which neither forks nor needs a manager process."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path) -> None:
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, keep_only_main_replica=True)
        planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        torch_save(mcore_to_pyt_state_dict(by_key), storage_writer=FileSystemWriter(checkpoint_dir), planner=planner)


def _metadata() -> dict[str, Any]:
    """How Megatron lays out sharded state. Its default for the distributed optimizer cannot be loaded in 0.16.1."""
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def _model_state(model_chunks: Sequence[Any]) -> dict[str, Any]:
    """Sharded state of the model: ``model``, or ``model0``, ``model1`` … of virtual pipeline stages."""
    states = [unwrap(chunk).sharded_state_dict(metadata=_metadata()) for chunk in model_chunks]
    return dict(zip(model_keys(model_chunks), states, strict=True))


def _wanted_state(directory: Path, model_chunks: Sequence[Any], optional: Collection[str] = ()) -> dict[str, Any]:
    """What to read of a checkpoint into the model, under the names that the checkpoint has for it.

    Megatron's ``_extra_state`` has the scales of FP8 layers, which nothing here has, and so it may be missing.

    Raises:
        UserError: the checkpoint is of another model.
    """
    state = _model_state(model_chunks)
    there = dist_checkpointing.load_tensors_metadata(str(directory))
    absent = set(optional) - there.keys()
    for of_chunk in state.values():
        for name in [name for name in of_chunk if name.endswith("_extra_state") or name in absent]:
            del of_chunk[name]
    for tensor in nested_values(state):
        if tensor.key not in there:
            tensor.key = fused_norm_name(tensor.key)
    _check_tensors(directory, there, state, _tokens(model_chunks))
    return state


def _load_model_state(model_chunks: Sequence[Any], loaded: dict[str, Any], optional: Collection[str] = ()) -> None:
    for chunk, key in zip(model_chunks, model_keys(model_chunks), strict=True):
        missing, unexpected = unwrap(chunk).load_state_dict(loaded[key], strict=False)
        forgotten = [name for name in missing if not name.endswith("_extra_state") and name not in optional]
        assert not forgotten and not unexpected, (forgotten, unexpected)


def _optimizer_state(optimizer: Any, state: dict[str, Any], model_chunks: Sequence[Any], *, is_loading: bool) -> Any:
    allocate_moments(optimizer)
    keys = model_keys(model_chunks)
    model_state = state["model"] if len(keys) == 1 else {key: state[key] for key in keys}
    sharded = optimizer.sharded_state_dict(model_state, is_loading=is_loading, metadata=_metadata())
    return parts_of(optimizer, sharded) if _has_experts(model_chunks) else sharded


def _has_experts(model_chunks: Sequence[Any]) -> bool:
    return unwrap(model_chunks[0]).config.num_moe_experts is not None


def _load_optimizer(optimizer: Any | None, state: Any | None, directory: Path | str) -> None:
    if optimizer is None:
        return
    if state is not None:
        optimizer.load_state_dict(state)
        return
    logger.warning("%s has no optimizer state: moments start at zero", directory)
    optimizer.reload_model_params()


def _content(directory: Path) -> dict[str, Any]:
    """What ``save_megatron`` noted about its checkpoint; nothing where somebody else wrote it.

    It comes before all else that reads the folder: Megatron's own reader runs whatever code ``.metadata`` names.
    """
    if not all((directory / name).is_file() for name in ("metadata.json", METADATA)):
        raise UserError(f"{directory} is not a Megatron checkpoint, neither in torch_dist nor in torch format")
    read_json_object(directory / "metadata.json")
    read_metadata(directory)
    try:
        with safe_load(directory / "common.pt"):
            return dist_checkpointing.load_content_metadata(str(directory)) or {}
    except (CheckpointingException, OSError, RuntimeError, KeyError) as error:
        raise damaged(directory, error) from error


def _read(directory: Path, state: dict[str, Any]) -> dict[str, Any]:
    load_plain_objects()
    with safe_load(directory):
        loaded: dict[str, Any] = dist_checkpointing.load(state, str(directory))
    return loaded


def _tokens(model_chunks: Sequence[Any]) -> int:
    """The size of the vocabulary, without the rows that only pad."""
    tokens: int = unwrap(model_chunks[0]).tokens_in_vocabulary
    return tokens


def _check_tensors(directory: Path, there: Mapping[str, ShardedTensor], state: dict[str, Any], tokens: int) -> None:
    """Says which of the model's tensors the checkpoint lacks or has in another shape, before any is read."""
    found = (_problem(tensor, there.get(tensor.key), tokens) for tensor in _sharded_tensors(state))
    problems = [problem for problem in found if problem]
    check_same_model(directory, problems)


def _sharded_tensors(state: dict[str, Any]) -> Iterator[ShardedTensor]:
    seen: set[str] = set()
    for value in nested_values(state):
        for tensor in nested_values(value.build()) if hasattr(value, "build") else [value]:
            if isinstance(tensor, ShardedTensor) and tensor.key not in seen:
                seen.add(tensor.key)
                yield tensor


def _problem(wanted: ShardedTensor, there: ShardedTensor | None, tokens: int) -> str | None:
    """Rows that pad the vocabulary may differ between layouts; Megatron would fill other missing rows with zeros."""
    if there is None:
        return f"it has no {wanted.key}"
    rows, *rest = there.global_shape
    fits = rows >= tokens and tuple(rest) == wanted.global_shape[1:]
    if there.global_shape == wanted.global_shape or (wanted.allow_shape_mismatch and fits):
        return None
    return f"its {wanted.key} is {list(there.global_shape)} instead of {list(wanted.global_shape)}"


def _sharded_random_states() -> ShardedObject:
    return ShardedObject("random_states", random_states(), (dist.get_world_size(),), (dist.get_rank(),), replica_id=0)
