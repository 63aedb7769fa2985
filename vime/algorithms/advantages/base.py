"""What an advantage estimator is: three hooks, along the way from a reward to a loss.

``normalize_rewards`` runs once a rollout where all samples are known, without torch. ``advantages`` and ``policy_loss``
run on each trainer rank, on the samples that it got; every sample is there as a whole. Estimators hold no state.

To add one, add a file to this folder with a class like

    class Raft(AdvantageEstimator, name="raft"): ...

Its name is then a value of ``--advantage-estimator``, and every test that goes over all estimators covers it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from torch import Tensor

    from vime.algorithms.policy_loss import ClipRange, PolicyLoss

TAKEN = ("gamma", "lambd", "disable_rewards_normalization", "disable_grpo_std_normalization")
"""Flags that some estimators have no use for."""

__all__ = ["TAKEN", "AdvantageEstimator", "AdvantageSettings", "PackedSamples", "PolicyTokens", "get", "names"]


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

    def kl(self, settings: AdvantageSettings) -> Tensor:
        """The estimate of KL(π_old ‖ π_ref) of each token [t]."""
        from vime.algorithms.kl import kl

        assert self.log_probs_t is not None and self.ref_log_probs_t is not None, "the KL needs both policies"
        return kl(self.log_probs_t, self.ref_log_probs_t, settings.kl_kind).values_t

    def token_rewards(self, settings: AdvantageSettings) -> Tensor:
        """Rewards of the single tokens [t]: the KL penalty of each, and the sample's reward at its last trained one."""
        from vime.algorithms.gae import token_rewards

        penalties_t = settings.kl_coef * self.kl(settings) if settings.kl_coef else None
        return token_rewards(self.rewards_n, self.mask_t, self.lengths_n, penalties_t=penalties_t)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTokens:
    """What a policy loss may look at."""

    log_probs_t: Tensor  # float32 with gradient, of the policy
    old_log_probs_t: Tensor  # float32, of the policy before the update
    advantages_t: Tensor  # float32
    mask_t: Tensor  # bool or 0/1, the tokens that are trained
    lengths_n: Tensor  # int64, response tokens of each sample; they sum to t


class AdvantageEstimator(ABC):
    """Turns rewards into the advantages of tokens, and those into their loss."""

    group_relative: ClassVar[bool] = True
    """Whether a sample alone in its group, or a group of equal rewards, teaches nothing."""

    takes_kl: ClassVar[bool] = False
    """Whether --kl-coef is part of the reward."""

    takes: ClassVar[frozenset[str]] = frozenset()
    """Which of ``TAKEN`` change what it does."""

    needs_critic: ClassVar[bool] = False
    """Whether a critic is trained along, whose values the samples have."""

    needs_whitening: ClassVar[bool] = False
    """Whether the advantages have no scale of their own, so that --normalize-advantages must be given."""

    def __init_subclass__(cls, *, name: str) -> None:
        if name in _ESTIMATORS:
            raise TypeError(f"two advantage estimators are called {name!r}")
        _ESTIMATORS[name] = cls()

    @abstractmethod
    def normalize_rewards(
        self,
        rewards: Sequence[float],
        group_ids: Sequence[Hashable],
        *,
        std: bool = True,
        parents: Sequence[Hashable] | None = None,
    ) -> list[float]:
        """The reward that training uses for each sample, from the raw rewards of a whole rollout.

        Args:
            rewards: one finite number a sample.
            group_ids: the group of each sample.
            std: whether the estimator may divide by the deviation of the group (--disable-grpo-std-normalization).
            parents: the drawn sample that each comes from, see ``group_normalize``.

        Raises:
            ValueError: a reward is not a finite number; the message names its position.
        """

    @abstractmethod
    def advantages(self, samples: PackedSamples, settings: AdvantageSettings) -> Tensor:
        """The advantage of each response token, float32 [t], masked tokens included."""

    def policy_loss(self, tokens: PolicyTokens, clip: ClipRange) -> PolicyLoss:
        """The loss of each response token, before any mean: PPO's clipped one, unless an estimator has its own."""
        from vime.algorithms.policy_loss import policy_loss

        return policy_loss(tokens.log_probs_t, tokens.old_log_probs_t, tokens.advantages_t, clip)


_ESTIMATORS: dict[str, AdvantageEstimator] = {}


def names() -> tuple[str, ...]:
    """The names that ``get`` knows."""
    return tuple(sorted(_ESTIMATORS))


def get(name: str) -> AdvantageEstimator:
    """The estimator of that name.

    Raises:
        ValueError: there is none; the message lists those there are.
    """
    if name not in _ESTIMATORS:
        raise ValueError(f"unknown advantage estimator {name!r}, known are: {', '.join(names())}")
    return _ESTIMATORS[name]
