"""How samples become steps and micro-batches, whatever their number and lengths."""

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vime.data.batching import karmarkar_karp, make_train_batches, split_into_steps
from vime.errors import UserError
from vime.types import CHILD_STRIDE, RolloutBatch, TrainSample


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


def children_of(*counts, trained=1):
    """That many children of each drawn sample, in one group of all; the n-th child trains n more tokens."""
    return tuple(
        dataclasses.replace(
            sample(parent + child * CHILD_STRIDE, group=0, trained=trained + child),
            parent_index=parent if count > 1 else None,
        )
        for parent, count in enumerate(counts)
        for child in range(count)
    )


def test_a_step_has_as_many_drawn_samples_as_the_global_batch_size_whatever_became_of_them():
    samples = children_of(3, 1, 1, 2)
    (batch,) = make_train_batches(RolloutBatch(rollout_id=0, samples=samples), dp_size=1, global_batch_size=2)
    assert [[s.origin for s in batch.samples if s.counts]] == [[0, 0, 0, 1, 2, 3, 3]]
    assert [[batch.samples[p].origin for micro in step.micro_batches for p in micro] for step in batch.steps] == [
        [0, 0, 0, 1],
        [2, 3, 3],
    ]
    assert [(s.num_samples, s.num_tokens) for s in batch.steps] == [(2, 1 + 2 + 3 + 1), (2, 1 + 1 + 2)]
    with pytest.raises(UserError, match="its 4 samples are not a multiple of the global batch size 3"):
        make_train_batches(RolloutBatch(rollout_id=0, samples=samples), dp_size=1, global_batch_size=3)


def test_children_know_what_their_siblings_train_wherever_those_are():
    batches = make_train_batches(RolloutBatch(rollout_id=0, samples=children_of(3, 1)), dp_size=2, global_batch_size=2)
    by_rank = [{(s.origin, s.trained_tokens): s.sibling_tokens for s in batch.samples} for batch in batches]
    assert by_rank == [{(0, 1): 5, (0, 3): 3}, {(0, 2): 4, (1, 1): 0}]


@pytest.mark.parametrize("dynamic", [False, True])
def test_idle_copies_fill_the_ranks_where_children_do_not(dynamic):
    batches = make_train_batches(
        RolloutBatch(rollout_id=0, samples=children_of(3, 1, 1)), dp_size=4, global_batch_size=3,
        use_dynamic_batch_size=dynamic, max_tokens_per_gpu=20,
    )  # fmt: skip
    assert len({len(step.micro_batches) for batch in batches for step in batch.steps}) == 1
    idle = [s for batch in batches for s in batch.samples if not s.counts]
    assert len(idle) == 3 and not any(s.trained_tokens or s.graded for s in idle)
    assert all((s.num_samples, s.num_tokens) == (3, 8) for batch in batches for s in batch.steps)


@settings(deadline=None)
@given(cases(), st.data())
def test_whatever_becomes_of_drawn_samples(case, data):
    """Every child is trained once, in the step of its siblings, and shares are right for each."""
    batch, options = case
    families = [children_of(data.draw(st.integers(1, 4)), trained=data.draw(st.integers(0, 2))) for _ in batch.samples]
    samples = [
        dataclasses.replace(
            child,
            index=drawn.index + child.index,
            parent_index=None if child.parent_index is None else drawn.index,
            group_index=drawn.group_index,
        )
        for drawn, family in zip(batch.samples, families, strict=True)
        for child in family
    ]
    batches = make_train_batches(dataclasses.replace(batch, samples=tuple(samples)), **options)
    step_of: dict[int, set[int]] = {}
    used = []
    for rank in batches:
        for number, step in enumerate(rank.steps):
            assert step.num_samples == options["global_batch_size"]
            for one in (rank.samples[p] for micro in step.micro_batches for p in micro):
                if one.counts:
                    used.append(one.index)
                    step_of.setdefault(one.origin, set()).add(number)
                    siblings = (s for s in samples if s.origin == one.origin and s.index != one.index)
                    assert one.sibling_tokens == sum(s.trained_tokens for s in siblings)
    assert sorted(used) == sorted(s.index for s in samples)
    assert all(len(numbers) == 1 for numbers in step_of.values())
