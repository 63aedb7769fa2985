"""Every estimator learns the demo's task: a real language model, on a CPU, within 24 optimizer steps."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.harness import ROOT
from tools.compare_estimators import ESTIMATORS, train

MODEL, TASK = "models/SmolLM2-135M-Instruct", "data/arithmetic"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_an_estimator_learns_the_demo_task(estimator: str, tmp_path: Path) -> None:
    """The model starts at about no right answer; three of 12 rollouts are the measure at either end."""
    for tool, result in (("fetch_smollm2", MODEL), ("make_arithmetic", TASK)):
        if not (ROOT / result).exists():
            subprocess.run([sys.executable, f"tools/{tool}.py", result], cwd=ROOT, check=True)
    curve = train(estimator, tmp_path / "run")
    assert curve.end > curve.start + 0.2
    assert curve.held_out > 0.2, "sums that it never saw"
