"""Writes tasks.jsonl: questions that one entry of the corpus answers, each after two examples of how to search.

    python -m examples.search_tool.tasks data/search_tool

The same arguments write the same bytes. A model that knows tools by its chat template needs no examples (--shots 0).
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from examples.search_tool.search_tool import CORPUS

SYSTEM = {"role": "system", "content": "Look it up with the tool."}
QUESTIONS = {
    "What do people grow in {title}?": r"people grow (\w+)\.",
    "Which river is {title} on?": r"on the river (\w+)\.",
    "Who built the bridge of {title}?": r"built by (\w+ \w+) in",
    "In which month is the fair of {title}?": r"held in (\w+)\.",
}
"""Question → where its answer stands in the entry."""

SHOTS = [
    ("What do people grow in Arlen?", "Arlen", "Arlen is a village on the river Tov. Its people grow hemp.", "hemp"),
    ("Who built the bridge of Tomsa?", "Tomsa", "The bridge of Tomsa was built by Mira Holt in 1802.", "Mira Holt"),
]


def shot(question: str, query: str, result: str, answer: str) -> list[dict[str, Any]]:
    """A question, the call, what the tool says, the answer."""
    call = json.dumps({"name": "search", "arguments": {"query": query}})
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": f"<tool_call>{call}</tool_call>"},
        {"role": "tool", "content": result},
        {"role": "assistant", "content": answer},
    ]


def rows(shots: int) -> Iterator[dict[str, Any]]:
    shown = list(itertools.chain.from_iterable(shot(*each) for each in SHOTS[:shots]))
    for line in CORPUS.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        for question, place in QUESTIONS.items():
            (answer,) = re.findall(place, entry["text"])
            asked = {"role": "user", "content": question.format(title=entry["title"])}
            yield {"prompt": [SYSTEM, *shown, asked], "label": answer}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shots", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    found = list(rows(arguments.shots))
    random.Random(arguments.seed).shuffle(found)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(row) + "\n" for row in found)
    (arguments.folder / "tasks.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
