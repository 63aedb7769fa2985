"""The page on custom functions is what the contracts say."""

from __future__ import annotations

from tools.write_customization import PAGE, page
from vime.plugins import CONTRACTS
from vime.plugins.training import READ_BACK


def test_the_reference_is_up_to_date():
    text = PAGE.read_text(encoding="utf-8")
    assert page(text) == text, "run python tools/write_customization.py"


def test_every_function_has_a_section_with_an_example_that_others_can_read():
    text = PAGE.read_text(encoding="utf-8")
    for contract in CONTRACTS.values():
        _, _, section = text.partition(f"\n## `{contract.flag}`\n")
        assert f"`{contract.flag} {contract.example}`:\n\n```python\n" in section
        assert '"""' in section.partition("```python")[2].partition("```")[0], "examples have docstrings"


def test_the_keys_that_are_read_back_are_explained():
    text = PAGE.read_text(encoding="utf-8").partition("## Overview")[0]
    assert all(f"`{key}`" in text for key in READ_BACK)
