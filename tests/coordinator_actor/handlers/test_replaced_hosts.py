"""A host that Ray has replaced, or whose node is dead, owns nothing any more, whichever process speaks first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from backends.conf import StateStoreConf
from coordinator_actor.coordinator import Coordinator
from coordinator_actor.coordinator_conf import CoordinatorConf
from coordinator_actor.exceptions import ReplacedHostError
from coordinator_actor.messages import HostInfo, HostReport
from spark_bridge.host.host import Host
from tests.coordinator_actor.coordinator_world import World


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def coordinator(world: World, dead: set[str]) -> Coordinator:
    return Coordinator(
        lambda: world.now, world.storage, CoordinatorConf(report_timeout=0.0), dead_nodes=lambda: frozenset(dead)
    )


def owners(c: Coordinator) -> set[str]:
    return {owner.incarnation for owner in c.locate("op").owners}


def restarted(world: World, times: int) -> HostInfo:
    return msgspec.structs.replace(world.host(0, f"incarnation{times}"), restart=times)


def made(world: World, c: Coordinator, info: HostInfo) -> Host:
    port: Any = c
    conf = StateStoreConf(provider="file", fsync=False)
    host = Host(info, port, world.root / info.incarnation, conf=conf, open_storage=world.storage)
    host.register()
    return host


def test_a_replaced_host_learns_from_its_heartbeat_that_it_must_end(world: World) -> None:
    c = coordinator(world, set())
    old = made(world, c, restarted(world, 0))
    c.register_query(world.registration())
    assert owners(c) == {"incarnation0"}
    new = made(world, c, restarted(world, 1))
    for _ in range(3):  # the old one speaks first, each time
        old.heartbeat()
        new.heartbeat()
        assert owners(c) == {"incarnation1"}
    assert new.replaced is None
    assert old.replaced is not None
    assert "was replaced by incarnation incarnation1" in old.replaced
    old.close()
    new.close()


def test_a_host_on_a_dead_node_ends_though_no_other_takes_its_place(world: World) -> None:
    dead: set[str] = set()
    c = coordinator(world, dead)
    lost, other = world.host(0), world.host(1)
    for info in (lost, other):
        c.register_host(info, HostReport())
    c.register_query(world.registration(n=4))
    assert {o.host_id for o in c.locate("op").owners} == {"h0", "h1"}
    dead.add(lost.node_id)
    c.expire()  # long before its lease is over
    assert {o.host_id for o in c.locate("op").owners} == {"h1"}
    assert not c.heartbeat_host("h0", "a").known
    with pytest.raises(ReplacedHostError, match=r"Node node0 of host h0 .* declared dead"):
        c.register_host(lost, HostReport())
    assert {o.host_id for o in c.locate("op").owners} == {"h1"}
