"""docs/en/algorithms.md: its code runs, and it forgets nothing."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from vime.algorithms import advantages
from vime.algorithms.advantages import base
from vime.config.flags import option
from vime.config.sections import Algorithm, OffPolicy

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "en" / "algorithms.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
ELSEWHERE = re.compile("mtp|opd|routing_replay|get_mismatch_metrics")  # other pages, or without effect


@pytest.mark.parametrize("block", BLOCKS)
def test_the_code_runs(block):
    before = set(base._ESTIMATORS)
    try:
        exec(compile(block, "docs/en/algorithms.md", "exec"), {"__name__": "page"})
    finally:
        for name in set(base._ESTIMATORS) - before:
            del base._ESTIMATORS[name]


def test_every_estimator_has_a_section():
    assert all(f"\n### {name}\n" in PAGE for name in advantages.names())


@pytest.mark.parametrize("section", [Algorithm, OffPolicy])
def test_every_flag_is_named(section):
    names = [field.name for field in dataclasses.fields(section) if not ELSEWHERE.search(field.name)]
    assert [option(name) for name in names if not re.search(rf"{option(name)}\b(?!-)", PAGE)] == []


def test_links_lead_somewhere():
    here = Path(__file__).resolve().parents[2] / "docs" / "en"
    links = re.findall(r"\]\((\.\./[^)#]+)\)", PAGE)
    assert links and all((here / link).exists() for link in links)
