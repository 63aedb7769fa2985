"""Proximal policy optimization: the baseline of a token is what a critic expects of the rest of the answer."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from vime.algorithms.advantages.base import AdvantageEstimator, AdvantageSettings, PackedSamples
from vime.algorithms.rewards import unchanged

if TYPE_CHECKING:
    from torch import Tensor


class Ppo(AdvantageEstimator, name="ppo"):
    """Generalized advantage estimation (``vime.algorithms.gae``) of ``r_t = 1[t is last] R - kl_coef KL_t``.

    https://arxiv.org/abs/1707.06347, equation 11. Rewards are used as they are: the critic knows what is usual.
    """

    group_relative = False
    takes_kl = True
    needs_critic = True
    takes = frozenset({"gamma", "lambd"})

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

        assert samples.values_t is not None, "the critic comes first"
        return gae(
            samples.token_rewards(settings),
            samples.values_t,
            samples.mask_t,
            samples.lengths_n,
            gamma=settings.gamma,
            lambd=settings.lambd,
        )
