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
class AdvantageSettings:
    """What a user can set of the estimators; each takes what it knows of."""

    gamma: float = 1.0  # --gamma: the discount of a step
    lambd: float = 1.0  # --lambd: of generalized advantage estimation, between bias (0) and variance (1)
    kl_coef: float = 0.0  # --kl-coef: of the KL divergence to the reference model in the rewards of tokens
    kl_kind: str = "k1"  # --kl-loss-type: how it is estimated, one of ``vime.algorithms.kl.KINDS``


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSamples:
    """What an estimator may look at: N samples, their response tokens one after the other."""

    rewards_n: Tensor  # float32, after normalize_rewards
    lengths_n: Tensor  # int64, response tokens of each sample; they sum to t
    mask_t: Tensor  # bool or 0/1, the tokens that are trained
    log_probs_t: Tensor | None = None  # float32, of the policy before the update
    ref_log_probs_t: Tensor | None = None  # float32, of the reference model
    values_t: Tensor | None = None  # float32, of the critic before the update

    def per_token(self, values_n: Tensor) -> Tensor:
        """Repeats a value of each sample [n] over its tokens [t]."""
        return values_n.repeat_interleave(self.lengths_n, output_size=self.mask_t.numel())

    def token_rewards(self, settings: AdvantageSettings) -> Tensor:
        """Rewards of the single tokens [t]: the KL penalty of each, and the sample's reward at its last trained one."""
        from vime.algorithms.gae import token_rewards
        from vime.algorithms.kl import kl

        penalties_t = None
        if settings.kl_coef:
            assert self.log_probs_t is not None and self.ref_log_probs_t is not None, "the KL needs both policies"
            penalties_t = settings.kl_coef * kl(self.log_probs_t, self.ref_log_probs_t, settings.kl_kind).values_t
        return token_rewards(self.rewards_n, self.mask_t, self.lengths_n, penalties_t=penalties_t)


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
    def advantages(self, samples: PackedSamples, settings: AdvantageSettings) -> Tensor:
        """The advantage of each response token, float32 [t], masked tokens included."""
