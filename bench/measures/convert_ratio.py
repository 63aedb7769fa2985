"""convert_ratio: bytes/s of the conversion tools ÷ those of a plain copy of the same folder, the slower direction.

All sides write to the same disk, through to it, and what they read is in the page cache after the warm-up.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.stats import Comparison, by_turns
from bench.work import MODEL, need_model
from vime.training.convert import hf_to_torch_dist, torch_dist_to_hf

TURNS = 5


def measure(folder: Path) -> dict[str, Any]:
    need_model()
    folder.mkdir(parents=True, exist_ok=True)
    nbytes = (MODEL / "model.safetensors").stat().st_size
    root, back, copy = folder / "torch_dist", folder / "hf", folder / "copy"
    sides = {
        "copy": lambda: _gb_per_s(lambda: shutil.copytree(MODEL, copy), copy, nbytes),
        "to_torch_dist": lambda: _gb_per_s(
            lambda: hf_to_torch_dist(["--hf-checkpoint", str(MODEL), "--save", str(root)]), root, nbytes, keep=True
        ),
        "to_hf": lambda: _gb_per_s(lambda: torch_dist_to_hf(root / "iter_0000000", back, MODEL), back, nbytes),
    }
    spreads = by_turns(sides, turns=TURNS, warm_ups=1)
    ways = {
        name: Comparison(spreads[name], spreads["copy"]).to_json(ours="vime", theirs="copy", unit="GB/s")
        for name in ("to_torch_dist", "to_hf")
    }
    return {"value": min(way["value"] for way in ways.values()), "bytes": nbytes, **ways}


def _gb_per_s(work: Callable[[], object], written: Path, nbytes: int, *, keep: bool = False) -> float:
    """Until all that was written is on the disk."""
    begin = time.perf_counter()
    work()
    for path in written.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
    seconds = time.perf_counter() - begin
    if not keep:
        shutil.rmtree(written)
    return nbytes / seconds / 1e9
