"""Seed → a run: its flags, as a user would give them, and what goes wrong in its world."""

from __future__ import annotations

from dataclasses import dataclass, replace

from vime.types import derive_seed


@dataclass(frozen=True, kw_only=True)
class Faults:
    """Probabilities, each of one request, grading or call, unless it says otherwise."""

    stragglers: float = 0.0
    refused: float = 0.0
    lost_replies: float = 0.0
    graders_slow: float = 0.0
    graders_hang: float = 0.0
    graders_fail: float = 0.0
    control_fails: float = 0.0
    engine_deaths: float = 0.0  # of one engine in one rollout
    driver_crashes: int = 0  # in a run


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One run."""

    seed: int
    mode: str
    flags: tuple[str, ...]  # beside those that every run has
    engines: int
    prompts: int
    rollouts: int
    faults: Faults
    max_staleness: int | None  # trainings between sampling and training of a token; None: no bound
    repeats_exactly: bool  # it gives bit for bit what ``plain`` gives

    def plain(self) -> Scenario:
        """The run that this one must equal where it ``repeats_exactly``: nothing crashes, nothing runs ahead."""
        flags = tuple(word for word in self.flags if word != "--asynchronous")
        return replace(self, flags=flags, faults=replace(self.faults, driver_crashes=0))


MODES = ("sync", "async", "async like sync")


def scenario_of(seed: int) -> Scenario:
    """The run of a seed. Neighbouring seeds have different modes."""

    def fraction(what: str) -> float:
        return derive_seed("scenario", seed, what) / 2**31

    def between(low: int, high: int, what: str) -> int:
        return low + derive_seed("scenario", seed, what) % (high - low + 1)

    def often(what: str, at_most: float) -> float:
        """Half of the runs do not have this fault at all."""
        return max(0.0, 2 * fraction(what) - 1) * at_most

    batch, group = between(2, 5, "batch"), between(2, 4, "group")
    flags = [f"--rollout-batch-size {batch} --n-samples-per-prompt {group}"]
    flags += [f"--rollout-max-response-len {between(8, 40, 'length')} --save-interval {between(1, 3, 'save')}"]
    if fraction("shuffle") < 0.5:
        flags += ["--rollout-shuffle"]
    mode, staleness = MODES[seed % len(MODES)], 0
    if mode == "async":
        staleness = between(1, 3, "staleness")
        flags += [f"--asynchronous --max-staleness {staleness}"]
        flags += [f"--update-weights-interval {between(1, staleness + 1, 'interval')}"]
    elif mode == "async like sync":
        flags += ["--asynchronous --max-staleness 0"]
    return Scenario(
        seed=seed,
        mode=mode,
        flags=tuple(" ".join(flags).split()),
        engines=between(1, 3, "engines"),
        prompts=between(6, 30, "prompts"),
        rollouts=between(3, 6, "rollouts"),
        max_staleness=staleness,
        repeats_exactly=mode != "async",
        faults=Faults(
            stragglers=often("stragglers", 0.2),
            graders_slow=often("graders slow", 0.2),
            graders_hang=often("graders hang", 0.1),
            graders_fail=often("graders fail", 0.1),
            driver_crashes=between(0, 2, "crashes"),
        ),
    )
