"""async_ratio: seconds of train_async.py's loop ÷ those of train.py's, where generation and training take equal time.

Both run the same rollouts on the same engine. Training is a sleep of as long as its rollout took to generate, so that
what is measured is the overlap: with N rollouts, (N + 1) / 2N is the least that there can be.
"""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path
from typing import Any

from bench.asynchrony import base_flags, engine_for, run
from bench.stats import Comparison, Spread

ROLLOUTS = 20
TOKENS = 192
PAIRS = 2


def measure(folder: Path) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    flags = base_flags(folder)
    with engine_for(flags, folder) as url:
        times = functools.partial(run, url=url, folder=folder, length_of=lambda session: TOKENS)
        return asyncio.run(_measure(flags, times))


async def _measure(flags: list[str], times: Any) -> dict[str, Any]:
    await times(flags, rollouts=2, train_s=0.0)
    ahead, in_turn = [], []
    for _ in range(PAIRS):
        in_turn.append((await times(flags, rollouts=ROLLOUTS, train_s=None)).wall)
        ahead.append((await times(["--asynchronous", *flags], rollouts=ROLLOUTS, train_s=None)).wall)
    result = Comparison(Spread(tuple(ahead)), Spread(tuple(in_turn))).to_json(ours="async", theirs="sync", unit="s")
    work = {"rollouts": ROLLOUTS, "tokens": TOKENS, "least": (ROLLOUTS + 1) / (2 * ROLLOUTS)}
    return result | {"work": work}
