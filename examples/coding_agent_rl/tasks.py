"""Writes tasks.jsonl: small functions to write, with two tests that are shown to the agent and four that are not.

    python -m examples.coding_agent_rl.tasks data/coding_agent_rl --terms 4

The same arguments write the same bytes. A small model can do the first four kinds of functions; one that writes code
without an example needs none (--shots 0).
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

TERMS = {
    "the sum of a and b": "a + b",
    "a minus b": "a - b",
    "a times b": "a * b",
    "a squared plus b": "a ** 2 + b",
    "the larger of a and b": "max(a, b)",
    "the smaller of a and b": "min(a, b)",
    "the distance between a and b": "abs(a - b)",
    "the sum of the digits of a, plus b": "sum(map(int, str(a))) + b",
    "the remainder of a divided by b": "a % b",
    "the number of even numbers from a to a + b, both included": "sum(n % 2 == 0 for n in range(a, a + b + 1))",
}
ASK = "Write a Python function f(a, b) that returns {}. Answer with one block of code."
BLOCK = "```python\ndef f(a, b):\n    return {}\n```"


def row(words: str, expression: str, addend: int, pairs: list[tuple[int, int]], shots: int) -> dict[str, Any]:
    tests = [f"assert f({a}, {b}) == {eval(expression, {'a': a, 'b': b}) + addend}" for a, b in pairs]
    shown = [
        {"role": "user", "content": ASK.format("a plus b, and 5 more")},
        {"role": "assistant", "content": BLOCK.format("a + b + 5")},
    ] * bool(shots)
    question = {"role": "user", "content": ASK.format(f"{words}, and {addend} more")}
    return {"prompt": [*shown, question], "metadata": {"public_tests": tests[:2], "tests": tests[2:]}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=256)
    parser.add_argument("--terms", type=int, default=len(TERMS), choices=range(1, len(TERMS) + 1), help="kinds of them")
    parser.add_argument("--shots", type=int, default=1, choices=(0, 1))
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    numbers = random.Random(arguments.seed)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with (arguments.folder / "tasks.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(arguments.count):
            words, expression = numbers.choice(list(TERMS.items())[: arguments.terms])
            pairs = [(numbers.randrange(10, 100), numbers.randrange(1, 30)) for _ in range(6)]
            file.write(json.dumps(row(words, expression, numbers.randrange(1, 10), pairs, arguments.shots)) + "\n")


if __name__ == "__main__":
    main()
