"""The pace, second requests and repeats of the real storage, under the scheduler: it fails only as it promises."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.effort import effort
from tests.simulation.requests import Service, readers, rivals

SEEDS = effort((0, 2), range(300))


def test_of_rivals_one_creates_a_file_whatever_the_service_does() -> None:
    seen: Counter[str] = Counter()
    for seed in SEEDS:
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
