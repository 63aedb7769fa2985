"""Folders of models must hold the weights that a run starts from: reading them is what ranks do first, long after."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from vime.config.config import Config
from vime.config.rules.base import Violation, known
from vime.config.rules.files import TRACKER
from vime.errors import UserError

READ_BY_ENGINES = (".safetensors", ".bin", ".pt", ".gguf")


def of_the_trainer(config: Config) -> Iterator[Violation]:
    from vime.models.hf_folder import weight_files

    for flag, folder in _started_from(config):
        if (Path(folder) / "config.json").is_file():  # else it is a checkpoint, or another rule speaks
            try:
                weight_files(Path(folder))
            except UserError as error:
                yield Violation(f"{flag} {error}")


def of_the_engines(config: Config) -> Iterator[Violation]:
    given = config.checkpoint.hf_checkpoint
    read = known(given) and config.has_engines and "load_format" not in config.vllm
    if not read or ("--hf-checkpoint", given) in _started_from(config) or not (Path(given) / "config.json").is_file():
        return
    if not any(path.suffix in READ_BY_ENGINES for path in Path(given).iterdir()):
        yield Violation(f"--hf-checkpoint {given}: there are no weights in it, which the engines start from")


def _started_from(config: Config) -> list[tuple[str, str]]:
    """(flag, folder) of weights that ranks read, from a Hugging Face folder or a checkpoint."""
    checkpoint = config.checkpoint
    is_new = checkpoint.load is None or not (Path(checkpoint.load) / TRACKER).is_file()
    found: list[tuple[str, str | None]] = [("--opd-teacher-load", config.distillation.opd_teacher_load)]
    if config.algorithm.needs_critic:
        found.append(("--critic-load", config.critic.critic_load))
    if is_new:
        found.append(("--load", checkpoint.load))
    if is_new or config.algorithm.needs_reference:
        own = ("--hf-checkpoint", checkpoint.hf_checkpoint)
        found.append(own if checkpoint.ref_load is None else ("--ref-load", checkpoint.ref_load))
    return [(flag, folder) for flag, folder in found if folder is not None]


RULES = (of_the_trainer, of_the_engines)
