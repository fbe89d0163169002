"""``python -m tests.simulation --seed 17``: run one seed again; ``--seeds 1000:2000`` or ``--steps 1000000``: search.

``--fresh`` begins the search at a seed that is drawn anew.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from itertools import count

from tests.simulation.world import run

TELL_SECONDS = 30.0
"""How often a search says how far it is."""


def main() -> int:
    """Run what was asked for; 1 if a seed failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="run this one alone")
    parser.add_argument("--seeds", help="first:last, the last not included")
    parser.add_argument("--steps", type=int, help="go on with new seeds until so many steps are done")
    parser.add_argument("--fresh", action="store_true", help="begin with a seed that is drawn anew")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at the first seed that fails")
    given = parser.parse_args()
    begin = secrets.randbelow(10**9) if given.fresh else given.seed or 0
    first, _, last = (given.seeds or f"{begin}:").partition(":")
    seeds = range(int(first), int(last)) if last else count(int(first)) if given.steps else [int(first)]
    started, steps, failed, done = time.perf_counter(), 0, [], 0
    told = started
    for seed in seeds:
        result = run(seed)
        steps, done = steps + result.steps, done + 1
        if result.failure is not None:
            failed.append(seed)
            print(result, flush=True)
            if not given.keep_going:
                break
        elif given.seed is not None and not given.steps:
            print(result)
        if (now := time.perf_counter()) > told + TELL_SECONDS:
            told = now
            print(f"{done} seeds, {steps} steps so far; failed: {failed or 'none'}", flush=True)
        if given.steps and steps >= given.steps:
            break
    seconds = time.perf_counter() - started
    print(f"{done} seeds from {first} on, {steps} steps in {seconds:.1f} s; failed: {failed or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
