"""Measures vime against references and prints one JSON object; progress goes to stderr.

    python -m bench                                   everything
    python -m bench --only train_ratio,rollout_ratio  some of it

What each key means stands in bench/README.md. The exit status is 1 if a measure failed.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.machine import describe
from bench.measures import MEASURES, Entry
from bench.runner import adopt_orphans, end_children, run_measure

Run = Callable[[Entry, Path], dict[str, Any]]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", type=_chosen, default=MEASURES, metavar="NAMES", help="comma-separated keys")
    parser.add_argument("--folder", type=Path, help="where logs stay; a temporary folder otherwise")
    return parser.parse_args(argv)


def _chosen(names: str) -> tuple[Entry, ...]:
    """Measures by name, in our order."""
    wanted = names.split(",")
    known = [entry.name for entry in MEASURES]
    for name in wanted:
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name!r} is not a measure; there are {', '.join(known)}")
    return tuple(entry for entry in MEASURES if entry.name in wanted)


def run_all(entries: Sequence[Entry], folder: Path, run: Run = run_measure) -> dict[str, Any]:
    """Each key holds its number, or {"error": …}; "details" holds spreads and sides."""
    numbers: dict[str, Any] = {}
    details: dict[str, Any] = {}
    for entry in entries:
        _say(f"{entry.name} …")
        begin = time.monotonic()
        result = run(entry, folder)
        seconds = round(time.monotonic() - begin, 1)
        has_failed = "error" in result
        numbers[entry.name] = result if has_failed else result["value"]
        if not has_failed:
            details[entry.name] = result | {"target": entry.target, "measured_in_s": seconds}
        _say(f"{entry.name}: {numbers[entry.name]} (target {entry.target}), {seconds} s")
    return {**numbers, "details": details}


def failed(results: dict[str, Any]) -> bool:
    return any(isinstance(value, dict) and "error" in value for value in results.values())


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _end_on_sigterm() -> None:
    """SIGTERM unwinds like Ctrl-C, so that measures are ended."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def main(argv: Sequence[str]) -> int:
    arguments = parse(argv)
    _end_on_sigterm()
    adopt_orphans()
    about = describe() | {"command": shlex.join(["python", "-m", "bench", *argv])}
    try:
        with tempfile.TemporaryDirectory(prefix="vime-bench-") as temporary:
            results = run_all(arguments.only, arguments.folder or Path(temporary))
    finally:
        end_children()
    print(json.dumps(results | about, indent=2))
    return int(failed(results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
