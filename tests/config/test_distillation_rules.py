"""Which teacher, and where it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.conftest import Flags
from vime.config import resolve


def test_a_teacher_alone_needs_no_grader(flags: Flags, model_dir: Path) -> None:
    words = flags("--use-opd", "--opd-type", "megatron", "--opd-teacher-load", str(model_dir))
    at = words.index("--rm-type")
    del words[at : at + 2]
    resolution = resolve(words)
    assert (resolution.violations, resolution.warnings) == ((), ())
    assert resolution.config.distillation.opd_kl_coef == 1.0


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("--opd-kl-coef 0.5", "--opd-kl-coef needs --use-opd"),
        ("--use-opd", "--use-opd needs --opd-type megatron or vllm: where the teacher is"),
        ("--use-opd --opd-type megatron", "--opd-type megatron needs --opd-teacher-load: the teacher"),
        ("--use-opd --opd-type vllm", "--opd-type vllm needs --opd-teacher-url: the teacher"),
        (
            "--use-opd --opd-type vllm --opd-teacher-url http://h:1 --opd-teacher-load {model}",
            "--opd-teacher-load is the teacher of --opd-type megatron, not of vllm",
        ),
        (
            "--use-opd --opd-type megatron --opd-teacher-load {model}/none",
            "--opd-teacher-load {model}/none: neither a checkpoint (latest_checkpointed_iteration.txt) nor a Hugging "
            "Face folder (config.json)",
        ),
        ("--use-opd --opd-type vllm --opd-teacher-url h:1", "--opd-teacher-url h:1: give it as http://HOST:PORT"),
        (
            "--use-opd --opd-type vllm --opd-teacher-url http://h:1 --rollout-temperature 0.5",
            "--opd-type vllm needs --rollout-temperature 1, not 0.5: a server's log-probs of given tokens are those of "
            "temperature 1 (--opd-type megatron takes any)",
        ),
        (
            "--use-opd --opd-type vllm --opd-teacher-url http://h:1 --loss-type sft_loss --n-samples-per-prompt 1",
            "--use-opd and --loss-type sft_loss exclude each other: the teacher judges sampled answers",
        ),
        (
            "--use-opd --opd-type megatron --opd-teacher-load {model} --exclude-zero-signal-groups",
            "--exclude-zero-signal-groups and --use-opd exclude each other: the teacher has something to say about "
            "answers of equal reward too",
        ),
        (
            "--use-opd --opd-type megatron --opd-teacher-load {model} --opd-teacher-ckpt-step 5",
            "--opd-teacher-ckpt-step 5: --opd-teacher-load {model} is a Hugging Face folder, which has no steps",
        ),
        (
            "--use-opd --opd-type vllm --opd-teacher-url http://h:1 --opd-teacher-ckpt-step 5",
            "--opd-teacher-ckpt-step 5 needs --opd-type megatron: a server has one teacher",
        ),
        (
            "--use-opd --opd-type megatron --opd-teacher-load {model} --opd-kl-coef 0",
            "--opd-kl-coef must be above 0, not 0.0",
        ),
    ],
)
def test_what_cannot_be_is_refused(flags: Flags, model_dir: Path, extra: str, message: str) -> None:
    words = flags(*extra.format(model=model_dir).split())
    assert message.format(model=model_dir) in resolve(words).violations
