"""Fine-tuning on given dialogues: what it needs, what it refuses, what has no effect there."""

from __future__ import annotations

from pathlib import Path

import pytest

from vime.config import resolve
from vime.config.parse import Resolution


@pytest.fixture
def sft(model_dir: Path, prompt_file: Path, tmp_path: Path):
    """``sft(extra…)``: what the flags of a fine-tuning run and these come to."""

    def make(*extra: str) -> Resolution:
        words = f"""
            --loss-type sft_loss --hf-checkpoint {model_dir} --prompt-data {prompt_file} --save {tmp_path / "save"}
            --actor-num-gpus-per-node 1 --num-epoch 3 --rollout-batch-size 8
        """.split()
        return resolve([*words, *extra])

    return make


def test_neither_grader_nor_engines_nor_a_response_length_are_needed(sft) -> None:
    resolution = sft()
    assert (resolution.violations, resolution.warnings) == ((), ())
    assert resolution.config.cluster.rollout_num_gpus == 0
    assert not resolution.config.has_engines


def test_the_flags_that_fine_tuning_scripts_give_are_taken(sft) -> None:
    """As far as they say what it is anyway."""
    resolution = sft("--calculate-per-token-loss", "--disable-compute-advantages-and-returns", "--debug-train-only")
    assert (resolution.violations, resolution.warnings) == ((), ())


def test_flags_of_a_script_for_reinforcement_learning_are_named_as_without_effect(sft) -> None:
    resolution = sft("--rm-type", "math", "--colocate", "--rollout-max-response-len", "9", "--vllm-max-model-len", "99")
    assert resolution.violations == ()
    assert resolution.warnings == (
        "--loss-type sft_loss samples and grades nothing; without effect: --colocate, "
        "--rollout-max-response-len, --rm-type, --vllm-max-model-len",
    )


@pytest.mark.parametrize(
    "words",
    [
        "--use-kl-loss --ref-load {model} --ref-update-interval 10",
        "--use-tis --rollout-top-p 0.9",
        "--tis-clip 3",
        "--group-rm",
        "--rm-type remote_rm",
        "--advantage-estimator reinforce_plus_plus",
        "--kl-coef 0.1 --kl-loss-coef 0.1",
        "--critic-lr 1e-5 --critic-num-gpus-per-node 2",
        "--custom-advantage-function-path examples.plugins.losses:leave_one_out",
        "--custom-pg-loss-reducer-function-path examples.plugins.losses:constant_length",
        "--custom-tis-function-path examples.plugins.losses:clipped_weights",
        "--custom-loss-function-path examples.plugins.losses:reinforce",
    ],
)
def test_rules_of_reinforcement_learning_are_silent_about_what_has_no_effect(sft, model_dir: Path, words: str) -> None:
    given = words.format(model=model_dir).split()
    resolution = sft(*given)
    assert resolution.violations == ()
    (warning,) = [each for each in resolution.warnings if "without effect" in each]
    assert all(word in warning for word in given if word.startswith("--") and word != "--ref-load")


def test_the_context_of_an_engine_that_is_not_started_leaves_no_dialogue_out(sft) -> None:
    from vime.rollout.limits import max_context_of

    assert max_context_of(sft("--vllm-max-model-len", "8").config, None) == max_context_of(sft().config, None) > 8


def test_slots_of_engines_are_ignored(sft) -> None:
    resolution = sft("--rollout-num-gpus", "4")
    assert resolution.config.cluster.rollout_num_gpus == 0
    assert resolution.warnings == ("--rollout-num-gpus 4 is ignored by --loss-type sft_loss: no engine is started",)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (
            "--n-samples-per-prompt 2",
            "--n-samples-per-prompt 2: with --loss-type sft_loss a dialogue is one sample; only 1 is possible",
        ),
        (
            "--rollout-temperature 0.8",
            "--rollout-temperature 0.8: with --loss-type sft_loss nothing is sampled, and log-probs are those of "
            "temperature 1",
        ),
        (
            "--loss-type policy_loss --disable-compute-advantages-and-returns",
            "--disable-compute-advantages-and-returns: --loss-type policy_loss needs advantages",
        ),
        (
            "--eval-function-path tests.config.sample_hooks:rollout",
            "--eval-function-path: an evaluation of --loss-type sft_loss is the loss on --eval-prompt-data",
        ),
        ("--eval-interval 2", "--eval-interval needs --eval-prompt-data NAME FILE: what to evaluate on"),
    ],
)
def test_what_cannot_be_is_refused(sft, extra: str, message: str) -> None:
    assert message in sft(*extra.split()).violations
