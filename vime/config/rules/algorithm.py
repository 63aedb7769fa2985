"""What an estimator needs, and terms of the loss that exclude each other."""

from __future__ import annotations

from collections.abc import Iterator

from vime.algorithms import advantages
from vime.config.config import Config
from vime.config.rules.base import Violation


def one_kl(config: Config) -> Iterator[Violation]:
    algorithm = config.algorithm
    if algorithm.kl_coef and algorithm.kl_loss_coef:
        yield Violation(
            f"--kl-coef {algorithm.kl_coef:g} (in the reward) and --kl-loss-coef {algorithm.kl_loss_coef:g} "
            "(in the loss) exclude each other"
        )


def kl_in_the_reward(config: Config) -> Iterator[Violation]:
    algorithm = config.algorithm
    if algorithm.kl_coef and not algorithm.estimator.takes_kl:
        able = [name for name in advantages.names() if advantages.get(name).takes_kl]
        yield Violation(
            f"--kl-coef {algorithm.kl_coef:g} has no place in the rewards of {algorithm.advantage_estimator}: use "
            f"--use-kl-loss with --kl-loss-coef, or --advantage-estimator {', '.join(able)}",
            ("advantage_estimator",),
        )


def whitening(config: Config) -> Iterator[Violation]:
    algorithm = config.algorithm
    if algorithm.estimator.needs_whitening and not algorithm.normalize_advantages:
        yield Violation(
            f"--advantage-estimator {algorithm.advantage_estimator} needs --normalize-advantages: its advantages have "
            "no scale of their own",
            ("advantage_estimator",),
        )


RULES = (one_kl, kl_in_the_reward, whitening)
