"""rollout_batch_size x n_samples_per_prompt = global_batch_size x num_steps_per_rollout, and its spread over ranks."""

from __future__ import annotations

from collections.abc import Iterator

from vime.config.config import Config
from vime.config.rules.base import Violation, known

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
    world, model = config.cluster.train_world_size, config.parallel.model_parallel_size
    size, micro = config.batch.global_batch_size, config.batch.micro_batch_size
    if world < 1 or model < 1 or world % model or not known(size) or size < 1 or micro < 1:
        return
    ranks = world // model
    if config.batch.use_dynamic_batch_size:
        if size % ranks:
            yield Violation(
                f"--global-batch-size {size} must be a multiple of the {ranks} data-parallel ranks "
                f"({world} training slots / {model})",
                ABOUT,
            )
    elif size % (micro * ranks):
        yield Violation(
            f"--global-batch-size {size} must be a multiple of --micro-batch-size {micro} x {ranks} data-parallel "
            f"ranks = {micro * ranks}; or pack by --use-dynamic-batch-size",
            (*ABOUT, "micro_batch_size"),
        )


RULES = (whole_steps, share_of_each_rank)
