"""Starts ``train.py`` or ``train_async.py`` as a user would, and looks at what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil

from tests.processes import command_of, is_alive

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 240
MAPS_PERIOD_S = 1.0


class Run:
    """One run of a script; a context manager that leaves nothing running, whatever a test does.

    Args:
        save: the folder of the run.
        keeps: whether it saves checkpoints there; else only its record.
        patience_s: how long it may show no sign of life before a wait for something fails.
    """

    def __init__(
        self,
        save: Path,
        *flags: str,
        script: str = "train.py",
        keeps: bool = True,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.save = save
        self._patience_s = patience_s
        self._begin = time.time()
        self.log = save.with_suffix(f".{time.monotonic_ns()}.log")
        self._shm = shared_memory()
        command = [sys.executable, script, *flags, "--save" if keeps else "--run-dir", str(save)]
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )
        self._tree: dict[int, psutil.Process] = {}
        self._files: set[str] = set()  # shared memory that its processes were seen to use
        self._looked = 0.0

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.remember()
        for process in self._tree.values():
            if process.is_running():
                process.kill()
        self.process.kill()
        self.process.wait()

    def remember(self) -> None:
        """Notes all processes below the run, and now and then their shared memory, to look for them when it has ended.

        Other programs have shared memory too, some of it left behind: only what the run's own processes mapped counts.
        """
        try:
            for process in psutil.Process(self.process.pid).children(recursive=True):
                self._tree.setdefault(process.pid, process)
        except psutil.NoSuchProcess:
            return
        if time.monotonic() - self._looked > MAPS_PERIOD_S:
            self._looked = time.monotonic()
            self._files |= mapped_by(map(str, self._tree)) - self._shm

    def wait_for(self, happened: Any, what: str) -> None:
        """Polls until ``happened()``; fails with the end of the log when the run ends before or stands still."""
        while not happened():
            self.remember()
            assert self.process.poll() is None, f"the run ended before {what}:\n{self.output()[-3000:]}"
            assert self._moves(), f"no sign of {what}:\n{self.output()[-3000:]}"
            time.sleep(0.05)
        self.remember()

    def wait(self) -> int:
        """The exit status."""
        while self.process.poll() is None:
            self.remember()
            assert self._moves(), f"the run hangs:\n{self.output()[-3000:]}"
            time.sleep(0.1)
        return self.process.returncode

    def _moves(self) -> bool:
        """Whether it, its engines or its router wrote something of late. How long a whole run takes depends on what
        else the machine does; the timeout of the test is the only bound of that."""
        written = [self.log, self.save / "metrics.jsonl", *self.save.glob("logs/*"), *self.save.glob("samples/*")]
        last = max((path.stat().st_mtime for path in written if path.exists()), default=0.0)
        return time.time() - max(last, self._begin) < self._patience_s

    def finish(self) -> None:
        """Waits for an end without error."""
        status = self.wait()
        assert status == 0, self.output()[-3000:]

    def signal(self, number: signal.Signals) -> None:
        self.remember()
        self.process.send_signal(number)

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def named(self, text: str) -> list[psutil.Process]:
        """Living processes of the run whose command line has ``text``."""
        self.remember()
        return [process for process in self._tree.values() if text in command_of(process)]

    def assert_nothing_is_left(self, *, but: tuple[str, ...] = ()) -> None:
        """No process and no shared memory of the run, after a moment for the kernel and Ray to clean up.

        Args:
            but: processes, by the start of their command line, that may take longer.
        """
        end = time.monotonic() + 30
        while time.monotonic() < end:
            alive = [each for each in self._tree.values() if is_alive(each) and not command_of(each).startswith(but)]
            files = (shared_memory() & self._files) - mapped_by(path.name for path in Path("/proc").glob("[0-9]*"))
            if not alive and not files:
                return
            time.sleep(0.2)
        names = [command_of(process)[:120] for process in alive]
        raise AssertionError(f"left behind: processes {names}, shared memory {sorted(files)}")

    def rows(self) -> list[dict[str, Any]]:
        path = self.save / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]  # the last may still be written

    def samples(self, rollout_id: int) -> list[dict[str, Any]]:
        path = self.save / "samples" / f"rollout_{rollout_id:07d}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]


def has_signal(samples: list[dict[str, Any]]) -> bool:
    """Whether the rewards of some group differ: GRPO has a gradient just then."""
    rewards: dict[int, set[float]] = {}
    for sample in samples:
        if sample["reward"] is not None:
            rewards.setdefault(sample["group_index"], set()).add(sample["reward"])
    return any(len(found) > 1 for found in rewards.values())


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


def mapped_by(pids: Iterable[str]) -> set[str]:
    """Files of shared memory that these processes use, as far as they live."""
    found = set()
    for pid in pids:
        try:
            lines = Path("/proc", pid, "maps").read_text(errors="replace").splitlines()
        except OSError:
            continue
        found.update(line.rpartition("/dev/shm/")[2] for line in lines if "/dev/shm/" in line)
    return found
