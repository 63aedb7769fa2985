"""Advantages and the policy loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vime.algorithms import advantages
from vime.config.flags import derived, flag


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """Which estimator, and the terms of the loss."""

    advantage_estimator: str = flag("grpo", choices=advantages.names(), help="How rewards become advantages.")
    loss_type: Literal["policy_loss", "sft_loss", "custom_loss"] = flag(
        "policy_loss",
        help="What is learnt: policy_loss from sampled answers and their rewards; sft_loss from the dialogues in "
        "--prompt-data as they stand, without engines; custom_loss by --custom-loss-function-path.",
    )
    disable_compute_advantages_and_returns: bool = flag(
        False,
        help="No advantages are computed. Only for losses that need none: sft_loss, which implies it, or custom_loss.",
    )
    eps_clip: float = flag(0.2, help="The probability ratio is clipped from below at 1 - this.")
    eps_clip_high: float = derived("eps-clip", help="The probability ratio is clipped from above at 1 + this.")
    eps_clip_c: float | None = flag(None, help="Dual clip: the loss of a negative advantage stops at this ratio (> 1).")
    use_kl_loss: bool = flag(False, help="Compute the KL divergence to the reference model (one more forward pass).")
    kl_loss_coef: float = flag(0.0, help="Weight of the KL divergence in the loss; 0 only reports it.")
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = flag(
        "k1", help="KL estimator. k1 can be negative; low_var_kl is k3 limited to 10."
    )
    use_unbiased_kl: bool = flag(
        False, help="Weigh the KL of each token by the ratio of the policy to the old one: unbiased after it has moved."
    )
    kl_coef: float = flag(0.0, help="Weight of the KL divergence in the reward of each token.")
    gamma: float = flag(1.0, help="Discount of a reward for each trained token that it lies ahead.")
    lambd: float = flag(1.0, help="Lambda of generalized advantage estimation: 0 trusts the critic, 1 the rewards.")
    entropy_coef: float = flag(0.0, help="Weight of the entropy bonus.")
    normalize_advantages: bool = flag(False, help="Whiten advantages over all tokens of the rollout.")
    disable_grpo_std_normalization: bool = derived(
        "when n-samples-per-prompt is 1, and with use-dr-grpo",
        help="Do not divide by the standard deviation of a group.",
    )
    use_routing_replay: bool = flag(
        False, help="Experts: training follows the routes that were chosen when the old log-probs were computed."
    )
    use_rollout_routing_replay: bool = flag(
        False, help="Experts: training and the old log-probs follow the routes that the engines chose while sampling."
    )
    mtp_num_layers: int | None = flag(
        None, help="Layers for multi-token prediction that the checkpoint has behind the decoder."
    )
    enable_mtp_training: bool = flag(
        False, help="Train them on the rollouts too, so that drafts keep up with the policy; the policy is not changed."
    )
    mtp_loss_scaling_factor: float = flag(0.2, help="Weight of their loss.")
    disable_rewards_normalization: bool = flag(False, help="Use rewards as they are, without a group baseline.")
    use_dr_grpo: bool = flag(
        False, help="Sum the policy loss of a sample and divide by a constant, and no reward by a deviation (Dr.GRPO)."
    )
    dr_grpo_divisor: float = derived("rollout-max-response-len", help="That constant, in tokens.")
    overlong_buffer_len: int | None = flag(
        None, help="The reward falls along the last so many tokens before --rollout-max-response-len (DAPO)."
    )
    overlong_penalty_factor: float = flag(1.0, help="By how much it has fallen at the limit.")
    exclude_zero_signal_groups: bool = flag(
        False, help="Groups whose rewards are all equal do not count in the means of a step, as if they were not there."
    )
    ref_update_interval: int | None = flag(
        None, help="Every so many rollouts the reference model becomes what the actor is by then."
    )
    reset_optimizer_states: bool = flag(False, help="Forget the optimizer's moments after each rollout.")

    @property
    def estimator(self) -> advantages.AdvantageEstimator:
        return advantages.get(self.advantage_estimator)

    @property
    def needs_critic(self) -> bool:
        """Whether a critic is trained along."""
        return not self.is_sft and self.estimator.needs_critic

    @property
    def is_sft(self) -> bool:
        """Whether the run trains on given dialogues instead of on sampled answers."""
        return self.loss_type == "sft_loss"

    @property
    def needs_reference(self) -> bool:
        """Whether a reference model must be loaded and run."""
        return not self.is_sft and (self.use_kl_loss or self.kl_loss_coef != 0 or self.kl_coef != 0)
