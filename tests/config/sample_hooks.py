"""Custom functions as users write them, right and wrong; used by test_hooks.py through their paths."""

from __future__ import annotations

NOT_CALLABLE = 3


async def reward(args, sample):
    return 1.0


async def reward_with_keywords(args, sample, **kwargs):
    return 1.0


def plain_reward(args, sample):
    return 1.0


async def reward_of_one(sample):
    return 1.0


async def generate(args, sample, sampling_params, evaluation=False):
    return sample


def rollout(args, rollout_id, data_source, evaluation=False):
    return []


def rollout_without_evaluation(args, rollout_id, data_source):
    return []


def sample_filter(args, groups):
    return None


def log(rollout_id, args, samples, rollout_extra_metrics, rollout_time):
    return False


async def async_log(rollout_id, args, samples, rollout_extra_metrics, rollout_time):
    return False


class Source:
    def __init__(self, args):
        self.args = args

    def get_samples(self, num_samples):
        return []

    def add_samples(self, samples):
        return None

    def save(self, rollout_id):
        return None

    def load(self, rollout_id=None):
        return None

    def __len__(self):
        return 0


class HalfASource:
    def __init__(self, args):
        self.args = args

    def get_samples(self):
        return []


class Reward:
    async def __call__(self, args, sample):
        return 1.0


reward_object = Reward()
