"""train_ratio: training tokens/s of vime ÷ those of transformers on the same samples.

Both sides make one GRPO step a turn: bf16 compute, fp32 master weights, the same micro-batches, no padding.
Their gradient norms are compared in the first step, so it is the same work. transformers runs in two modes of
precision, and the faster one is what vime is compared with.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.sides import Side
from bench.stats import Comparison, Spread, by_turns
from bench.work import TrainingWork, need_model, start_side, threads
from vime.cluster.actors import environment

DEMO = TrainingWork(samples=64, prompt=24, response=8)  # the demo's samples, filled up to 2,048 tokens
DISTINCT = TrainingWork(samples=64, prompt=24, response=8, group=1)
LONG = TrainingWork(samples=8, prompt=128, response=128)
MODES = ("autocast", "copy")
PAIRS = 3
TOLERANCE = 0.15  # of the first gradient norms; bf16 moves them by up to a tenth, on either side, against fp32


def measure(folder: Path) -> dict[str, Any]:
    need_model()
    with ExitStack() as stack:
        ours = start_side("bench.training.vime_side", folder, environment=environment(threads()))
        sides = {"vime": stack.enter_context(ours)}
        for mode in MODES:
            sides[mode] = stack.enter_context(start_side("bench.training.transformers_side", folder, mode))
        for side in sides.values():
            side.ready()
        result = compare(DEMO, sides, MODES)
        faster = (result["transformers_mode"],)
        return result | {
            "distinct_prompts": compare(DISTINCT, sides, faster),
            "long_responses": compare(LONG, sides, faster),
        }


def compare(work: TrainingWork, sides: Mapping[str, Side], modes: Sequence[str]) -> dict[str, Any]:
    """vime and transformers in these modes by turns; the fastest mode counts."""
    request = work.to_json()
    taking_part = {name: sides[name] for name in ("vime", *modes)}
    norms = {name: float(side.ask(**request)["grad_norm"]) for name, side in taking_part.items()}  # the warm-up
    check_same_work(norms)
    speeds = {name: functools.partial(_tokens_per_s, side, work) for name, side in taking_part.items()}
    spreads = by_turns(speeds, turns=PAIRS)
    return _result(spreads, modes) | {"first_grad_norms": norms, "work": request}


def _tokens_per_s(side: Side, work: TrainingWork) -> float:
    return work.tokens / side.seconds(**work.to_json())


def _result(spreads: Mapping[str, Spread], modes: Sequence[str]) -> dict[str, Any]:
    fastest = max(modes, key=lambda mode: spreads[mode].median)
    result = Comparison(spreads["vime"], spreads[fastest]).to_json(ours="vime", theirs="transformers", unit="tokens/s")
    others = {mode: spreads[mode].to_json() for mode in modes if mode != fastest}
    return result | {"transformers_mode": fastest, "other_modes": others}


def check_same_work(norms: Mapping[str, float]) -> None:
    """Raises RuntimeError when the sides do not compute the same gradient."""
    low, high = min(norms.values()), max(norms.values())
    if not all(map(math.isfinite, norms.values())) or high - low > TOLERANCE * high:
        raise RuntimeError(f"the sides do not compute the same gradient: norms {dict(norms)}")
