"""Options of the algorithm from the command line to the metrics of a run, on the real stack."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.harness import Run

pytestmark = pytest.mark.timeout(900)


def test_a_run_with_old_actors_sequence_weights_and_a_moving_reference(flags: list[str], save: Path) -> None:
    reference = flags[flags.index("--hf-checkpoint") + 1]
    words = "--advantage-estimator gspo --eps-clip 3e-4 --eps-clip-high 4e-4 --num-steps-per-rollout 2 --keep-old-actor"
    words += " --use-tis --tis-level sequence --tis-mode mask --tis-clip-low 0.5 --tis-veto 1e-4 --use-opsm"
    words += " --overlong-buffer-len 6 --overlong-penalty-factor 0.5 --exclude-zero-signal-groups"
    words += f" --use-kl-loss --kl-loss-coef 0.01 --kl-loss-type k3 --use-unbiased-kl --ref-load {reference}"
    words += " --ref-update-interval 1 --reset-optimizer-states"
    with Run(save, *flags, *words.split(), "--num-rollout", "2") as run:
        run.finish()
        run.assert_nothing_is_left()
    rows = [row for row in run.rows() if "train/loss" in row]
    assert [row["rollout_id"] for row in rows] == [0, 0, 1, 1]
    for first, second in (rows[:2], rows[2:]):
        assert first["train/ppo_kl"] == 0, "the weights that sampled are those that training starts from"
        assert first["train/kl_loss"] == 0, "and the reference has followed"
        assert first["train/train_rollout_logprob_abs_diff_max"] < 1e-4
        assert first["train/tis"] == pytest.approx(1, abs=1e-3)
        assert second["train/ppo_kl"] != 0 and second["train/kl_loss"] > 0
    for row in rows:
        assert row["train/skipped_steps"] == row["train/nonfinite_samples"] == row["train/tis_vetofrac"] == 0
        assert {"train/ois", "train/mismatch_k3_kl", "train/opsm_maskfrac", "train/tis_clipfrac"} <= row.keys()
    assert any(row["train/grad_norm"] > 0 for row in rows)
