"""layout_ratio: seconds of a training step on two processes ÷ those on one process with as many cores.

Every layout takes turns with the same process that has the model alone, on the same tokens; the value is that of the
slowest layout. Gradient norms are compared in the first step, so it is the same work.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.measures.train_ratio import check_same_work
from bench.sides import Side
from bench.stats import Comparison, by_turns
from bench.work import TrainingWork, need_model, start_side
from tests.tiny import make_model
from vime.cluster.actors import environment

SIZES = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8}
SIZES |= {"num_key_value_heads": 4, "head_dim": 64, "vocab_size": 8192, "initializer_range": 0.02}
WORK = TrainingWork(samples=16, prompt=64, response=64, group=1, vocabulary=SIZES["vocab_size"])
PIPELINE = ("--pipeline-model-parallel-size", "2")
LAYOUTS: Mapping[str, Sequence[str]] = {
    "data": (),
    "data, distributed optimizer": ("--use-distributed-optimizer",),
    "tensor, sequence": ("--tensor-model-parallel-size", "2", "--sequence-parallel"),
    "pipeline": PIPELINE,
    "pipeline, interleaved": (*PIPELINE, "--virtual-pipeline-model-parallel-size", "2"),
    "context": ("--context-parallel-size", "2"),
}
TURNS = 3


def measure(folder: Path) -> dict[str, Any]:
    need_model()  # its task stands for the prompts that a configuration needs
    model = make_model(folder / "model", "qwen3", **SIZES)
    with _side(folder / "alone", model, 1) as alone:
        alone.ready()
        norm = float(alone.ask(**WORK.to_json())["grad_norm"])
        found = {
            name: _compare(folder / name.replace(", ", "-"), model, flags, alone, norm)
            for name, flags in LAYOUTS.items()
        }
    slowest = max(found, key=lambda name: found[name]["value"])
    return {
        "value": found[slowest]["value"],
        "slowest": slowest,
        "unit": "s",
        "layouts": found,
        "work": WORK.to_json(),
        "model": SIZES,
    }


def _compare(folder: Path, model: Path, flags: Sequence[str], alone: Side, norm: float) -> dict[str, Any]:
    """``norm``: of the first gradient, by the one process."""
    with _side(folder, model, 2, *flags) as shared:
        shared.ready()
        sides = {"two": shared, "one": alone}
        request = WORK.to_json()
        check_same_work({"two": float(shared.ask(**request)["grad_norm"]), "one": norm})
        spreads = by_turns(
            {name: functools.partial(side.seconds, **request) for name, side in sides.items()}, turns=TURNS
        )
        return Comparison(spreads["two"], spreads["one"]).to_json(ours="two", theirs="one", unit="s")


def _side(folder: Path, model: Path, ranks: int, *flags: str) -> Side:
    folder.mkdir(parents=True, exist_ok=True)
    arguments = (str(model), "--actor-num-gpus-per-node", str(ranks), *flags)
    return start_side("bench.training.layout_side", folder, *arguments, environment=environment(1))
