"""REINFORCE++: no baseline of a group, returns token by token, and advantages on the scale of the whole batch."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from vime.algorithms.advantages.base import AdvantageEstimator, AdvantageSettings, PackedSamples
from vime.algorithms.rewards import unchanged

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ReinforcePlusPlus"]


class ReinforcePlusPlus(AdvantageEstimator, name="reinforce_plus_plus"):
    """``A_t = G_t = r_t + gamma G_{t+1}`` with ``r_t = -kl_coef KL_t``, and the reward added at the last trained token.

    https://arxiv.org/abs/2501.03262, section 3. "Next" and "last" are among the trained tokens: what a tool wrote
    passes a return on as it is. Whitening the result is part of the method (--normalize-advantages).
    """

    takes_kl = True
    needs_whitening = True
    group_relative = False
    takes = frozenset({"gamma"})

    def normalize_rewards(
        self,
        rewards: Sequence[float],
        group_ids: Sequence[Hashable],
        *,
        std: bool = True,
        parents: Sequence[Hashable] | None = None,
    ) -> list[float]:
        return unchanged(rewards)

    def advantages(self, samples: PackedSamples, settings: AdvantageSettings) -> Tensor:
        from vime.algorithms.gae import gae

        rewards_t = samples.token_rewards(settings)
        no_values_t = rewards_t.new_zeros(rewards_t.shape)  # then the advantages are the returns
        return gae(rewards_t, no_values_t, samples.mask_t, samples.lengths_n, gamma=settings.gamma)
