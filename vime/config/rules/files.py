"""Files and folders that must exist, or must not be overwritten."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from vime.checkpoints import CheckpointStore
from vime.config.config import Config
from vime.config.rules.base import Violation, known, option
from vime.errors import UserError
from vime.folder_lock import LOCK
from vime.models.remote_code import tokenizer_problem

TRACKER = "latest_checkpointed_iteration.txt"
LEFT_BY_A_START = frozenset({LOCK, "run_config.json", "logs", "tensorboard", "wandb", "samples"})
"""What a run has written before its first row of metrics, also where its first rewards fail: it can be started again
over that."""

SLICE = re.compile(r"@\[(-?\d{1,18})?:(-?\d{1,18})?\]$")


def hf_checkpoint(config: Config) -> Iterator[Violation]:
    given = config.checkpoint.hf_checkpoint
    if not known(given):
        return
    folder = Path(given)
    if not folder.is_dir():
        yield Violation(f"--hf-checkpoint {given}: no such folder (it must be a local one; `hf download` makes it)")
        return
    if not (folder / "config.json").is_file():
        yield Violation(f"--hf-checkpoint {given}: there is no config.json in it")
    problem = tokenizer_problem(folder, trust_remote_code=config.checkpoint.trust_remote_code)
    if problem is not None:
        yield Violation(problem)


def ref_load(config: Config) -> Iterator[Violation]:
    given = config.checkpoint.ref_load
    if given is None:
        return
    folder = Path(given)
    if not folder.is_dir():
        yield Violation(f"--ref-load {given}: no such folder")
    elif not (folder / TRACKER).is_file() and not (folder / "config.json").is_file():
        yield Violation(
            f"--ref-load {given}: neither a checkpoint ({TRACKER}) nor a Hugging Face folder (config.json)"
            + (f"; give its parent {folder.parent}" if folder.name.startswith("iter_") else "")
        )


def load_is_a_root(config: Config) -> Iterator[Violation]:
    for flag, given in (("--load", config.checkpoint.load), ("--save", config.checkpoint.save)):
        yield from checkpoint_root(flag, given)


def load_has_something(config: Config) -> Iterator[Violation]:
    """A run may find no checkpoint only where it saves its own: then it is the first of several starts."""
    given, save = config.checkpoint.load, config.checkpoint.save
    if given is None or (save is not None and _same_folder(save, given)) or list(checkpoint_root("--load", given)):
        return
    folder = Path(given)
    if (folder / TRACKER).is_file() or (folder / "config.json").is_file() or CheckpointStore(folder).iterations():
        return
    found = "there is no checkpoint in it, and it is no Hugging Face folder" if folder.is_dir() else "no such folder"
    yield Violation(f"--load {given}: {found}; only the folder of --save itself may be empty at first", ("save",))


def step_of_a_checkpoint(config: Config) -> Iterator[Violation]:
    """Nothing else has steps to pick from."""
    for step, name in (
        ("ckpt_step", "load"),
        ("ref_ckpt_step", "ref_load"),
        ("opd_teacher_ckpt_step", "opd_teacher_load"),
    ):
        section = config.distillation if step.startswith("opd") else config.checkpoint
        given, source = getattr(section, step), getattr(section, name)
        if given is None:
            continue
        if source is None and section is config.checkpoint:
            yield Violation(f"{option(step)} {given} needs {option(name)}: the checkpoints to pick from", (name,))
        elif source is not None and (Path(source) / "config.json").is_file():
            yield Violation(
                f"{option(step)} {given}: {option(name)} {source} is a Hugging Face folder, which has no steps"
            )


def checkpoint_root(flag: str, given: str | None) -> Iterator[Violation]:
    """A folder for checkpoints is not one of them."""
    if given is not None and re.fullmatch(r"iter_\d+", Path(given).name):
        yield Violation(f"{flag} {given}: give the root {Path(given).parent}, and --ckpt-step to pick a step")


def _same_folder(save: str, load: str | None) -> bool:
    return load is not None and Path(save).resolve() == Path(load).resolve()


def save_is_free(config: Config) -> Iterator[Violation]:
    """A run never writes among an older run's checkpoints unless it resumes."""
    if config.checkpoint.save is not None:
        yield from folder_is_free("--save", config.checkpoint.save, "--load", config.checkpoint.load)


def folder_is_free(flag: str, save: str, load_flag: str, load: str | None) -> Iterator[Violation]:
    """A folder to save to is new or empty, has only what a run left that failed at its start, or is the one that the
    run resumes from."""
    if _same_folder(save, load):
        return
    folder = Path(save)
    if folder.is_file():
        yield Violation(f"{flag} {save}: this is a file, not a folder")
    elif folder.is_dir() and any(path.name not in LEFT_BY_A_START for path in folder.iterdir()):
        yield Violation(
            f"{flag} {save}: the folder is not empty; resume from it by {load_flag} {save}, or give another one"
        )


def prompt_files(config: Config) -> Iterator[Violation]:
    files = [("--prompt-data", config.data.prompt_data)]
    files += [(f"--eval-prompt-data {name}", path) for name, path in config.evaluation.eval_prompt_data]
    files += _evaluation_file(config)
    for flag, given in files:
        if given is None:
            continue
        path = Path(SLICE.sub("", given))
        if "@[" in path.name:
            yield Violation(f"{flag} {given}: a slice is FILE@[a:b], with whole numbers of up to 18 digits or none")
        elif path.suffix not in (".jsonl", ".json"):
            yield Violation(f"{flag} {given}: only .jsonl files are read")
        elif not path.is_file():
            yield Violation(f"{flag} {given}: no such file")


def _evaluation_file(config: Config) -> list[tuple[str, str | None]]:
    """The data sets of ``--eval-config``; none where another rule says that the file is wrong."""
    from vime.config.eval_datasets import eval_datasets

    given = config.evaluation.eval_config
    if given is None:
        return []
    try:
        sets = eval_datasets(config)[len(config.evaluation.eval_prompt_data) :]
    except UserError:
        return []
    return [(f"--eval-config {given}: {each.name}", each.path) for each in sets]


def templates(config: Config) -> Iterator[Violation]:
    given = {
        "--save-hf": config.checkpoint.save_hf,
        "--save-debug-rollout-data": config.ops.save_debug_rollout_data,
        "--load-debug-rollout-data": config.ops.load_debug_rollout_data,
    }
    for flag, template in given.items():
        if template is not None and "{rollout_id}" not in template:
            yield Violation(f"{flag} {template}: it must contain {{rollout_id}}, which becomes the rollout's number")


RULES = (
    hf_checkpoint,
    ref_load,
    load_is_a_root,
    load_has_something,
    step_of_a_checkpoint,
    save_is_free,
    prompt_files,
    templates,
)
