"""``python -m tests.simulation SEED|FIRST:STOP [--trace]``: runs seeds, and tells what is wrong with them."""

from __future__ import annotations

import argparse
import logging
import sys

from tests.simulation.check import check
from tests.simulation.run import simulate
from tests.simulation.scenario import scenario_of


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("seeds", metavar="SEED", help="one seed, or FIRST:STOP")
    parser.add_argument("--trace", action="store_true", help="tell what happened, event by event")
    given = parser.parse_args()
    logging.disable(logging.WARNING)  # what the orchestration says of faults; the trace tells of them too
    first, colon, stop = given.seeds.partition(":")
    failed = 0
    for seed in range(int(first), int(stop) if colon else int(first) + 1):
        if given.trace:
            print(scenario_of(seed))
            for event in simulate(scenario_of(seed)).trace:
                print(event)
        found = check(seed)
        failed += found is not None
        if found is not None or not colon:
            print(found or f"seed {seed}: all is well")
    if colon:
        print(f"{failed} of these seeds failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
