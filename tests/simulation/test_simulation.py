"""A fixed set of seeds of the simulation, and that runs repeat exactly. ``test_planted_faults.py`` tests what it finds.

More seeds: ``python -m tests.simulation --for 10m``.

The pace, second requests and repeats of the real storage, under the scheduler: it fails only as it promises.
"""

from __future__ import annotations

from collections import Counter
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from tests.effort import effort, only_thorough
from tests.simulation.requests import Service, readers, rivals
from tests.simulation.scheduler import Violation
from tests.simulation.searches import WORLDS, fresh, in_which_plans_run_again, keep, kept, search
from tests.simulation.sometimes import MUST_BE_REACHED, never_reached, sometimes, told
from tests.simulation.world import Result, run

SEEDS = range(8)
"""A usual run tries a few of them: the seeds that show the most planted faults for the least work."""


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


@pytest.mark.parametrize("seed", effort([4, 8], SEEDS))
def test_a_world_in_which_plans_run_again_keeps_the_rules(seed: int) -> None:
    check(run(seed, prepare=in_which_plans_run_again))


@pytest.mark.parametrize(
    ("seed", "world"), [(7, "as-it-is"), *(only_thorough(*one) for one in kept() if one != (7, "as-it-is"))]
)
def test_a_seed_that_failed_once_passes_now(seed: int, world: str) -> None:
    check(run(seed, prepare=WORLDS[world]))


def test_a_search_records_failing_seeds_with_their_worlds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Violation("a rule is broken")

    def failing(seed: int, **given: Any) -> Result:
        return Result(seed, 10, 1, 1.0, broken if seed % 2 else None, [], 0, Counter({"files are exchanged": 1}))

    monkeypatch.setattr("tests.simulation.searches.run", failing)
    said: list[str] = []
    found = search(zip(range(5), cycle(("as-it-is",))), keep_going=True, say=said.append)
    assert found.failed == [(1, "as-it-is"), (3, "as-it-is")] and found.steps == 50 and len(said) == 2
    keep(found.failed, tmp_path / "found.txt")
    keep([*found.failed, (9, "on-failing-storage")], tmp_path / "found.txt")
    assert kept(tmp_path / "found.txt") == [(1, "as-it-is"), (3, "as-it-is"), (9, "on-failing-storage")]
    assert len(search(fresh(0), steps=25).failed) == 1, "a search ends at the first failure, unless it is to continue"


def test_a_search_names_the_situations_that_it_never_reached() -> None:
    reached = Counter(name for names in MUST_BE_REACHED.values() for name in names)
    assert never_reached(reached) == []
    del reached["files are exchanged"]
    assert never_reached(reached) == ["files are exchanged"]
    assert any(line.split() == ["0", "forgetting:", "files", "are", "exchanged"] for line in told(reached))
    with pytest.raises(KeyError, match="not declared"):
        sometimes("something else")


REQUEST_SEEDS = effort((0, 2), range(300))


def test_of_rivals_one_creates_a_file_whatever_the_service_does() -> None:
    seen: Counter[str] = Counter()
    for seed in REQUEST_SEEDS:
        seen += rivals(seed)
    assert seen["refused"] > 0 and seen["get"] > 0


@pytest.mark.parametrize("seed", effort([0], range(20)))
def test_a_service_that_refuses_is_asked_at_about_the_rate_that_it_takes(seed: int) -> None:
    service = Service(limit=200)
    world = readers(seed, service, threads=40, each=60)
    assert world.done == 40 * 60
    assert service.seen["refused"] <= 0.1 * service.seen["get"], service.seen
    assert world.done / world.scheduler.now >= 100, "far fewer requests than the service takes"


@pytest.mark.parametrize("seed", effort([0], range(20)))
def test_late_requests_are_made_twice_and_few_others(seed: int) -> None:
    service = Service(late=0.01)
    world = readers(seed, service, threads=4, each=250)
    assert world.longest < 0.5, "a call waited for a late answer"
    assert world.done < service.seen["get"] <= world.done * 1.05 + 8
