"""Which parallel layouts a model can have on so many ranks, and those nearest to one that cannot work.

Pure functions of sizes. Most of what is refused here Megatron-core 0.16.1 would refuse too, but only after all
processes have started. It could also share one key/value head between several ranks; the weight maps cannot.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vime.config.config import Config
    from vime.models import ModelShape

__all__ = ["FLAGS", "Layout", "chunk_layers", "described", "nearest", "problems"]

OFFERED = 3
LOOKS = 50_000
"""Layouts that are looked at before the search gives up and offers data parallelism alone: about a second."""

FLAGS = {
    "tensor": "--tensor-model-parallel-size",
    "sequence": "--sequence-parallel",
    "pipeline": "--pipeline-model-parallel-size",
    "virtual": "--virtual-pipeline-model-parallel-size",
    "first_stage": "--decoder-first-pipeline-num-layers",
    "last_stage": "--decoder-last-pipeline-num-layers",
    "context": "--context-parallel-size",
    "expert": "--expert-model-parallel-size",
    "expert_tensor": "--expert-tensor-parallel-size",
}
"""What sets each field of a layout; the world size comes from the cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How the ranks share the work. Data parallelism takes those that the other kinds leave."""

    world: int
    tensor: int = 1
    sequence: bool = False
    pipeline: int = 1
    virtual: int = 1  # chunks of the model on each pipeline rank
    first_stage: int | None = None  # layers of the first pipeline rank; None: like the others
    last_stage: int | None = None
    context: int = 1
    expert: int = 1
    expert_tensor: int | None = None  # None: as many as ``tensor``

    @classmethod
    def of(cls, config: Config, shape: ModelShape | None = None) -> Layout:
        parallel, megatron = config.parallel, config.megatron
        derived = config.origins.get("expert_tensor_parallel_size", "derived").startswith("derived")
        return cls(
            world=config.cluster.train_world_size,
            tensor=parallel.tensor_model_parallel_size,
            sequence=parallel.sequence_parallel,
            pipeline=parallel.pipeline_model_parallel_size,
            virtual=parallel.virtual_stages(None if shape is None else shape.num_layers) or 1,
            first_stage=megatron.get("num_layers_in_first_pipeline_stage"),
            last_stage=megatron.get("num_layers_in_last_pipeline_stage"),
            context=parallel.context_parallel_size,
            expert=parallel.expert_model_parallel_size,
            expert_tensor=None if derived else parallel.expert_tensor_parallel_size,
        )

    @property
    def model(self) -> int:
        """Ranks that hold one replica of the model and work on one micro-batch."""
        return self.tensor * self.pipeline * self.context

    @property
    def data(self) -> int:
        return self.world // self.model

    @property
    def micro_batch_multiple(self) -> int:
        """Interleaved pipelines run micro-batches in rounds of one for each rank."""
        return self.pipeline if self.virtual > 1 else 1

    @property
    def expert_tensor_size(self) -> int:
        return self.tensor if self.expert_tensor is None else self.expert_tensor


def chunk_layers(layout: Layout, layers: int) -> list[int]:
    """How many layers a chunk of the model has, in rising order without repetition, in a layout without problems."""
    own = [count for count in (layout.first_stage, layout.last_stage) if count is not None]
    stages = layout.pipeline - len(own)
    rest = [(layers - sum(own)) // stages] if stages else []
    return sorted({count // layout.virtual for count in (*own, *rest)})


def problems(layout: Layout, shape: ModelShape | None) -> Iterator[str]:
    """Why a layout cannot work, one reason each; without a shape only what holds for any model."""
    yield from _ranks(layout)
    yield from _sequences(layout, shape)
    if shape is not None:
        yield from _heads_and_channels(layout, shape)
        yield from _experts(layout, shape)
    yield from _stages(layout, shape)


def _ranks(layout: Layout) -> Iterator[str]:
    slots = f"{layout.world} training slots (--actor-num-nodes x --actor-num-gpus-per-node)"
    if layout.world % layout.model:
        yield f"{slots} must be a multiple of tensor x pipeline x context parallel size = {layout.model}"
    experts = layout.expert * layout.expert_tensor_size * layout.pipeline
    if layout.expert > 1 and layout.world % experts:
        yield f"{slots} must be a multiple of expert x expert tensor x pipeline parallel size = {experts}"


def _sequences(layout: Layout, shape: ModelShape | None) -> Iterator[str]:
    if layout.sequence and layout.tensor == 1:
        yield "--sequence-parallel needs --tensor-model-parallel-size above 1"
    if shape is not None and shape.moe is not None and layout.tensor > 1 and not layout.sequence:
        yield "a mixture-of-experts model with --tensor-model-parallel-size above 1 needs --sequence-parallel"


def _heads_and_channels(layout: Layout, shape: ModelShape) -> Iterator[str]:
    moe = shape.moe
    shared = [("attention heads", shape.num_attention_heads)]
    if shape.mla is None:
        shared.append(("key/value heads", shape.num_query_groups))
    if moe is None or moe.dense_layers:
        shared.append(("channels of an MLP", shape.ffn_hidden_size))
    if moe is not None and moe.shared_ffn_hidden_size is not None:
        shared.append(("channels of the shared expert", moe.shared_ffn_hidden_size))
    yield from _undivided("tensor", layout.tensor, shared)


def _experts(layout: Layout, shape: ModelShape) -> Iterator[str]:
    if shape.moe is not None:
        yield from _undivided("expert", layout.expert, [("experts", shape.moe.num_experts)])
        channels = [("channels of an expert", shape.moe.ffn_hidden_size)]
        yield from _undivided("expert_tensor", layout.expert_tensor_size, channels)
    elif layout.expert > 1:
        yield f"{FLAGS['expert']} {layout.expert} needs a mixture-of-experts model, which this one is not"
    elif layout.expert_tensor_size not in (1, layout.tensor):
        yield f"{FLAGS['expert_tensor']} {layout.expert_tensor} needs a mixture-of-experts model, which this one is not"


def _undivided(name: str, size: int, shared: Iterable[tuple[str, int]]) -> Iterator[str]:
    missed = [f"{number} {what}" for what, number in shared if number % size]
    if missed:
        yield f"{FLAGS[name]} {size} does not divide the model's {' and '.join(missed)}"


def _stages(layout: Layout, shape: ModelShape | None) -> Iterator[str]:
    uneven = [name for name in ("first_stage", "last_stage") if getattr(layout, name) is not None]
    if layout.pipeline == 1:
        for name in ["virtual"] * (layout.virtual > 1) + uneven:
            yield f"{FLAGS[name]} {getattr(layout, name)} needs {FLAGS['pipeline']} above 1"
    elif shape is not None:
        yield from _layers(layout, shape.num_layers, uneven)


def _layers(layout: Layout, layers: int, uneven: list[str]) -> Iterator[str]:
    """Each pipeline rank has equally many layers, but for the first and the last if that is said; and each of its
    virtual stages has equally many of those."""
    own = {name: getattr(layout, name) for name in uneven}
    rest, stages = layers - sum(own.values()), layout.pipeline - len(own)
    given = "".join(f" with {FLAGS[name]} {count}" for name, count in own.items())
    if min(own.values(), default=1) < 1 or (rest != 0 if stages == 0 else rest < stages or rest % stages):
        yield f"{FLAGS['pipeline']} {layout.pipeline}{given} does not divide the model's {layers} layers"
        return
    counts = sorted({*own.values(), *([rest // stages] if stages else [])})
    if any(count % layout.virtual for count in counts):
        shown = " and ".join(map(str, counts))
        yield f"{FLAGS['virtual']} {layout.virtual} does not divide the {shown} layers of a pipeline rank"


def nearest(
    layout: Layout, shape: ModelShape | None, *, fits: Callable[[Layout], bool] = lambda layout: True
) -> list[Layout]:
    """Up to three layouts that work on the same ranks, of those that change the fewest flags: the nearest in size.

    Args:
        fits: what else a layout must keep to be worth an offer. Where none does, this is given up.
    """
    fallback: list[Layout] = []
    looks = itertools.count(1)
    for changes in range(len(FLAGS) + 1):
        working = [each for each in _candidates(layout, shape, changes, looks) if not any(problems(each, shape))]
        offers = [each for each in working if fits(each)]
        fallback = fallback or working
        if offers:
            return _closest(layout, offers)
    return _closest(layout, fallback or [Layout(world=layout.world)])


def _closest(layout: Layout, offers: list[Layout]) -> list[Layout]:
    return heapq.nsmallest(OFFERED, offers, key=lambda each: _distance(layout, each))


def _candidates(layout: Layout, shape: ModelShape | None, changes: int, looks: Iterator[int]) -> Iterator[Layout]:
    """Layouts that change so many flags and use nothing which the given one does not use, while ``looks`` lasts."""
    choices = _choices(layout, shape)
    wants_sequence = layout.sequence or (shape is not None and shape.moe is not None)
    must = {name for name, values in choices.items() if getattr(layout, name) not in values}
    # sequence parallelism follows from the others: it may be one of the changes
    for names in itertools.chain(*(itertools.combinations(choices, size) for size in {max(changes - 1, 0), changes})):
        if not must.issubset(names):
            continue
        others = [[each for each in choices[name] if each != getattr(layout, name)] for name in names]
        for values in itertools.product(*others):
            if next(looks) > LOOKS:
                return
            found = dataclasses.replace(layout, **dict(zip(names, values, strict=True)))
            found = dataclasses.replace(found, sequence=wants_sequence and found.tensor > 1)
            if _changed(layout, found) == changes:
                yield found


def _choices(layout: Layout, shape: ModelShape | None) -> dict[str, list[Any]]:
    """What each field may become: a size of 1 stays 1, but for the tensor ranks that --sequence-parallel needs."""
    ranks = _divisors(layout.world)

    def sizes(name: str) -> list[int]:
        return [1] if getattr(layout, name) == 1 else ranks

    return {
        "tensor": ranks if layout.sequence else sizes("tensor"),
        "pipeline": sizes("pipeline"),
        # each pipeline rank has a multiple of it, and so has the whole
        "virtual": _divisors(layout.virtual if shape is None else shape.num_layers) if layout.virtual > 1 else [1],
        "first_stage": [layout.first_stage, None],
        "last_stage": [layout.last_stage, None],
        "context": sizes("context"),
        "expert": sizes("expert"),
        "expert_tensor": [None] if layout.expert_tensor is None else sizes("expert_tensor"),
    }


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _changed(one: Layout, other: Layout) -> int:
    return sum(getattr(one, name) != getattr(other, name) for name in FLAGS)


def _distance(one: Layout, other: Layout) -> tuple[float, tuple[int, ...]]:
    """Factors between the sizes; among equals, the larger sizes, which need less memory, come first."""
    pairs = [(getattr(one, name), getattr(other, name)) for name in FLAGS]
    factor = sum(abs(math.log2(a / b)) for a, b in pairs if a and b)
    return factor, tuple(-int(b or 0) for _, b in pairs)


def described(given: Layout, offers: Iterable[Layout]) -> str:
    """The flags by which the offers differ from what was given: "--tensor-model-parallel-size 2 or 4"."""
    shown = [" with ".join(_changes(given, each)) for each in offers]
    stem = shown[0].partition(" ")[0]
    if all(each.startswith(f"{stem} ") and " with " not in each for each in shown):
        shown[1:] = [each.removeprefix(f"{stem} ") for each in shown[1:]]
    return " or ".join(filter(None, (", ".join(shown[:-1]), shown[-1])))


def _changes(given: Layout, other: Layout) -> Iterator[str]:
    for name, flag in FLAGS.items():
        value = getattr(other, name)
        if value != getattr(given, name):
            yield flag if value is True else f"no {flag}" if value in (False, None) else f"{flag} {value}"
