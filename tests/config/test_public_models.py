"""scripts/models against the values that the public config.json files have.

``tests/models/public_configs`` holds these values and says which published code confirms each, or that it was written
down from memory.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.config.test_model_args import MODELS, ROOT, sourced
from vime.config import resolve
from vime.config.rules.expected import EXPECTED
from vime.models.family import families

CONFIGS = {path.stem: path for path in sorted((ROOT / "tests" / "models" / "public_configs").glob("*.json"))}
SUPPORTED = [
    name for name, path in CONFIGS.items() if json.loads(path.read_text())["config"]["architectures"][0] in families()
]
CONTEXT = ("--rollout-max-context-len", "2048")  # sparse attention cannot be trained beyond it
SETTINGS = {"moe_router_dtype", "group_query_attention", "position_embedding_type"}
"""What MODEL_ARGS may say beside the shape of the model."""


def read(name: str) -> dict[str, Any]:
    return json.loads(CONFIGS[name].read_text())


@pytest.fixture
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A model folder with the public values of the model that the test names, its weights made whole."""
    folder = tmp_path / "public"
    folder.mkdir()
    config = {key: value for key, value in read(request.param)["config"].items() if key != "quantization_config"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").touch()
    return folder


def test_every_script_has_its_public_values() -> None:
    assert {path.stem for path in MODELS} == set(CONFIGS)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_value_says_where_it_is_from(name: str) -> None:
    public = read(name)
    told = {*public["from memory"], *(key for keys in public["confirmed by"].values() for key in keys)}
    assert told == set(public["config"]) - {"architectures", "model_type"}


@pytest.mark.parametrize(("folder", "name"), [(name, name) for name in SUPPORTED], indirect=["folder"], ids=SUPPORTED)
def test_model_args_agree_with_the_public_config(flags, folder: Path, name: str) -> None:
    words = flags("--hf-checkpoint", str(folder), *CONTEXT, *sourced(ROOT / "scripts" / "models" / f"{name}.sh"))
    resolution = resolve(words)
    assert resolution.violations == ()
    assert set(resolution.config.megatron) <= set(EXPECTED) | SETTINGS, "each flag is compared with config.json"


@pytest.mark.parametrize(("folder", "name"), [(name, name) for name in SUPPORTED], indirect=["folder"], ids=SUPPORTED)
def test_any_other_number_is_named(flags, folder: Path, name: str) -> None:
    script = sourced(ROOT / "scripts" / "models" / f"{name}.sh")
    given = resolve(flags("--hf-checkpoint", str(folder), *CONTEXT, *script)).config.megatron
    for key, expected in EXPECTED.items():
        if key in given and isinstance(given[key], int | float) and not isinstance(given[key], bool):
            wrong = 2 * given[key] + 1
            words = [*script, expected.flag, str(wrong)]
            (line,) = resolve(flags("--hf-checkpoint", str(folder), *CONTEXT, *words)).violations
            assert line.startswith(f"{expected.flag} {wrong} differs from {folder / 'config.json'}")
