"""The evaluation data sets: those of ``--eval-prompt-data``, and those of the YAML file of ``--eval-config``.

The file overrides the flags set by set::

    eval:
      defaults:                 # for every set below
        rm_type: math
      datasets:
        - name: aime
          path: aime-2024.jsonl
          n_samples_per_eval_prompt: 16
          temperature: 0.6

What neither a set nor the defaults say is as the ``--eval-*`` flags say, which in turn are as in rollouts.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from vime.config.config import Config
from vime.config.sections.reward import RM_TYPES
from vime.errors import UserError


@dataclass(frozen=True, kw_only=True)
class EvalDataset:
    """One named set of prompts and how to sample and grade answers to them."""

    name: str
    path: str
    n_samples_per_eval_prompt: int
    temperature: float
    top_p: float
    top_k: int
    max_response_len: int
    min_new_tokens: int
    max_prompt_len: int | None
    input_key: str
    label_key: str | None
    rm_type: str | None


NUMBERS = {"int": (int,), "float": (int, float)}


def eval_datasets(config: Config) -> tuple[EvalDataset, ...]:
    """All sets of a run, in the order given.

    Raises:
        UserError: the file cannot be read, an entry is unknown, missing or of the wrong type, or a name occurs twice.
    """
    flags = _from_flags(config)
    sets = [EvalDataset(name=name, path=path, **flags) for name, path in config.evaluation.eval_prompt_data]
    if config.evaluation.eval_config is not None:
        sets += _from_file(config, config.evaluation.eval_config, flags)
    names = [each.name for each in sets]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UserError(f"evaluation data sets need different names; {', '.join(twice)} occurs more than once")
    return tuple(sets)


def _from_flags(config: Config) -> dict[str, Any]:
    evaluation = config.evaluation
    return {
        "n_samples_per_eval_prompt": evaluation.n_samples_per_eval_prompt,
        "temperature": evaluation.eval_temperature,
        "top_p": evaluation.eval_top_p,
        "top_k": evaluation.eval_top_k,
        "max_response_len": evaluation.eval_max_response_len,
        "min_new_tokens": evaluation.eval_min_new_tokens,
        "max_prompt_len": evaluation.eval_max_prompt_len,
        "input_key": evaluation.eval_input_key,
        "label_key": evaluation.eval_label_key,
        "rm_type": config.reward.rm_type,
    }


def _from_file(config: Config, path: str, flags: Mapping[str, Any]) -> list[EvalDataset]:
    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.safe_load(file)
    except (OSError, yaml.YAMLError) as error:
        raise UserError(f"--eval-config {path}: {' '.join(str(error).split())}") from None
    body = content.get("eval") if isinstance(content, dict) else None
    if not isinstance(body, dict) or not isinstance(body.get("datasets"), list):
        raise UserError(f"--eval-config {path}: expected the key eval with a list datasets and perhaps defaults")
    unknown = sorted(set(body) - {"defaults", "datasets"})
    if unknown:
        raise UserError(f"--eval-config {path}: eval.{unknown[0]} is unknown; it has defaults and datasets")
    defaults = _checked(f"--eval-config {path}: eval.defaults", body.get("defaults") or {})
    sets = []
    for number, entry in enumerate(body["datasets"]):
        where = f"--eval-config {path}: eval.datasets[{number}]"
        values = {**flags, **defaults, **_checked(where, entry)}
        if config.hooks.custom_rm_path is not None and "rm_type" in {**defaults, **entry}:
            raise UserError(f"{where}: rm_type has no effect beside --custom-rm-path, which grades every answer")
        missing = [key for key in ("name", "path") if key not in values]
        if missing:
            raise UserError(f"{where}: {missing[0]} is missing")
        sets.append(EvalDataset(**values))
    return sets


def _checked(where: str, entry: Any) -> dict[str, Any]:
    if not isinstance(entry, dict):
        raise UserError(f"{where}: expected names and values, found {entry!r}")
    kinds = {item.name: str(item.type) for item in dataclasses.fields(EvalDataset)}
    for key, value in entry.items():
        if key not in kinds:
            near = difflib.get_close_matches(str(key), kinds, n=1)
            raise UserError(f"{where}: {key} is unknown" + (f"; did you mean {near[0]}?" if near else ""))
        kind, _, optional = kinds[key].partition(" | ")
        if optional and value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, NUMBERS.get(kind, (str,))):
            raise UserError(f"{where}: {key} must be {'a text' if kind == 'str' else f'a {kind}'}, not {value!r}")
    if entry.get("rm_type") not in (None, *RM_TYPES):
        raise UserError(f"{where}: rm_type {entry['rm_type']!r} is unknown; there are {', '.join(RM_TYPES)}")
    return dict(entry)
