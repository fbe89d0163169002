"""A suspected host is given up once a connection shows that it is lost, and never because it is slow."""

from __future__ import annotations

import logging
import socket
import threading
import types
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from coordinator_actor.coordinator import Coordinator
from coordinator_actor.coordinator_conf import CoordinatorConf
from coordinator_actor.handlers import suspicions
from coordinator_actor.handlers.suspicions import Probed, probe_address
from coordinator_actor.messages import HandOver, HostInfo, HostReport
from tests.coordinator_actor.coordinator_world import World


class ProbedWorld(World):
    """Two hosts with a query, and what probes of them show. A silent machine takes all seconds of a probe."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.shows: dict[str, Probed] = {}
        self.probes: Counter[str] = Counter()
        self.timeouts: list[float] = []
        self.infos = [msgspec.structs.replace(self.host(i), query_address=f"127.0.0.1:7{i}") for i in range(2)]
        self.c = Coordinator(lambda: self.now, self.storage, CoordinatorConf(report_timeout=0.0), probe=self.probe)

    def begin(self) -> None:
        for info in self.infos:
            self.c.register_host(info, HostReport())
        self.c.register_query(self.registration(n=4))
        self.look()  # the coordinator has reached both hosts
        self.probes.clear()
        self.now += 1

    def probe(self, address: str, seconds: float) -> Probed:
        self.probes[address] += 1
        shown = self.shows.get(address, Probed.CONNECTED)
        if shown is Probed.SILENT:
            self.now += seconds
            self.timeouts.append(seconds)
        return shown

    def settle(self) -> None:
        """Wait until no host is being probed."""
        for thread in threading.enumerate():
            if thread.name == "statestore-probe":
                thread.join()

    def look(self) -> None:
        self.c.expire()
        self.settle()

    def suspect(self, info: HostInfo) -> None:
        self.c.suspect_host(info.address)
        self.settle()

    def beat(self, info: HostInfo) -> bool:
        return self.c.heartbeat_host(info.host_id, info.incarnation).known

    def owners(self) -> set[str]:
        return {owner.host_id for owner in self.c.locate("op").owners}

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ProbedWorld:
    made = ProbedWorld(tmp_path)
    monkeypatch.setattr(suspicions, "time", types.SimpleNamespace(monotonic=lambda: made.now, sleep=made.sleep))
    made.begin()
    return made


def test_a_host_that_refuses_is_lost_at_once(world: ProbedWorld, caplog: pytest.LogCaptureFixture) -> None:
    dead, other = world.infos
    assert world.beat(dead)
    world.shows[dead.address] = Probed.REFUSED
    world.suspect(dead)
    assert world.owners() == {other.host_id}
    assert not world.beat(dead)
    assert world.c.lost_hosts() == {"refused": 1, "silent": 0, "node_dead": 0, "no_heartbeat": 0}
    (record,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "Host h0 is lost" in record
    assert "(REFUSED)" in record
    assert "last heartbeat 0.0 s ago" in record


def copies(world: ProbedWorld, reported: dict[str, list[int]]) -> None:
    """The second host reports copies of partitions, by run."""
    other = world.infos[1]
    warm = {run: {"op": dict.fromkeys(partitions, 0)} for run, partitions in reported.items()}
    number = world.c.registries.hosts.leases[other.host_id].hand_over.number + 1
    world.c.heartbeat_host(other.host_id, other.incarnation, {}, HandOver(number, warm))


@pytest.mark.parametrize("standbys", [0, 1])
def test_a_host_that_refuses_and_owns_partitions_is_lost_at_once_only_if_there_are_copies(
    world: ProbedWorld, standbys: int
) -> None:
    """Else its next process, which Ray starts, finds the files of the partitions on its disk."""
    world.c.register_query(world.registration("run2", n=4, standby_replicas=standbys))
    dead, other = world.infos
    assert world.owners() == {dead.host_id, other.host_id}
    if standbys:
        copies(world, {"run2": owned_by(world, "run2", dead)})
    world.shows[dead.address] = Probed.REFUSED
    world.suspect(dead)
    assert world.owners() == ({other.host_id} if standbys else {dead.host_id, other.host_id})
    world.now += 11
    world.beat(other)
    world.look()
    assert world.owners() == {other.host_id}, "its lease is over"


def owned_by(world: ProbedWorld, run: str, info: HostInfo) -> list[int]:
    return [p for p in range(4) if world.open_owner(world.c, p, run) == info]


def test_a_host_that_refuses_is_lost_at_once_only_if_all_its_partitions_have_reported_copies(
    world: ProbedWorld,
) -> None:
    dead, _ = world.infos
    world.c.register_query(world.registration("run2", n=4, standby_replicas=1))
    other_query = {"query_id": "q2", "checkpoint_location": "ck2", "state_location": str(world.root / "ck2/statestore")}
    world.c.register_query(world.registration("run3", n=4, standby_replicas=1, **other_query))
    owned = {run: owned_by(world, run, dead) for run in ("run2", "run3")}
    assert all(len(partitions) == 2 for partitions in owned.values())
    world.shows[dead.address] = Probed.REFUSED
    incomplete = [{}, {"run2": owned["run2"]}, {**owned, "run3": owned["run3"][:1]}]
    for reported in incomplete:
        copies(world, reported)
        world.suspect(dead)
        assert dead.host_id in world.c.registries.hosts.leases, reported
        world.now += suspicions.PROBE_PAUSE_SECONDS
    copies(world, owned)
    world.suspect(dead)
    assert dead.host_id not in world.c.registries.hosts.leases


def test_a_query_without_standbys_keeps_the_lease_of_a_host_that_refuses(world: ProbedWorld) -> None:
    """Its partitions wait for the restarted process, even if another query has copies."""
    dead, _ = world.infos
    world.c.register_query(world.registration("run2", n=4, standby_replicas=1))
    other_query = {"query_id": "q2", "checkpoint_location": "ck2", "state_location": str(world.root / "ck2/statestore")}
    world.c.register_query(world.registration("run3", n=4, **other_query))
    assert owned_by(world, "run3", dead)
    copies(world, {"run2": owned_by(world, "run2", dead)})
    world.shows[dead.address] = Probed.REFUSED
    world.suspect(dead)
    assert dead.host_id in world.c.registries.hosts.leases


def test_a_client_reports_the_address_that_it_knows(world: ProbedWorld) -> None:
    dead, other = world.infos
    world.c.register_host(world.host(2), HostReport())  # no client can ask it
    world.look()
    world.probes.clear()
    world.now += 1
    world.shows[dead.address] = Probed.REFUSED
    world.c.suspect_host("10.9.9.9:1")  # of a host that is lost since
    world.c.suspect_host("")
    world.c.suspect_host(dead.query_address)
    world.settle()
    assert set(world.c.registries.hosts.leases) == {other.host_id, "h2"}
    assert set(world.probes) == {dead.address}


def test_a_suspended_process_keeps_its_lease(world: ProbedWorld) -> None:
    slow, other = world.infos
    began = world.now - 1
    while world.now < began + 10:
        world.beat(other)
        world.suspect(slow)
        world.look()
        assert world.owners() == {slow.host_id, other.host_id}, world.now - began
        world.now += 0.5
    assert world.probes[slow.address] > 10
    world.now += 0.5
    world.look()
    assert world.owners() == {other.host_id}
    assert world.c.lost_hosts()["no_heartbeat"] == 1


@pytest.mark.parametrize("suspected_after", [0.0, 1.0, 2.1, 2.6, 2.9, 3.0])
def test_a_silent_machine_is_superseded_after_four_seconds(world: ProbedWorld, suspected_after: float) -> None:
    """Whenever it was suspected: the coordinator looks at late hosts each second, and a probe takes as long."""
    silent, other = world.infos
    world.beat(silent)
    last = world.now
    world.shows[silent.address] = Probed.SILENT
    world.beat(other)
    world.now += suspected_after
    world.suspect(silent)
    assert world.owners() == {other.host_id}
    assert 4.0 <= world.now - last <= 4.5
    assert world.probes[silent.address] == suspicions.SILENT_PROBES
    assert world.timeouts[0] == suspicions.CONNECTION_SECONDS
    assert suspicions.LEAST_CONNECTION_SECONDS <= world.timeouts[1] <= suspicions.CONNECTION_SECONDS


def test_a_heartbeat_that_is_very_late_does_not_shorten_the_first_probe(world: ProbedWorld) -> None:
    silent, other = world.infos
    world.shows[silent.address] = Probed.SILENT
    world.now += 4
    world.beat(other)
    world.suspect(silent)
    assert world.owners() == {other.host_id}
    assert world.timeouts == [suspicions.CONNECTION_SECONDS, suspicions.LEAST_CONNECTION_SECONDS]
    assert world.c.lost_hosts()["silent"] == 1


def test_one_packet_that_is_lost_is_no_silence(world: ProbedWorld) -> None:
    one, _ = world.infos
    answers = [Probed.SILENT, Probed.CONNECTED]
    world.c._suspicions._probe = lambda address, seconds: answers.pop(0)
    world.now += 4
    world.suspect(one)
    assert answers == []
    assert one.host_id in world.c.registries.hosts.leases


def test_a_network_that_reports_a_machine_as_unreachable_at_once_does_not_shorten_the_time(world: ProbedWorld) -> None:
    gone, _ = world.infos
    world.beat(gone)
    last = world.now

    def unreachable(address: str, seconds: float) -> Probed:
        world.probes[address] += 1
        return Probed.SILENT

    world.c._suspicions._probe = unreachable
    world.suspect(gone)
    assert gone.host_id not in world.c.registries.hosts.leases
    assert 4.0 <= world.now - last <= 4.5
    assert world.probes[gone.address] <= 6


def test_reports_of_one_moment_cost_one_probe(world: ProbedWorld) -> None:
    one, _ = world.infos
    for _ in range(5):
        world.suspect(one)
    assert world.probes == {one.address: 1}
    world.now += suspicions.PROBE_PAUSE_SECONDS
    world.suspect(one)
    assert world.probes == {one.address: 2}


def test_a_host_that_registers_again_is_still_known_to_be_reachable(world: ProbedWorld) -> None:
    dead, other = world.infos
    world.c.register_host(dead, HostReport())
    world.shows[dead.address] = Probed.REFUSED
    world.suspect(dead)
    assert world.owners() == {other.host_id}


def test_a_late_heartbeat_is_a_suspicion(world: ProbedWorld) -> None:
    silent, other = world.infos
    world.shows[silent.address] = Probed.SILENT
    world.beat(silent)
    world.now += 1.9
    world.beat(other)
    world.look()
    assert not world.probes
    world.now += 0.2
    world.look()
    assert world.owners() == {other.host_id}


def test_heartbeats_of_an_unreachable_address_keep_the_lease(world: ProbedWorld) -> None:
    one, other = world.infos

    def silent(address: str, seconds: float) -> Probed:
        world.now += 1
        world.probes[address] += 1
        assert world.probes[address] <= 10, "each suspicion costs one probe"
        assert world.beat(one)  # arrives during the probe
        return Probed.SILENT

    world.c._suspicions._probe = silent
    for _ in range(10):
        world.suspect(one)
        world.beat(other)
        world.now += 0.5
    assert world.owners() == {one.host_id, other.host_id}


@pytest.mark.parametrize("shown", [Probed.REFUSED, Probed.SILENT])
def test_a_firewall_before_a_host_is_not_its_death(tmp_path: Path, world: ProbedWorld, shown: Probed) -> None:
    behind = msgspec.structs.replace(world.host(2), address="grpc://10.0.0.9:9")
    world.shows[behind.address] = shown
    world.c.register_host(behind, HostReport())
    for _ in range(8):
        world.suspect(behind)
        world.look()
        assert behind.host_id in world.c.registries.hosts.leases
        world.beat(world.infos[0])
        world.beat(world.infos[1])
        world.now += 0.1
    assert world.probes[behind.address]


def test_a_probe_that_cannot_be_tried_shows_nothing(world: ProbedWorld) -> None:
    world.shows[world.infos[0].address] = Probed.UNCLEAR
    world.now += 5
    world.suspect(world.infos[0])
    assert world.owners() == {"h0", "h1"}


@pytest.mark.parametrize("is_lost_before", [False, True])
def test_a_dead_host_that_is_started_again_is_the_next_incarnation(world: ProbedWorld, is_lost_before: bool) -> None:
    dead, other = world.infos
    again = msgspec.structs.replace(dead, incarnation="b", restart=1, address="grpc://10.0.0.1:77")
    world.shows[dead.address] = Probed.REFUSED
    if is_lost_before:
        world.suspect(dead)
        assert world.owners() == {other.host_id}
        world.c.register_host(again, HostReport())
    else:
        world.c.register_host(again, HostReport())
        world.suspect(dead)
    assert world.c.heartbeat_host("h0", "b").known
    assert not world.beat(dead)
    assert world.c.lost_hosts()["refused"] == int(is_lost_before)


def test_a_refusal_of_the_last_incarnation_says_nothing_of_the_next(world: ProbedWorld) -> None:
    dead, _ = world.infos
    again = msgspec.structs.replace(dead, incarnation="b", restart=1, address="grpc://10.0.0.1:77")

    def refused(address: str, seconds: float) -> Probed:
        world.c.register_host(again, HostReport())
        world.c.registries.hosts.leases["h0"].is_reachable = True
        return Probed.REFUSED

    world.c._suspicions._probe = refused
    world.suspect(dead)
    assert world.c.heartbeat_host("h0", "b").known
    assert world.c.lost_hosts()["refused"] == 0


def test_the_partitions_of_the_only_host_wait_for_it(world: ProbedWorld) -> None:
    for info in world.infos:
        world.shows[info.address] = Probed.REFUSED
        world.suspect(info)
    assert world.c.counts() == (0, 1)
    world.c.register_host(msgspec.structs.replace(world.infos[0], incarnation="b", restart=1), HostReport())
    assert world.owners() == {"h0"}


def test_probes_are_shared_and_a_hanging_one_delays_nothing(world: ProbedWorld) -> None:
    hanging, other = world.infos
    begun, done, other_probed = threading.Event(), threading.Event(), threading.Event()

    def probe(address: str, seconds: float) -> Probed:
        world.probes[address] += 1
        if address == hanging.address:
            begun.set()
            done.wait()
        else:
            other_probed.set()
        return Probed.REFUSED

    world.c._suspicions._probe = probe
    for _ in range(20):
        world.c.suspect_host(hanging.address)
        world.now += 0.01
    assert begun.wait(60)
    world.now += 1
    world.c.suspect_host(hanging.address)
    assert world.beat(hanging)
    world.c.suspect_host(other.address)
    assert other_probed.wait(60)
    done.set()
    world.settle()
    assert world.probes == {hanging.address: 1, other.address: 1}
    assert world.c.counts() == (0, 1)


def test_a_coordinator_that_stood_still_gives_up_no_host(world: ProbedWorld) -> None:
    one, _ = world.infos

    def suspended(address: str, seconds: float) -> Probed:
        world.now += 30  # of this process itself
        world.probes[address] += 1
        assert world.probes[address] <= 3, "the heartbeat ends the suspicion"
        if world.probes[address] == 3:
            world.beat(one)  # was waiting all the time
        return Probed.SILENT

    world.c._suspicions._probe = suspended
    world.suspect(one)
    assert "h0" in world.c.registries.hosts.leases
    assert world.probes[one.address] == 3


def test_a_host_relies_on_its_lease_for_no_longer_than_the_coordinator_waits(world: ProbedWorld) -> None:
    info = world.infos[0]
    assert world.c.heartbeat_host(info.host_id, info.incarnation).lease_seconds == 4.0
    assert CoordinatorConf(host_timeout=3.0).lease_seconds == 3.0
    assert CoordinatorConf(host_timeout=30.0, silent_timeout=6.0).lease_seconds == 6.0


# -- real connections


def test_a_process_that_listens_is_connected_though_it_accepts_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        assert probe_address(f"grpc://127.0.0.1:{listening.getsockname()[1]}", 1.0) is Probed.CONNECTED


def test_a_port_without_a_listener_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    assert probe_address(f"grpc+tls://127.0.0.1:{port}", 1.0) is Probed.REFUSED
    with socket.socket(socket.AF_INET6) as bound:
        bound.bind(("::1", 0))
        assert probe_address(f"grpc://[::1]:{bound.getsockname()[1]}", 1.0) is Probed.REFUSED


def test_a_kernel_that_does_not_answer_is_silent() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        address = full.getsockname()
        waiting = [socket.socket() for _ in range(3)]
        for connection in waiting:
            connection.setblocking(False)
            connection.connect_ex(address)
        assert probe_address(f"grpc://127.0.0.1:{address[1]}", 0.05) is Probed.SILENT
        for connection in waiting:
            connection.close()


def test_an_address_that_cannot_be_tried_is_unclear(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_many(*args: object, **kwargs: object) -> socket.socket:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(socket, "create_connection", too_many)
    assert probe_address("grpc://127.0.0.1:1", 1.0) is Probed.UNCLEAR
