"""grpo_step_vs_trl: seconds of a whole GRPO step of vime ÷ seconds of one of TRL's GRPOTrainer.

Both: the same model, prompts, samples a prompt, response length (end tokens do not end a response), reward, objective
and optimizer settings. TRL generates with transformers, as it does on a CPU out of the box. It runs in two modes of
precision, and the faster one is what vime is compared with.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.sides import Side
from bench.stats import Comparison, by_turns
from bench.work import MODEL, TASK, demo_config, demo_flags, need_model, start_side

PAIRS = 3
WARM_UPS = 2
PYTHON = ".venv-trl/bin/python"
MODES: dict[str, dict[str, Any]] = {
    "autocast": {},  # fp32 weights, bf16 products while training; TRL generates in the dtype of the weights, fp32
    "bf16": {"bf16": False, "model_init_kwargs": {"dtype": "bfloat16"}},  # the checkpoint's dtype, no fp32 anywhere
}


def measure(folder: Path) -> dict[str, Any]:
    need_model()
    subprocess.run(["bash", "bench/trl/setup.sh"], check=True, stdout=sys.stderr)
    flags = (*demo_flags(), "--num-rollout", "1000", "--run-dir", str(folder / "run"))
    custom = ("--custom-generate-function-path", "bench.fixed_length:generate")
    with ExitStack() as stack:
        sides = {"vime": stack.enter_context(start_side("bench.vime_step", folder, *flags, *custom))}
        for mode, overrides in MODES.items():
            sides[mode] = stack.enter_context(_start_trl(mode, overrides, folder))
        return _compared(sides)


def _start_trl(mode: str, overrides: dict[str, Any], folder: Path) -> Side:
    place = folder / mode
    place.mkdir(exist_ok=True)
    settings = json.dumps({"learning_rate": demo_config().optimizer.lr, **overrides})
    arguments = ("--model", str(MODEL), "--prompts", str(TASK / "train.jsonl"), "--override", settings)
    return start_side("bench.trl.side", place, *arguments, python=PYTHON)


def _compared(sides: Mapping[str, Side]) -> dict[str, Any]:
    for side in sides.values():
        side.ready()
    spreads = by_turns({name: side.seconds for name, side in sides.items()}, turns=PAIRS, warm_ups=WARM_UPS)
    faster = min(MODES, key=lambda mode: spreads[mode].median)
    result = Comparison(spreads["vime"], spreads[faster]).to_json(ours="vime", theirs="trl", unit="s")
    others = {mode: spreads[mode].to_json() for mode in MODES if mode != faster}
    return result | {"trl_mode": faster, "other_modes": others, "last_vime_step": sides["vime"].last}
