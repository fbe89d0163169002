"""One version across many hosts: which requests a router repeats, and which answers it never gives."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from msgspec.structs import replace

from coordinator_actor.messages import OperatorLocation
from spark_bridge.exceptions import HostUnavailableError, StateVersionError
from spark_bridge.queryable.client import lookups
from spark_bridge.queryable.client.discovery import KnownOperator
from spark_bridge.queryable.client.lookups import KeyLookups
from spark_bridge.queryable.connections import KvConnections
from spark_bridge.queryable.protocol import At, KeyRowsRequest, ScanRequest
from spark_bridge.queryable.routing import router as chunk_module
from spark_bridge.queryable.routing.router import MAX_SEEN_RUNS, SeenVersions, StateRouter
from spark_bridge.queryable.routing.scatter_gather import RoutingTable
from tests.effort import effort
from tests.patience import PATIENCE
from tests.spark_bridge.queryable.client_world import Cluster
from tests.spark_bridge.queryable.memory_reads import eventually
from tests.spark_bridge.queryable.routing.router_world import (
    COMPLETED,
    FAMILY,
    asked,
    located,
    numbers,
    owned_by,
    soon,
    stored,
)
from tests.spark_bridge.queryable.routing.slow_hosts import Lagging, Memory


def test_hosts_with_different_latest_versions_give_one_answer(
    cluster: Cluster, router: StateRouter, connections: KvConnections
) -> None:
    location = located(cluster)
    users = list(range(1000))
    for version in range(2, 8):
        cluster.batch(dict.fromkeys(users, (version, "b")), complete=False)
        ahead = cluster.hosts[version % 2]
        cluster.c.batch_committed(cluster.run, version - 1)
        ahead.host.heartbeat()  # the other one does not know it
        found, values = router.lookup(location, FAMILY, stored(users), COMPLETED, soon())
        if version > 2:  # else what the first batch has written, which is one number per user
            assert set(numbers(values)) == {found}
        assert found in (version - 1, version)
        answer = router.scan(location, ScanRequest("", "totals", columns=["n"]), soon())
        if version > 2:
            assert {n for b in answer.batches for n in b.column("n").to_pylist()} == {answer.version}
        assert answer.version >= found
        assert router.count(location, ScanRequest("", "totals"), soon()) == (answer.version, 1000)
        assert router.seen.get(cluster.run) == answer.version


def test_one_more_request_at_most_aligns_the_versions(cluster: Cluster, connections: KvConnections) -> None:
    router, other = StateRouter(connections), StateRouter(connections)
    location = located(cluster)
    cluster.batch(dict.fromkeys(range(1000), (2, "b")), complete=False)
    cluster.c.batch_committed(cluster.run, 1)
    cluster.hosts[1].host.heartbeat()
    # As a host that has restarted since its tasks committed: it does not look for Spark's commit by itself.
    cluster.hosts[0].host.prepared._prepared.clear()
    before = asked(cluster, "lookup")
    version, values = router.lookup(location, FAMILY, stored(range(1000)), COMPLETED, soon())
    assert (version, numbers(values)) == (1, list(range(1000)))
    # Only the host that is ahead is asked again. (A request is counted after its answer.)
    eventually(lambda: np.subtract(asked(cluster, "lookup"), before).tolist() == [1, 2])
    # A client that has seen version 2 gets nothing older from a host that does not know it.
    user = owned_by(cluster, 1)[0]
    assert other.lookup_one(location, FAMILY, stored([user])[0].as_py(), COMPLETED, soon())[0] == 2
    eventually(lambda: np.subtract(asked(cluster, "lookup"), before).tolist() == [1, 3])
    before = asked(cluster, "lookup")
    version, values = other.lookup(location, FAMILY, stored(range(1000)), COMPLETED, soon())
    assert (version, set(numbers(values))) == (2, {2})
    eventually(lambda: np.subtract(asked(cluster, "lookup"), before).tolist() == [1, 1])


def test_a_named_version_and_the_latest_one(cluster: Cluster, router: StateRouter) -> None:
    location = located(cluster)
    for version in (2, 3, 4):
        cluster.batch(dict.fromkeys(range(1000), (version, "b")), complete=version < 4)
    for version in (2, 3):
        at = At("version", version)
        found, values = router.lookup(location, FAMILY, stored(range(50)), at, soon())
        assert (found, set(numbers(values))) == (version, {version})
        answer = router.scan(location, ScanRequest("", "totals", at=at, columns=["n"]), soon())
        assert {n for b in answer.batches for n in b.column("n").to_pylist()} == {version} == {answer.version}
    version, values = router.lookup(location, FAMILY, stored(range(50)), At("latest"), soon())
    assert (version, set(numbers(values))) == (4, {4}), "not completed yet"
    answer = router.scan(location, ScanRequest("", "totals", at=At("latest"), columns=["n"]), soon())
    assert {n for b in answer.batches for n in b.column("n").to_pylist()} == {4}
    assert router.seen.get(cluster.run) <= 3


def test_answer_has_one_version_while_versions_advance_on_distant_hosts(connections: KvConnections) -> None:
    coordinator = [1]
    reads = [Lagging(coordinator) for _ in range(3)]
    memory = Memory(reads)
    rng = random.Random(7)
    router = StateRouter(connections)
    keys = stored(range(100))
    seen = 0
    try:
        with pytest.raises(StateVersionError, match="77"):
            router.lookup(memory.location, FAMILY, keys, At("version", 77), soon())
        with pytest.raises(HostUnavailableError, match="77"):  # a client has seen it, so the router asks again
            router.lookup(memory.location, FAMILY, keys, At("completed", 77), soon())
        with pytest.raises(StateVersionError, match="77"):
            router.scan(memory.location, ScanRequest("", "totals", at=At("version", 77)), soon())
        for _ in range(150):
            coordinator[0] += rng.choice((0, 0, 1, 1, 5))
            for r in reads:
                if rng.random() < 0.4:
                    r.version = rng.randint(r.version, coordinator[0])
            kind = rng.randrange(5)
            if kind == 0:
                version, values = router.lookup(memory.location, FAMILY, keys, COMPLETED, soon())
                assert set(values.to_pylist()) == {b"%d" % version}
            elif kind == 1:
                version, value = router.lookup_one(
                    memory.location, FAMILY, keys[rng.randrange(100)].as_py(), COMPLETED, soon()
                )
                assert value == b"%d" % version
            elif kind == 2:
                answer = router.key_rows(memory.location, KeyRowsRequest("", "totals"), keys, soon())
                rows, version = pa.Table.from_batches(list(answer.batches)), answer.version
                assert sorted(rows["position"].to_pylist()) == list(range(100))
                assert set(rows["v"].to_pylist()) == {str(version)}
            elif kind == 3:
                try:
                    answer = router.scan(memory.location, ScanRequest("", "totals"), soon())
                except HostUnavailableError:
                    continue  # a host is two versions ahead of the one that was fixed: asked again by the client
                rows, version = pa.Table.from_batches(list(answer.batches)), answer.version
                assert set(rows["v"].to_pylist()) == {str(version)}
                assert sorted(rows["k"].to_pylist()) == sorted(list(range(6)) * 10)
            else:
                version, count = router.count(memory.location, ScanRequest("", "totals"), soon())
                assert count == 60
            assert version >= seen, "time does not run backwards"
            seen = version
    finally:
        memory.close()


def test_many_requests_of_one_call_are_of_one_version(
    connections: KvConnections, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_module, "KEYS_PER_REQUEST", 10)

    class Advancing(Lagging):
        """There is a new version whenever it is asked for one."""

        def _at(self, at: At) -> int:
            if at.isolation == "completed":
                self.coordinator[0] += 1
                self.version = self.coordinator[0]
            return super()._at(at)

    memory = Memory([Advancing([1])])
    router = StateRouter(connections)
    try:
        version, values = router.lookup(memory.location, FAMILY, stored(range(35)), COMPLETED, soon())
        assert (version, set(values.to_pylist())) == (2, {b"2"})
        answer = router.key_rows(memory.location, KeyRowsRequest("", "totals"), stored(range(35)), soon())
        assert (answer.version, {v for b in answer.batches for v in b["v"].to_pylist()}) == (3, {"3"})
    finally:
        memory.close()


class Racing(Lagging):
    """A host that makes three new versions on each request for one, ``races`` times.

    Versions that it does not hold come from storage.
    """

    def __init__(self, races: int) -> None:
        super().__init__([1])
        self.races = races
        self.copies = 0

    def _at(self, at: At) -> int:
        if at.isolation == "version":
            if not self.version - 1 <= at.version <= self.version:
                if at.held_only:
                    raise StateVersionError(f"Version {at.version} is not held; version {self.version} is.")
                self.copies += 1
            return at.version
        version = self.version
        if self.races:
            self.races -= 1
            self.version += 3
        return version


@pytest.mark.parametrize("races", [2, 100])
def test_slow_parts_restart_instead_of_reading_storage(
    connections: KvConnections, monkeypatch: pytest.MonkeyPatch, races: int
) -> None:
    keys = stored(range(35))

    def values(router: StateRouter, location: OperatorLocation) -> tuple[int, list[Any]]:
        version, found = router.lookup(location, FAMILY, keys, COMPLETED, soon())
        return version, found.to_pylist()

    def rows(router: StateRouter, location: OperatorLocation) -> tuple[int, list[Any]]:
        answer = router.key_rows(location, KeyRowsRequest("", "totals"), keys, soon())
        found = pa.Table.from_batches(list(answer.batches)).sort_by("position")
        assert found["position"].to_pylist() == list(range(35))
        return answer.version, [v.encode() for v in found["v"].to_pylist()]

    def parts(router: StateRouter, location: OperatorLocation) -> tuple[int, list[Any]]:
        known = KnownOperator.of(location)
        answer = KeyLookups(router, known, known.view(None), COMPLETED, soon()).key_rows(
            KeyRowsRequest("", "totals"), keys
        )
        found = pa.Table.from_batches(list(answer.batches)).sort_by("position")
        assert found["position"].to_pylist() == list(range(35))
        return answer.version, [v.encode() for v in found["v"].to_pylist()]

    asks = [(values, chunk_module), (rows, chunk_module), (parts, lookups)]
    for ask, module in asks:
        reads = Racing(races)
        memory = Memory([reads])
        try:
            with monkeypatch.context() as smaller:
                smaller.setattr(module, "KEYS_PER_REQUEST", 10)
                version, found = ask(StateRouter(connections), memory.location)
            assert found == [b"%d" % version] * 35
            # Of four parts the first has said which version; the fourth beginning was the last one.
            assert (reads.copies, version) == ((0, 7) if races == 2 else (3, 10))
        finally:
            memory.close()


def test_completed_read_never_names_a_version_unknown_to_a_host(
    connections: KvConnections, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator does not answer the host that lags. The client may repeat the request."""
    memory = Memory([Lagging([5]), Lagging([1])])
    keys = stored(range(100))
    try:
        with pytest.raises(HostUnavailableError, match="Version 5 is not completed"):
            StateRouter(connections).lookup(memory.location, FAMILY, keys, COMPLETED, soon())
        with pytest.raises(HostUnavailableError, match="Version 1 is not held"):
            StateRouter(connections).scan(
                replace(memory.location, owners=memory.location.owners[::-1]), ScanRequest("", "totals"), soon()
            )
        lagging = memory.reads[1]
        local = StateRouter(connections, local=(memory.servers[1].server_address, lagging))
        local.seen.note("run", 5)  # another client has shown it
        table = RoutingTable(memory.location)
        key = next(k for k in keys.to_pylist() if table.address_of(k) == memory.servers[1].server_address)
        with pytest.raises(HostUnavailableError, match="Version 5 is not completed"):
            local.lookup_one(memory.location, FAMILY, key, COMPLETED, soon())
        with pytest.raises(StateVersionError, match="Version 5 is not held"):
            local.lookup_one(memory.location, FAMILY, key, At("version", 5), soon())
    finally:
        memory.close()

    class Forgetful(Lagging):
        """Knows no version that it has said."""

        def _at(self, at: At) -> int:
            if at.isolation == "version":
                raise StateVersionError(f"Version {at.version} is not completed.")
            return super()._at(at)

    monkeypatch.setattr(chunk_module, "KEYS_PER_REQUEST", 10)
    memory = Memory([Forgetful([5])])
    try:
        with pytest.raises(HostUnavailableError, match="Version 5 is not completed"):
            StateRouter(connections).lookup(memory.location, FAMILY, keys, COMPLETED, soon())
    finally:
        memory.close()


