"""How the samples of a rollout become optimizer steps, and those the micro-batches of data-parallel ranks.

Invariants:
* every sample is in exactly one micro-batch of one rank;
* a micro-batch has at most the allowed tokens, except that a sample which is longer alone stands alone;
* all ranks have the same number of micro-batches in a step, and none of them is empty;
* children of one sample are in the same step, and the sample that they came from is one of its samples;
* the denominators of a step count all ranks, so the loss does not depend on any choice made here.

Where generate calls made several samples of one, their number fits no ranks: idle copies of a sample fill the step.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from vime.errors import UserError
from vime.naming import rollout_name
from vime.types import RolloutBatch, TrainBatch, TrainSample, TrainStep

MicroBatch = list[TrainSample]

Family = list[TrainSample]
"""What became of one drawn sample: itself, or its children."""

_order = operator.attrgetter("order")


def make_train_batches(
    batch: RolloutBatch,
    *,
    dp_size: int,
    global_batch_size: int,
    micro_batch_size: int = 1,
    use_dynamic_batch_size: bool = False,
    max_tokens_per_gpu: int | None = None,
    balance_data: bool = False,
    cp_size: int = 1,
    micro_batch_multiple: int = 1,
) -> list[TrainBatch]:
    """One TrainBatch for each data-parallel rank. Depends on nothing but its arguments.

    Args:
        global_batch_size: drawn samples of one optimizer step, over all ranks; children of one sample are one.
        micro_batch_size: samples of one micro-batch, without dynamic batch size.
        max_tokens_per_gpu: most tokens of a micro-batch on one GPU, with dynamic batch size; a sequence is split over
            ``cp_size`` GPUs.
        balance_data: give each rank about the same number of tokens.
        micro_batch_multiple: the number of micro-batches a rank is a multiple of this, as interleaved pipelines need.

    Raises:
        UserError: the numbers do not divide, or two samples have one index; the message names them.
    """
    samples = sorted(batch.samples, key=_order)
    if len({sample.index for sample in samples}) != len(samples):
        raise UserError(
            f"{rollout_name(batch.rollout_id)}: two samples have the same index; it must be unique in the run"
        )
    drawn = len({sample.origin for sample in samples})
    if not samples or drawn % global_batch_size:
        raise UserError(
            f"{rollout_name(batch.rollout_id)}: its {drawn} samples are not a multiple of the global batch size "
            f"{global_batch_size}; nothing may be left out"
        )
    ranks: list[list[list[MicroBatch]]] = [[] for _ in range(dp_size)]
    steps = split_into_steps(samples, global_batch_size)
    if drawn < len(samples):
        multiple = dp_size * micro_batch_multiple * (1 if use_dynamic_batch_size else micro_batch_size)
        free = itertools.count(max(sample.index for sample in samples) + 1)
        steps = [_filled(_with_sibling_tokens(step), multiple, free) for step in steps]
    for step in steps:
        if use_dynamic_batch_size:
            if max_tokens_per_gpu is None:
                raise ValueError("dynamic batch sizes need max_tokens_per_gpu")
            micro_batches = pack(step, max_tokens_per_gpu * cp_size, multiple=dp_size * micro_batch_multiple)
        else:
            micro_batches = _fixed(step, micro_batch_size, dp_size, micro_batch_multiple, balance_data)
        for rank, share in zip(ranks, deal(micro_batches, dp_size, balance=balance_data), strict=True):
            rank.append(share)
    return [_train_batch(batch.rollout_id, steps, shares) for shares in ranks]


def make_eval_batches(
    batch: RolloutBatch, *, dp_size: int, micro_batch_size: int = 1, micro_batch_multiple: int = 1, **options: Any
) -> list[TrainBatch]:
    """One TrainBatch of a single step for each data-parallel rank, from any number of samples.

    Where they do not fill the ranks, copies of a short one without trained tokens do, which count nowhere.

    Args:
        options: further arguments of ``make_train_batches``.
    """
    multiple = dp_size * micro_batch_size * micro_batch_multiple
    free = itertools.count(max(sample.index for sample in batch.samples) + 1)
    samples = _filled(batch.samples, multiple, free)
    return make_train_batches(
        dataclasses.replace(batch, samples=tuple(samples)),
        dp_size=dp_size,
        global_batch_size=len(samples),
        micro_batch_size=micro_batch_size,
        micro_batch_multiple=micro_batch_multiple,
        **options,
    )


def split_into_steps(samples: Sequence[TrainSample], size: int) -> list[list[TrainSample]]:
    """Steps of ``size`` drawn samples by index, with the samples of a group in one step wherever that is possible.

    Where whole groups do not fill a step exactly, one group is split. The children of one sample are never split.
    """
    families: dict[int, Family] = {}
    for sample in samples:
        families.setdefault(sample.origin, []).append(sample)
    groups: dict[int, list[Family]] = {}
    for family in families.values():
        groups.setdefault(family[0].group_index, []).append(family)
    waiting = list(groups.values())
    steps = []
    while waiting:
        chosen = _exact_fill([len(group) for group in waiting], size)
        if chosen is None:
            flat = list(itertools.chain.from_iterable(waiting))
            step, waiting = flat[:size], _regroup(flat[size:])
        else:
            step = [family for index in sorted(chosen) for family in waiting[index]]
            waiting = [group for index, group in enumerate(waiting) if index not in chosen]
        steps.append(sorted(itertools.chain.from_iterable(step), key=_order))
    return steps


def _with_sibling_tokens(step: Sequence[TrainSample]) -> list[TrainSample]:
    """Children know what their siblings train, which may be on other ranks."""
    tokens = Counter[int]()
    for sample in step:
        tokens[sample.origin] += sample.trained_tokens
    return [
        dataclasses.replace(sample, sibling_tokens=tokens[sample.origin] - sample.trained_tokens) for sample in step
    ]


def _filled(samples: Sequence[TrainSample], multiple: int, free: Iterator[int]) -> list[TrainSample]:
    """With copies of a short sample, up to a multiple of so many. They train nothing and count nowhere.

    Args:
        free: indices that nobody has.
    """
    short = min(samples, key=lambda sample: sample.total_length)
    missing = -len(samples) % multiple
    idle = dataclasses.replace(
        short, parent_index=None, loss_mask=(0,) * short.response_length, sibling_tokens=0, graded=False, counts=False
    )
    places = itertools.islice(free, missing)
    return [*samples, *(dataclasses.replace(idle, index=place, group_index=place) for place in places)]


def pack(samples: Sequence[TrainSample], max_tokens: int, *, multiple: int) -> list[MicroBatch]:
    """First-fit packing in the order given, then splitting until the number of micro-batches is a multiple.

    Raises:
        UserError: there are too few samples for so many micro-batches.
    """
    micro_batches: list[MicroBatch] = []
    room: list[int] = []
    for sample in samples:
        place = next((i for i, left in enumerate(room) if sample.total_length <= left), None)
        if place is None:
            micro_batches.append([sample])
            room.append(max_tokens - sample.total_length)
        else:
            micro_batches[place].append(sample)
            room[place] -= sample.total_length
    wanted = -(-len(micro_batches) // multiple) * multiple
    if wanted > len(samples):
        raise UserError(
            f"a step of {len(samples)} samples cannot fill {wanted} micro-batches ({len(micro_batches)} are needed for "
            f"at most {max_tokens} tokens each, and the ranks need a multiple of {multiple}); make the global batch "
            f"size a multiple of {multiple}, or allow more tokens"
        )
    while len(micro_batches) < wanted:
        _split_largest(micro_batches)
    return micro_batches


def deal(micro_batches: Sequence[MicroBatch], dp_size: int, *, balance: bool) -> list[list[MicroBatch]]:
    """Equally many micro-batches for each rank: in turn, or balanced by tokens."""
    if balance:
        parts = karmarkar_karp([_tokens(micro_batch) for micro_batch in micro_batches], dp_size)
    else:
        parts = [list(range(rank, len(micro_batches), dp_size)) for rank in range(dp_size)]
    return [[micro_batches[index] for index in part] for part in parts]


@dataclass(order=True)
class _Partition:
    """A partial solution of the largest differencing method: ``parts`` by falling sum."""

    key: tuple[int, int]  # (-spread, tie-breaker): a heap gives the widest spread first, and ties in a fixed order
    parts: list[tuple[int, list[int]]] = field(compare=False)  # (sum, positions)


def karmarkar_karp(weights: Sequence[int], count: int) -> list[list[int]]:
    """Positions in ``count`` parts of equal size with about equal sums (Karmarkar and Karp's differencing method).

    Starts from tuples of ``count`` weights next to each other in size, one for each part, and always merges the two
    tuples of the widest spread, the heaviest parts of one with the lightest of the other.

    Raises:
        ValueError: ``count`` does not divide the number of weights.
    """
    if not weights or len(weights) % count:
        raise ValueError(f"{len(weights)} weights cannot be dealt to {count} parts of equal size")
    order = sorted(range(len(weights)), key=lambda index: (-weights[index], index))
    ties = itertools.count()
    heap = [
        _partition([(weights[index], [index]) for index in order[start : start + count]], ties)
        for start in range(0, len(order), count)
    ]
    heapq.heapify(heap)
    while len(heap) > 1:
        widest, next_widest = heapq.heappop(heap), heapq.heappop(heap)
        merged = [
            (heavy + light, [*of_heavy, *of_light])
            for (heavy, of_heavy), (light, of_light) in zip(widest.parts, reversed(next_widest.parts), strict=True)
        ]
        heapq.heappush(heap, _partition(merged, ties))
    return sorted(sorted(positions) for _, positions in heap[0].parts)


def _partition(parts: list[tuple[int, list[int]]], ties: Iterator[int]) -> _Partition:
    ordered = sorted(parts, key=lambda part: (-part[0], part[1]))
    return _Partition((ordered[-1][0] - ordered[0][0], next(ties)), ordered)


def _exact_fill(sizes: Sequence[int], target: int) -> set[int] | None:
    """The first positions (in lexical order) whose sizes sum to ``target``, or None.

    ``reachable[i]`` has bit s set where sizes i and later contain a subset of sum s.
    """
    reachable = [1]
    for size in reversed(sizes):
        reachable.append(reachable[-1] | reachable[-1] << size & (1 << target + 1) - 1)
    reachable.reverse()
    if not reachable[0] >> target & 1:
        return None
    chosen = set()
    for index, size in enumerate(sizes):
        if size <= target and reachable[index + 1] >> (target - size) & 1:
            chosen.add(index)
            target -= size
    return chosen


def _regroup(families: Sequence[Family]) -> list[list[Family]]:
    return [list(group) for _, group in itertools.groupby(families, key=lambda family: family[0].group_index)]


def _fixed(samples: Sequence[TrainSample], size: int, dp_size: int, multiple: int, balance: bool) -> list[MicroBatch]:
    """Micro-batches of exactly ``size`` samples; balanced ones hold samples whose tokens sum to about the same."""
    if len(samples) % (size * dp_size * multiple):
        raise UserError(
            f"the global batch size {len(samples)} is not a multiple of micro-batch size x data-parallel size x "
            f"micro-batch multiple = {size} x {dp_size} x {multiple} = {size * dp_size * multiple}"
        )
    if balance and size > 1:
        parts = karmarkar_karp([sample.total_length for sample in samples], len(samples) // size)
        return [[samples[index] for index in part] for part in parts]
    return [list(samples[start : start + size]) for start in range(0, len(samples), size)]


def _split_largest(micro_batches: list[MicroBatch]) -> None:
    """Splits the micro-batch with the most tokens that can be split into two of about equal tokens."""
    place = max((i for i, m in enumerate(micro_batches) if len(m) > 1), key=lambda i: (_tokens(micro_batches[i]), -i))
    halves: tuple[MicroBatch, MicroBatch] = ([], [])
    for sample in sorted(micro_batches[place], key=lambda sample: (-sample.total_length, sample.order)):
        min(halves, key=_tokens).append(sample)
    micro_batches[place] = sorted(halves[0], key=_order)
    micro_batches.append(sorted(halves[1], key=_order))


def _tokens(micro_batch: MicroBatch) -> int:
    return sum(sample.total_length for sample in micro_batch)


def _train_batch(rollout_id: int, steps: list[list[TrainSample]], shares: list[list[MicroBatch]]) -> TrainBatch:
    """The batch of one rank. ``steps``: all samples of each step; ``shares``: this rank's micro-batches of each."""
    own = sorted((s for share in shares for micro in share for s in micro), key=_order)
    position = {sample.index: place for place, sample in enumerate(own)}
    return TrainBatch(
        rollout_id=rollout_id,
        samples=tuple(own),
        steps=tuple(
            TrainStep(
                micro_batches=tuple(tuple(position[sample.index] for sample in micro) for micro in share),
                num_samples=max(len({sample.origin for sample in step if sample.counts}), 1),
                num_tokens=max(sum(max(sample.trained_tokens, 1) for sample in step if sample.counts), 1),
            )
            for step, share in zip(steps, shares, strict=True)
        ),
    )
