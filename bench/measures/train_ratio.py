"""train_ratio: training tokens/s of vime ÷ those of transformers on the same samples.

Both sides make one GRPO step a turn: bf16 compute, fp32 master weights, micro-batches of 1,024 tokens, no padding.
Their gradient norms are compared in the first step, so it is the same work. transformers runs in two modes of
precision, and the faster one is what vime is compared with.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.sides import Side
from bench.stats import Comparison, by_turns
from bench.work import TrainingWork, need_model, start_side

DEMO = TrainingWork(samples=64, prompt=24, response=8)  # the demo's samples, filled up to 2,048 tokens
LONG = TrainingWork(samples=8, prompt=128, response=128)
MODES = ("autocast", "copy")
PAIRS = 4
TOLERANCE = 0.05  # relative difference of the first gradient norms: two bf16 computations of the same number


def measure(folder: Path) -> dict[str, Any]:
    need_model()
    return compare(DEMO, folder) | {"long_responses": compare(LONG, folder)}


def compare(work: TrainingWork, folder: Path) -> dict[str, Any]:
    """Three sides by turns; the faster transformers side counts."""
    text = json.dumps(work.to_json())
    with ExitStack() as stack:
        sides = {"vime": stack.enter_context(start_side("bench.training.vime_side", folder, text))}
        for mode in MODES:
            sides[mode] = stack.enter_context(start_side("bench.training.transformers_side", folder, text, mode))
        return _compared(work, sides) | {"work": work.to_json()}


def _compared(work: TrainingWork, sides: Mapping[str, Side]) -> dict[str, Any]:
    for side in sides.values():
        side.ready()
    norms = {name: float(side.ask()["grad_norm"]) for name, side in sides.items()}  # the warm-up
    check_same_work(norms)
    speed = {name: (lambda side=side: work.tokens / side.seconds()) for name, side in sides.items()}
    spreads = by_turns(speed, turns=PAIRS)
    faster = max(MODES, key=lambda mode: spreads[mode].median)
    result = Comparison(spreads["vime"], spreads[faster]).to_json(ours="vime", theirs="transformers", unit="tokens/s")
    modes = {mode: spreads[mode].to_json() for mode in MODES}
    return result | {"transformers_mode": faster, "transformers_modes": modes, "first_grad_norms": norms}


def check_same_work(norms: Mapping[str, float]) -> None:
    """Raises RuntimeError when the sides do not compute the same gradient."""
    low, high = min(norms.values()), max(norms.values())
    if not all(map(math.isfinite, norms.values())) or high - low > TOLERANCE * high:
        raise RuntimeError(f"the sides do not compute the same gradient: norms {dict(norms)}")