def test_completed_scan_never_uses_an_invented_version(connections: KvConnections) -> None:
    class Ignorant(Lagging):
        """Does not know the run, and cannot reach the coordinator."""

        def await_completed(self, run_id: str, after: int, seconds: float) -> int:
            return -1

    memory = Memory([Ignorant([5]), Lagging([5])])
    try:
        with pytest.raises(HostUnavailableError, match="knows no completed version"):
            StateRouter(connections).scan(memory.location, ScanRequest("", "totals"), soon())
        local = StateRouter(connections, local=(memory.servers[0].server_address, memory.reads[0]))
        with pytest.raises(HostUnavailableError, match="knows no completed version"):
            local.scan(memory.location, ScanRequest("", "totals"), soon())
        # The version that came with the location is completed, even if the owner does not know it yet.
        memory.reads[1].version = 4
        location = replace(memory.location, completed_version=5, owners=memory.location.owners[::-1])
        assert StateRouter(connections).scan(location, ScanRequest("", "totals"), soon()).version == 5
    finally:
        memory.close()


def test_the_highest_version_seen_never_goes_down_and_is_never_away() -> None:
    versions = SeenVersions()
    seen: list[int] = []

    class Watched(dict[str, int]):
        """Looks, as any thread may at any time, while it is changed."""

        def __setitem__(self, run_id: str, version: int) -> None:
            seen.append(versions.get("run"))
            super().__setitem__(run_id, version)
            seen.append(versions.get("run"))

    versions._versions = Watched()
    for version in (1, 5, 3, 5, 6):
        versions.note("run", version)
    assert seen == [0, 1, 1, 5, 5, 6]
    for i in range(MAX_SEEN_RUNS - 1):
        versions.note(f"other{i}", 1)
    versions.note("other7", 2)
    assert (versions.get("run"), versions.get("other7")) == (6, 2), "nothing has to go for a run that is known"
    versions.note("new", 1)
    assert [versions.get(run) for run in ("run", "other0", "new")] == [0, 1, 1]
    assert len(versions._versions) == MAX_SEEN_RUNS


def test_threads_see_one_version_and_never_an_older_one(connections: KvConnections) -> None:
    coordinator = [1]
    reads = [Lagging(coordinator) for _ in range(2)]
    memory = Memory(reads)
    router = StateRouter(connections)
    keys = stored(range(60))
    failures: list[BaseException] = []
    stop = threading.Event()

    def advance() -> None:
        rng = random.Random(1)
        while not stop.is_set():
            coordinator[0] += 1
            rng.choice(reads).version = coordinator[0]
            time.sleep(0.001)

    def ask() -> None:
        seen = 0
        try:
            for _ in range(effort(15, 80)):
                floor = router.seen.get("run")
                version, values = router.lookup(memory.location, FAMILY, keys, COMPLETED, soon())
                assert set(values.to_pylist()) == {b"%d" % version}
                assert version >= max(floor, seen)
                seen = version
        except BaseException as error:  # noqa: BLE001 - shown below
            failures.append(error)

    threads = [threading.Thread(target=ask) for _ in range(effort(4, 6))]
    clock = threading.Thread(target=advance)
    try:
        for thread in (*threads, clock):
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
    finally:
        stop.set()
        clock.join()
        memory.close()
    assert not failures, failures
