"""The model looks things up before it answers. The corpus is invented, so nothing of it can be known by heart."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from examples.search_tool.bm25 import BM25, words
from vime.rollout.multi_turn import Limits, MultiTurn, ToolFunction, final_answer
from vime.types import Sample

CORPUS = Path(__file__).with_name("corpus.jsonl")
LIMITS = Limits(max_turns=6, max_result_chars=2000)
LONGEST_ANSWER = 12
"""Words; who recites what was found has not answered."""


async def search(query: str, top: int = 1) -> str:
    """Finds the entries of the encyclopedia that fit a query best."""
    index, texts = corpus()
    return "\n".join(texts[i] for i in index.best(query, min(max(top, 1), 5))) or "Nothing was found."


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """``--custom-generate-function-path``"""
    return await MultiTurn.from_args(args).with_tools(sample, sampling_params, [ToolFunction(search)], LIMITS)


async def reward(args: Any, sample: Sample) -> float:
    """``--custom-rm-path``: whether the last turn is short and names the label."""
    answer, label = words(final_answer(sample)), words(str(sample.label))
    places = range(len(answer) - len(label) + 1)
    return float(len(answer) <= LONGEST_ANSWER and any(answer[i : i + len(label)] == label for i in places))


@functools.cache
def corpus() -> tuple[BM25, list[str]]:
    """The index and the texts, one for each entry."""
    texts = [json.loads(line)["text"] for line in CORPUS.read_text(encoding="utf-8").splitlines()]
    return BM25(texts), texts
