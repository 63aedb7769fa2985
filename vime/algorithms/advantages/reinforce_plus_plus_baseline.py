"""REINFORCE++ with a baseline: the mean of the group is taken off, its deviation is not divided by."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from vime.algorithms.advantages.base import AdvantageEstimator, AdvantageSettings, PackedSamples
from vime.algorithms.rewards import group_normalize

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ReinforcePlusPlusBaseline"]


class ReinforcePlusPlusBaseline(AdvantageEstimator, name="reinforce_plus_plus_baseline"):
    """``A_t = (R_i - mean_g) - kl_coef KL_t``, whitened over the batch (--normalize-advantages).

    https://arxiv.org/abs/2501.03262, section 3 (the variant for several answers to a prompt).
    """

    takes_kl = True
    needs_whitening = True
    takes = frozenset({"disable_rewards_normalization"})

    def normalize_rewards(
        self,
        rewards: Sequence[float],
        group_ids: Sequence[Hashable],
        *,
        std: bool = True,
        parents: Sequence[Hashable] | None = None,
    ) -> list[float]:
        return group_normalize(rewards, group_ids, std=False, parents=parents)

    def advantages(self, samples: PackedSamples, settings: AdvantageSettings) -> Tensor:
        rewards_t = samples.per_token(samples.rewards_n)
        return rewards_t - settings.kl_coef * samples.kl(settings) if settings.kl_coef else rewards_t
