"""A tiny model and a tiny task for whole runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tiny import make_model


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole runs on a busy machine; each wait has a deadline of its own."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(scope="session")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A float32 run of one optimizer step a rollout, without --save and --num-rollout."""
    folder = tmp_path_factory.mktemp("task")
    model = make_model(folder / "model", "llama", tied=True)
    rows = [{"prompt": f"What is {a} + {b}?", "label": a + b} for a in range(1, 6) for b in range(1, 4)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        *("--hf-checkpoint", str(model)),
        *("--prompt-data", str(folder / "train.jsonl")),
        *("--input-key", "prompt", "--label-key", "label", "--apply-chat-template", "--rollout-shuffle"),
        *("--custom-rm-path", "tests.e2e.hooks:short_words"),
        *("--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--rollout-max-response-len", "12"),
        *("--use-dynamic-batch-size", "--max-tokens-per-gpu", "256"),
        *("--actor-num-gpus-per-node", "1", "--colocate", "--fp32", "--lr", "3e-3"),
        *("--vllm-max-model-len", "128", "--vllm-max-num-seqs", "16"),
    ]


@pytest.fixture
def save(tmp_path: Path) -> Path:
    return tmp_path / "run"
