"""Whose something unfinished is: a number of a process alone does not say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from vime.unfinished import Owner, identity, owner_of, unfinished


def left_by(path: Path, mark: str) -> Path:
    """As if the process of that mark had begun it."""
    return path.with_name(unfinished(path).name.replace(identity(os.getpid()), mark))


def test_a_process_knows_its_own_work(tmp_path: Path) -> None:
    work = unfinished(tmp_path / "model")
    assert re.fullmatch(r"\.model\..+\.\d+-\d+\.tmp", work.name)
    assert owner_of(work, "model") is Owner.SELF
    assert owner_of(unfinished(tmp_path / "model", "old.tmp"), "model") is Owner.SELF


def test_another_process_with_the_number_of_a_dead_one_is_not_taken_for_it(tmp_path: Path) -> None:
    pid, began = identity(os.getppid()).split("-")
    assert owner_of(left_by(tmp_path / "model", f"{pid}-{began}"), "model") is Owner.ALIVE
    assert owner_of(left_by(tmp_path / "model", f"{pid}-{int(began) - 1}"), "model") is Owner.DEAD


def test_a_process_that_nobody_has_waited_for_yet_is_dead(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    work = left_by(tmp_path / "model", identity(process.pid))
    assert owner_of(work, "model") is Owner.ALIVE
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
    assert owner_of(work, "model") is Owner.DEAD
    process.communicate()
    assert owner_of(work, "model") is Owner.DEAD


@pytest.mark.parametrize(
    ("name", "owner"),
    [
        (".model.somewhere-else.12-345.tmp", Owner.ELSEWHERE),
        (".model.tmp", None),
        (".other.HOST.1-2.tmp", None),
        ("model", None),
    ],
)
def test_names_of_others(tmp_path: Path, name: str, owner: Owner | None) -> None:
    assert owner_of(tmp_path / name, "model") is owner


def test_a_name_without_the_start_cannot_be_told_from_a_living_process(tmp_path: Path) -> None:
    assert owner_of(left_by(tmp_path / "model", str(os.getppid())), "model") is Owner.UNCLEAR
    dead = subprocess.Popen(["true"])
    dead.wait()
    assert owner_of(left_by(tmp_path / "model", str(dead.pid)), "model") is Owner.DEAD
