"""The state of the optimizer in a checkpoint of experts, in one form however the experts are spread.

Megatron has one optimizer for the experts that expert parallelism spreads and one for everything else; where it spreads
none, one for both. What it saves looks different then, and neither form can be loaded in place of the other. Here the
state is always a dict of parts: 0 has what the first optimizer has, 1 what the optimizer of spread experts has.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import extract_matching_values, merge
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedBase

__all__ = ["parts_of", "plain_values", "state_of"]

Parts = dict[int, Any]


def parts_of(optimizer: Any, state: Any) -> Parts:
    """The sharded state of Megatron's optimizer as parts."""
    return state if len(optimizer.chained_optimizers) > 1 else {0: state}


def plain_values(parts: Parts) -> Parts:
    """What is not sharded: settings and step counts. A checkpoint has them by part, tensors by name."""
    plain, _ = extract_matching_values(
        parts, lambda value: not isinstance(value, ShardedBase | LocalNonpersistentObject)
    )
    return plain  # type: ignore[no-any-return]


def state_of(optimizer: Any, loaded: Parts, plain: Parts) -> Any:
    """What Megatron's optimizer takes, from loaded parts that may have been saved where there were others.

    A part that is new here got its tensors by their names. The rest comes from ``plain``, this optimizer's own values
    of before the load, and the step count is that of the first part: all parts step together.
    """
    steps = [{"step": group["step"]} for group in _groups(loaded[0]) if "step" in group]
    parts = {number: loaded[number] for number in plain}
    for number, part in parts.items():
        if not any("lr" in group for group in _groups(part)):
            parts[number] = merge(plain[number], part)
            for group in _groups(parts[number]):
                group.update(*steps[:1])
    return parts if len(optimizer.chained_optimizers) > 1 else parts[0]


def _groups(part: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Parameter groups; an optimizer with main parameters or shards of them keeps them one level further down."""
    yield from part.get("optimizer", part).get("param_groups", ())
