"""An engine of two processes that share the model: every one gets its part of new weights."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.serving.conftest import (
    TOLERANCE,
    Sender,
    Served,
    changed,
    generate_on,
    largest_difference,
    reference,
    serve,
)
from tests.serving.test_weight_broadcast import Trainer
from tests.tiny import make_model
from vime.serving.control import EngineControl
from vime.weights.sync import sync_engines
from vime.weights.transfers import Broadcast

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PROMPT = [5, 6, 7, 8, 9, 10]


@pytest.fixture(scope="module", params=["llama, tied", "qwen2, untied"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    family, _, tying = request.param.partition(", ")
    folder = tmp_path_factory.mktemp("shared")
    yield from serve(make_model(folder / "model", family, tied=tying == "tied"), folder, tensor_parallel_size=2)


@pytest.fixture
async def sender(engine: Served) -> AsyncIterator[Sender]:
    control = EngineControl(engine.url, "engine 0")
    yield Sender(engine.weights, control)
    await control.close()


async def test_both_processes_serve_the_new_weights(sender: Sender, engine: Served) -> None:
    """Each of them also proves that it computes with what was sent."""
    for seed, bucket_bytes in ((1, 1 << 30), (2, 100_000)):
        new = changed(engine.weights, seed=seed)
        await sender.send(new, bucket_bytes=bucket_bytes)
        generation = await generate_on(sender.control, PROMPT)
        expected = reference(engine.folder, new, PROMPT, generation.token_ids)
        assert largest_difference(generation, expected) < TOLERANCE
    assert proofs(engine) == 2 * 2


async def test_both_processes_receive_what_is_broadcast(sender: Sender, engine: Served) -> None:
    """They are two members of the trainer's group, and each takes its part of every bucket."""
    trainer = Trainer(engine.weights)
    transfer = Broadcast(trainer, bucket_bytes=40_000)
    for seed in (3, 4):
        trainer.weights = changed(engine.weights, seed=seed)
        await sync_engines(transfer, [sender.control], 500 + seed)
        generation = await generate_on(sender.control, PROMPT)
        expected = reference(engine.folder, trainer.weights, PROMPT, generation.token_ids)
        assert largest_difference(generation, expected) < TOLERANCE
    assert trainer.sender is not None
    assert trainer.sender.invitation.world_size == 3
    trainer.sender.close()


def proofs(engine: Served) -> int:
    log = (engine.folder.parent / "engine_0.log").read_text()
    return log.count(f"the model computes with what was sent, {len(engine.weights)} of {len(engine.weights)}")


def test_the_processes_leave_no_shared_memory_behind(engine: Served) -> None:
    """Its names are gone while it is in use."""
    assert not [path for path in Path("/dev/shm").iterdir() if path.name.endswith(("cpushm_0", "cpushm_1"))]
