"""One seed → None, or one line that says what is wrong and how to see it again."""

from __future__ import annotations

from tests.simulation.invariants import differences, violations
from tests.simulation.run import Driver, simulate
from tests.simulation.scenario import scenario_of


def check(seed: int, driver: type[Driver] = Driver) -> str | None:
    scenario = scenario_of(seed)
    outcome = simulate(scenario, driver)
    found = violations(outcome)
    if not found and scenario.repeats_exactly and not scenario.is_plain:
        found = differences(outcome, simulate(scenario.plain(), driver))
    if not found:
        return None
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return f"seed {seed} ({', '.join(scenario.features)}): {found[0]}{more}; python -m tests.simulation {seed} --trace"
