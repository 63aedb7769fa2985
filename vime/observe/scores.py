"""How good answers are: their mean, what that may be off by, and the chance to be right within k tries.

Everything takes prompts: the rewards of the answers to each one. Answers to one prompt are alike, so what a mean may be
off by follows from how prompts differ, however many answers each of them got.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import TypeAlias

from vime.types import mean

__all__ = ["Prompts", "average", "half_width", "pass_at_k", "pass_rates"]

Prompts: TypeAlias = Sequence[Sequence[float]]
"""The rewards of the answers to each prompt."""

Z95 = statistics.NormalDist().inv_cdf(0.975)

SOLVED = 1.0
"""An answer with at least this reward is right."""


def average(prompts: Prompts) -> float:
    """The mean over all answers (avg@n where each prompt has n); NaN of none."""
    return mean(list(itertools.chain.from_iterable(prompts)))


def half_width(prompts: Prompts) -> float | None:
    """Half the width of the 95 % confidence interval of ``average``; None where fewer than two prompts have answers.

    By the standard error with prompts as clusters, ``sqrt(G / (G - 1) Σ_g (Σ_i (r_gi - mean))²) / N`` for N answers to
    G prompts: https://arxiv.org/abs/2411.00640, section 2.2, with the usual factor for few clusters. With one answer a
    prompt this is the plain standard error of a mean. The normal quantile makes it too narrow for a handful of prompts,
    and answers that are all alike leave nothing to estimate: 0.
    """
    answered = [answers for answers in prompts if answers]
    if len(answered) < 2:
        return None
    center, count = average(answered), sum(map(len, answered))
    squares = math.fsum(math.fsum(reward - center for reward in answers) ** 2 for answers in answered)
    return Z95 * math.sqrt(len(answered) / (len(answered) - 1) * squares) / count


def pass_rates(prompts: Prompts, *, solved: float = SOLVED) -> dict[int, Prompts]:
    """For k = 1, 2, 4 … up to the most answers that a prompt has: pass@k of each prompt with at least k answers.

    ``average`` of them is pass@k, ``half_width`` what that may be off by.
    """
    outcomes = [(len(answers), sum(reward >= solved for reward in answers)) for answers in prompts]
    largest = max((count for count, _ in outcomes), default=0)
    powers = [1 << exponent for exponent in range(largest.bit_length())]
    return {k: [[pass_at_k(count, right, k)] for count, right in outcomes if count >= k] for k in powers}


def pass_at_k(count: int, right: int, k: int) -> float:
    """The chance that at least one of k answers, drawn from ``count`` of which ``right`` are right, is right.

    ``1 - C(count - right, k) / C(count, k)``, the unbiased estimate of https://arxiv.org/abs/2107.03374, equation 1.
    """
    return 1.0 - math.comb(count - right, k) / math.comb(count, k)
