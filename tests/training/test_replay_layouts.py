"""Routes that free routers choose in the log-prob pass are the ones that every rank trains with, in every layout.

``test_expert_layouts.py`` shows that layouts compute the same along given routes; here each rank records its own, or
takes those of its tokens and layers from samples.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.training.layouts import LAYOUTS, Matrix, Outcome, Row, _of, compare, recompute, run_all
from tests.training.test_layouts import PER_SAMPLE
from vime.training import worker as worker_module
from vime.training.layers.moe import Router
from vime.training.packing import MicroBatch, Packer
from vime.training.replay import Routes
from vime.training.worker import TrainWorker
from vime.types import TrainSample

EXPERTS = 8
MOE = {"megatron": {"recompute_modules": ["moe"]}}
LAYOUTS.update(
    {
        "ep2 moe": _of(2, ep=2, **recompute("selective"), **MOE),
        "tp2 sp etp2": _of(2, tp=2, sp=True, etp=2),
        "cp2 ep2": _of(2, cp=2, ep=2),
        "tp2 sp ep2": _of(2, tp=2, sp=True, ep=2),
        "tp2 sp ep2 etp2 do": _of(4, tp=2, sp=True, ep=2, etp=2, do=True),
        "pp2 ep2 full": _of(4, pp=2, ep=2, **recompute("full", "uniform", 1)),
    }
)
PASSES = {"ep2 moe": 2, "tp2 sp etp2": 1, "pp2 vpp2 full": 2, "cp2 full": 2}
"""How often a layer sees a micro-batch while it trains: once more where it is recomputed."""


FOLLOWED = -1
"""The number of all micro-batches that nothing is recorded of: they have the routes of a rollout."""


@dataclass
class Seen:
    """The experts of each token [T, experts], bool, by the micro-batch on this rank and the layer."""

    recorded: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    used: list[tuple[tuple[int, int], Tensor]] = field(default_factory=list)


@contextmanager
def watched(worker: TrainWorker, left: Any, *, flip: bool = False) -> Iterator[Seen]:
    """Where routers end up sending tokens; ``flip`` changes what was recorded before it is followed."""
    seen, route, recorded = Seen(), Router.routing, worker_module.recorded
    numbers: dict[int, int] = {}

    def watching(self: Router, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        probs, chosen = route(self, *args, **kwargs)
        if self.router_replay is not None:
            routes = self.router_replay.routes
            key = numbers.get(id(routes), FOLLOWED), self.layer_number
            if routes.recording:
                seen.recorded[key] = chosen.clone()
            else:
                seen.used.append((key, chosen.clone()))
        return probs, chosen

    @contextmanager
    def numbered(packs: list[MicroBatch]) -> Iterator[None]:
        with recorded(packs):
            numbers.update({id(pack.segments.routes): number for number, pack in enumerate(packs)})
            yield
        for pack in packs if flip else ():
            assert pack.segments.routes is not None
            experts = pack.segments.routes.experts
            experts.update({layer: (found + EXPERTS // 2) % EXPERTS for layer, found in experts.items()})

    with mock.patch.object(Router, "routing", watching), mock.patch.object(worker_module, "recorded", numbered):
        yield seen


@contextmanager
def flipped(worker: TrainWorker, left: Any) -> Iterator[Seen]:
    with watched(worker, left, flip=True) as seen:
        yield seen


@contextmanager
def told(worker: TrainWorker, left: Any, lacking: Container[int] = ()) -> Iterator[None]:
    """Samples have routes, which depend on the token, its position and the layer alone; some lack the later half."""
    pack = Packer.pack

    def with_routes(self: Packer, samples: Sequence[TrainSample]) -> MicroBatch:
        kept = [(each.total_length - 1) // (2 if each.index in lacking else 1) for each in samples]
        known = [routes_of(each)[:length] for each, length in zip(samples, kept, strict=True)]
        batch = pack(
            self, [dataclasses.replace(each, routed_experts=of) for each, of in zip(samples, known, strict=True)]
        )
        batch.segments.routes = Routes(told=batch.rollout_routes)
        return batch

    with mock.patch.object(Packer, "pack", with_routes):
        yield


@contextmanager
def told_with_gaps(worker: TrainWorker, left: Any) -> Iterator[Seen]:
    with told(worker, left, lacking=LACKING), watched(worker, left) as seen:
        yield seen


def routes_of(sample: TrainSample) -> np.ndarray:
    """uint8 [L - 1, 3, 2]: the first of 4 layers is dense."""
    tokens, layers = np.array(sample.tokens[:-1])[:, None], np.arange(3)
    first = tokens * 31 + np.arange(len(tokens))[:, None] * 17 + layers * 7
    experts = (first[..., None] + (1 + first % (EXPERTS - 1))[..., None] * np.arange(2)) % EXPERTS
    return experts.astype(np.uint8)


FREE = Row(
    family="qwen3_moe",
    overrides={"num_hidden_layers": 4},
    flags=["--fp32", *PER_SAMPLE],
    layouts=tuple(PASSES),
    around=watched,
)
FLAGS = [*FREE.flags, "--use-routing-replay"]
ROWS = {
    "free": FREE,
    "replayed": Row(family=FREE.family, overrides=FREE.overrides, flags=FLAGS, layouts=FREE.layouts, around=watched),
    "flipped": Row(family=FREE.family, overrides=FREE.overrides, flags=FLAGS, layouts=FREE.layouts, around=flipped),
}

TOLD = dataclasses.replace(FREE, flags=[*FREE.flags, "--use-rollout-routing-replay"], around=told)
ROWS["told"] = TOLD
LACKING = (3,)
GAPS = dataclasses.replace(
    TOLD,
    flags=[*TOLD.flags, "--use-rollout-logprobs"],
    layouts=("ep2 moe", "pp2 vpp2 full", "cp2 full"),
    around=told_with_gaps,
)
ROWS["gaps"] = GAPS
SLOW = dataclasses.replace(TOLD, layouts=("cp2 ep2", "tp2 sp ep2", "tp2 sp ep2 etp2 do", "pp2 ep2 full"))


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(ROWS, tmp_path_factory.mktemp("routes"))


@pytest.fixture(scope="module")
def outcomes(matrix: Matrix) -> dict[str, list[Outcome]]:
    """By row and layout, of every rank."""
    return run_all(2, matrix.works(2))


@pytest.mark.parametrize("layout", PASSES)
def test_a_rank_trains_along_the_routes_that_it_recorded(layout: str, outcomes: dict[str, list[Outcome]]) -> None:
    for rank in outcomes[f"replayed: {layout}"]:
        seen: Seen = rank.left
        uses = Counter(key for key, _ in seen.used)
        assert uses == dict.fromkeys(seen.recorded, PASSES[layout])
        assert all(torch.equal(chosen, seen.recorded[key]) for key, chosen in seen.used)
        assert len({number for number, _ in uses}) >= 4


@pytest.mark.parametrize("layout", PASSES)
def test_replaying_changes_no_number_before_weights_move(layout: str, outcomes: dict[str, list[Outcome]]) -> None:
    """The routes of another micro-batch would."""
    replayed, free = (outcomes[f"{row}: {layout}"][0].metrics[0] for row in ("replayed", "free"))
    names = [name for name in free if not name.startswith("perf/")]
    assert {name: replayed[name] for name in names} == pytest.approx(
        {name: free[name] for name in names}, rel=1e-5, abs=1e-7
    )


@pytest.mark.parametrize("layout", PASSES)
def test_flipped_routes_are_followed_on_every_rank(layout: str, outcomes: dict[str, list[Outcome]]) -> None:
    ranks, straight = outcomes[f"flipped: {layout}"], outcomes[f"replayed: {layout}"][0]
    for rank in ranks:
        seen: Seen = rank.left
        assert len(seen.used) == PASSES[layout] * len(seen.recorded)
        assert all(torch.equal(chosen, seen.recorded[key].roll(EXPERTS // 2, 1)) for key, chosen in seen.used)
    for name in ("train/loss", "train/grad_norm"):
        assert abs(ranks[0].metrics[0][name] - straight.metrics[0][name]) > 1e-3


@pytest.mark.parametrize("layout", PASSES)
def test_a_layout_changes_no_number_along_the_routes_of_a_rollout(
    layout: str, outcomes: dict[str, list[Outcome]], matrix: Matrix
) -> None:
    """Each rank has found those of its tokens and layers. Free routers come out elsewhere."""
    deviation = compare(outcomes[f"told: {layout}"], matrix.alone("told"), "train/grad_norm")
    print(layout, "|", deviation)
    assert not deviation.exceeded(TOLD.tolerance)
    assert (
        abs(outcomes[f"free: {layout}"][0].metrics[0]["train/loss"] - matrix.alone("told").metrics[0]["train/loss"])
        > 1e-3
    )


@pytest.mark.parametrize("layout", GAPS.layouts)
def test_all_ranks_route_the_tokens_that_one_of_them_lacks_routes_of(
    layout: str, outcomes: dict[str, list[Outcome]]
) -> None:
    """In the same micro-batch, which they compute together before weights move, and no other."""
    for rank in outcomes[f"gaps: {layout}"]:
        seen: Seen = rank.left
        uses = Counter(key for key, _ in seen.used if key[0] != FOLLOWED)
        assert {number for number, _ in seen.recorded} == {0}
        assert uses == dict.fromkeys(seen.recorded, PASSES[layout])
        assert all(torch.equal(chosen, seen.recorded[key]) for key, chosen in seen.used if key in seen.recorded)


@pytest.mark.slow
def test_no_layout_changes_a_number_along_the_routes_of_a_rollout(tmp_path: Path) -> None:
    matrix = Matrix({"told": SLOW}, tmp_path)
    for layout in SLOW.layouts:
        deviation = matrix.deviation("told", layout)
        print(layout, "|", deviation)
        assert not deviation.exceeded(SLOW.tolerance), layout
