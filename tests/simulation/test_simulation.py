"""A fixed set of seeds of the simulation, and that runs repeat exactly. ``test_planted_faults.py``: what it finds.

More seeds: ``python -m tests.simulation --steps 1000000``.
"""

from __future__ import annotations

import pytest

from tests.effort import effort, only_thorough
from tests.simulation.searches import in_which_plans_run_again
from tests.simulation.world import Result, run

SEEDS = range(8)
"""A usual run tries a few of them: those in which the most planted faults show for the least work."""


def check(result: Result) -> None:
    if result.failure is not None:
        pytest.fail(str(result), pytrace=False)


# A usual run sees in the world of test_a_world_in_which_plans_run_again what it would see here.
@pytest.mark.parametrize("seed", [only_thorough(seed) for seed in SEEDS])
def test_a_troubled_world_keeps_the_rules(seed: int) -> None:
    check(run(seed))


def test_a_hanging_storage_of_one_query_is_not_felt_by_another() -> None:
    for seed in effort([199], range(9, 200, 10)):
        check(run(seed))


@pytest.mark.thorough  # otherwise: test_a_world_in_which_plans_run_again_keeps_the_rules
@pytest.mark.long
@pytest.mark.parametrize("first", range(1000, 1100, 5))
def test_many_troubled_worlds_keep_the_rules(first: int) -> None:
    for seed in range(first, first + 5):
        check(run(seed))


def test_a_seed_gives_the_same_run_again() -> None:
    first, second = run(3, max_steps=1500, traced=True), run(3, max_steps=1500, traced=True)
    assert first.steps == 1500 and first.batches > 0
    assert (first.trace, first.batches, first.last_events) == (second.trace, second.batches, second.last_events)
    assert run(4, max_steps=1500, traced=True).trace != first.trace


@pytest.mark.parametrize("seed", effort([1, 4], SEEDS))
def test_a_world_in_which_plans_run_again_keeps_the_rules(seed: int) -> None:
    check(run(seed, prepare=in_which_plans_run_again))
