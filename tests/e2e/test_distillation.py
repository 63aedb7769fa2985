"""On-policy distillation on the real stack: a student on its own engine, a teacher on another vLLM server."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.harness import Run
from tests.serving.conftest import serve
from tests.tiny import make_model

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]


def test_a_student_comes_nearer_to_a_teacher_on_a_server_without_any_reward(
    flags: list[str], tmp_path: Path, save: Path
) -> None:
    """Sixteen rollouts of 32 answers. The teacher is a larger model of the same tokenizer."""
    words = list(flags)
    at = words.index("--custom-rm-path")
    del words[at : at + 2]
    teacher = make_model(tmp_path / "teacher", "qwen3", seed=5, num_hidden_layers=3)
    for server in serve(teacher, tmp_path / "logs"):
        more = ["--use-opd", "--opd-type", "vllm", "--opd-teacher-url", server.url, "--rollout-batch-size", "32"]
        with Run(save, *words, *more, "--n-samples-per-prompt", "1", "--num-rollout", "16", "--lr", "1e-2") as run:
            run.finish()
            run.assert_nothing_is_left()
    rows = [row for row in run.rows() if "train/opd_kl" in row]
    assert len(rows) == 16
    assert {row["rollout/raw_reward"] for row in rows} == {0.0}
    gaps = [row["train/opd_kl"] for row in rows]
    assert sum(gaps[-3:]) / 3 < sum(gaps[:3]) / 3 / 2, gaps


def test_a_teacher_that_is_not_there_ends_the_run_before_an_engine_starts(flags: list[str], save: Path) -> None:
    more = ["--use-opd", "--opd-type", "vllm", "--opd-teacher-url", "http://127.0.0.1:9", "--num-rollout", "1"]
    with Run(save, *flags, *more) as run:
        assert run.wait() == 1
        run.assert_nothing_is_left()
    assert "the teacher (http://127.0.0.1:9) cannot be reached" in run.output().splitlines()[-1]
