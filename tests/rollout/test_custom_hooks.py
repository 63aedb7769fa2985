"""Custom functions of the rollout over fake engines: when they are called, and what becomes of their answers."""

from __future__ import annotations

import copy
import json
import re
from types import SimpleNamespace

import pytest

from examples.plugins import filters, rewards
from tests.rollout.fakes import FakeRecorder, FakeRewarder, FakeSource
from vime.data.codec import sample_from_json, sample_to_json
from vime.errors import UserError
from vime.plugins import Hook, HookError
from vime.rollout.evaluation import EvalSet, eval_metrics
from vime.rollout.hooks import (
    CustomSource,
    all_samples_process,
    custom_conversion,
    custom_evaluation,
    custom_generate,
    custom_rollout,
    dynamic_filter,
    own_generate,
    sample_filter,
    sample_hook,
)
from vime.rollout.manager import RolloutManager
from vime.rollout.runner import Runner
from vime.rollout.sampling import Sampler, keep_all
from vime.types import CHILD_STRIDE, Sample, SamplingParams

ARGS = SimpleNamespace(reward_key=None, global_batch_size=4)


def hook(function, flag="--flag"):
    return Hook(function, flag, f"mine:{function.__name__}")


async def generate(args, sample, sampling_params):
    length = 1 + sample.index % 3
    sample.tokens, sample.response_length = [1, 2, *range(10, 10 + length)], length
    sample.response, sample.status = "x" * length, Sample.Status.COMPLETED
    sample.rollout_log_probs, sample.weight_versions = [-0.5] * length, [1] * length
    return sample


def manager(rewarder=None, *, source=None, hooks=(), judge=keep_all, **more):
    runner = Runner(
        custom_generate(hook(generate), ARGS),
        rewarder or FakeRewarder(),
        seed=1,
        concurrency=4,
        hooks=[sample_hook(each, ARGS) for each in hooks],
    )
    params = SamplingParams(max_tokens=8)
    sampler = Sampler(
        source or FakeSource(n=4), lambda group, k: runner.run(group, k, params), batch_size=2, judge=judge
    )
    return RolloutManager(
        sampler=sampler,
        runner=runner,
        batch_size=2,
        post_process=lambda samples: ([sample.score() for sample in samples],) * 2,
        metrics=lambda rollout_id, collected, seconds: dict(collected.metrics),
        recorder=FakeRecorder(),
        **more,
    )


async def test_sample_hooks_see_generated_samples_before_they_are_graded_one_after_the_other():
    seen = []

    def first(args, sample, *, rollout_id, evaluation):
        seen.append((sample.index, rollout_id, evaluation, sample.reward))
        sample.metadata["seen"] = 1

    async def second(args, sample, *, rollout_id, evaluation):
        sample.metadata["seen"] += 1
        return sample

    rewarder = FakeRewarder(lambda sample: float(sample.metadata["seen"]))
    batch = await manager(rewarder, hooks=[hook(first), hook(second)]).generate(7)
    assert [sample.raw_reward for sample in batch.samples] == [2.0] * 8
    assert sorted(seen) == [(index, 7, False, None) for index in range(8)]


async def test_the_mask_of_a_sample_hook_is_trained_with():
    batch = await manager(hooks=[hook(filters.mask_first_token)]).generate(0)
    assert [sample.loss_mask for sample in batch.samples[:3]] == [(1,), (0, 1), (0, 1, 1)]


async def test_a_sample_that_a_hook_broke_names_hook_and_sample():
    def breaks(args, sample, *, rollout_id, evaluation):
        sample.loss_mask = [1] * 9

    with pytest.raises(HookError, match=r"--rollout-sample-hook mine:breaks: returned a sample .* for sample \d"):
        await manager(hooks=[hook(breaks, "--rollout-sample-hook")]).generate(0)


async def test_removed_samples_keep_their_place_but_train_nothing():
    def removes(args, groups):
        groups[0][1].remove_sample = True

    batch = await manager(sample_filter=sample_filter(hook(removes), ARGS)).generate(0)
    assert [sum(sample.loss_mask) for sample in batch.samples[:3]] == [1, 0, 3]


