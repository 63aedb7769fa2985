"""Writes tasks.jsonl: questions that take a product and a sum.

    python -m examples.multi_agent.tasks data/multi_agent

The same arguments write the same bytes.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

THINGS = [
    "A box holds {a} pens. How many pens are in {b} boxes and {c} more?",
    "A tray holds {a} eggs. How many eggs are on {b} trays and {c} more?",
    "A row has {a} seats. How many seats are in {b} rows and {c} more?",
    "A crate holds {a} plums. How many plums are in {b} crates and {c} more?",
]


def row(numbers: random.Random) -> dict[str, str]:
    a, b, c = numbers.randint(11, 99), numbers.randint(3, 19), numbers.randint(2, 30)
    return {"prompt": numbers.choice(THINGS).format(a=a, b=b, c=c), "label": str(a * b + c)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    numbers = random.Random(arguments.seed)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(row(numbers)) + "\n" for _ in range(arguments.count))
    (arguments.folder / "tasks.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
