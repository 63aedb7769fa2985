"""A custom function is called as a run would call it, and keeps its contract."""

from __future__ import annotations

import pytest

from vime.plugins.check import check


def test_the_function_keeps_its_contract(flag: str, path: str, further: list[str]) -> None:
    (verdict,) = check([flag, path, *further])
    if verdict.problems:
        pytest.fail("\n".join([*verdict.problems, *verdict.tracebacks[:1]]), pytrace=False)
