"""Settings of users' own, from --custom-config-path into args."""

from __future__ import annotations

from pathlib import Path

import pytest

from vime.config import resolve


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "custom.yaml"


def test_entries_become_attributes_of_args(flags, file):
    file.write_text("sandbox-url: http://10.0.0.7\nweights: {accuracy: 0.9}\n")
    resolution = resolve(flags("--custom-config-path", str(file)))
    assert not resolution.violations
    args = resolution.config.args
    assert (args.sandbox_url, args.weights) == ("http://10.0.0.7", {"accuracy": 0.9})
    assert args.rollout_batch_size == resolution.config.rollout.rollout_batch_size
    with pytest.raises(AttributeError, match="args is read-only: weights cannot be set"):
        args.weights = {}


def test_entries_are_shown_with_where_they_come_from(flags, file):
    file.write_text("bonus: 0.5\n")
    shown = resolve(flags("--custom-config-path", str(file))).config.to_dict()
    assert shown["custom"] == {"bonus": {"value": 0.5, "origin": str(file)}}


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("lr: 1", "lr is a flag of the run: give it as --lr, or another name to your own setting"),
        ("rollout_batch_size: 8", "rollout_batch_size is a flag of the run: give it as --rollout-batch-size, or"),
        ("vllm_max_model_len: 8", "vllm_max_model_len is a flag of the run: give it as --vllm-max-model-len"),
        ("use_tis: true", "use_tis is a flag of the run: give it as --use-tis"),
        ("role: judge", "args.role is set by vime; give another name to your own setting"),
        ("'my key': 1", "'my key' cannot be an attribute of args"),
        ("bonus: 1", "bonus stands there twice"),
    ],
)
def test_names_that_are_taken_are_refused_with_file_and_line(flags, file, entry, message):
    file.write_text(f"bonus: 0.5\n{entry}\n")
    (violation,) = resolve(flags("--custom-config-path", str(file))).violations
    assert violation.startswith(f"{file}:2: {message}")


def test_a_missing_file_is_refused(flags, file):
    (violation,) = resolve(flags("--custom-config-path", str(file))).violations
    assert violation == f"{file}: cannot be read (No such file or directory)"
