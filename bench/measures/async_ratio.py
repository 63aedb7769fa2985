"""async_ratio: seconds of train_async.py's loop ÷ those of train.py's, where generation and training take equal time.

Both run equally many rollouts of the same kind on the same engine. Training is a sleep of as long as its rollout took
to generate, so that what is measured is the overlap: with N rollouts, (N + 1) / 2N is the least that there can be. (A
sleep of a fixed length would be equal to generation only until the machine changes its speed.)

Turns are short, and half of the synchronous rollouts come before the asynchronous ones, half of them after: a machine
that gets slower or faster on the way does so for both sides. How far it did not is seen from ``training``, which would
be equally long on both; ``at_equal_speed`` compares what the two loops took for each second of it.
"""

from __future__ import annotations

import asyncio
import functools
import sys
from pathlib import Path
from typing import Any

from bench.asynchrony import Times, base_flags, engine_for, run
from bench.stats import Comparison, Spread

ROLLOUTS = 20
TOKENS = 64
TURNS = 9


def measure(folder: Path) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    flags = base_flags(folder)
    with engine_for(flags, folder) as url:
        times = functools.partial(run, url=url, folder=folder, length_of=lambda session: TOKENS, train_s=None)
        return asyncio.run(_measure(flags, times))


async def _measure(flags: list[str], times: Any) -> dict[str, Any]:
    await times(flags, rollouts=ROLLOUTS // 4)
    ahead: list[Times] = []
    in_turn: list[Times] = []
    for _ in range(TURNS):
        before = await times(flags, rollouts=ROLLOUTS // 2)
        ahead.append(await times(["--asynchronous", *flags], rollouts=ROLLOUTS))
        in_turn.append(before + await times(flags, rollouts=ROLLOUTS // 2))
        print(f"sync {in_turn[-1].wall:.3f}, async {ahead[-1].wall:.3f}", file=sys.stderr, flush=True)
    walls = Comparison(*(Spread(tuple(each.wall for each in side)) for side in (ahead, in_turn)))
    training = Comparison(*(Spread(tuple(each.total("train") for each in side)) for side in (ahead, in_turn)))
    return walls.to_json(ours="async", theirs="sync", unit="s") | {
        "training": training.to_json(ours="async", theirs="sync", unit="s"),
        "at_equal_speed": Comparison(walls.ratio, training.ratio).ratio.to_json(),
        "work": {"rollouts": ROLLOUTS, "tokens": TOKENS, "least": (ROLLOUTS + 1) / (2 * ROLLOUTS)},
    }
