"""New weights in an engine whose model has experts."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.serving.conftest import (
    TOLERANCE,
    Sender,
    Served,
    Weights,
    changed,
    generate_on,
    largest_difference,
    reference,
    serve,
)
from tests.tiny import make_model
from vime.serving.control import EngineControl

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PROMPT = [5, 6, 7, 8, 9, 10]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("experts")
    yield from serve(make_model(folder / "model", "qwen3_moe"), folder)


@pytest.fixture
async def sender(engine: Served) -> AsyncIterator[Sender]:
    control = EngineControl(engine.url, "engine 0")
    yield Sender(engine.weights, control)
    await control.close()


def reference_of(engine: Served, weights: Weights, response: Sequence[int], scratch: Path) -> torch.Tensor:
    """transformers joins the experts of a layer to one tensor while it loads a folder."""
    folder = scratch / "reference"
    shutil.copytree(engine.folder, folder, dirs_exist_ok=True)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return reference(folder, {}, PROMPT, response)


async def test_experts_are_served_as_they_were_sent(sender: Sender, engine: Served, tmp_path: Path) -> None:
    """vLLM alone would take the new experts for packed ones. (Theirs are padded, too: 48 is no multiple of 32.)"""
    old = engine.weights
    for weights in (None, old, changed(old, seed=1), old):
        if weights is not None:
            await sender.send(weights)
        generation = await generate_on(sender.control, PROMPT)
        expected = reference_of(engine, weights or old, generation.token_ids, tmp_path)
        assert largest_difference(generation, expected) < TOLERANCE
