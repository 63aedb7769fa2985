"""Which of Megatron's two kinds of optimizer a checkpoint is of: neither can load what the other saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from vime.errors import UserError

__all__ = ["allocate_moments", "check_kind", "forget_moments", "is_distributed", "optimizers_of"]


def optimizers_of(optimizer: Any) -> list[Any]:
    """Those that have something to do: Megatron chains an empty one where a kind of parameters is frozen."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [each for each in chained if getattr(each, "optimizer", None) is not None]


def allocate_moments(optimizer: Any) -> None:
    """Moments of zero, where no step has made them yet."""
    for each in optimizers_of(optimizer):
        each.init_state_fn(each.optimizer, each.config)


def forget_moments(optimizer: Any) -> None:
    """Moments and step counts as before the first step; main weights stay (--reset-optimizer-states)."""
    for each in optimizers_of(optimizer):
        for group in each.optimizer.param_groups:
            if "step" in group:
                group["step"] = 0
        for state in each.optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, Tensor) and name != "master_param":
                    value.zero_()


def is_distributed(optimizer: Any) -> bool:
    return any(isinstance(each, DistributedOptimizer) for each in optimizers_of(optimizer))


def check_kind(directory: Path | str, saved: bool | None, optimizer: Any) -> None:
    """Raises a UserError unless the state in ``directory`` is of this kind of optimizer. Needs no other rank.

    Args:
        saved: whether the distributed optimizer saved it; None where nobody noted that.
    """
    if saved is None or saved == is_distributed(optimizer):
        return
    was, now = ("with", "without") if saved else ("without", "with")
    raise UserError(
        f"{directory}: its optimizer state was saved {was} --use-distributed-optimizer and this run is {now}: resume "
        f"{was} the flag, or start anew from the weights by --ref-load"
    )
