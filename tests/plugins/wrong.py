"""Custom functions as they go wrong; test_check.py says what check-plugin finds in each."""

from __future__ import annotations

import asyncio
import math
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch

from vime.types import Sample


async def fine(args, sample):
    return 1.0


# --- rewards


async def reward_of_text(args, sample):
    return "1"


async def reward_nan(args, sample):
    return math.nan


async def reward_nothing(args, sample):
    return 1.0 if sample.response else None


async def reward_dict(args, sample):
    return {"accuracy": 1.0}


async def reward_raises(args, sample):
    return 1 / len(sample.response)


async def reward_exits(args, sample):
    sys.exit(3)


async def reward_cancels(args, sample):
    task = asyncio.ensure_future(asyncio.sleep(9))
    task.cancel()
    await task


async def reward_needs_metadata(args, sample):
    return float(len(sample.metadata["tests"]))


async def reward_coroutine(args, sample):
    return fine(args, sample)


async def reward_sleeps(args, sample):
    time.sleep(0.1)  # noqa: ASYNC251 - what it must not do
    return 1.0


async def reward_waits(args, sample):
    await asyncio.sleep(0.1)
    return 1.0


async def reward_forgets_await(args, sample):
    fine(args, sample)
    return 1.0


async def reward_changes_mask(args, sample):
    sample.loss_mask = [0] * sample.response_length
    return 1.0


async def group_one_number(args, samples):
    return 1.0


async def group_too_few(args, samples):
    return [1.0] * (len(samples) - 1)


async def reward_reads_unknown_flag(args, sample):
    return args.rollout_max_response_length


async def reward_writes_args(args, sample):
    args.bonus = 1.0
    return args.bonus


async def reward_from_config(args, sample):
    return args.bonus


# --- generation


async def generate_text(args, sample, sampling_params):
    return "the answer"


async def generate_nothing(args, sample, sampling_params):
    return []


async def generate_pending(args, sample, sampling_params):
    sample.tokens, sample.response_length = [1, 2, 3], 2
    return sample


async def generate_short_mask(args, sample, sampling_params):
    sample.tokens, sample.response_length, sample.loss_mask = [1, 2, 3], 2, [1]
    sample.status = Sample.Status.COMPLETED
    return sample


async def generate_without_prompt(args, sample, sampling_params):
    sample.tokens, sample.response_length, sample.status = [2, 3], 2, Sample.Status.COMPLETED
    return sample


async def generate_new_sample(args, sample, sampling_params):
    return Sample(prompt=sample.prompt, tokens=[1, 2], response_length=1, status=Sample.Status.COMPLETED)


async def generate_changes_label(args, sample, sampling_params):
    sample.tokens, sample.response_length, sample.status = [1, 2, 3], 2, Sample.Status.COMPLETED
    sample.label = "5"
    return sample


# --- whole rollouts


def rollout_flat(args, rollout_id, data_source, evaluation=False):
    return [sample for group in data_source.get_samples(args.rollout_batch_size) for sample in group]


