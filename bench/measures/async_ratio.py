"""async_ratio: seconds of train_async.py's loop ÷ those of train.py's, where generation and training take equal time.

Both run the same rollouts on the same engine. Training is a sleep of as long as a rollout takes to generate, so that
what is measured is the overlap: with N rollouts, (N + 1) / 2N is the least that there can be.
"""

from __future__ import annotations

import asyncio
import functools
import statistics
from pathlib import Path
from typing import Any

from bench.asynchrony import Times, base_flags, engine_for, run
from bench.stats import Comparison, Spread

ROLLOUTS = 20
TOKENS = 128
PAIRS = 2


def measure(folder: Path) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    flags = base_flags(folder)
    with engine_for(flags, folder) as url:
        times = functools.partial(run, url=url, folder=folder, length_of=lambda session: TOKENS)
        return asyncio.run(_measure(flags, times))


async def _measure(flags: list[str], times: Any) -> dict[str, Any]:
    alone: Times = await times(flags, rollouts=6, train_s=0.0)
    generate_s = statistics.median(alone.phases["generate"][1:])
    ahead, in_turn = [], []
    for _ in range(PAIRS):
        in_turn.append((await times(flags, rollouts=ROLLOUTS, train_s=generate_s)).wall)
        ahead.append((await times(["--asynchronous", *flags], rollouts=ROLLOUTS, train_s=generate_s)).wall)
    result = Comparison(Spread(tuple(ahead)), Spread(tuple(in_turn))).to_json(ours="async", theirs="sync", unit="s")
    work = {"rollouts": ROLLOUTS, "generate_s": generate_s, "least": (ROLLOUTS + 1) / (2 * ROLLOUTS)}
    return result | {"work": work}
