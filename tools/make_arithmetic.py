"""Writes a small arithmetic task: train.jsonl, and eval.jsonl whose operand pairs occur nowhere in train.jsonl.

    python tools/make_arithmetic.py data/arithmetic --largest 9 --held-out 13 --seed 0

Each row asks for the sum of two numbers from 1 to --largest, in the format that --prompt-data takes. A pair is held out
in both orders. The same arguments write the same bytes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from pathlib import Path

SYSTEM = "Add."


def row(a: int, b: int) -> str:
    prompt = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"{a} + {b} ="}]
    return json.dumps({"prompt": prompt, "label": str(a + b)})


def split(largest: int, held_out: int, seed: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(train, eval) as ordered operand pairs in random order; ``held_out`` counts unordered pairs."""
    rng = random.Random(seed)
    unordered = list(itertools.combinations_with_replacement(range(1, largest + 1), 2))
    held = set(rng.sample(unordered, held_out))
    ordered = list(itertools.product(range(1, largest + 1), repeat=2))
    rng.shuffle(ordered)
    train = [pair for pair in ordered if (min(pair), max(pair)) not in held]
    evaluation = [pair for pair in ordered if (min(pair), max(pair)) in held]
    return train, evaluation


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--largest", type=int, default=9, help="the largest operand")
    parser.add_argument("--held-out", type=int, default=13, help="unordered operand pairs kept for evaluation")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for name, pairs in zip(
        ("train", "eval"), split(arguments.largest, arguments.held_out, arguments.seed), strict=True
    ):
        rows = "".join(row(a, b) + "\n" for a, b in pairs)
        (arguments.folder / f"{name}.jsonl").write_text(rows, encoding="utf-8")


if __name__ == "__main__":
    main()
