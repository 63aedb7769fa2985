"""From the rewards that samples got to those that training uses, where no custom function does it."""

from __future__ import annotations

import functools

from vime.algorithms.rewards import overlong_penalty
from vime.config import Config
from vime.rewards.values import Score
from vime.rollout.conversion import PostProcess
from vime.types import Sample

__all__ = ["equal_rewards_cancel", "score_of", "shape_rewards"]


def score_of(config: Config) -> Score:
    """Reads the reward of a graded sample."""
    return functools.partial(Sample.score, reward_key=config.reward.reward_key)


def equal_rewards_cancel(config: Config) -> bool:
    """Whether a group whose answers all have one reward gives advantages of 0: rewards are compared within groups, and
    nothing else makes a difference between its answers."""
    algorithm, hooks = config.algorithm, config.hooks
    return not (
        not algorithm.estimator.group_relative
        or algorithm.disable_rewards_normalization
        or algorithm.overlong_buffer_len is not None
        or config.distillation.use_opd
        or hooks.custom_reward_post_process_path is not None
        or hooks.custom_advantage_function_path is not None
    )


def shape_rewards(config: Config) -> PostProcess:
    """Takes off what long answers lose, then normalizes as the estimator does."""
    algorithm, key = config.algorithm, config.reward.reward_key

    def shape(samples: list[Sample]) -> tuple[list[float], list[float]]:
        raw = [sample.score(key) for sample in samples]
        rewards = [reward + _penalty(sample, config) for reward, sample in zip(raw, samples, strict=True)]
        if algorithm.disable_rewards_normalization:
            return raw, rewards
        groups, std = [sample.group_index for sample in samples], not algorithm.disable_grpo_std_normalization
        parents = [sample.origin for sample in samples]
        return raw, algorithm.estimator.normalize_rewards(rewards, groups, std=std, parents=parents)

    return shape


def _penalty(sample: Sample, config: Config) -> float:
    buffer = config.algorithm.overlong_buffer_len
    if buffer is None:
        return 0.0
    longest, factor = config.rollout.rollout_max_response_len, config.algorithm.overlong_penalty_factor
    return overlong_penalty(sample.response_length, max_length=longest, buffer=buffer, factor=factor)
