"""Writes the reference pages of docs/en/get_started from what the code says: custom functions, flags, metrics.

What stands above the marker of a page is written by hand; what follows is replaced.
A test fails when it is not up to date.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from vime.config.flags import Flag, option  # noqa: E402
from vime.config.foreign.megatron_lm import WITHOUT_EFFECT  # noqa: E402
from vime.config.foreign.owned import OWNED  # noqa: E402
from vime.config.foreign.sglang import INSTEAD  # noqa: E402
from vime.config.reference import default, flags_in, meaning, takes  # noqa: E402
from vime.config.sections import SECTIONS  # noqa: E402
from vime.config.unimplemented import UNIMPLEMENTED  # noqa: E402
from vime.observe.metrics import METRICS  # noqa: E402
from vime.plugins import CONTRACTS, Contract, load_function  # noqa: E402

FOLDER = ROOT / "docs" / "en" / "get_started"
MARKER = "<!-- From here on written by tools/write_reference.py; do not edit. -->\n"


def main() -> None:
    for path in PAGES:
        path.write_text(page(path), encoding="utf-8")


def page(path: Path) -> str:
    """What the file is to hold: its text by hand and a fresh reference."""
    by_hand, _, _ = path.read_text(encoding="utf-8").partition(MARKER)
    return by_hand + MARKER + "\n" + "\n".join(PAGES[path]()).rstrip() + "\n"


def table(*head: str, rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    """A table and the empty line after it."""
    yield f"| {' | '.join(head)} |"
    yield "|---" * len(head) + "|"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"
    yield ""


def flags() -> Iterator[str]:
    """Vime's own flags by section, then those that it refuses."""
    for section, cls in SECTIONS.items():
        yield f"## {section.replace('_', ' ').capitalize()}\n"
        yield f"{(inspect.getdoc(inspect.getmodule(cls)) or '').strip()}\n"
        yield from table("flag", "value", "default", "meaning", rows=map(flag_row, flags_in(section)))
    yield "## Decided by vime\n"
    yield "Flags of vLLM, of the router and of Megatron-core that cannot be given, and why.\n"
    prefixes = {"vllm": "vllm-", "router": "router-", "megatron": ""}
    owned = [(f"`--{prefixes[program]}{name}`", why) for program in OWNED for name, why in OWNED[program].items()]
    yield from table("flag", "instead", rows=owned)
    yield "Those of Megatron that may be given, but have no effect:\n"
    yield from table("flag", "why", rows=((f"`{option(name)}`", why) for name, why in WITHOUT_EFFECT.items()))
    yield "## Not implemented\n"
    yield from table("flag", "instead", rows=((f"`--{name}`", why or "not yet") for name, why in UNIMPLEMENTED.items()))
    yield "## For those who come from SGLang\n"
    yield from table("flag", "here", rows=((f"`--sglang-{name}`", f"`--{here}`") for name, here in INSTEAD.items()))


def flag_row(flag: Flag) -> tuple[str, str, str, str]:
    return f"`{flag.option}`", takes(flag), default(flag).removeprefix("default: "), meaning(flag)


def metrics() -> Iterator[str]:
    """Every metric, by the part of its name before the first slash."""
    families = list(dict.fromkeys(metric.name.partition("/")[0] for metric in METRICS))
    for family in families:
        yield f"## {family}/...\n"
        members = [each for each in METRICS if each.name.startswith(f"{family}/")]
        rows = [(f"`{each.name}`", each.unit, each.description) for each in members]
        yield from table("metric", "unit", "meaning", rows=rows)


def functions() -> Iterator[str]:
    """A table, then each custom function."""
    yield "## Overview\n"
    rows = [(f"[`{each.flag}`](#{each.flag})", f"`{call(each)}`", place(each)) for each in CONTRACTS.values()]
    yield from table("flag", "called with", "runs", rows=rows)
    for contract in CONTRACTS.values():
        yield from section(contract)


def section(contract: Contract) -> Iterator[str]:
    """All there is to say of one function."""
    yield f"## `{contract.flag}`\n"
    yield f"{contract.purpose}\n"
    yield f"* Called: `{call(contract)}`" + optional(contract)
    if contract.methods is not None:
        methods = ", ".join(f"`{name}({', '.join(words)})`" for name, words in contract.methods.items())
        yield f"* Methods: {methods}"
    yield f"* When: {contract.when}"
    yield f"* Returns: {contract.returns}\n"
    function = load_function(contract.example, contract.flag)
    yield f"`{contract.flag} {contract.example}`:\n"
    yield f"```python\n{inspect.getsource(function).rstrip()}\n```\n"


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


PAGES: Mapping[Path, Callable[[], Iterator[str]]] = {
    FOLDER / "customization.md": functions,
    FOLDER / "flags.md": flags,
    FOLDER / "metrics.md": metrics,
}


if __name__ == "__main__":
    main()
