"""The thread that ends leases goes on, whatever fails in it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from coordinator_actor.coordinator import Coordinator
from coordinator_actor.coordinator_conf import CoordinatorConf
from coordinator_actor.messages import HostReport
from coordinator_actor.threads.lease_watch import LeaseWatch
from tests.coordinator_actor.coordinator_world import World


class LookedEnoughError(BaseException):
    """Ends the thread of a test."""


def watched(world: World, c: Coordinator, publish: Callable[[int, int], None], looks: int) -> list[float]:
    """Look at the leases so many times; return the times, in seconds, at which the process was to end."""
    ends: list[float] = []
    left = looks

    def sleep(seconds: float) -> None:
        nonlocal left
        if left == 0:
            raise LookedEnoughError
        left -= 1
        world.now += seconds

    with pytest.raises(LookedEnoughError):
        LeaseWatch(c, publish, lambda: ends.append(world.now), clock=lambda: world.now, sleep=sleep).run()
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

    assert watched(world, c, publish, 9) == [1009.0]
    assert told == [(1, 1)] * 3 + [(0, 1)] * 2 + [(0, 0)] * 4
    errors = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert len(errors) == 9 and all("the agent for metrics is gone" in str(r.exc_info) for r in errors)


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
