"""``vime grade --rm-type TYPE``: grades JSON lines {"response", "label"[, "metadata"]} from standard input.

One line {"score", "status", "detail"} goes to standard output for each line read, in the same order. Answers are graded
in processes with a deadline, as in training.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Awaitable, Sequence
from typing import IO, Any

from vime.errors import UserError
from vime.rewards import GraderProcessPool, registry
from vime.rewards.wire import grade_to_json
from vime.types import Grade


def main(argv: Sequence[str]) -> int:
    """Returns 0, or 1 where a line could not be read.

    Raises:
        UserError: there is no such grader.
    """
    options = _parser().parse_args(argv)
    registry.load(options.rm_type)
    return asyncio.run(_grade_all(options, sys.stdin, sys.stdout))


async def _grade_all(options: argparse.Namespace, lines: IO[str], out: IO[str]) -> int:
    """Reads and grades ahead of what is written, by a few answers a process."""
    pool = GraderProcessPool(
        options.workers,
        options.deadline,
        preload=[options.rm_type],
        memory_limit_bytes=registry.address_space([options.rm_type]),
    )
    pending: asyncio.Queue[Awaitable[Grade] | None] = asyncio.Queue(maxsize=4 * options.workers)
    number = bad = 0
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_write_all(pending, out))
            while line := await asyncio.to_thread(lines.readline):
                number += 1
                if not line.strip():
                    continue
                try:
                    grading = pool.grade(options.rm_type, **_request(line))
                except UserError as error:
                    bad += 1
                    grading = _told(f"line {number}: {error}")
                await pending.put(tasks.create_task(grading))
            await pending.put(None)
    except* BrokenPipeError:  # the reader, e.g. `head`, has seen enough
        pass
    finally:
        await pool.close()
    return 1 if bad else 0


async def _write_all(pending: asyncio.Queue[Awaitable[Grade] | None], out: IO[str]) -> None:
    """Writes each grade as soon as those before it are written."""
    while (grading := await pending.get()) is not None:
        record = grade_to_json(await grading)
        out.write(json.dumps({key: record[key] for key in ("score", "status", "detail")}, ensure_ascii=False) + "\n")
        out.flush()


async def _told(problem: str) -> Grade:
    return Grade.error(problem)


def _request(line: str) -> dict[str, Any]:
    """The arguments of a grading, from one line."""
    try:
        record = json.loads(line.removeprefix("\ufeff"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"not JSON: {error}") from None
    if not isinstance(record, dict) or not isinstance(record.get("response"), str):
        raise UserError('expected an object with "response" (a text) and "label"')
    label, metadata = record.get("label"), record.get("metadata") or {}
    if not isinstance(metadata, dict):
        raise UserError('"metadata" must be an object')
    return {
        "response": record["response"],
        "label": label if label is None or isinstance(label, str) else json.dumps(label, ensure_ascii=False),
        "metadata": metadata,
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="vime grade", description=__doc__, allow_abbrev=False)
    boxed = f"the prefix {registry.BOXED} grades the content of the last box"
    parser.add_argument("--rm-type", required=True, help=f"{', '.join(registry.LOCAL)}; {boxed}")
    parser.add_argument("--workers", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--deadline", type=float, default=10.0, help="seconds for one answer (default: 10)")
    return parser
