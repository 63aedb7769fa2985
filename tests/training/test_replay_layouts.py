"""Routes that free routers choose in the log-prob pass are the ones that every rank trains with, in every layout.

``test_expert_layouts.py`` shows that layouts compute the same along given routes; here each rank records its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.training.layouts import LAYOUTS, Matrix, Outcome, Row, _of, recompute, run_all
from tests.training.test_layouts import PER_SAMPLE
from vime.training import worker as worker_module
from vime.training.layers.moe import Router
from vime.training.packing import MicroBatch
from vime.training.worker import TrainWorker

EXPERTS = 8
MOE = {"megatron": {"recompute_modules": ["moe"]}}
LAYOUTS.update(
    {
        "ep2 moe": _of(2, ep=2, **recompute("selective"), **MOE),
        "tp2 sp etp2": _of(2, tp=2, sp=True, etp=2),
    }
)
PASSES = {"ep2 moe": 2, "tp2 sp etp2": 1, "pp2 vpp2 full": 2, "cp2 full": 2}
"""How often a layer sees a micro-batch while it trains: once more where it is recomputed."""


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
            key = numbers[id(routes)], self.layer_number
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


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Outcome]]:
    """By row and layout, of every rank."""
    return run_all(2, Matrix(ROWS, tmp_path_factory.mktemp("routes")).works(2))


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
