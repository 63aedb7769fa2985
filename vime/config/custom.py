"""``--custom-config-path``: a YAML file of settings for custom functions, which become attributes of ``args``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vime.config.catalog import all_names
from vime.config.reading import yaml_entries
from vime.errors import UserError

AT_RUN_TIME = ("role", "vllm_model_routers")
"""Attributes of ``args`` that no flag sets."""


def custom_values(path: str | None) -> dict[str, Any]:
    """The entries of the file, by attribute name.

    Raises:
        UserError: the file cannot be read, or an entry has the name of a flag or none that Python can say; one line
            each.
    """
    if path is None:
        return {}
    entries = list(yaml_entries(path))
    problems = [problem for key, _, line in entries for problem in _problems(key, f"{path}:{line}")]
    if problems:
        raise UserError("\n".join(problems))
    return {key.replace("-", "_"): value for key, value, _ in entries}


def _problems(key: str, where: str) -> Iterator[str]:
    attribute, name = key.replace("-", "_"), key.replace("_", "-")
    if name in all_names():
        yield f"{where}: {key} is a flag of the run: give it as --{name}, or another name to your own setting"
    elif attribute in AT_RUN_TIME:
        yield f"{where}: args.{attribute} is set by vime; give another name to your own setting"
    elif not attribute.isidentifier():
        yield f"{where}: {key!r} cannot be an attribute of args; use letters, digits and underscores"
