"""The reference pages are what the code says; that on custom functions is what the contracts say."""

from __future__ import annotations

import pytest

from tools.write_reference import FOLDER, PAGES, page
from vime.plugins import CONTRACTS
from vime.plugins.training import READ_BACK

PAGE = FOLDER / "customization.md"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_reference_pages_are_up_to_date(path):
    assert page(path) == path.read_text(encoding="utf-8"), "run python tools/write_reference.py"


def test_every_function_has_a_section_with_an_example_that_others_can_read():
    text = PAGE.read_text(encoding="utf-8")
    for contract in CONTRACTS.values():
        _, _, section = text.partition(f"\n## `{contract.flag}`\n")
        assert f"`{contract.flag} {contract.example}`:\n\n```python\n" in section
        assert '"""' in section.partition("```python")[2].partition("```")[0], "examples have docstrings"


def test_the_keys_that_are_read_back_are_explained():
    text = PAGE.read_text(encoding="utf-8").partition("## Overview")[0]
    assert all(f"`{key}`" in text for key in READ_BACK)