async def test_all_finished_groups_are_seen_in_the_order_of_their_prompts_with_the_data_source():
    seen, source = [], FakeSource(n=4)

    def process(args, all_samples, data_source):
        seen.append(([group[0].group_index for group in all_samples], data_source))

    await manager(source=source, process_all=lambda *a: all_samples_process(hook(process), ARGS, source)(*a)).generate(
        0
    )
    assert seen == [([0, 1], source)]


async def test_groups_that_a_dynamic_filter_dropped_are_seen_too_but_neither_filtered_nor_trained():
    seen, filtered = [], []

    def every_other(args, samples):
        return SimpleNamespace(keep=samples[0].group_index % 2 == 1, reason="even")

    def process(args, all_samples, data_source):
        seen.extend((group[0].group_index, group[0].reward) for group in all_samples)

    def removes(args, groups):
        filtered.extend(group[0].group_index for group in groups)

    source = FakeSource(n=4)
    one = manager(
        source=source,
        judge=dynamic_filter(hook(every_other), ARGS),
        process_all=all_samples_process(hook(process), ARGS, source),
        sample_filter=sample_filter(hook(removes), ARGS),
    )
    batch = await one.generate(0)
    assert filtered == [1, 3] and {sample.group_index for sample in batch.samples} == {1, 3}
    dropped = [0, 2] if len(seen) == 4 else [0, 2, 4]
    assert [index for index, _ in seen] == sorted([1, 3, *dropped]) and all(reward is not None for _, reward in seen)
    assert batch.metrics["rollout/groups/dropped/even"] == len(dropped)


async def test_a_custom_conversion_takes_the_place_of_post_processing():
    convert = custom_conversion(hook(rewards.centred_rows), ARGS, None)
    batch = await manager(FakeRewarder(lambda sample: float(sample.index)), convert=convert).generate(0)
    assert [sample.reward for sample in batch.samples] == [index - 3.5 for index in range(8)]
    assert [sample.index for sample in batch.samples] == list(range(8))
    assert batch.samples[1].rollout_log_probs == (-0.5, -0.5), "what the function leaves out is as the sample has it"


@pytest.mark.parametrize(
    ("keep", "needs", "message"),
    [
        (7, None, "returned 7 rows, which are no multiple of --global-batch-size 4"),
        (8, "--use-tis", "returned no rollout_log_probs, and --use-tis needs them"),
    ],
)
async def test_rows_that_cannot_be_trained_on_are_refused(keep, needs, message):
    def some(args, samples):
        kept = samples[:keep]
        return {
            "tokens": [[1, 2, 3] for _ in kept],
            "response_lengths": [1 + keep % 2 for _ in kept],
            "rewards": [1.0 for _ in kept],
            "sample_indices": [sample.index for sample in kept],
            "rollout_log_probs": [None for _ in kept],
        }

    with pytest.raises(HookError, match=message):
        await manager(convert=custom_conversion(hook(some), ARGS, needs)).generate(0)


def plain_rows(args, samples):
    """As little as a conversion must say; a sample without a response gets a place."""
    return {
        "tokens": [sample.tokens or [1, 2] for sample in samples],
        "response_lengths": [sample.response_length or 1 for sample in samples],
        "rewards": [1.0 for _ in samples],
    }


def test_rows_without_masks_have_those_of_their_samples_and_samples_without_a_reward_are_not_trained():
    samples = [
        Sample(index=i, group_index=0, tokens=[1, 5, 6], response_length=2, reward=1.0, rollout_log_probs=[-1.0, -2.0])
        for i in range(4)
    ]
    for sample in samples:
        sample.status = Sample.Status.COMPLETED
    samples[0].loss_mask = [0, 1]
    samples[0].teacher_log_probs = [-3.0, -4.0]
    samples[1].remove_sample = True
    samples[2].reward = float("nan")
    samples[3] = Sample(index=3, group_index=0, status=Sample.Status.FAILED)
    samples += [Sample(index=4 + i, **{**fields(samples[0]), "loss_mask": None}) for i in range(4)]
    rows = custom_conversion(hook(plain_rows), ARGS, "--use-tis")(0, [samples], None).samples
    assert [row.loss_mask for row in rows] == [(0, 1), (0, 0), (0, 0), (0,), *[(1, 1)] * 4]
    assert [row.graded for row in rows] == [True, True, False, False, *[True] * 4]
    assert [row.rollout_log_probs for row in rows[2:5]] == [(-1.0, -2.0), (0.0,), (-1.0, -2.0)]
    assert [row.scores.teacher_log_probs for row in rows[2:5]] == [(0.0, 0.0), (0.0,), (-3.0, -4.0)]


