"""The loop that ends leases continues after any failure in it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from coordinator_actor.coordinator import Coordinator, LeaseWatch
from coordinator_actor.coordinator_conf import CoordinatorConf
from coordinator_actor.messages import HostReport
from tests.coordinator_actor.coordinator_world import World


def watched(world: World, c: Coordinator, publish: Callable[[int, int], None], looks: int) -> list[float]:
    """Look at the leases so many times; return the times, in seconds, at which the process was asked to end."""
    ends: list[float] = []
    loop = LeaseWatch(c, publish, lambda: ends.append(world.now), clock=lambda: world.now).loop()
    for _ in range(looks):
        world.now += 1
        loop.run_once()
    loop.close()
    return ends


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def coordinator(world: World) -> Coordinator:
    conf = CoordinatorConf(report_timeout=0.0, host_timeout=3.5, driver_timeout=5.5, idle_timeout=8.5)
    c = Coordinator(lambda: world.now, world.storage, conf)
    c.register_host(world.host(0), HostReport())
    assert c.register_query(world.registration()).refusal is None
    return c


def test_leases_end_and_the_coordinator_too_though_no_metric_can_be_published(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    c = coordinator(world)
    world.open(c, 0)
    told = []

    def publish(hosts: int, queries: int) -> None:
        told.append((hosts, queries))
        raise OSError("the agent for metrics is gone")

    ends = watched(world, c, publish, 9)
    assert ends == [1009.0]
    assert told == [(1, 1)] * 3 + [(0, 1)] * 2 + [(0, 0)] * 4
    warnings = [r for r in caplog.records if r.levelno == logging.WARNING and "background loop" in r.getMessage()]
    assert len(warnings) == 4, "the 1st failure, and the 2nd, 4th and 8th"
    assert "the agent for metrics is gone" in str(warnings[0].exc_info)


def test_a_look_that_fails_is_followed_by_another(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    c = coordinator(world)
    expire = c._hosts.expire

    def failing(now: float) -> None:
        if now == 1004:
            raise RuntimeError("dictionary changed size during iteration")
        expire(now)

    monkeypatch.setattr(c._hosts, "expire", failing)
    told: list[tuple[int, int]] = []
    watched(world, c, lambda *counts: told.append(counts), 5)
    assert told == [(1, 1)] * 4 + [(0, 1)]
    assert "dictionary changed size" in caplog.text
