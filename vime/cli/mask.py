"""``vime data mask FILE``: the exact tokens that --loss-type sft_loss trains, as training itself masks them.

On a terminal trained tokens are green and the others grey, each token in another shade than its neighbours. Elsewhere
trained runs stand between ⟦ and ⟧. ``--tokens`` writes one line a token: its place, whether it is trained, id and text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich.text import Text

from vime.data.dialogue import Dialogue, DialogueEncoder, dialogue_of
from vime.data.jsonl import PromptFile, Row
from vime.errors import UserError
from vime.observe.console import text_console

SHADES = {1: ("bold green", "bold bright_green"), 0: ("bright_black", "white")}
REPLACEMENT = "\ufffd"


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens that make whole characters together; nearly always one."""

    text: str
    trained: int
    token_ids: tuple[int, ...]


def show(file: PromptFile, tokenizer: Any, encoder: DialogueEncoder, *, count: int, tokens: bool) -> int:
    """Writes the first ``count`` rows; returns how many of them cannot be trained."""
    console = text_console()
    problems = 0
    for row in file.rows[:count]:
        try:
            for title, dialogue in _samples(row, encoder):
                console.print(f"--- {file.path}:{row.line}{title}", soft_wrap=True)
                pieces = list(pieces_of(tokenizer, dialogue))
                console.print(_table(pieces) if tokens else _text(pieces, console.is_terminal), soft_wrap=True)
        except UserError as error:
            problems += 1
            console.print(f"--- {file.path}:{row.line}: {error}", soft_wrap=True)
    return problems


def _samples(row: Row, encoder: DialogueEncoder) -> Iterator[tuple[str, Dialogue]]:
    parts = encoder.parts(dialogue_of(row.prompt, row.label), row.metadata)
    for number, part in enumerate(parts, 1):
        dialogue = encoder.encode(part, row.metadata)
        which = f", sample {number} of {len(parts)}" if len(parts) > 1 else ""
        yield f"{which}: {len(dialogue.mask)} tokens, {sum(dialogue.mask)} trained", dialogue


def pieces_of(tokenizer: Any, dialogue: Dialogue) -> Iterator[Piece]:
    """The tokens with their texts. Bytes of one character stay together, as far as they are masked alike."""
    waiting: list[int] = []
    for token, trained, following in zip(dialogue.token_ids, dialogue.mask, [*dialogue.mask[1:], None], strict=True):
        waiting.append(token)
        text: str = tokenizer.decode(waiting, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if not text.endswith(REPLACEMENT) or following != trained:
            yield Piece(text, trained, tuple(waiting))
            waiting = []


def _text(pieces: Sequence[Piece], colours: bool) -> Text:
    text = Text()
    if colours:
        for number, piece in enumerate(pieces):
            text.append(piece.text.replace("\n", "⏎\n"), SHADES[piece.trained][number % 2])
        return text
    for trained, run in groupby(pieces, key=lambda piece: piece.trained):
        written = "".join(piece.text for piece in run)
        text.append(f"⟦{written}⟧" if trained else written)
    return text


def _table(pieces: Sequence[Piece]) -> Text:
    text, place = Text(), 0
    for piece in pieces:
        ids = " ".join(map(str, piece.token_ids))
        style = SHADES[piece.trained][0]
        text.append(f"{place:6}  {'trained' if piece.trained else '-':7}  {ids:>8}  {piece.text!r}\n", style)
        place += len(piece.token_ids)
    text.rstrip()
    return text