def fields(sample):
    return {"group_index": 1} | {
        name: getattr(sample, name)
        for name in ("tokens", "response_length", "reward", "rollout_log_probs", "teacher_log_probs", "status")
    }


def test_a_row_with_another_response_has_nothing_of_the_sample_but_its_place():
    def other(args, samples):
        return plain_rows(args, samples) | {"tokens": [[1, 7, 8]] * 4}

    samples = [Sample(index=i, group_index=0, tokens=[1, 5, 6], response_length=2, reward=1.0) for i in range(4)]
    for sample in samples:
        sample.status, sample.loss_mask, sample.weight_versions = Sample.Status.COMPLETED, [0, 1], [1, 1]
    rows = custom_conversion(hook(other), ARGS, None)(0, [samples], None).samples
    assert {(row.loss_mask, row.weight_versions, row.index in range(4)) for row in rows} == {((1, 1), (), True)}


async def test_a_rollout_function_may_be_plain_and_give_metrics():
    def rollout(args, rollout_id, data_source, evaluation):
        groups = data_source.get_samples(2)
        for sample in (sample for group in groups for sample in group):
            sample.tokens, sample.response_length, sample.reward = [1, 2], 1, 1.0
            sample.status = Sample.Status.COMPLETED
        return SimpleNamespace(samples=groups, metrics={"rollout/mine": 3})

    source = FakeSource(n=2)
    batch = await manager(collect=custom_rollout(hook(rollout), ARGS, source)).generate(4)
    assert batch.metrics["rollout/mine"] == 3.0 and len(batch.samples) == 4


@pytest.mark.parametrize(("groups", "count"), [(1, 2), (0, 0)])
async def test_a_rollout_function_must_return_samples_for_whole_steps(groups, count):
    def rollout(args, rollout_id, data_source, evaluation):
        groups_made = data_source.get_samples(groups) if groups else []
        for sample in (sample for group in groups_made for sample in group):
            sample.tokens, sample.response_length, sample.reward = [1, 2], 1, 1.0
            sample.status = Sample.Status.COMPLETED
        return groups_made

    collect = custom_rollout(hook(rollout, "--rollout-function-path"), ARGS, FakeSource(n=2), multiple=4)
    message = f"--rollout-function-path mine:rollout: returned {count} samples, which are no multiple of .* 4, for roll"
    with pytest.raises(HookError, match=message):
        await collect(0)


def test_a_data_source_must_give_groups_of_the_size_that_steps_are_made_of():
    class Source:
        def __init__(self, args): ...
        def get_samples(self, n):
            return [[Sample(index=i, group_index=0) for i in range(3)]]

        def add_samples(self, groups): ...
        def save(self, rollout_id): ...
        def load(self, rollout_id=None): ...
        def __len__(self):
            return 5

    made = hook(Source, "--data-source-path")
    with pytest.raises(
        HookError, match="returned a group of 3 samples, it must have --n-samples-per-prompt 4, for 1 g"
    ):
        CustomSource(made, ARGS, 4).get_samples(1)
    assert len(CustomSource(made, ARGS).get_samples(1)[0]) == 3


async def test_an_evaluation_function_may_give_rewards_alone_and_metrics():
    async def evaluate(args, rollout_id, data_source, evaluation):
        assert evaluation
        return SimpleNamespace(data={"mine": {"rewards": [1.0, 0.0]}}, metrics={"eval/mine-tries": 2})

    found = await manager(evaluate=custom_evaluation(hook(evaluate), ARGS, FakeSource())).evaluate(3)
    assert found == {"eval/mine": 0.5, "eval/mine-tries": 2.0}


