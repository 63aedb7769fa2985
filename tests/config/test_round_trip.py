"""Whatever value a flag can have: written on the command line or in YAML, it is read back as it was."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from vime.config.config import OWN_FLAGS
from vime.config.kinds import FLOAT, INT, JSON_OBJECT, STR, SWITCH
from vime.config.reading import Draft, read

TEXT = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1).filter(lambda s: not s.startswith("--"))
JSON_VALUES = st.dictionaries(TEXT, st.integers() | TEXT | st.booleans(), max_size=3)
BY_KIND: dict[Any, st.SearchStrategy[Any]] = {
    id(INT): st.integers(),
    id(FLOAT): st.floats(allow_nan=False, allow_infinity=False),
    id(STR): TEXT,
    id(SWITCH): st.booleans(),
}


def values_of(name: str) -> st.SearchStrategy[Any]:
    kind = OWN_FLAGS[name].kind
    for known in (INT, FLOAT, STR, SWITCH):
        if kind.convert is known.convert:
            return BY_KIND[id(known)]
    if kind.convert is JSON_OBJECT.convert:
        return JSON_VALUES
    return st.nothing()


NAMES = sorted(name for name in OWN_FLAGS if not values_of(name).is_empty)
ASSIGNMENTS = st.lists(st.sampled_from(NAMES), unique=True, max_size=8).flatmap(
    lambda names: st.fixed_dictionaries({name: values_of(name) for name in names})
)


def words(name: str, value: Any) -> list[str]:
    option = OWN_FLAGS[name].option
    if isinstance(value, bool):
        negation = option.replace("--no-", "--", 1) if option.startswith("--no-") else option.replace("--", "--no-", 1)
        return [option if value else negation]
    if isinstance(value, dict):
        import json

        return [option, json.dumps(value)]
    return [option, str(value)]


def read_values(argv: list[str]) -> dict[str, Any]:
    draft: Draft = read(argv)
    assert draft.errors == []
    return draft.of("vime")


@given(ASSIGNMENTS)
@settings(max_examples=200, deadline=None)
def test_on_the_command_line(values):
    assert read_values([word for name, value in values.items() for word in words(name, value)]) == values


@given(ASSIGNMENTS)
@settings(max_examples=100, deadline=None)
def test_in_yaml(values):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.yaml"
        path.write_text(yaml.safe_dump(values))
        assert read_values(["--config", str(path)]) == values
