"""The critic of PPO: its slots, its checkpoints, and flags that are only for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from vime.config.config import OWN_FLAGS, Config
from vime.config.layouts import Layout, problems
from vime.config.roles import critic_config
from vime.config.rules.base import Violation, is_given, known, option, where_sampled
from vime.config.rules.batches import uneven_shares
from vime.config.rules.files import TRACKER, checkpoint_root, folder_is_free
from vime.config.rules.layout import learning_rate, recomputation, recomputed_units
from vime.config.rules.model import shape_or_none

OF_CLUSTER = ("critic_num_nodes", "critic_num_gpus_per_node", "colocate_critic")


def only_with_critic(config: Config) -> Iterator[Violation]:
    if config.algorithm.needs_critic:
        return
    names = [name for name, flag in OWN_FLAGS.items() if flag.section == "critic" or name in OF_CLUSTER]
    given = [option(name) for name in names if is_given(config, name)]
    if given:
        verb = "needs" if len(given) == 1 else "need"
        yield Violation(
            f"{' and '.join(given)} {verb} --advantage-estimator ppo: {config.algorithm.advantage_estimator} has no "
            "critic"
        )


def slots(config: Config) -> Iterator[Violation]:
    cluster = config.cluster
    if not config.algorithm.needs_critic or min(cluster.critic_world_size, cluster.train_world_size) < 1:
        return
    each, node = cluster.critic_num_gpus_per_node or 0, cluster.num_gpus_per_node
    if each > node >= 1:
        yield Violation(f"--critic-num-gpus-per-node {each} is more than a node has (--num-gpus-per-node {node})")
    if cluster.colocate_critic and cluster.critic_world_size != cluster.train_world_size:
        yield Violation(
            f"--colocate-critic shares the actor's {cluster.train_world_size} slots: the critic cannot have "
            f"{cluster.critic_world_size} (leave --critic-num-nodes and --critic-num-gpus-per-node out)"
        )
    yield from _layout(config)


def _layout(config: Config) -> Iterator[Violation]:
    """What is wrong with the critic's ranks and right with the actor's."""
    shape, critic = shape_or_none(config), critic_config(config)
    of_actor, of_critic = (Layout.of(each, shape) for each in (config, critic))
    if of_critic.model < 1:
        return
    reasons = [reason for reason in problems(of_critic, shape) if reason not in set(problems(of_actor, shape))]
    uneven = None if of_critic.world % of_critic.model else uneven_shares(critic, of_critic)
    if uneven is not None and of_critic.data != of_actor.data:
        reasons.append(uneven)
    for reason in reasons:
        yield Violation(f"critic: {reason.replace('--actor-num', '--critic-num')}")


def overrides(config: Config) -> Iterator[Violation]:
    """The rules of single flags, where the critic's differ from the actor's."""
    if config.algorithm.needs_critic:
        for rule in (learning_rate, recomputation, recomputed_units):
            of_actor = {each.message for each in rule(config)}
            for violation in rule(critic_config(config)):
                if violation.message not in of_actor:
                    yield Violation(f"critic: {violation.message}", violation.about)


def checkpoints(config: Config) -> Iterator[Violation]:
    critic, checkpoint = config.critic, config.checkpoint
    yield from checkpoint_root("--critic-load", critic.critic_load)
    yield from checkpoint_root("--critic-save", critic.critic_save)
    if critic.critic_load is not None:
        folder = Path(critic.critic_load)
        if not any((folder / name).is_file() for name in (TRACKER, "config.json")):
            yield Violation(
                f"--critic-load {folder}: neither a checkpoint ({TRACKER}) nor a Hugging Face folder (config.json)"
            )
    if critic.critic_save is None:
        return
    if not known(checkpoint.save):
        yield Violation("--critic-save needs --save: a checkpoint is actor and critic together", ("save",))
    elif checkpoint.save is not None and Path(checkpoint.save).resolve() == Path(critic.critic_save).resolve():
        yield Violation(
            f"--critic-save {critic.critic_save} is --save itself: leave it out, checkpoints there have the critic too"
        )
    else:
        yield from folder_is_free("--critic-save", critic.critic_save, "--critic-load", critic.critic_load)


def shared_samples(config: Config) -> Iterator[Violation]:
    """A custom function computes advantages twice, of the samples of a rank: once for each model."""
    if not config.algorithm.needs_critic or config.hooks.custom_advantage_function_path is None:
        return
    if min(config.cluster.critic_world_size, config.cluster.train_world_size) < 1:
        return
    shape = shape_or_none(config)
    of_actor, of_critic = (_division(Layout.of(each, shape)) for each in (config, critic_config(config)))
    if of_actor != of_critic:
        differing = ", ".join(
            f"{name} {of_actor[name]} and {of_critic[name]}" for name in of_actor if of_actor[name] != of_critic[name]
        )
        yield Violation(
            "--custom-advantage-function-path must see the same samples on the ranks of actor and critic, which "
            f"differ: {differing}"
        )


def _division(layout: Layout) -> dict[str, int]:
    """What decides which samples a rank has."""
    return {
        "data-parallel size": layout.data if layout.model else 0,
        "context-parallel size": layout.context,
        "multiple of micro-batches": layout.micro_batch_multiple,
    }


RULES = (where_sampled(only_with_critic), slots, overrides, shared_samples, checkpoints)


def actor_never_learns(config: Config) -> Iterator[Violation]:
    only, rollouts = config.critic.num_critic_only_steps, config.rollout.num_rollout
    if config.algorithm.needs_critic and rollouts is not None and only >= rollouts > 0:
        yield Violation(f"--num-critic-only-steps {only} of {rollouts} rollouts: the actor never learns")


WARNINGS = (actor_never_learns,)
