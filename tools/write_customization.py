"""Writes the reference in docs/en/get_started/customization.md from the contracts and their examples.

What stands above the marker is written by hand; what follows is replaced. A test fails when it is out of date.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from vime.plugins import CONTRACTS, Contract, load_function  # noqa: E402

PAGE = ROOT / "docs" / "en" / "get_started" / "customization.md"
MARKER = "<!-- From here on written by tools/write_customization.py; do not edit. -->\n"


def main() -> None:
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def page(text: str) -> str:
    """The page with a fresh reference."""
    by_hand, _, _ = text.partition(MARKER)
    return by_hand + MARKER + "\n" + "\n".join(reference())


def reference() -> Iterator[str]:
    """The lines of the reference: a table, then each function."""
    yield "## Overview\n"
    yield "| flag | called with | runs |"
    yield "|---|---|---|"
    for contract in CONTRACTS.values():
        yield f"| [`{contract.flag}`](#{contract.flag}) | `{call(contract)}` | {place(contract)} |"
    for contract in CONTRACTS.values():
        yield from section(contract)


def section(contract: Contract) -> Iterator[str]:
    """All there is to say of one function."""
    yield f"\n## `{contract.flag}`\n"
    yield f"{contract.purpose}\n"
    yield f"* Called: `{call(contract)}`" + optional(contract)
    if contract.methods is not None:
        methods = ", ".join(f"`{name}({', '.join(words)})`" for name, words in contract.methods.items())
        yield f"* Methods: {methods}"
    yield f"* When: {contract.when}"
    yield f"* Returns: {contract.returns}\n"
    function = load_function(contract.example, contract.flag)
    yield f"`{contract.flag} {contract.example}`:\n"
    yield f"```python\n{inspect.getsource(function).rstrip()}\n```"


def call(contract: Contract) -> str:
    """f(args, sample), as in the code that calls it."""
    if contract.methods is not None:
        return f"class{contract}"
    return {True: "await ", False: "", None: "(await) "}[contract.is_async] + f"f{contract}"


def optional(contract: Contract) -> str:
    """What is passed only to functions that name it."""
    if not contract.optional:
        return ""
    return ", and with " + ", ".join(f"`{name}=`" for name in contract.optional) + " if the function names it"


def place(contract: Contract) -> str:
    return {"rollout": "in the driver", "training": "on the trainer's ranks"}[contract.side]


if __name__ == "__main__":
    main()
