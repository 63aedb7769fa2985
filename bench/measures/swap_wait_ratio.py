"""swap_wait_ratio: seconds that training waits when weights are swapped in flight ÷ when the engine is drained for it.

One answer in eight is sixteen times as long as the others. Both sides are train_async.py with --fully-async and the
same bound of staleness; they differ in the sync alone: one halts the requests that are running, the other lets them end
first and starts no new ones until the sync is over. Training is a sleep of as long as a rollout takes to generate,
which is measured anew before each turn, because the machine's speed changes.
"""

from __future__ import annotations

import asyncio
import functools
import statistics
import sys
from pathlib import Path
from typing import Any

from bench.asynchrony import Times, base_flags, engine_for, run
from bench.stats import Comparison, Spread
from vime.types import derive_seed

ROLLOUTS = 12
MAX_STALENESS = 3
SHORT, LONG = 16, 256  # tokens
ONE_IN = 8
TURNS = 3
ALONE = 6  # rollouts by which the time of generation is measured


def length_of(session: str) -> int:
    """Of the response of a sample, by its identity."""
    return LONG if derive_seed("length", session) % ONE_IN == 0 else SHORT


def measure(folder: Path) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    flags = base_flags(folder)
    with engine_for(flags, folder) as url:
        times = functools.partial(run, url=url, folder=folder, length_of=length_of)
        return asyncio.run(_measure(flags, times))


async def _measure(flags: list[str], times: Any) -> dict[str, Any]:
    await times(flags, rollouts=2, train_s=0.0)
    ahead = ["--asynchronous", "--fully-async", "--max-staleness", str(MAX_STALENESS), *flags]
    swapped, drained, training = [], [], []
    for _ in range(TURNS):
        alone: Times = await times(flags, rollouts=ALONE, train_s=0.0)
        generate_s = statistics.median(alone.phases["generate"])
        training.append(generate_s)
        drained.append((await times(ahead, rollouts=ROLLOUTS, train_s=generate_s, drains=True)).waiting())
        swapped.append((await times(ahead, rollouts=ROLLOUTS, train_s=generate_s)).waiting())
        print(
            f"training {generate_s:.3f}, drain {drained[-1]:.3f}, swap {swapped[-1]:.3f}", file=sys.stderr, flush=True
        )
    result = Comparison(Spread(tuple(swapped)), Spread(tuple(drained))).to_json(ours="swap", theirs="drain", unit="s")
    lengths = {"short": SHORT, "long": LONG, "one_in": ONE_IN}
    return result | {
        "work": {"rollouts": ROLLOUTS, "max_staleness": MAX_STALENESS, **lengths},
        "train_s": Spread(tuple(training)).to_json(),
    }
