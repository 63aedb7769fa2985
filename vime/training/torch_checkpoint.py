"""Megatron's older checkpoint format: each model-parallel rank's state dict as one file of ``torch.save``.

    iter_0000100/mp_rank_01_002_003/model_optim_rng.pt    tensor, pipeline and expert rank 1, 2 and 3; the latter two
                                                          only where there are several
    iter_0000100/mp_rank_01_002_003/distrib_optim.pt      what the distributed optimizer has of it

It can be loaded under the layout that saved it and under no other.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from vime.errors import UserError, check_same_model
from vime.models.piecewise import PiecewiseFile
from vime.models.torch_dist import fused_norm_name
from vime.training.freezing import check_frozen, frozen_names
from vime.training.optimizer_kind import allocate_moments, check_kind, is_distributed
from vime.training.rank_state import layout, model_keys, random_states, set_random_states
from vime.training.safe_load import damaged, safe_load
from vime.training.weights_io import unwrap

__all__ = ["is_torch_checkpoint", "load_torch", "save_torch"]

FILE = "model_optim_rng.pt"
OPTIMIZER_FILE = "distrib_optim.pt"
VERSION = 3.0  # of Megatron-LM's names
LAYOUT = "vime_layout"
DISTRIBUTED, FROZEN = "vime_distributed_optimizer", "vime_frozen"
FLAGS = {
    "tensor": "--tensor-model-parallel-size",
    "pipeline": "--pipeline-model-parallel-size",
    "expert": "--expert-model-parallel-size",
    "expert_tensor": "--expert-tensor-parallel-size",
    "context": "--context-parallel-size",
    "world": "number of training slots",
}
OF_WEIGHTS = ("tensor", "pipeline", "expert", "expert_tensor")  # what the weights alone depend on


def is_torch_checkpoint(directory: Path) -> bool:
    return any(directory.glob(f"mp_rank_*/{FILE}"))


def save_torch(directory: Path, model_chunks: Sequence[Any], optimizer: Any | None, scheduler: Any | None) -> None:
    """Writes a checkpoint into an existing empty folder. Collective.

    Raises:
        UserError: expert tensor parallelism cuts experts otherwise than the rest, for which the format has no names.
    """
    sizes = _sizes()
    expert_tensor = sizes["expert_tensor"]
    if expert_tensor not in (1, sizes["tensor"]):
        raise UserError(f"--ckpt-format torch does not go with --expert-tensor-parallel-size {expert_tensor}")
    folder = directory / _name()
    states: list[Any] = [None] * _replicas().size()
    dist.all_gather_object(states, random_states(), group=_replicas())
    state = {
        "checkpoint_version": VERSION,
        LAYOUT: sizes,
        **{key: unwrap(chunk).state_dict() for key, chunk in zip(model_keys(model_chunks), model_chunks, strict=True)},
        "rng_state": states,
    }
    if optimizer is not None:
        allocate_moments(optimizer)
        state["optimizer"] = optimizer.state_dict()
        state |= {DISTRIBUTED: is_distributed(optimizer), FROZEN: frozen_names(model_chunks)}
    if scheduler is not None:
        state["opt_param_scheduler"] = scheduler.state_dict()
    folder.mkdir(exist_ok=True)
    if _writes():
        with open(folder / FILE, "wb", buffering=0) as file:
            pieces: Any = PiecewiseFile(file)  # torch, which opens files in C++, would forget why one is full
            torch.save(state, pieces)
    if optimizer is not None and is_distributed(optimizer):
        optimizer.save_parameter_state(str(folder / OPTIMIZER_FILE))
    dist.barrier()


def load_torch(
    directory: Path,
    model_chunks: Sequence[Any],
    optimizer: Any | None = None,
    scheduler: Any | None = None,
    *,
    weights_only: bool = False,
    optional: Collection[str] = (),
) -> tuple[bool, bool]:
    """Restores what is there and wanted. Collective.

    Args:
        optional: parameters that may be missing there, and then stay as they are.

    Returns:
        whether there was optimizer state, and whether there were random states.

    Raises:
        UserError: it is of another layout, model or kind of optimizer, or would run code.
    """
    state = _read(directory, _name(), OF_WEIGHTS if weights_only else tuple(FLAGS))
    has_optimizer = optimizer is not None and "optimizer" in state and not weights_only
    if has_optimizer:
        check_kind(directory, state.get(DISTRIBUTED), optimizer)
        check_frozen(directory, state.get(FROZEN, []), model_chunks)
    for key, chunk in zip(model_keys(model_chunks), model_chunks, strict=True):
        _load_chunk(unwrap(chunk), state.get(key), directory, optional)
    if weights_only:
        return False, False
    if optimizer is not None and has_optimizer:
        allocate_moments(optimizer)
        optimizer.load_state_dict(state["optimizer"])
        if is_distributed(optimizer):
            path = directory / _name() / OPTIMIZER_FILE
            with safe_load(path):
                optimizer.load_parameter_state(str(path))
    if scheduler is not None and "opt_param_scheduler" in state:
        scheduler.load_state_dict(state["opt_param_scheduler"])
    if LAYOUT in state:
        set_random_states(state["rng_state"][_replicas().rank()])
    return has_optimizer, LAYOUT in state


def _sizes() -> dict[str, int]:
    return layout() | {"expert_tensor": parallel_state.get_expert_tensor_parallel_world_size()}


def _name() -> str:
    """The folder of this rank, as Megatron-LM names it."""
    sizes = layout()
    name = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
    if sizes["pipeline"] > 1:
        name += f"_{parallel_state.get_pipeline_model_parallel_rank():03d}"
    if sizes["expert"] > 1:
        name += f"_{parallel_state.get_expert_model_parallel_rank():03d}"
    return name


def _writes() -> bool:
    """Whether this rank is the first one that has what its folder is for."""
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, _name())
    return names.index(_name()) == dist.get_rank()


def _replicas() -> dist.ProcessGroup:
    group: dist.ProcessGroup = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return group


def _read(directory: Path, name: str, compared: Sequence[str]) -> dict[str, Any]:
    """This rank's state dict, once its layout is known to be that of the run."""
    path = directory / name / FILE
    any_path = path if path.is_file() else min(directory.glob(f"mp_rank_*/{FILE}"))
    state = _load(any_path)
    saved, here = _layout_of(state), _sizes()
    if any_path != path or any(saved.get(key, here[key]) != here[key] for key in compared):
        raise UserError(
            f"{directory} was saved with {_told(saved)} and this run has {_told(here)}: a torch checkpoint needs the "
            "same layout; one that --ckpt-format torch_dist saves can be loaded under any"
        )
    return state


