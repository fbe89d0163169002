"""``python -m tests.simulation --seed 17``: run one seed again; ``--seeds 1000:2000`` or ``--steps 1000000``: search.

``--for 1h`` searches fresh seeds in all worlds, and adds each that fails to ``found.txt``, which the suite runs.
``--fresh`` begins a search at a random seed. A search also fails if it never reached one of the situations that
``sometimes.py`` declares, unless it was too short for that.
"""

from __future__ import annotations

import argparse
import re
import secrets
import sys
import time
from itertools import count

from tests.simulation.searches import WORLDS, fresh, keep, search
from tests.simulation.sometimes import never_reached, told
from tests.simulation.world import run

ENOUGH_SEEDS = 400
"""So many seeds of all worlds come to everything that ``sometimes.py`` declares."""
UNITS = {"": 1, "s": 1, "m": 60, "h": 3600}


def duration(text: str) -> float:
    """Read ``90``, ``90s``, ``10m`` or ``1h``."""
    match = re.fullmatch(r"(\d+)([smh]?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration: give seconds, or a number with s, m or h.")
    return float(int(match[1]) * UNITS[match[2]])


def main() -> int:
    """Run the seed or the search; return 1 if a seed failed, or a long search has left something out."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="run this one alone")
    parser.add_argument("--seeds", help="first:last, the last not included")
    parser.add_argument("--world", choices=WORLDS, default="as-it-is", help="run or search in this world")
    parser.add_argument("--steps", type=int, help="try new seeds until this many steps are done")
    parser.add_argument("--for", dest="seconds", type=duration, help="search fresh seeds for so long: 90s, 10m, 1h")
    parser.add_argument("--fresh", action="store_true", help="begin with a random seed")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at the first seed that fails")
    given = parser.parse_args()
    if given.seed is not None and not (given.steps or given.seconds):
        result = run(given.seed, prepare=WORLDS[given.world])
        print(result)
        return 0 if result.failure is None else 1
    first = secrets.randbelow(10**9) if given.fresh or given.seconds else given.seed or 0
    if given.seconds:
        worlds = fresh(first)
    else:
        begin, _, end = (given.seeds or f"{first}:").partition(":")
        first = int(begin)
        worlds = ((seed, given.world) for seed in (range(first, int(end)) if end else count(first)))
    started = time.perf_counter()
    found = search(
        worlds,
        seconds=given.seconds,
        steps=given.steps,
        keep_going=given.keep_going or bool(given.seconds),
        say=lambda text: print(text, flush=True),
    )
    print("\n".join(told(found.reached)))
    seconds = time.perf_counter() - started
    print(
        f"{found.seeds} seeds from {first} on, {found.steps} steps in {seconds:.1f} s; failed: {found.failed or 'none'}"
    )
    if given.seconds:
        keep(found.failed)
    missed = never_reached(found.reached) if given.seconds and found.seeds >= ENOUGH_SEEDS else []
    if missed:
        print(f"Never reached, so that nothing shows whether it is right: {'; '.join(missed)}")
    return 1 if found.failed or missed else 0


if __name__ == "__main__":
    sys.exit(main())
