"""The work that both sides do."""

from pathlib import Path

import pytest

from bench import work as bench_work
from bench.measures.overhead_share import STEPS, summarize
from bench.measures.train_ratio import DEMO, DISTINCT, LONG, check_same_work
from bench.work import MODEL, TrainingWork, demo_config, demo_flags
from tests.tiny import make_model


@pytest.fixture
def tiny_demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The demo's flags over a model and prompts that need no download."""
    make_model(tmp_path / "model")
    (tmp_path / "train.jsonl").write_text('{"prompt": "1 + 1 =", "label": "2"}\n')
    monkeypatch.setattr(bench_work, "MODEL", tmp_path / "model")
    monkeypatch.setattr(bench_work, "TASK", tmp_path)


def test_the_work_is_the_demos_without_its_own_length_and_checkpoints() -> None:
    flags = demo_flags()
    assert flags[flags.index("--n-samples-per-prompt") + 1] == "8"
    assert "--hf-checkpoint" in flags and str(MODEL) in flags
    assert not {"--save", "$RUN", "--num-rollout", "--eval-interval", "scripts/eval-arithmetic.yaml"} & set(flags)


@pytest.mark.usefixtures("tiny_demo")
def test_vime_accepts_the_flags() -> None:
    config = demo_config()
    assert config.batch.global_batch_size == DEMO.samples == DISTINCT.samples
    assert config.batch.use_dynamic_batch_size


@pytest.mark.usefixtures("tiny_demo")
@pytest.mark.parametrize("work", [DEMO, DISTINCT, LONG])
def test_a_step_trains_on_2048_tokens_in_equal_micro_batches(work: TrainingWork) -> None:
    max_tokens = demo_config().batch.max_tokens_per_gpu
    assert max_tokens is not None
    assert work.tokens == 2048
    assert work.samples % work.micro_batch(max_tokens) == 0


def test_both_sides_make_the_same_samples() -> None:
    again = TrainingWork.from_json(DEMO.to_json())
    assert again.token_ids() == DEMO.token_ids()
    assert {len(tokens) for tokens in again.token_ids()} == {DEMO.length}
    assert sum(again.advantages()) == 0


def test_the_samples_of_a_group_share_their_prompt_and_nothing_else() -> None:
    def different(work: TrainingWork, begin: int, end: int) -> int:
        return len({tuple(tokens[begin:end]) for tokens in work.token_ids()})

    assert (different(DEMO, 0, DEMO.prompt), different(DEMO, DEMO.prompt, DEMO.length)) == (8, 64)
    assert different(DISTINCT, 0, DISTINCT.prompt) == 64


def test_sides_that_compute_different_gradients_are_not_compared() -> None:
    check_same_work({"a": 1.0, "b": 1.1})
    with pytest.raises(RuntimeError, match="same gradient"):
        check_same_work({"a": 1.0, "b": 1.2})
    with pytest.raises(RuntimeError, match="same gradient"):
        check_same_work({"a": 1.0, "b": float("nan")})


STEP_ROW = {
    "perf/step_time": 10.0,
    "perf/overhead_share": 0.0,
    "perf/rollout_time": 3.0,
    "perf/actor_pack_time": 0.5,
    "perf/actor_train_time": 5.0,
    "perf/actor_train_tokens_per_s": 400.0,
    "perf/phase_time/generate": 3.2,
    "perf/phase_time/train": 5.8,
    "perf/phase_time/sync": 1.0,
}


def test_what_a_phase_does_beside_its_work_is_overhead() -> None:
    """10 s, of which sampling took 3, the trainer 0.5 + 5 and the sync 1: a twentieth is left."""
    found = summarize([STEP_ROW] * STEPS)
    assert found["value"] == pytest.approx(0.05)
    assert found["share_by_the_run"]["median"] == 0
    assert found["phases_s"]["perf/phase_time/train"]["median"] == 5.8


def test_a_run_that_ended_early_has_no_overhead() -> None:
    with pytest.raises(RuntimeError, match=f"3 rows .* not {STEPS}"):
        summarize([STEP_ROW] * 3)
