"""The configuration of the critic, as that of a run whose actor it is."""

from __future__ import annotations

import dataclasses
from typing import Any

from vime.config.config import OWN_FLAGS, Config, FrozenMap

__all__ = ["critic_config"]


def critic_config(config: Config) -> Config:
    """The configuration under which the critic's processes run: all that is said of the actor is said of the critic.

    A part of the run that knows one model only, like the division of a batch or a trainer's rank, needs no other.
    """
    values: dict[str, Any] = {
        "actor_num_nodes": config.cluster.critic_num_nodes,
        "actor_num_gpus_per_node": config.cluster.critic_num_gpus_per_node,
        "lr": config.critic.critic_lr,
        **config.critic_overrides,
    }
    sections: dict[str, dict[str, Any]] = {}
    for name in values.keys() & OWN_FLAGS.keys():
        sections.setdefault(OWN_FLAGS[name].section, {})[name] = values[name]
    parts = {section: dataclasses.replace(getattr(config, section), **own) for section, own in sections.items()}
    megatron = {name: value for name, value in values.items() if name not in OWN_FLAGS}
    return dataclasses.replace(config, **parts, megatron=FrozenMap({**config.megatron, **megatron}))
