"""What ``vime check-plugin`` does: loads the functions that a command line names and tries each on synthetic values."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vime.config import Args
from vime.config.config import OWN_FLAGS
from vime.config.custom import custom_values
from vime.config.reading import Draft, read
from vime.data import jsonl
from vime.data.jsonl import Keys, Row
from vime.errors import UserError
from vime.plugins.catalog import CONTRACTS, paths_of
from vime.plugins.contract import Contract
from vime.plugins.loading import load_checked
from vime.plugins.trial import Trial

MOST_ROWS = 8
"""Rows of --prompt-data that samples are made from."""

DEFAULTS: dict[str, Any] = {"n_samples_per_prompt": 4, "rollout_batch_size": 4, "rollout_max_response_len": 64}
"""For flags that a trial needs and nobody gave; small, but with groups of several samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What is to be said of one function."""

    flag: str
    path: str
    problems: tuple[str, ...]
    tracebacks: tuple[str, ...] = ()  # of what it raised
    doubts: tuple[str, ...] = ()
    calls: int = 0
    rows: int = 0  # of the user's own data that it could see


def check(argv: Sequence[str]) -> list[Verdict]:
    """Tries every custom function that the flags name; other flags give the values of ``args``.

    Raises:
        UserError: a flag is wrong or unknown, or none names a function.
    """
    draft = read(argv)
    values = {name: flag.default for name, flag in OWN_FLAGS.items()} | DEFAULTS | draft.of("vime")
    named = {name: paths_of(values[name]) for name in CONTRACTS if values.get(name)}
    custom = custom_values(values["custom_config_path"])
    if draft.errors:
        raise UserError("\n".join(draft.errors))
    if not named:
        raise UserError("name a function by its flag, e.g. vime check-plugin --custom-rm-path my_module:my_reward")
    rows = _rows(values)
    with tempfile.TemporaryDirectory() as folder:
        files = {"run_dir": values["run_dir"] or folder, "save": values["save"] or folder}
        args = Args({**custom, **_foreign(draft), **values, **files})
        return [check_one(CONTRACTS[name], path, args, rows) for name, paths in named.items() for path in paths]


def check_one(contract: Contract, path: str, args: Args, rows: Sequence[Row] = ()) -> Verdict:
    """Tries one function."""
    try:
        function = load_checked(path, contract.flag, contract)
    except UserError as error:
        return Verdict(flag=contract.flag, path=path, problems=(str(error).removeprefix(f"{contract.flag} {path}: "),))
    trial = Trial(function, contract, args, rows)
    problems = trial.run()
    return Verdict(
        flag=contract.flag,
        path=path,
        problems=tuple(problems),
        tracebacks=tuple(trial.tracebacks),
        doubts=tuple(trial.doubts),
        calls=trial.calls,
        rows=len(rows),
    )


def _foreign(draft: Draft) -> dict[str, Any]:
    """Flags of Megatron, vLLM and the router, as ``args`` has them."""
    values = draft.of("megatron")
    values |= {f"vllm_{name}": value for name, value in draft.of("vllm").items()}
    return values | {f"router_{name}": value for name, value in draft.of("router").items()}


def _rows(values: Mapping[str, Any]) -> list[Row]:
    """The first rows of --prompt-data, if it was given."""
    if values["prompt_data"] is None:
        return []
    keys = Keys(
        input=values["input_key"],
        label=values["label_key"],
        metadata=values["metadata_key"],
        tools=values["tool_key"],
    )
    file = jsonl.load(values["prompt_data"], keys)
    file.require_good()
    return file.rows[:MOST_ROWS]
