"""How samples become steps and micro-batches, whatever their number and lengths."""

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vime.data.batching import karmarkar_karp, make_train_batches, split_into_steps
from vime.errors import UserError
from vime.types import RolloutBatch, TrainSample


def sample(index, length=10, group=None, trained=1):
    return TrainSample(
        index=index,
        group_index=index if group is None else group,
        tokens=(0,) * length,
        response_length=max(trained, 1),
        loss_mask=(1,) * trained if trained else (0,),
        rollout_log_probs=None,
        weight_versions=(),
        raw_reward=0.0,
        reward=0.0,
    )


def rollout(lengths, group_size=1):
    samples = [sample(i, length, i // group_size) for i, length in enumerate(lengths)]
    return RolloutBatch(rollout_id=0, samples=tuple(samples))


def layout(batch):
    """Per step the micro-batches as tuples of sample indices."""
    return [[tuple(batch.samples[p].index for p in micro) for micro in step.micro_batches] for step in batch.steps]


def test_fixed_micro_batches_are_dealt_to_the_ranks_in_turn():
    first, second = make_train_batches(rollout([10] * 8), dp_size=2, global_batch_size=4, micro_batch_size=1)
    assert layout(first) == [[(0,), (2,)], [(4,), (6,)]]
    assert layout(second) == [[(1,), (3,)], [(5,), (7,)]]


def test_first_fit_packs_up_to_the_limit_and_a_longer_sample_stands_alone():
    (batch,) = make_train_batches(
        rollout([60, 50, 40, 150, 30, 20]), dp_size=1, global_batch_size=6, use_dynamic_batch_size=True,
        max_tokens_per_gpu=100,
    )  # fmt: skip
    assert layout(batch) == [[(0, 2), (1, 4, 5), (3,)]]


def test_context_parallelism_multiplies_the_room():
    (batch,) = make_train_batches(
        rollout([60, 60]), dp_size=1, global_batch_size=2, use_dynamic_batch_size=True, max_tokens_per_gpu=60, cp_size=2
    )
    assert layout(batch) == [[(0, 1)]]


def test_the_number_of_micro_batches_is_the_same_on_all_ranks_and_a_multiple_for_pipelines():
    batches = make_train_batches(
        rollout([60] * 12), dp_size=2, global_batch_size=12, use_dynamic_batch_size=True, max_tokens_per_gpu=130,
        micro_batch_multiple=2,
    )  # fmt: skip
    assert [len(step) for batch in batches for step in layout(batch)] == [4, 4]  # 6 bins, rounded up to 8


def test_denominators_count_all_ranks_and_a_masked_sample_as_one():
    samples = tuple(sample(i, trained=trained) for i, trained in enumerate([3, 0, 5, 2]))
    batches = make_train_batches(RolloutBatch(rollout_id=0, samples=samples), dp_size=2, global_batch_size=2)
    assert [[(s.num_samples, s.num_tokens) for s in batch.steps] for batch in batches] == [[(2, 4), (2, 7)]] * 2


def test_samples_that_do_not_count_are_in_no_denominator():
    samples = tuple(dataclasses.replace(sample(i, trained=3), counts=i < 3) for i in range(4))
    (batch,) = make_train_batches(RolloutBatch(rollout_id=0, samples=samples), dp_size=1, global_batch_size=2)
    assert [(s.num_samples, s.num_tokens) for s in batch.steps] == [(2, 6), (1, 3)]
    idle = tuple(dataclasses.replace(each, counts=False) for each in samples)
    (batch,) = make_train_batches(RolloutBatch(rollout_id=0, samples=idle), dp_size=1, global_batch_size=4)
    assert [(s.num_samples, s.num_tokens) for s in batch.steps] == [(1, 1)], "nothing to divide, and never by 0"


@pytest.mark.parametrize(("balance", "tokens"), [(False, [255, 145]), (True, [195, 205])])
def test_balancing_gives_each_rank_about_the_same_tokens(balance, tokens):
    lengths = [100, 90, 80, 10, 5, 5, 70, 40]
    batches = make_train_batches(rollout(lengths), dp_size=2, global_batch_size=8, balance_data=balance)
    assert [sum(s.total_length for s in batch.samples) for batch in batches] == tokens


def test_nothing_is_dropped_where_numbers_do_not_divide():
    with pytest.raises(UserError, match="its 15 samples are not a multiple of the global batch size 4"):
        make_train_batches(rollout([10] * 15), dp_size=1, global_batch_size=4)
    with pytest.raises(UserError, match=r"global batch size 6 is not a multiple of .* 2 x 2 x 1 = 4"):
        make_train_batches(rollout([10] * 6), dp_size=2, global_batch_size=6, micro_batch_size=2)
    with pytest.raises(UserError, match="a step of 3 samples cannot fill 4 micro-batches"):
        make_train_batches(
            rollout([90] * 3), dp_size=2, global_batch_size=3, use_dynamic_batch_size=True, max_tokens_per_gpu=100
        )


def test_an_empty_rollout_and_equal_indices_are_refused():
    with pytest.raises(UserError, match="its 0 samples"):
        make_train_batches(RolloutBatch(rollout_id=0, samples=()), dp_size=1, global_batch_size=1)
    with pytest.raises(UserError, match="two samples have the same index"):
        make_train_batches(RolloutBatch(rollout_id=0, samples=(sample(0), sample(0))), dp_size=1, global_batch_size=2)


def groups_of(sizes):
    numbers = itertools.count()
    return [sample(next(numbers), group=group) for group, size in enumerate(sizes) for _ in range(size)]


@pytest.mark.parametrize(
    ("sizes", "step", "expected"),
    [
        ([2, 2, 2, 2], 4, [[0, 0, 1, 1], [2, 2, 3, 3]]),
        ([3, 2, 1, 2], 4, [[0, 0, 0, 2], [1, 1, 3, 3]]),  # whole groups, out of order where that keeps them whole
        ([4, 4], 4, [[0] * 4, [1] * 4]),
        ([6, 2], 4, [[0] * 4, [0, 0, 1, 1]]),  # no way around splitting
        ([3, 3], 3, [[0] * 3, [1] * 3]),
        ([3, 3], 2, [[0, 0], [0, 1], [1, 1]]),
    ],
)
def test_groups_stay_together_wherever_that_is_possible(sizes, step, expected):
    steps = split_into_steps(groups_of(sizes), step)
    assert [[s.group_index for s in each] for each in steps] == expected


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=60), st.integers(1, 6))
def test_karmarkar_karp_deals_every_weight_once_in_parts_of_equal_size(weights, count):
    weights = weights * count
    parts = karmarkar_karp(weights, count)
    assert sorted(position for part in parts for position in part) == list(range(len(weights)))
    assert {len(part) for part in parts} == {len(weights) // count}
    sums = [sum(weights[position] for position in part) for part in parts]
    assert max(sums) - min(sums) <= max(weights)


@st.composite
def cases(draw):
    dp_size, multiple, micro, steps = (draw(st.integers(1, high)) for high in (4, 2, 3, 3))
    per_step = dp_size * multiple * micro * draw(st.integers(1, 4))
    lengths = draw(st.lists(st.integers(1, 300), min_size=per_step * steps, max_size=per_step * steps))
    options = {
        "dp_size": dp_size,
        "global_batch_size": per_step,
        "micro_batch_size": micro,
        "micro_batch_multiple": multiple,
        "use_dynamic_batch_size": draw(st.booleans()),
        "max_tokens_per_gpu": draw(st.integers(50, 400)),
        "cp_size": draw(st.integers(1, 2)),
        "balance_data": draw(st.booleans()),
    }
    return rollout(lengths, draw(st.integers(1, 5))), options


@settings(deadline=None)
@given(cases())
def test_whatever_the_lengths(case):
    batch, options = case
    batches = make_train_batches(batch, **options)
    limit = options["max_tokens_per_gpu"] * options["cp_size"]
    by_index = {s.index: s for s in batch.samples}
    steps = [list(step) for step in zip(*map(layout, batches), strict=True)]
    used = [index for step in steps for rank in step for micro in rank for index in micro]
    assert sorted(used) == sorted(by_index)
    for number, step in enumerate(steps):
        counts = {len(rank) for rank in step}
        assert len(counts) == 1
        assert counts.pop() % options["micro_batch_multiple"] == 0
        inside = [by_index[i] for rank in step for micro in rank for i in micro]
        assert len(inside) == options["global_batch_size"]
        for rank in batches:
            assert rank.steps[number].num_samples == options["global_batch_size"]
            assert rank.steps[number].num_tokens == sum(max(s.trained_tokens, 1) for s in inside)
        for micro in itertools.chain.from_iterable(step):
            assert micro
            if options["use_dynamic_batch_size"]:
                assert len(micro) == 1 or sum(by_index[i].total_length for i in micro) <= limit
            else:
                assert len(micro) == options["micro_batch_size"]
    assert make_train_batches(batch, **options) == batches
