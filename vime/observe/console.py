"""The consoles that vime writes to."""

from __future__ import annotations

from rich.console import Console

__all__ = ["text_console"]


def text_console(*, stderr: bool = False) -> Console:
    """A console that writes texts as they are: brackets in an answer are no markup, and ``big.jsonl:100:`` no emoji."""
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)
