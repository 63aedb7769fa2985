"""Damaged torch_dist checkpoints, and disks that take none: one line, whichever byte it is."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tests.disk import files_end_at
from vime.errors import DamagedFile, UserError
from vime.models.torch_dist import Place, TorchDistReader, TorchDistWriter, finish, read_metadata

PLACE = Place("weight", (0,), (1,))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with TorchDistWriter(tmp_path) as writer:
        writer.add(PLACE, torch.arange(300.0))
        writer.add(Place("bias"), torch.ones(3))
    finish(tmp_path, writer.regions, {})
    return tmp_path


def test_what_was_written_is_read(folder: Path) -> None:
    assert torch.equal(TorchDistReader(folder).read(PLACE), torch.arange(300.0))


@pytest.mark.parametrize("left", [0, 100, -1])
def test_a_file_that_is_cut_off_is_found_before_anything_is_read(folder: Path, left: int) -> None:
    file = folder / "__0_0.distcp"
    whole = file.stat().st_size
    size = left if left >= 0 else whole + left
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(DamagedFile, match=rf"^{file}: ends after {size} bytes, of the {whole} that were written$"):
        TorchDistReader(folder)


def test_a_file_that_is_gone_is_named(folder: Path) -> None:
    (folder / "__0_0.distcp").unlink()
    with pytest.raises(DamagedFile, match=r"__0_0.distcp: cannot be read: No such file or directory$"):
        TorchDistReader(folder)


def test_metadata_with_any_byte_wrong_is_read_or_refused_in_one_line(folder: Path) -> None:
    path = folder / ".metadata"
    whole = path.read_bytes()
    generator, refused = random.Random(0), 0
    for position in range(len(whole)):
        wrong = bytearray(whole)
        wrong[position] ^= generator.randrange(1, 256)
        path.write_bytes(wrong)
        try:
            read_metadata(folder)
        except UserError as error:
            refused += 1
            assert str(error).startswith(str(folder)) and "\n" not in str(error)
    assert refused > len(whole) / 4


@pytest.mark.parametrize("left", [0, 1, 100])
def test_metadata_that_is_cut_off_is_one_line(folder: Path, left: int) -> None:
    path = folder / ".metadata"
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(DamagedFile, match=rf"^{path}: cannot be read: ") as raised:
        TorchDistReader(folder)
    assert "\n" not in str(raised.value)


def test_tensors_with_wrong_bytes_are_one_line(folder: Path) -> None:
    file = folder / "__0_0.distcp"
    file.write_bytes(b"\x93" * file.stat().st_size)
    with pytest.raises(DamagedFile, match=rf"^{file}: weight cannot be read: ") as raised:
        TorchDistReader(folder).read(PLACE)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("room", [0, 700, 1500])
def test_a_full_disk_is_one_line(tmp_path: Path, room: int) -> None:
    with (
        files_end_at(room),
        pytest.raises(UserError, match=rf"^{tmp_path}/__0_0.distcp: cannot be written: File too large$"),
        TorchDistWriter(tmp_path) as writer,
    ):
        writer.add(PLACE, torch.arange(300.0))


def test_a_disk_that_is_full_at_the_end_is_one_line(tmp_path: Path) -> None:
    with TorchDistWriter(tmp_path) as writer:
        writer.add(PLACE, torch.arange(300.0))
    with files_end_at(50), pytest.raises(UserError, match=rf"^{tmp_path}: cannot be written: File too large$"):
        finish(tmp_path, writer.regions, {})
    assert not (tmp_path / "metadata.json").exists()
