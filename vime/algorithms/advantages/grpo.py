"""Group relative policy optimization: the baseline of an answer is the mean of the answers to the same prompt."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from vime.algorithms.advantages.base import AdvantageEstimator, AdvantageSettings, PackedSamples
from vime.algorithms.rewards import group_normalize

if TYPE_CHECKING:
    from torch import Tensor


class Grpo(AdvantageEstimator, name="grpo"):
    """``A[i, t] = (R_i - mean_g) / (std_g + 1e-6)`` for every token t of sample i.

    https://arxiv.org/abs/2402.03300, section 4.1.2 (outcome supervision). The reference model does not enter here, only
    through the KL term of the loss.
    """

    takes = frozenset({"disable_rewards_normalization", "disable_grpo_std_normalization"})

    def normalize_rewards(
        self,
        rewards: Sequence[float],
        group_ids: Sequence[Hashable],
        *,
        std: bool = True,
        parents: Sequence[Hashable] | None = None,
    ) -> list[float]:
        return group_normalize(rewards, group_ids, std=std, parents=parents)

    def advantages(self, samples: PackedSamples, settings: AdvantageSettings) -> Tensor:
        return samples.per_token(samples.rewards_n)
