"""Checkpoints of a run: one folder each, complete or not there, and a tracker that names the one to resume from.

    root/latest_checkpointed_iteration.txt    the rollout id of the last one, as Megatron writes it
    root/iter_0000019/                        Megatron's sharded files, and
        critic/                               the critic's, with PPO and without --critic-save
        vime_state.json                       data cursor, buffer, metrics position …: everything that is not Megatron's
        COMPLETE                              its presence means that all else is there

Invariants, at every moment and so also when the process is killed:

* A folder named ``iter_*`` that has ``COMPLETE`` is whole. Work in progress has another name.
* The tracker is replaced after its checkpoint is in place. The intention to replace it is written down before, so a
  commit that was interrupted in between counts.
* A checkpoint that is saved again is set aside until the new one is in place, and found there if that never happens.

One run at a time saves to a root (see ``vime.folder_lock``); any number may read it. Neither torch nor Megatron is
imported here.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vime.errors import DamagedFile, UserError
from vime.files import read_json_object, reading, writing
from vime.unfinished import Owner, owner_of, unfinished

__all__ = ["COMPLETE", "CRITIC", "STATE", "TRACKER", "CheckpointStore", "ResumePoint", "older_may_do"]

TRACKER = "latest_checkpointed_iteration.txt"
STATE = "vime_state.json"
COMPLETE = "COMPLETE"
CRITIC = "critic"
RELEASE = "release"  # what Megatron writes into the tracker for converted weights, and the name of their folder
_MEGATRON_METADATA = "metadata.json"  # Megatron writes it last into a torch_dist checkpoint
_ITERATION = re.compile(r"iter_(\d{7})")
_ASIDE = re.compile(r"\.iter_(\d{7})\.replaced")
_WORK = re.compile(r"\.(iter_\d{7})\..+\.tmp")
_OURS = re.compile(
    rf"(({CRITIC}|ref)/)?({STATE}|{COMPLETE}|common\.pt|metadata\.json|\.metadata|[^/]+\.distcp|mp_rank_[^/]+/[^/]+\.pt)"
)
_MOST_DIGITS = 18  # of the number of a rollout

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """A checkpoint that can be loaded."""

    directory: Path
    iteration: int  # the rollout after which it was saved; 0 for converted weights
    state: dict[str, Any] | None  # None: a Megatron checkpoint that no vime run saved, good for its weights only

    @property
    def weights_only(self) -> bool:
        return self.state is None

    @property
    def next_rollout_id(self) -> int:
        """Where a run goes on. Converted weights are a beginning."""
        return 0 if self.weights_only else self.iteration + 1


class CheckpointStore:
    """Writes and finds the checkpoints below one root folder."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)
        self._tracker = self.root / TRACKER
        self._next_tracker = self.root / f".{TRACKER}.next"

    def begin(self, rollout_id: int) -> Path:
        """An empty folder to write the checkpoint of ``rollout_id`` into. It counts for nothing before ``commit``.

        Raises:
            UserError: another process is saving to this root, or it cannot be written.
        """
        with writing(self.root):
            self._check_root()
            self.root.mkdir(parents=True, exist_ok=True)
            self._end_commit()
            self.clear()
            work = self._work(rollout_id)
            work.mkdir()
        return work

    def clear(self) -> None:
        """Removes what processes left that were killed while they saved. A run does it before it starts, too.

        Raises:
            UserError: another process is saving to this root, or may be.
        """
        with writing(self.root):
            self._remove_abandoned_work()

    def discard(self, rollout_id: int) -> None:
        """Removes what was written since ``begin``: it is not to be completed."""
        shutil.rmtree(self._work(rollout_id), ignore_errors=True)

    def commit(self, rollout_id: int, state: Mapping[str, Any] | None) -> Path:
        """Makes what was written since ``begin`` the checkpoint to resume from, and returns its folder.

        Args:
            state: what ``resolve`` gives back; JSON values, finite numbers only. None: these are weights only.

        Raises:
            UserError: the disk is full, or does not take it for another reason. What was there before still counts.
        """
        text = None if state is None else json.dumps(state, allow_nan=False)
        with writing(self.root):
            return self._commit(rollout_id, text)

    def _commit(self, rollout_id: int, state: str | None) -> Path:
        work, final = self._work(rollout_id), self._folder(rollout_id)
        if state is not None:
            (work / STATE).write_text(state, encoding="utf-8")
        _sync_below(work)
        _write_durably(work / COMPLETE, "")
        _sync_folder(work)
        if final.exists():
            final.rename(_aside(final))
        _write_durably(self._next_tracker, f"{rollout_id}\n")
        work.rename(final)
        _sync_folder(self.root)
        self._end_commit()
        return final

    def resolve(self, ckpt_step: int | None = None) -> ResumePoint | None:
        """The checkpoint to load: that of ``ckpt_step``, else the one that the tracker names.

        None means that there is nothing to resume: no root, or no checkpoint in it. A tracker that is lost, empty or
        names a checkpoint that is not whole is overruled, with a warning, by the newest whole one.

        Raises:
            UserError: the root is one of its checkpoints, ``ckpt_step`` is not there, none of the checkpoints that are
                there is whole, or the state of the one to load is damaged.
        """
        with reading(self.root):
            return self._resolve(ckpt_step)

    def _resolve(self, ckpt_step: int | None) -> ResumePoint | None:
        self._check_root()
        if ckpt_step is not None:
            return self._explicit(ckpt_step)
        tracked = self._tracked()
        if tracked is not None and _is_whole(tracked):
            return _resume_point(tracked)
        return self._newest_instead_of_tracked()

    def iterations(self) -> list[int]:
        """All whole checkpoints, oldest first."""
        names = [match[1] for pattern in (_ITERATION, _ASIDE) for match, _ in self._matching(pattern)]
        return sorted({int(digits) for digits in names if _is_whole(self._find(int(digits)))})

    def _explicit(self, ckpt_step: int) -> ResumePoint:
        folder = self._find(ckpt_step)
        if not _is_whole(folder):
            there = ", ".join(map(str, self.iterations())) or "none"
            raise UserError(f"--ckpt-step {ckpt_step}: {self.root} has no whole {folder.name}; there are: {there}")
        return _resume_point(folder)

    def _newest_instead_of_tracked(self) -> ResumePoint | None:
        iterations = self.iterations()
        said = f"says {self._tracker_text()!r}" if self._tracker.is_file() else "is missing"
        if iterations:
            logger.warning(
                "%s %s, which is not a whole checkpoint: taking the newest whole one, %d",
                self._tracker, said, iterations[-1],
            )  # fmt: skip
            return _resume_point(self._find(iterations[-1]))
        if self._tracker.is_file():
            raise UserError(f"{self._tracker} {said}, but no whole checkpoint is there; remove the file to start anew")
        return None

    def _tracked(self) -> Path | None:
        text = self._tracker_text()
        if text == RELEASE:
            return self.root / RELEASE
        iteration = _iteration(text)
        return None if iteration is None else self._find(iteration)

    def _tracker_text(self) -> str:
        return _beginning(self._next_tracker if self._commit_needs_only_its_end() else self._tracker)

    def _check_root(self) -> None:
        """A user who names one checkpoint instead of their root is told so."""
        match = _ITERATION.fullmatch(self.root.resolve().name)
        if match or (self.root / _MEGATRON_METADATA).is_file():
            step = f" and --ckpt-step {int(match[1])}" if match else ""
            raise UserError(f"{self.root} is one checkpoint; give its root, {self.root.resolve().parent}{step}")
        if self.root.exists() and not self.root.is_dir():
            raise UserError(f"{self.root} is a file; checkpoints need a folder")

    def _commit_needs_only_its_end(self) -> bool:
        """A process was killed after its checkpoint was in place and before the tracker said so."""
        iteration = _iteration(_beginning(self._next_tracker))
        return iteration is not None and _is_whole(self._folder(iteration))

    def _end_commit(self) -> None:
        """The last steps of every commit, and the first of a process that finds one interrupted."""
        if self._commit_needs_only_its_end():
            self._next_tracker.replace(self._tracker)
        self._next_tracker.unlink(missing_ok=True)
        for match, path in self._matching(_ASIDE):
            final = self._folder(int(match[1]))
            if final.exists():
                _remove_replaced(path, final)
            else:
                path.rename(final)
        _sync_folder(self.root)

    def _remove_abandoned_work(self) -> None:
        for match, path in self._matching(_WORK):
            owner = owner_of(path, match[1])
            if owner is Owner.ELSEWHERE:
                logger.warning("%s was left by another machine; remove it if no run there saves here", path)
            elif owner is Owner.ALIVE:
                raise UserError(f"{self.root}: another process is saving there ({path.name}); a root is for one run")
            elif owner is Owner.UNCLEAR:
                raise UserError(f"{path} was left by {owner.value}; remove it if no run saves there")
            elif owner is not None:
                shutil.rmtree(path)

    def _matching(self, pattern: re.Pattern[str]) -> Iterator[tuple[re.Match[str], Path]]:
        for path in sorted(self.root.iterdir()) if self.root.is_dir() else ():
            match = pattern.fullmatch(path.name)
            if match and path.is_dir():
                yield match, path

    def _folder(self, rollout_id: int) -> Path:
        return self.root / f"iter_{rollout_id:07d}"

    def _find(self, rollout_id: int) -> Path:
        """Where a checkpoint is: in its folder, or set aside by a commit that was interrupted."""
        final = self._folder(rollout_id)
        return _aside(final) if _aside(final).is_dir() and not final.exists() else final

    def _work(self, rollout_id: int) -> Path:
        return unfinished(self._folder(rollout_id))


