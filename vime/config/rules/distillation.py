"""On-policy distillation: which teacher, and where it is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from vime.config.config import Config
from vime.config.flags import option
from vime.config.rules.base import Violation
from vime.config.rules.files import TRACKER

TEACHER = {"megatron": "opd_teacher_load", "vllm": "opd_teacher_url"}
"""The flag that names the teacher of each type."""


def only_with_use_opd(config: Config) -> Iterator[Violation]:
    if config.distillation.use_opd:
        return
    for name in ("opd_type", "opd_kl_coef", "opd_teacher_load", "opd_teacher_ckpt_step", "opd_teacher_url"):
        if config.origins.get(name, "default") != "default":
            yield Violation(f"{option(name)} needs --use-opd")


def teacher(config: Config) -> Iterator[Violation]:
    distillation = config.distillation
    if not distillation.use_opd:
        return
    kind = distillation.opd_type
    if kind is None:
        yield Violation("--use-opd needs --opd-type megatron or vllm: where the teacher is", ("opd_type",))
        return
    for other, name in TEACHER.items():
        given = getattr(distillation, name)
        if other == kind and given is None and not _said_by_a_function(config):
            yield Violation(f"--opd-type {kind} needs {option(name)}: the teacher", (name,))
        if other != kind and given is not None:
            yield Violation(f"{option(name)} is the teacher of --opd-type {other}, not of {kind}")


def teacher_step(config: Config) -> Iterator[Violation]:
    distillation, given = config.distillation, config.distillation.opd_teacher_ckpt_step
    if distillation.use_opd and distillation.opd_type == "vllm" and given is not None:
        yield Violation(f"--opd-teacher-ckpt-step {given} needs --opd-type megatron: a server has one teacher")


def _said_by_a_function(config: Config) -> bool:
    """Custom functions can put ``teacher_log_probs`` on samples themselves."""
    hooks = config.hooks
    custom = hooks.custom_rm_path or hooks.custom_generate_function_path or hooks.rollout_function_path
    return config.distillation.opd_type == "vllm" and custom is not None


def loadable(config: Config) -> Iterator[Violation]:
    given = config.distillation.opd_teacher_load
    if given is None:
        return
    if not (Path(given) / TRACKER).is_file() and not (Path(given) / "config.json").is_file():
        yield Violation(
            f"--opd-teacher-load {given}: neither a checkpoint ({TRACKER}) nor a Hugging Face folder (config.json)"
        )


def address(config: Config) -> Iterator[Violation]:
    given = config.distillation.opd_teacher_url
    if given is not None and not given.startswith(("http://", "https://")):
        yield Violation(f"--opd-teacher-url {given}: give it as http://HOST:PORT")


def same_temperature(config: Config) -> Iterator[Violation]:
    """A server says what it thinks of given tokens at temperature 1 only."""
    temperature = config.rollout.rollout_temperature
    if config.distillation.opd_type == "vllm" and temperature != 1:
        yield Violation(
            f"--opd-type vllm needs --rollout-temperature 1, not {temperature}: a server's log-probs of given tokens "
            "are those of temperature 1 (--opd-type megatron takes any)",
            ("rollout_temperature",),
        )


def sampled_answers(config: Config) -> Iterator[Violation]:
    if config.distillation.use_opd and config.algorithm.is_sft:
        yield Violation("--use-opd and --loss-type sft_loss exclude each other: the teacher judges sampled answers")


def every_group_is_taught(config: Config) -> Iterator[Violation]:
    if config.distillation.use_opd and config.algorithm.exclude_zero_signal_groups:
        yield Violation(
            "--exclude-zero-signal-groups and --use-opd exclude each other: the teacher has something to say about "
            "answers of equal reward too"
        )


RULES = (
    every_group_is_taught,
    only_with_use_opd,
    teacher,
    teacher_step,
    loadable,
    address,
    same_temperature,
    sampled_answers,
)