async def test_a_generate_function_that_loses_the_sample_names_it():
    async def loses(args, sample, sampling_params):
        return Sample(index=sample.index)

    runner = Runner(custom_generate(hook(loses), ARGS), FakeRewarder(), seed=1, concurrency=1)
    with pytest.raises(
        HookError, match=r"must keep index 0 and group_index 0, .*, for sample 0 \(group 0, rollout 6\)"
    ):
        await runner.run(FakeSource(n=1).get_samples(1)[0], 5, SamplingParams(max_tokens=2))


async def fan_out(args, sample, sampling_params):
    """Sample i becomes 1 + i % 3 samples, of which the last alone is right."""
    children = [copy.deepcopy(sample) for _ in range(1 + sample.index % 3)]
    for number, child in enumerate(children):
        await generate(args, child, sampling_params)
        child.metadata["right"] = number == len(children) - 1
    return children


async def test_one_generate_call_may_make_several_samples_each_graded_by_itself():
    seen = []

    def note(args, sample, *, rollout_id, evaluation):
        seen.append(sample.index)

    rewarder = FakeRewarder(lambda sample: float(sample.metadata["right"]))
    runner = Runner(
        custom_generate(hook(fan_out), ARGS), rewarder, seed=1, concurrency=2, hooks=[sample_hook(hook(note), ARGS)]
    )
    group = await runner.run(FakeSource(n=3).get_samples(1)[0], 5, SamplingParams(max_tokens=2))
    far = CHILD_STRIDE
    assert (
        [s.index for s in group] == [0, 1, 1 + far, 2, 2 + far, 2 + 2 * far] == sorted(seen, key=lambda i: (i % far, i))
    )
    assert [s.parent_index for s in group] == [None, 1, 1, 2, 2, 2], "the only one is the sample itself"
    assert [s.reward for s in group] == [1.0, 0.0, 1.0, 0.0, 0.0, 1.0]
    assert not rewarder.groups, "several samples make no group reward of a reward function"
    assert [sample_from_json(json.loads(json.dumps(sample_to_json(s)))) for s in group] == group
    assert group[2].name == "child 1 of sample 1 (group 0, rollout 6)"


async def test_a_function_for_whole_groups_gets_all_children():
    rewarder = FakeRewarder(lambda sample: float(sample.metadata["right"]), by_group=True)
    runner = Runner(custom_generate(hook(fan_out), ARGS), rewarder, seed=1, concurrency=2)
    await runner.run(FakeSource(n=3).get_samples(1)[0], 5, SamplingParams(max_tokens=2))
    assert [[sample.origin for sample in group] for group in rewarder.groups] == [[0, 1, 1, 2, 2, 2]]


async def test_a_drawn_sample_is_one_answer_in_evaluations_whatever_became_of_it():
    runner = Runner(
        custom_generate(hook(fan_out), ARGS),
        FakeRewarder(lambda sample: float(sample.metadata["right"])),
        seed=1,
        concurrency=2,
    )
    groups = [await runner.run(group, 5, SamplingParams(max_tokens=2), "a") for group in FakeSource(n=3).get_samples(2)]
    one = EvalSet(name="a", groups=list, sampling=SamplingParams(max_tokens=2), score=Sample.score)
    found = one.result(groups)
    assert found["by_prompt"] == [[1, 1 / 2, 1 / 3]] * 2 and len(found["samples"]) == 12
    metrics = eval_metrics({"a": found})
    assert metrics["eval/a"] == pytest.approx(11 / 18) and metrics["eval/a-pass@1"] == pytest.approx(1 / 3)
    assert (metrics["eval/a-graded"], metrics["eval/a-errors"]) == (6, 0)