def rollout_half(args, rollout_id, data_source, evaluation=False):
    groups = data_source.get_samples(args.rollout_batch_size // 2)
    for sample in (sample for group in groups for sample in group):
        sample.tokens, sample.response_length, sample.status, sample.reward = [1, 2], 1, Sample.Status.COMPLETED, 1.0
    return groups


def rollout_ungraded(args, rollout_id, data_source, evaluation=False):
    groups = data_source.get_samples(args.rollout_batch_size)
    for sample in (sample for group in groups for sample in group):
        sample.tokens, sample.response_length, sample.status = [1, 2], 1, Sample.Status.COMPLETED
    return groups


def evaluate_list(args, rollout_id, data_source, evaluation=True):
    return [1.0, 0.0]


def evaluate_texts(args, rollout_id, data_source, evaluation=True):
    return {"gsm8k": {"rewards": [1.0], "samples": ["yes"]}}


def evaluate_step(args, rollout_id, data_source, evaluation=True):
    return SimpleNamespace(data={"gsm8k": {"rewards": [1.0]}}, metrics={"step": 3.0})


def evaluate_one_file(args, rollout_id, data_source, evaluation=True):
    return {"a b": {"rewards": [1.0]}, "a/b": {"rewards": [1.0]}}


def evaluate_scores(args, rollout_id, data_source, evaluation=True):
    return {"gsm8k": {"scores": [1.0]}}


class SourceWithoutIndices:
    def __init__(self, args):
        self.n = args.n_samples_per_prompt

    def get_samples(self, num_samples):
        return [[Sample(prompt="?") for _ in range(self.n)] for _ in range(num_samples)]

    def add_samples(self, groups):
        return None

    def save(self, rollout_id):
        return None

    def load(self, rollout_id=None):
        return None

    def __len__(self):
        return 7


class SourceThatRepeats(SourceWithoutIndices):
    def get_samples(self, num_samples):
        return [[Sample(index=i, group_index=0) for i in range(self.n)]]


class SourceOfEndlessLength(SourceWithoutIndices):
    drawn = 0

    def get_samples(self, num_samples):
        self.drawn += num_samples
        return [[Sample(index=self.drawn - i, group_index=self.drawn - i)] for i in range(num_samples)]

    def __len__(self):
        return -1


# --- after generation


def filter_returns(args, groups):
    return groups[:1]


def filter_exits(args, groups):
    sys.exit(3)


def filter_changes_reward(args, groups):
    for sample in groups[0]:
        sample.reward = 0.0


def filter_breaks_on_failures(args, groups):
    for group in groups:
        if max(sample.reward for sample in group) < 1:
            group[0].remove_sample = True


def process_short(args, samples):
    rewards = [sample.reward for sample in samples]
    return rewards[1:], rewards


def process_one_list(args, samples):
    return [sample.reward for sample in samples]


def process_infinite(args, samples):
    rewards = [sample.reward for sample in samples]
    return rewards, [math.inf for _ in rewards]


def process_by_position(args, samples):
    """Groups of four in order, as long as nothing else happens."""
    rewards = [sample.reward for sample in samples]
    groups = [rewards[i : i + 4] for i in range(0, len(rewards), 4)]
    return rewards, [reward - sum(group) / 4 for group in groups for reward in (group[j] for j in range(4))]


def process_changes_samples(args, samples):
    for sample in samples:
        sample.reward -= 0.5
    return ([sample.reward for sample in samples],) * 2


def log_step(rollout_id, args, samples, rollout_extra_metrics, rollout_time):
    rollout_extra_metrics["step"] = 3


def log_divides(rollout_id, args, samples, rollout_extra_metrics, rollout_time):
    print(sum(sample.reward for sample in samples) / len(samples))


def hook_drops(args, sample, *, rollout_id=None, evaluation=False):
    return "dropped"


def hook_breaks_mask(args, sample, *, rollout_id=None, evaluation=False):
    sample.loss_mask = [1]
    return sample


def dynamic_reason_only(args, samples):
    return "all wrong"


def dynamic_breaks(args, samples):
    return max(sample.reward for sample in samples) > 0


def buffer_copies(args, rollout_id, buffer, num_samples):
    return buffer[:num_samples]


def buffer_too_many(args, rollout_id, buffer, num_samples):
    taken = list(buffer)
    buffer.clear()
    return taken


def buffer_new(args, rollout_id, buffer, num_samples):
    return [[Sample()]]


def all_samples_returns(args, all_samples, data_source):
    return all_samples


def convert_list(args, samples):
    return [sample.tokens for sample in samples]


def convert_without_rewards(args, samples):
    return {"tokens": [s.tokens for s in samples], "response_lengths": [s.response_length for s in samples]}


def rows_of(samples):
    rewards = [sample.reward or 0.0 for sample in samples]
    return {
        "tokens": [s.tokens for s in samples],
        "response_lengths": [s.response_length for s in samples],
        "rewards": rewards,
    }


def convert_short(args, samples):
    return rows_of(samples) | {"rewards": [0.0]}


def convert_misspelt(args, samples):
    return rows_of(samples) | {"loss_mask": [[1] * s.response_length for s in samples]}


def convert_mask(args, samples):
    return rows_of(samples) | {"loss_masks": [[1] for s in samples]}


def convert_nan(args, samples):
    return rows_of(samples) | {"rewards": [math.nan for s in samples]}


def convert_half(args, samples):
    return rows_of(samples[::2])


def convert_twice(args, samples):
    return rows_of(samples) | {"sample_indices": [0 for s in samples]}


def written_moved(args, version_dir, rollout_engines):
    (Path(version_dir) / "model.safetensors").unlink()


# --- the trainer


def init_returns(args):
    return 1


def provider_returns_nothing(pre_process, post_process, vp_stage, *, build=None):
    build(pre_process, post_process, vp_stage)


def provider_returns_another(pre_process, post_process, vp_stage):
    return torch.nn.Linear(1, 1)


def log_prob_needs_layers(args, model, store_prefix):
    return model.decoder


def step_breaks_weights(args, rollout_id, step_id, model, optimizer, opt_param_scheduler):
    with torch.no_grad():
        next(model[0].parameters()).mul_(math.inf)


def data_expects_advantages(args, rollout_id, rollout_data):
    rollout_data["advantages"] = [2 * advantage for advantage in rollout_data["advantages"]]


def data_drops_advantages(args, rollout_id, rollout_data):
    rollout_data.pop("advantages", None)


def data_short(args, rollout_id, rollout_data):
    rollout_data["rollout_log_probs"][2] = rollout_data["rollout_log_probs"][2][1:]


def data_nan(args, rollout_id, rollout_data):
    rollout_data["rollout_log_probs"][2][0] = math.nan


def data_soft_masks(args, rollout_id, rollout_data):
    rollout_data["loss_masks"] = [0.5 * mask for mask in rollout_data["loss_masks"]]


def data_changes_tokens(args, rollout_id, rollout_data):
    rollout_data["tokens"][0][0] = 7
