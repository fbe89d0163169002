"""A coordinator that was just started waits for what hosts report before it gives their partitions to others."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from coordinator_actor.coordinator import Coordinator
from coordinator_actor.coordinator_conf import CoordinatorConf
from coordinator_actor.exceptions import UnknownRunError
from coordinator_actor.messages import NOBODY, BatchGrant, HandOver, HostReport, OpenBatch, QueryRegistration
from spark_bridge.transport.protocol import TaskIdentity
from tests.coordinator_actor.coordinator_world import World, acknowledge
from tests.coordinator_actor.savepoints.savepoint_streams import Stream

HOSTS, PARTITIONS = 10, 100
SECONDS = 5.0


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def coordinator(world: World) -> Coordinator:
    return Coordinator(lambda: world.now, world.storage, CoordinatorConf(report_timeout=SECONDS))


def registration(world: World) -> QueryRegistration:
    return world.registration(n=PARTITIONS)


def opened(c: Coordinator, host: int, *waiting: int) -> BatchGrant:
    return c.open_batch(OpenBatch("run1", 0, f"h{host}", "a", waiting=tuple(("op", p) for p in waiting)))


def owners(grant: BatchGrant) -> list[str | None]:
    """Return the host of each partition, None for one without an owner."""
    return [None if i == NOBODY else grant.hosts[i].host_id for i in grant.owners["op"]]


def report(world: World, c: Coordinator, host: int, before: list[str | None]) -> None:
    """A host reports what it has held."""
    held = [p for p, owner in enumerate(before) if owner == f"h{host}"]
    c.register_host(
        world.host(host), HostReport((registration(world),), opened={"run1": 0}, held={"run1": {"op": held}})
    )


@pytest.fixture
def before(world: World) -> list[str | None]:
    """The owners before the restart. A query that is new has them at once, however young its coordinator is."""
    c = coordinator(world)
    for i in range(HOSTS):
        c.register_host(world.host(i), HostReport())
    assert c.register_query(registration(world)).refusal is None
    found = owners(opened(c, 0))
    assert Counter(found) == {f"h{i}": PARTITIONS // HOSTS for i in range(HOSTS)}
    return found


def test_no_owner_moves_though_one_host_reports_before_the_others(world: World, before: list[str | None]) -> None:
    c = coordinator(world)
    for i in range(HOSTS):
        report(world, c, i, before)
        reported = {f"h{j}" for j in range(i + 1)}
        assert owners(opened(c, 0)) == [owner if owner in reported else None for owner in before]
        world.now += SECONDS / HOSTS / 2
    world.now += SECONDS
    assert owners(opened(c, 0)) == before
    assert [o.host_id for o in c.locate("op").owners] == before


def test_a_partition_that_a_task_waits_for_is_given_away_and_no_other(world: World, before: list[str | None]) -> None:
    c = coordinator(world)
    report(world, c, 0, before)
    waits = [p for p in range(PARTITIONS) if before[p] != "h0"][:2]
    expected = [owner if owner == "h0" or p in waits else None for p, owner in enumerate(before)]
    found = owners(opened(c, 0, *waits, 999))
    assert found == [None if owner is None else "h0" for owner in expected]
    report(world, c, 1, before)
    # What was given away stays where it is; the rest of the host that has come is its own.
    both = zip(found, before, strict=True)
    after = owners(opened(c, 1))
    assert after == [f if f is not None else "h1" if owner == "h1" else None for f, owner in both]


def test_unreported_partitions_are_assigned_when_the_time_is_over(world: World, before: list[str | None]) -> None:
    c = coordinator(world)
    for i in range(2):
        report(world, c, i, before)
    opened(c, 0)
    world.now += SECONDS - 0.001
    for ask in (lambda: c.locate("op"), lambda: c.get_kv_state_location_oracle("q")):
        with pytest.raises(UnknownRunError, match="hosts still report what they hold"):
            ask()
    held = [p for p in range(PARTITIONS) if before[p] == "h0"]
    assert c.open_for_read("run1", "op", held[0]).owner.host_id == "h0"
    assert c.verify_instances("h0", "a", ["run1"]) == {}, "no order to unload yet"
    world.now += 0.001
    after = owners(opened(c, 0))
    assert Counter(after) == {"h0": PARTITIONS // 2, "h1": PARTITIONS // 2}
    assert [a for a, b in zip(after, before, strict=True) if b in ("h0", "h1")] == [
        b for b in before if b in ("h0", "h1")
    ]
    assert len(c.verify_instances("h0", "a", ["run1"])["run1"]["op"]) == PARTITIONS // 2


def test_copies_own_the_partitions_of_a_host_that_was_lost_with_the_coordinator(
    world: World, before: list[str | None]
) -> None:
    """``h9`` does not report: its copies are on ``h3``, an older one of the first partition on ``h4`` too."""
    c = coordinator(world)
    for i in range(HOSTS - 1):
        report(world, c, i, before)
    lost = [p for p, owner in enumerate(before) if owner == "h9"]
    newest = dict.fromkeys(lost, 1)
    c.heartbeat_host("h3", "a", {"run1": 0}, HandOver(1, warm={"run1": {"op": newest}}))
    c.heartbeat_host("h4", "a", {"run1": 0}, HandOver(1, warm={"run1": {"op": {lost[0]: 0}}}))
    reported = [None if owner == "h9" else owner for owner in before]
    assert owners(opened(c, 0)) == reported, "h9 may still report"
    waiting = ["h3" if p == lost[1] else owner for p, owner in enumerate(reported)]
    assert owners(opened(c, 0, lost[1])) == waiting
    world.now += SECONDS
    assert owners(opened(c, 0)) == [owner or "h3" for owner in reported]
    new = c.registries.runs.by_id["run1"].assignment.new_owners.of_host
    assert set(new["h3"]) == {("op", p) for p in lost}, "the copies follow to the completed version"


def test_copies_own_partitions_if_the_first_question_comes_after_all_reports(
    world: World, before: list[str | None]
) -> None:
    c = coordinator(world)
    for i in range(HOSTS - 1):
        report(world, c, i, before)
    lost = [p for p, owner in enumerate(before) if owner == "h9"]
    c.heartbeat_host("h3", "a", {"run1": 0}, HandOver(1, warm={"run1": {"op": dict.fromkeys(lost, 1)}}))
    world.now += SECONDS
    assert owners(opened(c, 0)) == ["h3" if owner == "h9" else owner for owner in before]


def test_time_in_which_the_coordinator_stalled_does_not_count_as_time_to_report(
    world: World, before: list[str | None]
) -> None:
    c = coordinator(world)
    report(world, c, 0, before)
    world.now += 60
    c.expire(60.0)
    assert set(owners(opened(c, 0))) == {"h0", None}
    world.now += SECONDS
    assert set(owners(opened(c, 0))) == {"h0"}


def test_a_host_that_acknowledges_a_partition_without_an_owner_owns_it(world: World, before: list[str | None]) -> None:
    c = coordinator(world)
    report(world, c, 0, before)
    opened(c, 0)
    c.register_host(world.host(1), HostReport())
    mine = before.index("h1")
    grant = c.open_for_read("run1", "op", before.index("h0"))
    message = world.stage(msgspec.structs.replace(grant, owner=world.host(1)), mine, 0, "t")
    assert acknowledge(c, message).manifest_id is None
    assert [p for p, owner in enumerate(owners(opened(c, 1))) if owner == "h1"] == [mine]


def test_a_hosts_task_is_given_an_owner_while_other_hosts_have_yet_to_report(
    stream: Callable[..., Stream],
) -> None:
    s = stream(1, n=8, conf=CoordinatorConf(report_timeout=SECONDS))
    was = [s.c.open_for_read("run1", "op", p).owner.host_id for p in range(8)]
    assert set(was) == {"h0", "h1"}
    s.c = s.coordinator()
    first = s.hosts[0]
    first.coordinator.c = s.c
    first.heartbeat()
    far = [p for p in range(8) if was[p] == "h1"]

    def owner(p: int) -> str:
        task = TaskIdentity("run1", "op", p, 1, uuid.uuid4().hex, uuid.uuid4().hex)
        return str(first.grants.for_task(task).owner.host_id)

    assert owner(was.index("h0")) == "h0"
    assert owner(far[0]) == "h0"
    s.hosts[1].coordinator.c = s.c
    s.hosts[1].heartbeat()
    s.world.now += 2.0  # the host asks again
    assert [owner(p) for p in far] == ["h0", *["h1"] * (len(far) - 1)]
