"""Retrieval by the words that question and document share, in memory."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

K1, B = 1.2, 0.75


class BM25:
    """Okapi BM25 over a list of texts (Robertson and Zaragoza 2009, equation 3.15; the logarithm with 1 added, so that
    no word counts against a document)."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._counts = [Counter(words(text)) for text in texts]
        lengths = [count.total() for count in self._counts]
        mean = sum(lengths) / max(1, len(lengths))
        self._norms = [K1 * (1 - B + B * length / mean) for length in lengths]
        found = Counter(word for count in self._counts for word in count)
        self._weights = {word: math.log(1 + (len(texts) - n + 0.5) / (n + 0.5)) for word, n in found.items()}

    def best(self, query: str, count: int) -> list[int]:
        """Positions of the texts that fit best, best first; those that share no word are left out."""
        scores = [self._score(words(query), i) for i in range(len(self._counts))]
        ranked = sorted(range(len(scores)), key=lambda i: -scores[i])
        return [i for i in ranked[:count] if scores[i] > 0]

    def _score(self, query: Sequence[str], i: int) -> float:
        counts, norm = self._counts[i], self._norms[i]
        return sum(
            self._weights[word] * counts[word] * (K1 + 1) / (counts[word] + norm) for word in query if word in counts
        )


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())
