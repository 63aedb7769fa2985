"""rollout_batch_size x n_samples_per_prompt = global_batch_size x num_steps_per_rollout, and its spread over ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator

from vime.config.config import Config
from vime.config.layouts import Layout
from vime.config.rules.base import Violation, known
from vime.config.rules.model import shape_or_none

ABOUT = ("rollout_batch_size", "n_samples_per_prompt", "global_batch_size", "num_steps_per_rollout")
OFFERED = 3


def nearest_divisors(number: int, wanted: int) -> str:
    """The divisors of ``number`` nearest to ``wanted``, as "8, 16 or 32"."""
    divisors = [each for each in range(1, number + 1) if number % each == 0]
    near = sorted(sorted(divisors, key=lambda each: (abs(each - wanted), each))[:OFFERED])
    return " or ".join(filter(None, (", ".join(map(str, near[:-1])), str(near[-1]))))


def whole_steps(config: Config) -> Iterator[Violation]:
    prompts, n = config.rollout.rollout_batch_size, config.rollout.n_samples_per_prompt
    size, steps = config.batch.global_batch_size, config.batch.num_steps_per_rollout
    if not known(prompts, n) or prompts < 1 or n < 1:
        return
    samples = prompts * n
    made = f"--rollout-batch-size {prompts} x --n-samples-per-prompt {n} = {samples} samples a rollout"
    if known(size, steps):
        if size * steps != samples:
            yield Violation(
                f"{made}, but --global-batch-size {size} x --num-steps-per-rollout {steps} = {size * steps}; "
                "give only one of the two, the other follows",
                ABOUT,
            )
    elif known(size) and size > 0:
        yield Violation(
            f"{made}, but {samples} = {size} x steps has no whole solution; "
            f"--global-batch-size could be {nearest_divisors(samples, size)}",
            ABOUT,
        )
    elif known(steps) and steps > 0:
        yield Violation(
            f"{made}, but {samples} = global-batch-size x {steps} has no whole solution; "
            f"--num-steps-per-rollout could be {nearest_divisors(samples, steps)}",
            ABOUT,
        )


def share_of_each_rank(config: Config) -> Iterator[Violation]:
    layout = Layout.of(config, shape_or_none(config))
    if layout.world >= 1 and layout.model >= 1 and layout.world % layout.model == 0:
        message = uneven_shares(config, layout)
        if message is not None:
            yield Violation(message, (*ABOUT, "micro_batch_size"))


def uneven_shares(config: Config, layout: Layout) -> str | None:
    """Why the samples of a step cannot be dealt to the data-parallel ranks of a layout; None if they can.

    Every rank has as many micro-batches as the others; an interleaved pipeline takes as many at a time as it has ranks.
    """
    size, micro = config.batch.global_batch_size, config.batch.micro_batch_size
    if not known(size) or size < 1 or micro < 1:
        return None
    packed = config.batch.use_dynamic_batch_size
    factors = [] if packed else [(micro, f"--micro-batch-size {micro}")]
    factors.append((layout.data, f"{layout.data} data-parallel ranks"))
    at_a_time = layout.micro_batch_multiple
    if at_a_time > 1:
        factors.append((at_a_time, f"{at_a_time} micro-batches at a time in an interleaved pipeline"))
    multiple = math.prod(number for number, _ in factors)
    if size % multiple == 0:
        return None
    names = " x ".join(name for _, name in factors)
    total = f" = {multiple}" if len(factors) > 1 else f" ({layout.world} training slots / {layout.model})"
    rest = "" if packed else "; or pack by --use-dynamic-batch-size"
    return f"--global-batch-size {size} must be a multiple of {'' if len(factors) > 1 else 'the '}{names}{total}{rest}"


RULES = (whole_steps, share_of_each_rank)
