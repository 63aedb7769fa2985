"""Flags that nothing reads as the others are: each has its line, and none where it counts."""

from __future__ import annotations

import pytest

from vime.config import resolve

FUNCTION = "--custom-rm-path examples.plugins.rewards:closeness"

SILENT_UNLESS = {
    "--max-tokens-per-gpu 64": ("without --use-dynamic-batch-size", "--use-dynamic-batch-size"),
    "--micro-batch-size 2": (
        "with --use-dynamic-batch-size: --max-tokens-per-gpu says how much is packed",
        "--no-use-dynamic-batch-size",
    ),
    "--rollout-health-check-interval 5": ("without --use-fault-tolerance", "--use-fault-tolerance"),
    "--router-policy random": ("with --vllm-router-ip: that router runs already", "--vllm-router-port 80"),
    "--rm-url http://localhost:1": (
        "unless rows name the grader remote_rm: no flag does",
        "--rm-type boxed_remote_rm",
    ),
    "--rm-code-score fraction": ("unless rows name the grader code: no flag does", "--rm-type code"),
    "--kl-loss-type k3": ("without --use-kl-loss or --kl-coef", "--use-kl-loss --kl-loss-coef 1 --ref-load {model}"),
    "--min-lr 1e-9": ("with --lr-decay-style constant", "--lr-decay-style cosine"),
    "--lr-decay-iters 9": ("with --lr-decay-style constant", "--lr-warmup-fraction 0.5"),
    "--lr-warmup-init 1e-9": ("without --lr-warmup-iters or --lr-warmup-fraction", "--lr-warmup-iters 3"),
    "--loss-mask-type qwen3": ("without --loss-type sft_loss", "--loss-type sft_loss"),
    '--apply-chat-template-kwargs {{"a":1}}': ("without --apply-chat-template", "--apply-chat-template"),
}
"""The flag → why it has no effect, and what makes it count."""

BEFORE = {
    "--micro-batch-size 2": "--use-dynamic-batch-size --max-tokens-per-gpu 64",
    "--router-policy random": "--vllm-router-ip 127.0.0.1 --vllm-router-port 80",
}
"""What must be given for a flag to have no effect."""


def lines(flags, model, *words: str) -> list[str]:
    given = " ".join(words).format(model=model).split()
    return [each for each in resolve(flags(*given)).warnings if "no effect" in each]


@pytest.mark.parametrize("words", SILENT_UNLESS)
def test_a_flag_that_nothing_reads_has_a_line(flags, model_dir, words):
    name = words.split()[0]
    why, _ = SILENT_UNLESS[words]
    assert lines(flags, model_dir, BEFORE.get(words, ""), words) == [f"{name} has no effect {why}"]


@pytest.mark.parametrize("words", SILENT_UNLESS)
def test_a_flag_that_counts_has_none(flags, model_dir, words):
    _, counts = SILENT_UNLESS[words]
    assert not [each for each in lines(flags, model_dir, words, counts) if words.split()[0] in each]


def test_what_a_custom_function_grades_no_grader_of_ours_grades(flags, model_dir):
    assert lines(flags, model_dir, FUNCTION, "--rm-url http://localhost:1") == [
        "--rm-type, --rm-url have no effect with --custom-rm-path, which grades every answer, unless that function "
        "reads it"
    ]


def test_an_evaluation_set_may_name_the_grader(flags, model_dir, prompt_file, tmp_path):
    file = tmp_path / "eval.yaml"
    file.write_text(f"eval:\n  datasets:\n    - {{name: a, path: {prompt_file}, rm_type: remote_rm}}\n")
    words = (f"--eval-config {file} --eval-interval 1", "--rm-url http://localhost:1")
    assert lines(flags, model_dir, *words) == []


def test_flags_of_evaluations_that_never_run_are_named(flags):
    assert resolve(flags("--n-samples-per-eval-prompt", "4", "--skip-eval-before-train")).warnings == (
        "--n-samples-per-eval-prompt, --skip-eval-before-train without --eval-interval: no evaluation will run",
    )


def test_fine_tuning_says_it_once(flags):
    found = resolve(flags("--loss-type", "sft_loss", "--n-samples-per-prompt", "1", "--rm-url", "http://localhost:1"))
    assert sum("--rm-url" in each for each in found.warnings) == 1
