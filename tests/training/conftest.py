from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiny import make_model


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Tiny HF model folders by family and overrides, each made once."""
    made: dict[str, Path] = {}

    def find(family: str = "llama", **overrides: object) -> Path:
        key = repr((family, sorted(overrides.items())))
        if key not in made:
            made[key] = make_model(tmp_path_factory.mktemp(family) / "model", family, **overrides)  # type: ignore[arg-type]
        return made[key]

    return find
