"""A host reports the keys after a commit only once it has applied the changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from backends import fault_points
from tests.coordinator_actor.coordinator_world import World
from tests.spark_bridge.host.host_steps import make_host, plan_spark, reg, run_task


def test_a_version_that_is_shown_has_its_keys_only_when_it_is_applied(tmp_path: Path) -> None:
    world = World(tmp_path)
    c = world.coordinator(0)
    host = make_host(world, c, 0, tmp_path)
    assert c.register_query(reg(world, n=1)).refusal is None
    plan_spark(world, 0)
    run_task([host], 0)
    (instance,) = host.cache.all()
    during: list[dict[str, Any]] = []

    def reached(point: str) -> None:
        if point == "apply":
            during.append(instance.describe())

    world.commit_spark(0)
    c.batch_committed("run1", 0)
    fault_points.set_hook(reached)
    try:
        host.heartbeat()
    finally:
        fault_points.set_hook(None)
    (seen,) = during
    assert (seen["version"], seen["keys"]) == (1, 0) and "keys" not in seen["commits"][1]
    assert instance.describe()["commits"][1]["keys"] == instance.describe()["keys"] == 1
