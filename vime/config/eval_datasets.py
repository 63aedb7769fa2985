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

What neither a set nor the defaults say is as the ``--eval-*`` flags say, which in turn are as in rollouts. The fields
of ``EvalDataset`` are all that can be said.
"""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vime.config.config import Config
from vime.config.eval_names import problems
from vime.config.kinds import Kind, kind_of
from vime.config.reading import yaml_entries
from vime.config.sections.reward import RM_TYPES
from vime.errors import UserError
from vime.metadata import BadMetadata, checked


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
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    max_prompt_len: int | None
    max_context_len: int | None
    input_key: str
    label_key: str | None
    metadata_key: str
    tool_key: str
    metadata_overrides: Mapping[str, Any]  # go into the metadata of every row, over what it has under the same names
    rm_type: str | None  # where a set says it, custom_rm_path of the flags or defaults does not grade it
    custom_rm_path: str | None
    group_rm: bool
    reward_key: str | None
    custom_generate_function_path: str | None  # null: as without any

    @property
    def grader(self) -> str | None:
        """The built-in grader that answers meet, unless their row names another; None: a custom function grades."""
        return self.rm_type if self.custom_rm_path is None else None


_WITHOUT_FUNCTION = {"custom_rm_path": None, "group_rm": False, "reward_key": None}


def eval_datasets(config: Config) -> tuple[EvalDataset, ...]:
    """All sets of a run, in the order given.

    Raises:
        UserError: the file cannot be read, an entry is unknown, missing or of the wrong type, or a name occurs twice.
    """
    flags = _from_flags(config)
    sets = [EvalDataset(name=name, path=path, **flags) for name, path in config.evaluation.eval_prompt_data]
    if config.evaluation.eval_config is not None:
        sets += _from_file(config.evaluation.eval_config, flags)
    names = [each.name for each in sets]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UserError(f"evaluation data sets need different names; {', '.join(twice)} occurs more than once")
    for problem in problems(names):
        raise UserError(f"evaluation data sets: {problem}")
    return tuple(sets)


def _from_flags(config: Config) -> dict[str, Any]:
    evaluation, rollout, data, reward, hooks = (
        config.evaluation,
        config.rollout,
        config.data,
        config.reward,
        config.hooks,
    )
    return {
        "n_samples_per_eval_prompt": evaluation.n_samples_per_eval_prompt,
        "temperature": evaluation.eval_temperature,
        "top_p": evaluation.eval_top_p,
        "top_k": evaluation.eval_top_k,
        "max_response_len": evaluation.eval_max_response_len,
        "min_new_tokens": evaluation.eval_min_new_tokens,
        "stop": rollout.rollout_stop,
        "stop_token_ids": rollout.rollout_stop_token_ids,
        "max_prompt_len": evaluation.eval_max_prompt_len,
        "max_context_len": evaluation.eval_max_context_len,
        "input_key": evaluation.eval_input_key,
        "label_key": evaluation.eval_label_key,
        "metadata_key": data.metadata_key,
        "tool_key": data.tool_key,
        "metadata_overrides": {},
        "rm_type": reward.rm_type,
        "custom_rm_path": hooks.custom_rm_path,
        "group_rm": reward.group_rm,
        "reward_key": reward.eval_reward_key,
        "custom_generate_function_path": hooks.custom_generate_function_path,
    }


def _from_file(path: str, flags: Mapping[str, Any]) -> list[EvalDataset]:
    try:
        content = {key: value for key, value, _ in yaml_entries(path)}
    except UserError as error:
        raise UserError(f"--eval-config {error}") from None
    body = content.get("eval")
    if not isinstance(body, dict) or not isinstance(body.get("datasets"), list):
        raise UserError(f"--eval-config {path}: expected the key eval with a list datasets and perhaps defaults")
    unknown = sorted(set(body) - {"defaults", "datasets"})
    if unknown:
        raise UserError(f"--eval-config {path}: eval.{unknown[0]} is unknown; it has defaults and datasets")
    defaults = _checked(f"--eval-config {path}: eval.defaults", body.get("defaults") or {})
    sets = []
    for number, entry in enumerate(body["datasets"]):
        where = f"--eval-config {path}: eval.datasets[{number}]"
        values = _over(_over(flags, defaults), _checked(where, entry))
        missing = [key for key in ("name", "path") if key not in values]
        if missing:
            raise UserError(f"{where}: {missing[0]} is missing")
        sets.append(EvalDataset(**values))
    return sets


def _over(values: Mapping[str, Any], special: Mapping[str, Any]) -> dict[str, Any]:
    """``special`` over ``values``. Who names a grader wants it in place of a function, with what belongs to that."""
    replaces = special.get("rm_type") is not None and values["custom_rm_path"] is not None
    return {**values, **(_WITHOUT_FUNCTION if replaces else {}), **special}


def _checked(where: str, entry: Any) -> dict[str, Any]:
    """The entry with its values as the fields want them."""
    if not isinstance(entry, dict):
        raise UserError(f"{where}: expected names and values, found {entry!r}")
    values = {}
    for key, raw in entry.items():
        if key not in _KINDS:
            near = difflib.get_close_matches(str(key), _KINDS, n=1)
            raise UserError(f"{where}: {key} is unknown" + (f"; did you mean {near[0]}?" if near else ""))
        values[key] = _converted(f"{where}: {key}", raw, _KINDS[key])
    try:
        checked(values.get("metadata_overrides", {}), "metadata_overrides")
    except BadMetadata as error:
        raise UserError(f"{where}: {error}") from None
    if values.get("rm_type") is not None and values.get("custom_rm_path") is not None:
        raise UserError(f"{where}: rm_type has no effect beside custom_rm_path, which grades every answer")
    return values


def _converted(where: str, raw: Any, kind: Kind) -> Any:
    if raw is None and kind.optional:
        return None
    try:
        return kind.convert(raw)
    except (ValueError, TypeError):
        raise UserError(f"{where} expects {kind.expected}, not {raw!r}") from None


def _kinds() -> dict[str, Kind]:
    hints = typing.get_type_hints(EvalDataset)
    choices = {"rm_type": RM_TYPES}
    return {
        each.name: kind_of(hints[each.name], choices.get(each.name, ())) for each in dataclasses.fields(EvalDataset)
    }


_KINDS = _kinds()
