"""Which processes run where. A slot is a GPU where Ray has any, else one CPU process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from vime.config.flags import derived, flag


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Slots for training and for the engines."""

    actor_num_nodes: int = flag(1, help="Training nodes.")
    actor_num_gpus_per_node: int = flag(8, help="Training slots of each node; the training world has nodes x this.")
    critic_num_nodes: int | None = derived("actor-num-nodes with ppo", help="Nodes of the critic.")
    critic_num_gpus_per_node: int | None = derived(
        "actor-num-gpus-per-node with ppo", help="Slots of the critic on each of its nodes."
    )
    colocate_critic: bool = flag(False, help="Actor and critic take turns on the actor's slots.")
    rollout_num_gpus: int = derived(
        "the training slots under colocate, else required",
        help="Slots of all engines together; a multiple of --rollout-num-gpus-per-engine. Ignored under --colocate.",
    )
    rollout_num_gpus_per_engine: int = flag(1, help="Slots of one engine, which is its tensor-parallel size.")
    num_gpus_per_node: int = flag(8, help="Slots that one node has.")
    colocate: bool = flag(False, help="Trainer and engines take turns on the same slots.")
    offload: bool = flag(False, help="Both --offload-train and --offload-rollout.")
    offload_train: bool = derived(
        "under --colocate, --colocate-critic or --offload",
        help="On GPUs: a model leaves the device while engines generate or another model computes there.",
    )
    offload_rollout: bool = derived(
        "under --colocate or --offload", help="On GPUs: the engines leave the device while the trainer computes."
    )
    train_backend: Literal["megatron"] = flag("megatron", help="The training backend.")
    distributed_timeout_minutes: int = flag(10, help="Deadline of one collective operation between training ranks.")
    train_env_vars: Mapping[str, Any] = flag({}, help="Environment variables of the training processes, as JSON.")

    @property
    def train_world_size(self) -> int:
        return self.actor_num_nodes * self.actor_num_gpus_per_node

    @property
    def critic_world_size(self) -> int:
        """0 without a critic."""
        return (self.critic_num_nodes or 0) * (self.critic_num_gpus_per_node or 0)

    @property
    def train_slots(self) -> int:
        """Slots of actor and critic together; the actor's are the first."""
        return self.train_world_size + (0 if self.colocate_critic else self.critic_world_size)

    @property
    def num_slots(self) -> int:
        """Slots of the whole run; the engines' are the last, or under --colocate the actor's."""
        return self.train_slots + (0 if self.colocate else self.rollout_num_gpus)

    @property
    def num_engines(self) -> int:
        return self.rollout_num_gpus // self.rollout_num_gpus_per_engine
