"""A checkpoint for which there is no room: torch's own words are turned into a line that says so."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from tests.disk import files_end_at
from vime.errors import UserError
from vime.training.saving import saving

TENSOR = torch.zeros(1000)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_the_writer_of_sharded_tensors_raises(tmp_path: Path) -> None:
    with (
        files_end_at(2000),
        pytest.raises(UserError, match=rf"^{tmp_path}: cannot be written: File too large$"),
        saving(tmp_path),
    ):
        save({"weight": TENSOR}, storage_writer=FileSystemWriter(tmp_path), no_dist=True)


def test_what_torch_raises_for_a_file_that_it_opened_itself(tmp_path: Path) -> None:
    with (
        files_end_at(2000),
        pytest.raises(
            UserError, match=rf"^{tmp_path}: cannot be written: [\d,]+ bytes are free there, but \(.*unexpected pos"
        ),
        saving(tmp_path),
    ):
        torch.save(TENSOR, tmp_path / "state.pt")


@pytest.mark.parametrize(("free", "why"), [(4096, "No space left on device"), (5_000_000, "5,000,000 bytes are free")])
def test_what_another_rank_raised_and_only_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, why: str
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    told = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")
    with pytest.raises(UserError, match=rf"^{tmp_path}: cannot be written: {why}.* unexpected pos"), saving(tmp_path):
        raise CheckpointException("save", {1: (told, None)})  # type: ignore[dict-item]


@pytest.mark.parametrize("error", [RuntimeError("a bug"), CheckpointException("save", {0: (TypeError("a bug"), None)})])  # type: ignore[dict-item]
def test_errors_of_ours_stay_what_they_are(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)) as raised, saving(tmp_path):
        raise error
    assert raised.value is error
