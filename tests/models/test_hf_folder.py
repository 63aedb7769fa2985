"""What a model may replace on the disk, and what happens where it cannot be written or read."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from tests.disk import files_end_at
from vime.errors import UserError
from vime.models import HfTensor
from vime.models.hf_folder import HfWeights, check_replaceable, write_hf_folder
from vime.unfinished import identity, unfinished

PLAN = [HfTensor("model.embed_tokens.weight", (4, 2)), HfTensor("model.norm.weight", (2,))]


@pytest.fixture
def origin(tmp_path: Path) -> Path:
    folder = tmp_path / "origin"
    folder.mkdir()
    (folder / "config.json").write_text('{"vocab_size": 4, "dtype": "float32"}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "modeling_own.py").touch()
    return folder


def write(directory: Path, origin: Path, value: float = 1.0) -> None:
    tensors = ((tensor.name, torch.full(tensor.shape, value)) for tensor in PLAN)
    write_hf_folder(directory, origin=origin, plan=PLAN, tensors=tensors, dtype="float32")


def value_in(directory: Path) -> float:
    with HfWeights(directory) as weights:
        return float(weights.read("model.norm.weight")[0])


def test_a_model_is_replaced_by_a_model(tmp_path: Path, origin: Path) -> None:
    out = tmp_path / "out"
    write(out, origin, 1.0)
    for name in ("model-00001-of-00002.safetensors", "generation_config.json", "chat_template.jinja"):
        (out / name).touch()
    write(out, origin, 2.0)
    assert value_in(out) == 2.0
    assert {path.name for path in out.iterdir()} == {
        "config.json", "tokenizer.json", "modeling_own.py", "model.safetensors",
    }  # fmt: skip
    assert {path.name for path in tmp_path.iterdir()} == {"origin", "out"}


@pytest.mark.parametrize(
    "foreign",
    ["src/thesis.tex", "src/deep/thesis.tex", "notes.txt", "my_model.py", "adapter_model.safetensors", ".git/HEAD"],
)
def test_a_folder_with_anything_else_is_left_alone(tmp_path: Path, origin: Path, foreign: str) -> None:
    out = tmp_path / "out"
    write(out, origin, 1.0)
    (out / foreign).parent.mkdir(parents=True, exist_ok=True)
    (out / foreign).write_text("years of work")
    with pytest.raises(UserError, match=rf"^{out}: would be replaced, but {foreign} in it is no file of a model"):
        write(out, origin, 2.0)
    assert (out / foreign).read_text() == "years of work"
    assert value_in(out) == 1.0


def test_an_empty_folder_in_it_is_somebodys_too(tmp_path: Path, origin: Path) -> None:
    write(tmp_path / "out", origin)
    (tmp_path / "out" / "plans").mkdir()
    with pytest.raises(UserError, match="but plans in it is no file of a model"):
        check_replaceable(tmp_path / "out", origin)


def test_what_comes_while_the_model_is_written_is_not_lost(tmp_path: Path, origin: Path) -> None:
    out = tmp_path / "out"
    write(out, origin, 1.0)

    def tensors() -> object:
        for tensor in PLAN:
            yield tensor.name, torch.full(tensor.shape, 2.0)
        (out / "thesis.tex").write_text("years of work")

    with pytest.raises(UserError, match=r"thesis.tex in it is no file of a model"):
        write_hf_folder(out, origin=origin, plan=PLAN, tensors=tensors(), dtype="float32")  # type: ignore[arg-type]
    assert (out / "thesis.tex").is_file()
    assert {path.name for path in tmp_path.iterdir()} == {"origin", "out"}


def test_a_link_stays_and_what_it_stands_for_is_replaced(tmp_path: Path, origin: Path) -> None:
    write(tmp_path / "real" / "out", origin, 1.0)
    (tmp_path / "link").symlink_to(tmp_path / "real" / "out")
    write(tmp_path / "link", origin, 2.0)
    assert (tmp_path / "link").is_symlink()
    assert value_in(tmp_path / "real" / "out") == 2.0
    assert {path.name for path in tmp_path.iterdir()} == {"origin", "real", "link"}


def test_what_a_killed_process_left_goes_though_another_has_its_number(tmp_path: Path, origin: Path) -> None:
    pid, began = identity(os.getppid()).split("-")
    work = unfinished(tmp_path / "out").name
    dead, alive = (work.replace(identity(os.getpid()), mark) for mark in (f"{pid}-{int(began) - 1}", f"{pid}-{began}"))
    for name in (dead, alive):
        (tmp_path / name).mkdir()
    write(tmp_path / "out", origin)
    assert {path.name for path in tmp_path.iterdir()} == {"origin", "out", alive}


def test_a_model_that_a_killed_process_had_only_moved_away_comes_back(tmp_path: Path, origin: Path) -> None:
    out = tmp_path / "out"
    write(out, origin, 1.0)
    out.rename(unfinished(out, "old.tmp"))
    with files_end_at(50), pytest.raises(UserError, match="File too large"):
        write(out, origin, 2.0)
    assert value_in(out) == 1.0
    assert {path.name for path in tmp_path.iterdir()} == {"origin", "out"}


@pytest.mark.parametrize("room", [0, 50, 200])
def test_a_full_disk_is_one_line_and_the_old_model_stays(tmp_path: Path, origin: Path, room: int) -> None:
    out = tmp_path / "out"
    write(out, origin, 1.0)
    with (
        files_end_at(room),
        pytest.raises(UserError, match=r"^\S+model.safetensors: cannot be written: File too large$"),
    ):
        write(out, origin, 2.0)
    assert value_in(out) == 1.0
    assert {path.name for path in tmp_path.iterdir()} == {"origin", "out"}


@pytest.mark.parametrize("name", ["file/out", "n" * 250, "n" * 300])
def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path, origin: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"^\S+: cannot be (written|read): (Not a directory|File name too long)$"):
        write(tmp_path / name, origin)


INDEXES = {
    "cut": ('{"weight_map": {"model.norm.weight": "model-0', "not valid JSON"),
    "empty": ("", "not valid JSON"),
    "{}": ("{}", "'weight_map' must say of every tensor which file has it"),
    "no files": ('{"weight_map": {}}', "'weight_map' must say"),
    "a list": ('{"weight_map": ["model.safetensors"]}', "'weight_map' must say"),
    "numbers": ('{"weight_map": {"model.norm.weight": 1}}', "'weight_map' must say"),
    "deep": ("[" * 100_000, "not valid JSON: nested too deeply"),
}


@pytest.mark.parametrize(("text", "message"), INDEXES.values(), ids=INDEXES.keys())
def test_a_damaged_index_is_one_line(tmp_path: Path, origin: Path, text: str, message: str) -> None:
    write(tmp_path / "out", origin)
    (tmp_path / "out" / "model.safetensors.index.json").write_text(text)
    with pytest.raises(UserError, match=rf"^{tmp_path}/out/model.safetensors.index.json: {message}"):
        HfWeights(tmp_path / "out")


def test_a_header_that_is_nested_without_end_is_one_line(tmp_path: Path, origin: Path) -> None:
    header = json.dumps({}).encode()[:1] + b'"a":' + b"[" * 100_000
    (origin / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(UserError, match="is not a whole safetensors file"):
        HfWeights(origin)
