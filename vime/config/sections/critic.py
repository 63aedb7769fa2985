"""The critic of PPO: a second model, which learns what each token of an answer leads to."""

from __future__ import annotations

from dataclasses import dataclass

from vime.config.flags import derived, flag


@dataclass(frozen=True, kw_only=True)
class Critic:
    """Only with --advantage-estimator ppo. Its slots are in ``Cluster``; all else is as the actor's."""

    critic_lr: float = derived("lr", help="The critic's learning rate.")
    critic_load: str | None = flag(
        None, help="Where the critic starts: a checkpoint or a Hugging Face folder. Otherwise where the actor starts."
    )
    critic_save: str | None = flag(
        None, help="Folder for the critic's checkpoints, which otherwise are part of those in --save."
    )
    value_clip: float = flag(0.2, help="A value may move this far from what it was before the rollout's training.")
    num_critic_only_steps: int = flag(0, help="The first so many rollouts train the critic alone.")
    megatron_config_path: str | None = flag(
        None, help="YAML with flags of actor and critic that differ: megatron: [{role: critic, overrides: {lr: 1e-5}}]."
    )
