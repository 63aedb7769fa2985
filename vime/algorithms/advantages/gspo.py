"""Group sequence policy optimization: GRPO's advantages, and one probability ratio for a whole answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vime.algorithms.advantages.base import PolicyTokens
from vime.algorithms.advantages.grpo import Grpo

if TYPE_CHECKING:
    from vime.algorithms.policy_loss import ClipRange, PolicyLoss

__all__ = ["Gspo"]


class Gspo(Grpo, name="gspo"):
    """``s_i = exp(Σ_t m (log π - log π_old) / max(Σ_t m, 1))`` takes the place of the ratio of each token of sample i.

    https://arxiv.org/abs/2507.18071, equations 5 and 7. Its clip range is far smaller than that of GRPO: the paper has
    3e-4 and 4e-4 for --eps-clip and --eps-clip-high.
    """

    def policy_loss(self, tokens: PolicyTokens, clip: ClipRange) -> PolicyLoss:
        from vime.algorithms.policy_loss import sequence_policy_loss

        return sequence_policy_loss(
            tokens.log_probs_t, tokens.old_log_probs_t, tokens.advantages_t, tokens.mask_t, tokens.lengths_n, clip
        )