def _load(path: Path) -> dict[str, Any]:
    try:
        with safe_load(path):
            state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, KeyError) as error:
        raise damaged(path, error) from error
    return state


def _layout_of(state: Mapping[str, Any]) -> dict[str, int]:
    """Our note, or Megatron-LM's ``args``."""
    if LAYOUT in state:
        return dict(state[LAYOUT])
    args = vars(state.get("args", argparse.Namespace()))
    names = {key: f"{key}_model_parallel_size" for key in ("tensor", "pipeline", "expert")}
    names |= {key: f"{key}_parallel_size" for key in ("expert_tensor", "context")} | {"world": "world_size"}
    return {key: args[name] for key, name in names.items() if args.get(name) is not None}


def _told(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{FLAGS[key]} {sizes[key]}" for key in FLAGS if key in sizes) or "another layout"


def _load_chunk(
    model: torch.nn.Module, saved: Mapping[str, Any] | None, directory: Path, optional: Collection[str]
) -> None:
    if saved is None:
        raise UserError(
            f"{directory} has other virtual pipeline stages than this run; a torch checkpoint needs the same"
        )
    wanted = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    wanted = {name: value for name, value in wanted.items() if name in saved or name not in optional}
    found = {name: saved.get(name, saved.get(fused_norm_name(name))) for name in wanted}
    problems = [problem for name in wanted if (problem := _problem(name, wanted[name], found[name]))]
    check_same_model(directory, problems)
    model.load_state_dict(found, strict=False)


def _problem(name: str, wanted: Tensor, there: Tensor | None) -> str | None:
    if there is None:
        return f"it has no {name}"
    return None if there.shape == wanted.shape else f"its {name} is {list(there.shape)} instead of {list(wanted.shape)}"