async def test_children_stand_in_the_place_of_their_parent_in_a_batch():
    runner = Runner(
        custom_generate(hook(fan_out), ARGS),
        FakeRewarder(lambda sample: float(sample.metadata["right"])),
        seed=1,
        concurrency=2,
    )
    params = SamplingParams(max_tokens=8)
    one = RolloutManager(
        sampler=Sampler(FakeSource(n=3), lambda group, k: runner.run(group, k, params), batch_size=2),
        runner=runner,
        batch_size=2,
        post_process=lambda samples: ([sample.score() for sample in samples],) * 2,
        metrics=lambda rollout_id, collected, seconds: {},
        recorder=FakeRecorder(),
    )
    batch = await one.generate(7)
    assert [s.origin for s in batch.samples] == [0, 1, 1, 2, 2, 2, 3, 4, 4, 5, 5, 5]
    assert [s.reward for s in batch.samples] == [1, 0, 1, 0, 0, 1] * 2


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda sample: [], "returned an empty list: at least one sample must become of the one that it got"),
        (lambda sample: [sample, sample], "returned the same Sample twice in one list; each must be a copy of its own"),
        (lambda sample: [sample, "text"], "must return the Sample or a list of Samples, not str 'text'"),
        (lambda sample: [sample, Sample(index=9)], "must keep index 0 and group_index 0, not 9 and None"),
    ],
)
async def test_what_becomes_of_a_sample_is_checked(answer, message):
    async def wrong(args, sample, sampling_params):
        return answer(await generate(args, sample, sampling_params))

    runner = Runner(custom_generate(hook(wrong), ARGS), FakeRewarder(), seed=1, concurrency=1)
    with pytest.raises(HookError, match=f"^--flag mine:wrong: {re.escape(message)}, for sample 0 "):
        await runner.run(FakeSource(n=1).get_samples(1)[0], 5, SamplingParams(max_tokens=2))


def test_a_data_source_without_indices_is_refused_where_it_gives_them():
    class Source:
        def __init__(self, args): ...
        def get_samples(self, n):
            return [[Sample()]]

        def add_samples(self, groups): ...
        def save(self, rollout_id): ...
        def load(self, rollout_id=None): ...
        def __len__(self):
            return 5

    source = CustomSource(hook(Source, "--data-source-path"), ARGS)
    assert len(source) == 5
    with pytest.raises(UserError, match=r"--data-source-path mine:Source.get_samples: must give every sample an index"):
        source.get_samples(1)


async def test_a_sample_with_a_function_of_its_own_is_generated_by_that_which_is_loaded_once():
    loaded = []

    async def usual(sample, params, evaluation):
        return ["usual"]

    def load(path):
        loaded.append(path)
        return hook(generate)

    one = own_generate(usual, load, ARGS)
    mine = [Sample(index=i, group_index=0, custom_generate_function_path="mine:f") for i in range(2)]
    assert await one(Sample(index=5), SamplingParams(max_tokens=2), False) == ["usual"]
    for sample in mine:
        (done,) = await one(sample, SamplingParams(max_tokens=2), False)
        assert done.response == "x" * sample.response_length
    assert loaded == ["mine:f"]


def test_a_row_without_a_response_keeps_its_place_and_is_not_trained():
    samples = [
        Sample(index=i, group_index=0, tokens=[1, 5, 6], response_length=2, reward=1.0, rollout_log_probs=[-1.0, -2.0])
        for i in range(4)
    ]
    for sample in samples:
        sample.status = Sample.Status.COMPLETED
    samples[1] = Sample(index=1, group_index=0, status=Sample.Status.FAILED)
    samples[2] = Sample(index=2, group_index=0, tokens=[7, 8], status=Sample.Status.FAILED)

    def rows(args, samples):
        return {
            "tokens": [sample.tokens for sample in samples],
            "response_lengths": [sample.response_length for sample in samples],
            "rewards": [0.0 for _ in samples],
        }

    made = custom_conversion(hook(rows), ARGS, "--use-tis")(0, [samples], None).samples
    assert [row.tokens for row in made] == [(1, 5, 6), (0, 0), (7, 8), (1, 5, 6)]
    assert [row.loss_mask for row in made] == [(1, 1), (0,), (0,), (1, 1)]
    assert [row.rollout_log_probs for row in made] == [(-1.0, -2.0), (0.0,), (0.0,), (-1.0, -2.0)]
