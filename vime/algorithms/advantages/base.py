"""What an advantage estimator is: two hooks, one on each side of the wire.

``normalize_rewards`` runs once a rollout where all samples are known, without torch. ``advantages`` runs on each
trainer rank, on the samples that it got. Estimators hold no state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSamples:
    """What an estimator may look at: N samples, their response tokens one after the other."""

    rewards_n: Tensor  # float32, after normalize_rewards
    lengths_n: Tensor  # int64, response tokens of each sample; they sum to t
    mask_t: Tensor  # bool or 0/1, the tokens that are trained
    log_probs_t: Tensor | None = None  # float32, of the policy before the update
    ref_log_probs_t: Tensor | None = None  # float32, of the reference model

    def per_token(self, values_n: Tensor) -> Tensor:
        """Repeats a value of each sample [n] over its tokens [t]."""
        return values_n.repeat_interleave(self.lengths_n, output_size=self.mask_t.numel())


class AdvantageEstimator(ABC):
    """Turns rewards into the advantages of tokens."""

    @abstractmethod
    def normalize_rewards(
        self, rewards: Sequence[float], group_ids: Sequence[Hashable], *, std: bool = True
    ) -> list[float]:
        """The reward that training uses for each sample, from the raw rewards of a whole rollout.

        Args:
            rewards: one finite number a sample.
            group_ids: the group of each sample.
            std: whether the estimator may divide by the deviation of the group (--disable-grpo-std-normalization).

        Raises:
            ValueError: a reward is not a finite number; the message names its position.
        """

    @abstractmethod
    def advantages(self, samples: PackedSamples) -> Tensor:
        """The advantage of each response token, float32 [t], masked tokens included."""
