"""What hooks of the trainer leave in ``rollout_data``, read the same way in a run and in a trial."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vime.plugins.contract import WrongAnswer, shown

if TYPE_CHECKING:
    from torch import Tensor

MASKS = "loss_masks"


def token_rows(data: Mapping[str, Any], name: str, lengths: Sequence[int]) -> list[Tensor]:
    """The tensors that ``data[name]`` holds, one a sample with as many values as it has response tokens.

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
        read.append(_masks(tensor, place) if name == MASKS else _finite(tensor, name, place))
    return read


def _finite(tensor: Tensor, name: str, place: int) -> Tensor:
    values = tensor.float()
    if not bool(values.isfinite().all()):
        raise WrongAnswer(f"set {name}[{place}] to values that are not finite")
    return values


def _masks(tensor: Tensor, place: int) -> Tensor:
    mask = tensor.bool()
    if not bool((mask == tensor).all()):
        raise WrongAnswer(f"set {MASKS}[{place}] to values other than 0 and 1")
    return mask
