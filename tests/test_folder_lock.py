"""One run at a time writes to a folder, and a killed one is not in the way of the next."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from vime.errors import UserError
from vime.folder_lock import LOCK, locked

HOLD = """
import sys
from vime.folder_lock import locked

with locked(sys.argv[1], "--save"):
    print("has it", flush=True)
    input()
"""


def test_a_second_process_is_told_who_writes_there_until_the_first_is_gone(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "run"
    command = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "has it\n"
        with (
            pytest.raises(
                UserError,
                match=rf"^--save {folder}: another run writes there "
                rf"\(process {other.pid} on {socket.gethostname()}\); wait for its end, or give another folder$",
            ),
            locked(folder, "--save"),
        ):
            pass
        other.send_signal(signal.SIGKILL)
        other.wait()
    for _ in range(2):
        with locked(folder, "--save"):
            assert (folder / LOCK).read_text() == f"process {os.getpid()} on {socket.gethostname()}\n"


def test_a_file_system_without_locks_is_told_once_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with locked(tmp_path, "--save"):
        pass
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path} cannot be locked (No locks available): nothing keeps a second run from writing there"
    ]


@pytest.mark.parametrize(
    ("name", "why"),
    [("file/below", "Not a directory"), ("n" * 300, "File name too long"), ("/proc/x", "No such file or directory")],
)
def test_a_folder_that_cannot_be_is_one_line(tmp_path: Path, name: str, why: str) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / name
    with (
        pytest.raises(UserError, match=rf"^--save {folder}: nothing can be written there: {why}$"),
        locked(folder, "--save"),
    ):
        pass
