"""How often a host registers again, when the coordinator was restarted and does not know something."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from coordinator_actor.coordinator import Coordinator
from coordinator_actor.coordinator_conf import CoordinatorConf
from coordinator_actor.exceptions import UnknownRunError
from spark_bridge.host.registration import REGISTER_SECONDS
from tests.coordinator_actor.coordinator_world import World
from tests.spark_bridge.host.host_steps import make_host, plan_spark, reg, run_task


def test_readers_register_a_host_once_a_second_however_many_ask(tmp_path: Path) -> None:
    """The owner of a partition has not reported yet, so the location of the partition is unknown."""
    world = World(tmp_path)
    now = 0.0
    c = world.coordinator(0)
    hosts = [make_host(world, c, i, tmp_path, clock=lambda: now) for i in (0, 1)]
    assert c.register_query(reg(world)).refusal is None
    plan_spark(world, 0)
    owners = [run_task(hosts, 0, p)[0] for p in (0, 1)]
    assert owners[0] is not owners[1]
    world.commit_spark(0)
    c.batch_committed("run1", 0)
    host = owners[0]
    sent: Counter[str] = Counter()
    for message in ("register_host", "open_for_read"):
        host.port.before[message] = lambda *_, message=message: sent.update([message])
    host.port.c = Coordinator(lambda: world.now, world.storage, CoordinatorConf(report_timeout=5.0))
    for seconds in (0.0, 0.5, 1.0, 1.5, 2.0):
        now = seconds * REGISTER_SECONDS
        for _ in range(20):
            with pytest.raises(UnknownRunError, match="is not known yet"):
                host.grants.for_read("run1", "op", 1)
    assert sent["open_for_read"] >= 100 and sent["register_host"] == 3
    assert host.grants.for_read("run1", "op", 0).owner == host.info, "it has reported what it holds itself"
    owners[1].port.c = host.port.c
    owners[1].heartbeat()
    found: Any = host.grants.for_read("run1", "op", 1)
    assert found.owner == owners[1].info
