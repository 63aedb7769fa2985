"""Writes tasks.jsonl: products that a small model cannot find in its head, each after two examples of how to call.

    python -m examples.retool.tasks data/retool

The same arguments write the same bytes. A model that knows tools by its chat template needs no examples (--shots 0).
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from pathlib import Path
from typing import Any

SYSTEM = {"role": "system", "content": "Compute with the tool."}
SHOTS = [("What is 12 * 34?", "print(12 * 34)", "408"), ("What is 907 - 68?", "print(907 - 68)", "839")]


def shot(question: str, code: str, result: str) -> list[dict[str, Any]]:
    """A question, the call, what the tool says, the answer."""
    call = json.dumps({"name": "python", "arguments": {"code": code}})
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": f"<tool_call>{call}</tool_call>"},
        {"role": "tool", "content": result},
        {"role": "assistant", "content": result},
    ]


def row(a: int, b: int, shots: int) -> dict[str, Any]:
    shown = itertools.chain.from_iterable(shot(*each) for each in SHOTS[:shots])
    question = {"role": "user", "content": f"What is {a} * {b}?"}
    return {"prompt": [SYSTEM, *shown, question], "label": str(a * b)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=256)
    parser.add_argument("--shots", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    pairs = random.Random(arguments.seed).sample(list(itertools.product(range(11, 100), repeat=2)), arguments.count)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    rows = (json.dumps(row(a, b, arguments.shots)) + "\n" for a, b in pairs)
    (arguments.folder / "tasks.jsonl").write_text("".join(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