def _beginning(file: Path) -> str:
    """What a tracker says, as far as it can be a number; nothing if it is not there."""
    if not file.is_file():
        return ""
    with open(file, "rb") as stream:
        return stream.read(2 * _MOST_DIGITS).decode("utf-8", errors="backslashreplace").strip()


def _iteration(text: str) -> int | None:
    return int(text) if re.fullmatch(rf"[0-9]{{1,{_MOST_DIGITS}}}", text) else None


def _is_whole(folder: Path) -> bool:
    """Ours have the marker. Of Megatron's own, finished torch_dist ones have metadata; torch ones do not say."""
    if (folder / STATE).is_file():
        return (folder / COMPLETE).is_file()
    return (folder / _MEGATRON_METADATA).is_file() or any(folder.glob("mp_rank_*/model_optim_rng.pt"))


def _resume_point(folder: Path) -> ResumePoint:
    match = _ITERATION.fullmatch(folder.name) or _ASIDE.fullmatch(folder.name)
    state = folder / STATE
    with older_may_do(folder):
        return ResumePoint(
            directory=folder,
            iteration=int(match[1]) if match else 0,
            state=read_json_object(state) if state.is_file() else None,
        )


@contextmanager
def older_may_do(checkpoint: Path, option: str = "--ckpt-step") -> Iterator[None]:
    """Says what can be done where ``checkpoint`` turns out to be damaged in the block; nothing is taken by itself."""
    try:
        yield
    except DamagedFile as error:
        if checkpoint.name == CRITIC:
            checkpoint = checkpoint.parent
        match = _ITERATION.fullmatch(checkpoint.name) or _ASIDE.fullmatch(checkpoint.name)
        others = CheckpointStore(checkpoint.parent).iterations()
        older = [iteration for iteration in others if match and iteration < int(match[1])]
        advice = f"{option} {older[-1]} takes the one before" if older else "there is no older one"
        raise UserError(f"{error}; the checkpoint {checkpoint.name} is damaged: {advice}") from error


def _aside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.replaced")


def _remove_replaced(replaced: Path, final: Path) -> None:
    """Removes a checkpoint in whose place there is a new one. What somebody else put into it is kept beside that."""
    for path in sorted(replaced.rglob("*"), reverse=True):  # folders behind what is in them
        if path.is_dir() and not path.is_symlink():
            with suppress(OSError):  # something of others is there
                path.rmdir()
        elif _OURS.fullmatch(path.relative_to(replaced).as_posix()):
            path.unlink()
    if not any(replaced.iterdir()):
        replaced.rmdir()
        return
    names = (final.with_name(f"{final.name}.replaced-{number}") for number in itertools.count(1))
    kept = next(name for name in names if not name.exists())
    replaced.rename(kept)
    logger.warning("%s was saved again; what it had besides the checkpoint is in %s now", final, kept)


def _write_durably(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_below(folder: Path) -> None:
    """Files, and the folders that name them: those of critic and reference are inside."""
    for path in folder.rglob("*"):
        if path.is_dir():
            _sync_folder(path)
        elif path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
