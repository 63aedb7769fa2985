"""CISPO: GRPO's advantages, and a ratio that is clipped as a weight, so that every token keeps its gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vime.algorithms.advantages.base import PolicyTokens
from vime.algorithms.advantages.grpo import Grpo

if TYPE_CHECKING:
    from vime.algorithms.policy_loss import ClipRange, PolicyLoss

__all__ = ["Cispo"]


class Cispo(Grpo, name="cispo"):
    """``L_t = -sg(clip(ρ, 1 - low, 1 + high)) A log π``, sg: no gradient goes through it.

    https://arxiv.org/abs/2506.13585, equations 4 and 5. The paper leaves the lower bound out, as a large --eps-clip
    does here.
    """

    def policy_loss(self, tokens: PolicyTokens, clip: ClipRange) -> PolicyLoss:
        from vime.algorithms.policy_loss import weighted_policy_loss

        return weighted_policy_loss(tokens.log_probs_t, tokens.old_log_probs_t, tokens.advantages_t, clip)
