"""Texts as numbers, numbers as texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.simulation.engines import VOCABULARY


class Tokenizer:
    """Stands for one of transformers."""

    eos_token_id = None

    def __call__(self, texts: Sequence[str], **options: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [self.encode(text) for text in texts]}

    def encode(self, text: str) -> list[int]:
        return [1 + ord(letter) % (VOCABULARY - 1) for letter in text]

    def decode(self, token_ids: Sequence[int], **options: Any) -> str:
        return " ".join(map(str, token_ids))
