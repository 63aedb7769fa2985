"""What hooks of the trainer leave in ``rollout_data``, read the same way in a run and in a trial."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vime.plugins.contract import WrongAnswer, shown

if TYPE_CHECKING:
    from torch import Tensor

MASKS = "loss_masks"


def token_rows(
    data: Mapping[str, Any],
    name: str,
    lengths: Sequence[int],
    *,
    before: Sequence[Tensor] | None = None,
    finite: bool = True,
) -> list[Tensor]:
    """The tensors that ``data[name]`` holds, one a sample with as many values as it has response tokens.

    Args:
        before: what it held when the function got it. A value that is still the same is not the function's.
        finite: whether values must be.

    Returns:
        Float32 [T] each; of loss_masks bool.

    Raises:
        WrongAnswer: there are none, or their number, a length or a value is wrong.
    """
    import torch

    if name not in data:
        raise WrongAnswer(f"must leave {name} in rollout_data")
    rows = data[name]
    if not isinstance(rows, list | tuple) or len(rows) != len(lengths):
        found = len(rows) if isinstance(rows, list | tuple) else shown(rows)
        raise WrongAnswer(f"must set {name} to a list of {len(lengths)} tensors, one a sample, not {found}")
    read = []
    for place, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        try:
            tensor = torch.as_tensor(row).detach()
        except (TypeError, ValueError, RuntimeError):
            raise WrongAnswer(f"set {name}[{place}] to {shown(row)}, which is no tensor") from None
        if tensor.shape != (length,):
            raise WrongAnswer(f"set {name}[{place}] to the shape {list(tensor.shape)}, it must be [{length}]")
        if name == MASKS:
            tensor = _masks(tensor, place)
        elif finite:
            _check_finite(tensor, name, place, None if before is None else before[place])
        read.append(tensor if name == MASKS else tensor.float())
    return read


def _check_finite(tensor: Tensor, name: str, place: int, before: Tensor | None) -> None:
    bad = ~tensor.float().isfinite()
    if before is not None:
        given = before.to(tensor.device)
        bad &= ~((tensor == given) | (tensor.isnan() & given.isnan()))
    if bool(bad.any()):
        raise WrongAnswer(f"set {name}[{place}] to values that are not finite")


def _masks(tensor: Tensor, place: int) -> Tensor:
    mask = tensor.bool()
    if not bool((mask == tensor).all()):
        raise WrongAnswer(f"set {MASKS}[{place}] to values other than 0 and 1")
    return mask
