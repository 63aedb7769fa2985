"""Seed → a run: its flags, as a user would give them, and what goes wrong in its world."""

from __future__ import annotations

from dataclasses import dataclass, replace

from vime.types import derive_seed


@dataclass(frozen=True, kw_only=True)
class Faults:
    """Probabilities, each of one request, grading or call, unless it says otherwise."""

    stragglers: float = 0.0
    graders_slow: float = 0.0
    graders_hang: float = 0.0
    graders_fail: float = 0.0
    driver_crashes: int = 0  # in a run
    # what only a run with --use-fault-tolerance survives
    refused: float = 0.0
    lost_replies: float = 0.0
    control_fails: float = 0.0
    engine_deaths: float = 0.0  # of one engine process
    outage: float = 0.0  # of all engines at once, in one life of the driver
    starts_fail: float = 0.0
    not_taken: float = 0.0  # of an engine that was restarted, by the router
    router_death: float = 0.0  # in one life of the driver


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One run."""

    seed: int
    features: tuple[str, ...]
    flags: tuple[str, ...]  # beside those that every run has
    engines: int
    prompts: int
    rollouts: int
    faults: Faults
    max_staleness: int | None  # trainings between sampling and training of a token; None: no bound

    @property
    def repeats_exactly(self) -> bool:
        """Whether it gives bit for bit what ``plain`` gives. What runs ahead must not choose its groups by when they
        are finished: a checkpoint has those in flight as they were when they started. And which engine is there when
        differs from life to life, so that groups must be taken in order."""
        has = set(self.features)
        if "async" in has:
            return False
        if "in order" in has:
            return True
        faults = self.faults
        timely = not (faults.engine_deaths or faults.outage or faults.control_fails or faults.router_death)
        return timely and ("sync" in has or not {"dynamic", "over-sampling"} & has)

    def plain(self) -> Scenario:
        """The same run in a world where the driver does not crash and nothing runs ahead; where groups are taken in
        order, nothing happens to engines and answers either."""
        flags = tuple(word for word in self.flags if word != "--asynchronous")
        of_graders = {name: getattr(self.faults, name) for name in ("graders_slow", "graders_hang", "graders_fail")}
        calm = Faults(**of_graders) if "in order" in self.features else replace(self.faults, driver_crashes=0)
        return replace(self, flags=flags, faults=calm)

    @property
    def is_plain(self) -> bool:
        return self == self.plain()


class _Dice:
    """Draws for one seed; each draw has a name and does not depend on the others."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def fraction(self, what: str) -> float:
        return derive_seed("scenario", self._seed, what) / 2**31

    def between(self, low: int, high: int, what: str) -> int:
        return low + derive_seed("scenario", self._seed, what) % (high - low + 1)

    def rate(self, what: str, most: float) -> float:
        """0 in half of the runs."""
        return max(0.0, 2 * self.fraction(what) - 1) * most


FEATURES = (
    *("sync", "async", "async without staleness", "fully async"),
    *("wait", "drop", "mask"),
    *("shuffled", "dynamic", "over-sampling", "partial", "masked", "in order", "buffer filter"),
    *("evaluation", "episodes", "shared devices", "critic", "broadcast", "fault tolerant"),
)
"""What runs have, or have not."""


def scenario_of(seed: int) -> Scenario:
    """The run of a seed."""
    dice = _Dice(seed)
    batch = dice.between(2, 4, "batch")
    features: list[str] = []
    flags = [
        f"--rollout-batch-size {batch} --n-samples-per-prompt {dice.between(2, 3, 'group')}",
        f"--rollout-max-response-len {dice.between(8, 32, 'length')} --save-interval {dice.between(1, 3, 'save')}",
    ]

    def choose(feature: str, probability: float, words: str) -> bool:
        chosen = dice.fraction(feature) < probability
        if chosen:
            features.append(feature)
            flags.append(words)
        return chosen

    choose("shuffled", 0.5, "--rollout-shuffle")
    choose("evaluation", 0.4, f"--eval-interval {dice.between(1, 3, 'eval')} --n-samples-per-eval-prompt 2")
    choose("episodes", 0.3, "--custom-generate-function-path tests.simulation.episodes.play")
    choose("dynamic", 0.5, f"--dynamic-sampling-filter-path {FILTER}")
    choose("buffer filter", 0.2, "--buffer-filter-path examples.plugins.filters:longest_first")
    staleness = _loop(seed, dice, features, flags)
    if "async" not in features or not choose("fully async", 0.5, "--fully-async"):
        choose("over-sampling", 0.7, f"--over-sampling-batch-size {batch + dice.between(1, 3, 'over')}")
    if "async" not in features and not choose("in order", 0.3, "--deterministic-rollout"):
        partial = choose("partial", 0.6, "--partial-rollout")
        if partial:
            choose("masked", 0.4, "--mask-offpolicy-in-partial-rollout")
    if "sync" not in features or not choose("shared devices", 0.4, ""):
        choose("critic", 0.2, "")
    if not {"shared devices", "in order"} & set(features):
        choose("broadcast", 0.4, "--update-weight-transport nccl")
    tolerant = choose("fault tolerant", 0.5, "--use-fault-tolerance")
    return Scenario(
        seed=seed,
        features=tuple(features),
        flags=tuple(" ".join(flags).split()),
        engines=dice.between(1, 3, "engines"),
        prompts=dice.between(6, 30, "prompts"),
        rollouts=dice.between(3, 4, "rollouts"),
        max_staleness=staleness,
        faults=Faults(
            stragglers=dice.rate("stragglers", 0.15),
            graders_slow=dice.rate("graders slow", 0.1),
            graders_hang=dice.rate("graders hang", 0.04),
            graders_fail=dice.rate("graders fail", 0.1),
            driver_crashes=max(0, dice.between(-1, 2, "crashes")),
            refused=dice.rate("refused", 0.1) * tolerant,
            lost_replies=dice.rate("lost replies", 0.02) * tolerant,
            control_fails=dice.rate("control fails", 0.03) * tolerant,
            engine_deaths=dice.rate("engine deaths", 1.0) * tolerant,
            outage=dice.rate("outage", 1.0) * tolerant,
            starts_fail=dice.rate("starts fail", 0.3) * tolerant,
            not_taken=dice.rate("not taken", 0.5) * tolerant,
            router_death=dice.rate("router death", 1.0) * tolerant,
        ),
    )


FILTER = "vime.rollout.filters.check_reward_nonzero_std"


def _loop(seed: int, dice: _Dice, features: list[str], flags: list[str]) -> int | None:
    """Neighbouring seeds have different loops. Returns how stale a trained token may be: where nothing runs ahead,
    groups that a rollout did not need may wait for as long as it takes, unless a policy says otherwise."""
    kind = ("sync", "async", "async without staleness")[seed % 3]
    policy = ("wait", "wait", "drop", "mask")[dice.between(0, 3, "policy")]
    features += [kind, policy]
    flags.append(f"--staleness-policy {policy}")
    if kind == "async":
        staleness = dice.between(1, 3, "staleness")
        flags.append(f"--asynchronous --max-staleness {staleness}")
        flags.append(f"--update-weights-interval {dice.between(1, staleness + 1, 'interval')}")
        return staleness
    if kind == "async without staleness":
        flags.append("--asynchronous --max-staleness 0")
    return None if policy == "wait" else 0
