"""Generation and training at the same time, and how far the one may be ahead of the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vime.config.flags import derived, flag


@dataclass(frozen=True, kw_only=True)
class Asynchrony:
    """What each means in detail: docs/en/advanced/async.md."""

    asynchronous: bool = flag(
        False, help="Sample the next rollout while this one is trained on. train_async.py sets it; train.py does not."
    )
    max_staleness: int = derived(
        "1 in train_async.py, 0 in train.py",
        help="Most trainings between the weights that sampled a token and the training that uses it.",
    )
    staleness_policy: Literal["wait", "drop", "mask"] = flag(
        "wait",
        help="What becomes of a group that would be staler. wait: there is none, because training waits for the oldest "
        "one. drop: its prompt goes back and is sampled anew. mask: its stale tokens are not trained.",
    )
    update_weights_interval: int = flag(1, help="The engines get new weights after every so many rollouts.")
    fully_async: bool = derived(
        "only with --rollout-function-path vime.rollout.fully_async.generate_rollout",
        help="Keep groups in flight all the time, for later rollouts too, as far as --max-staleness lets them be used.",
    )
    max_groups_ahead: int = derived(
        "(max-staleness + 1) x rollout-batch-size",
        help="With --fully-async, most groups in flight or finished that no rollout has taken, also those that come "
        "too late.",
    )

    @property
    def runs_ahead(self) -> bool:
        """Whether sampling goes on while weights change."""
        return self.asynchronous and self.max_staleness > 0
