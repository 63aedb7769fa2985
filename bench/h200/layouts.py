"""The layout matrix of the tests on two GPUs over NCCL: how far every layout is from one process.

    python -m bench.h200.layouts > bench/results/h200_layouts.json 2> bench/results/h200_layouts.txt

The JSON states the tolerances; stderr gets the table.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import tempfile
from pathlib import Path

import torch

from tests.training import test_expert_layouts as experts
from tests.training.layouts import FP32, LAYOUTS, Matrix, Row
from tests.training.test_layouts import BF16, TIED, UNTIED

WIDE = {"num_hidden_layers": 4, "head_dim": 128}  # the width of a head for which there are kernels of our own
ON_TWO = [name for name, layout in LAYOUTS.items() if layout.world_size == 2 and name not in experts.TWO]
DENSE = [*ON_TWO, "dp2", "pp2 full"]
SINGLE = dataclasses.replace(FP32, update=2e-3)
"""As on a CPU, but for what two steps changed: Adam divides a gradient by its size, so that an element whose gradient
is rounding moves as far as others, and GPUs round otherwise."""
HALF = dataclasses.replace(BF16.tolerance, loss=0.05)
"""A token more or less at the edge of the clip is 1/48 of the clipped fraction here."""
ROWS: dict[str, Row] = {
    "fp32, untied": dataclasses.replace(UNTIED, layouts=DENSE, tolerance=SINGLE),
    "fp32, tied": dataclasses.replace(TIED, layouts=["dp2 do overlap", "tp2 sp", "pp2", "pp2 vpp2", "cp2"]),
    "fp32, experts": dataclasses.replace(experts.ROWS["glm4_moe, per sample"], layouts=experts.TWO),
    "bf16, untied": dataclasses.replace(BF16, overrides=WIDE, layouts=DENSE, tolerance=HALF),
}


def main() -> None:
    if torch.cuda.device_count() < 2:
        sys.exit("two GPUs are needed")
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        matrix = Matrix(ROWS, Path(folder))
        for name, row in ROWS.items():
            for layout in row.layouts:
                deviation = matrix.deviation(name, layout)
                exceeded = deviation.exceeded(row.tolerance)
                numbers = dataclasses.asdict(deviation)
                found[f"{name}: {layout}"] = numbers | {"exceeded": sorted(exceeded)}
                told = "  ".join(f"{key} {value:.1e}" for key, value in numbers.items())
                print(f"{name + ': ' + layout:36} {told}  {'EXCEEDED' if exceeded else 'ok'}", file=sys.stderr)
    versions = {"torch": torch.__version__, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    tolerances = {name: _finite(dataclasses.asdict(row.tolerance)) for name, row in ROWS.items()}
    device = torch.cuda.get_device_name(0)
    print(
        json.dumps(
            {"device": f"2 x {device}", "versions": versions, "tolerances": tolerances, "results": found}, indent=1
        )
    )


def _finite(tolerance: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in tolerance.items() if math.isfinite(value)}


if __name__ == "__main__":
    main()
