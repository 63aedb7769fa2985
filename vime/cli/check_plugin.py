"""``vime check-plugin --custom-rm-path package.module:function …``: tries custom functions on synthetic values.

Each function is called as a run would call it, and what it returns, raises or changes is checked, without GPU, Ray or
vLLM. Other flags of a run may follow: they are the values of ``args``. With --prompt-data (and --input-key,
--label-key, --metadata-key) samples have the prompts, labels and metadata of its first rows.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from vime.plugins.catalog import CONTRACTS
from vime.plugins.check import Verdict, check


def main(argv: Sequence[str]) -> int:
    """Returns 0 if every function keeps its contract, else 1.

    Raises:
        UserError: a flag is wrong or unknown, or none names a function.
    """
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0 if argv else 2
    verdicts = check(argv)
    for verdict in verdicts:
        print("\n".join(lines_of(verdict)))
    for verdict in verdicts:
        for traceback in verdict.tracebacks[:1]:
            print(f"\n{verdict.flag} {verdict.path} raised:\n{traceback}", file=sys.stderr)
    return 1 if any(verdict.problems for verdict in verdicts) else 0


def lines_of(verdict: Verdict) -> list[str]:
    """What is printed about one function."""
    name = f"{verdict.flag} {verdict.path}"
    doubts = [f"warn  {name}: {doubt}" for doubt in verdict.doubts]
    if verdict.problems:
        return [*(f"FAIL  {name}: {problem}" for problem in verdict.problems), *doubts]
    rows = f", samples from {verdict.rows} row{'s' if verdict.rows > 1 else ''}" if verdict.rows else ""
    return [f"ok    {name} ({verdict.calls} call{'s' if verdict.calls > 1 else ''}{rows})", *doubts]


def usage() -> str:
    """The flags that name functions."""
    lines = [f"  {contract.flag}  {contract}\n      {contract.purpose}" for contract in CONTRACTS.values()]
    return "\n".join([str(__doc__), *lines])
