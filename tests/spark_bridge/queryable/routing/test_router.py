"""Routing over real hosts: whatever is asked of whomever, one answer of one version, and each row once."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from msgspec.structs import replace

from backends.encoding.operator_schema import OperatorSchema, StateVariable
from backends.encoding.schema import StateSchema
from coordinator_actor.exceptions import RetiredRunError
from coordinator_actor.messages import HostInfo, OperatorLocation, OperatorSpec
from spark_bridge.exceptions import (
    ConnectionClosedError,
    HostUnavailableError,
    NotOwnerError,
    QueryTimeoutError,
    RequestError,
    StateVersionError,
    UnknownKeyOrNamespaceError,
    UnknownKvStateKeyGroupLocationError,
)
from spark_bridge.queryable.client import key_lookups
from spark_bridge.queryable.client.key_lookups import KeyLookups
from spark_bridge.queryable.client.known_operators import KnownOperator
from spark_bridge.queryable.protocol.connections import KvConnections
from spark_bridge.queryable.protocol.messages import At, KeyRowsRequest, LookupRequest, ScanRequest
from spark_bridge.queryable.protocol.state_reads import StateAnswer
from spark_bridge.queryable.routing import key_chunks as chunk_module
from spark_bridge.queryable.routing import router as router_module
from spark_bridge.queryable.routing.monotonic_reads import MAX_SEEN_RUNS, SeenVersions
from spark_bridge.queryable.routing.router import StateRouter
from spark_bridge.queryable.routing.routing_table import RoutingTable, is_stable
from spark_bridge.queryable.server.request_limits import RequestLimits
from spark_bridge.queryable.server.server import KvStateServer
from tests.effort import effort
from tests.patience import HANG, PATIENCE
from tests.spark_bridge.queryable.client_world import KEYS, TOKEN, TOTALS, Cluster, G
from tests.spark_bridge.queryable.memory_reads import ROWS, MemoryReads, OneToken, eventually
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
from tests.spark_bridge.queryable.server.relays import Relay


@pytest.fixture
def connections() -> Iterator[KvConnections]:
    with KvConnections(TOKEN, timeout=PATIENCE) as made:
        yield made


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path, hosts=2, partitions=5)
    made.batch({user: (user, "a") for user in range(1000)})
    yield made
    made.close()


@pytest.fixture(params=["direct", "via"])
def router(request: pytest.FixtureRequest, cluster: Cluster, connections: KvConnections) -> StateRouter:
    return StateRouter(connections, via=cluster.hosts[0].address if request.param == "via" else None)


# -- keys --------------------------------------------------------------------------------------


def test_keys_in_any_order_several_times_and_unknown_ones(cluster: Cluster, router: StateRouter) -> None:
    rng = random.Random(1)
    location = located(cluster)
    for n in (1, 2, 10, 1500):
        users = [rng.randrange(1200) for _ in range(n)]
        version, values = router.lookup(location, FAMILY, stored(users), COMPLETED, soon())
        assert (version, numbers(values)) == (1, [u if u < 1000 else None for u in users])
    assert router.lookup(location, FAMILY, stored([]), COMPLETED, soon()) == (1, pa.array([], pa.binary()))
    for user in (0, 1, 999, 1000, -5):
        version, value = router.lookup_one(location, FAMILY, stored([user])[0].as_py(), COMPLETED, soon())
        assert (version, value is None) == (1, not 0 <= user < 1000)
        assert value is None or numbers(pa.array([value])) == [user]


def test_more_keys_than_a_request_may_have(
    cluster: Cluster, router: StateRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    users = list(range(1100, -1, -1))
    monkeypatch.setattr(chunk_module, "KEYS_PER_REQUEST", 100)
    version, values = router.lookup(located(cluster), FAMILY, stored(users), COMPLETED, soon())
    assert (version, numbers(values)) == (1, [u if u < 1000 else None for u in users])
    monkeypatch.setattr(chunk_module, "BYTES_PER_REQUEST", 500)
    request = KeyRowsRequest("", "totals")
    answer = router.key_rows(located(cluster), request, stored(users[:500]), soon())
    rows = pa.Table.from_batches(list(answer.batches), answer.schema).sort_by("position")
    assert rows.column("user").to_pylist() == [u for u in users[:500] if u < 1000]
    assert [users[p] for p in rows.column("position").to_pylist()] == rows.column("user").to_pylist()


@pytest.mark.parametrize(
    ("keys", "sizes"),
    [
        ([], [0]),
        ([b"k"], [1]),
        ([b"k" * 30] * 9, [2, 2, 2, 2, 1]),
        ([b"k" * 200] * 2, [1, 1]),
        ([b"k"] * 11, [10, 1]),
    ],
)
def test_keys_are_asked_for_in_parts_by_number_and_bytes(
    keys: list[bytes], sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_module, "KEYS_PER_REQUEST", 10)
    monkeypatch.setattr(chunk_module, "BYTES_PER_REQUEST", 100)
    array = pa.array([b"x" * 300, *keys], pa.binary()).slice(1)  # what is not asked for does not count
    assert [len(part) for part in chunk_module.key_chunks(array)] == sizes
    assert [key for part in chunk_module.key_chunks(array) for key in part.to_pylist()] == keys


def test_rows_of_keys_name_the_position_among_all_keys(cluster: Cluster, router: StateRouter) -> None:
    users = [5, 2000, 7, 5, 999]
    answer = router.key_rows(located(cluster), KeyRowsRequest("", "totals", columns=["n"]), stored(users), soon())
    rows = pa.Table.from_batches(list(answer.batches), answer.schema).sort_by("position")
    assert answer.version == 1
    assert rows.select(["position", "n"]).to_pylist() == [
        {"position": i, "n": u} for i, u in enumerate(users) if u < 1000
    ]
    answer = router.key_rows(located(cluster), KeyRowsRequest("", "totals"), stored([]), soon())
    assert (list(answer.batches), answer.schema.names[0]) == ([], "position")


def test_what_is_no_stored_key(cluster: Cluster, connections: KvConnections) -> None:
    router = StateRouter(connections)
    location = located(cluster)
    for wrong in (b"", b"\x00", b"\xff\xff123"):
        with pytest.raises(UnknownKeyOrNamespaceError, match="begins with none of the 64 key groups"):
            router.lookup_one(location, FAMILY, wrong, COMPLETED, soon())
        with pytest.raises(UnknownKeyOrNamespaceError, match="begins with none of the 64 key groups"):
            router.lookup(location, FAMILY, pa.array([*stored([1]).to_pylist(), wrong]), COMPLETED, soon())
    with pytest.raises(RequestError, match="1 of 2 stored keys are null"):
        router.lookup(location, FAMILY, pa.array([b"\x00\x00", None]), COMPLETED, soon())


def test_a_host_that_hangs_is_not_waited_for_until_the_deadline(
    connections: KvConnections, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_module, "FEW_KEYS_SECONDS", 0.05)
    go_on = threading.Event()

    class Hanging(MemoryReads):
        def check(self, operator: str) -> None:
            assert go_on.wait(HANG)

    memory = Memory([Hanging()])
    router = StateRouter(connections)
    started = time.monotonic()
    try:
        # On a slow machine there may be no time left by the time of asking.
        with pytest.raises(HostUnavailableError, match=r"in time|no time left"):
            router.lookup_one(memory.location, FAMILY, stored([1])[0].as_py(), COMPLETED, soon(HANG))
        with pytest.raises(HostUnavailableError, match=r"in time|no time left"):
            router.lookup(memory.location, FAMILY, stored([1, 2]), COMPLETED, soon(HANG))
        assert time.monotonic() - started < PATIENCE
    finally:
        go_on.set()
        memory.close()


def test_windows_of_a_key_are_asked_of_all_hosts(connections: KvConnections) -> None:
    window = pa.struct([("start", pa.timestamp("us")), ("end", pa.timestamp("us"))])
    windowed = OperatorSchema.of_rows(StateSchema(pa.schema([("window", window), *KEYS]), TOTALS.value))
    reads = [Lagging([1]) for _ in range(3)]
    memory = Memory(reads)
    router = StateRouter(connections)
    try:
        keys = stored([42])
        router.key_rows(memory.location, KeyRowsRequest("", "totals"), keys, soon())
        assert sum(r.questions for r in reads) == 1
        spec = replace(memory.location.operator, schema=windowed.to_json())
        location = replace(memory.location, operator=spec)
        answer = router.key_rows(location, KeyRowsRequest("", "totals"), keys, soon())
        assert sum(b.num_rows for b in answer.batches) == 3
        assert sum(r.questions for r in reads) == 1 + 3
        router.lookup(location, FAMILY, keys, COMPLETED, soon())  # with a window, so that the key has a group
        assert sum(r.questions for r in reads) == 1 + 3 + 1
    finally:
        memory.close()


def test_rows_that_may_expire_are_known_by_the_schema() -> None:
    families = {"v": TOTALS}
    expiring = OperatorSchema(
        variables=(StateVariable("v", "value", families, ttl_ms=1000), StateVariable("w", "value", {"w": TOTALS}))
    )
    schema = expiring.to_json()
    assert [is_stable(schema, state) for state in ("v", "w")] == [False, True]
    assert is_stable(OperatorSchema.of_rows(TOTALS).to_json(), None)
    assert not is_stable("", None)
    assert not is_stable(schema, None), "one of them may be meant"
    assert not is_stable(schema, "u")
    timers = StateVariable("timers", "timers", families)
    for ttl_ms, stable in ((1000, False), (None, True)):
        processor = OperatorSchema(variables=(StateVariable("v", "value", families, ttl_ms=ttl_ms), timers))
        assert is_stable(processor.to_json(), None) is stable, "the only one, timers apart"
        assert is_stable(processor.to_json(), "v") is stable


# -- one version -------------------------------------------------------------------------------


def test_hosts_that_hear_of_a_version_at_different_times_give_one_answer(
    cluster: Cluster, router: StateRouter, connections: KvConnections
) -> None:
    location = located(cluster)
    users = list(range(1000))
    for version in range(2, 8):
        cluster.batch(dict.fromkeys(users, (version, "b")), complete=False)
        ahead = cluster.hosts[version % 2]
        cluster.c.batch_committed(cluster.run, version - 1)
        ahead.host.heartbeat()  # the other one has not heard of it
        found, values = router.lookup(location, FAMILY, stored(users), COMPLETED, soon())
        if version > 2:  # else what the first batch has written, which is one number per user
            assert set(numbers(values)) == {found}
        assert found in (version - 1, version)
        answer = router.scan(location, ScanRequest("", "totals", columns=["n"]), soon())
        if version > 2:
            assert {n for b in answer.batches for n in b.column("n").to_pylist()} == {answer.version}
        assert answer.version >= found
        assert router.count(location, ScanRequest("", "totals"), soon()) == (answer.version, 1000)
        assert router.completed_version(cluster.run) == answer.version


def test_at_most_one_more_question_levels_the_versions(cluster: Cluster, connections: KvConnections) -> None:
    router, other = StateRouter(connections), StateRouter(connections)
    location = located(cluster)
    cluster.batch(dict.fromkeys(range(1000), (2, "b")), complete=False)
    cluster.c.batch_committed(cluster.run, 1)
    cluster.hosts[1].host.heartbeat()
    # As a host that has begun anew since its tasks have committed: it does not look for Spark's commit by itself.
    cluster.hosts[0].host.prepared._prepared.clear()
    before = asked(cluster, "lookup")
    version, values = router.lookup(location, FAMILY, stored(range(1000)), COMPLETED, soon())
    assert (version, numbers(values)) == (1, list(range(1000)))
    # Only the host that is ahead is asked again. (A request is counted after its answer.)
    eventually(lambda: np.subtract(asked(cluster, "lookup"), before).tolist() == [1, 2])
    # Who has seen version 2 gets nothing older from a host that has not heard of it.
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
    assert router.completed_version(cluster.run) <= 3


class Lagging(MemoryReads):
    """A host that hears of versions late and holds the last two: the value of every key, and every row, is the
    version.
    """

    def __init__(self, coordinator: list[int]) -> None:
        super().__init__()
        self.coordinator = coordinator
        self.version = coordinator[0]
        self.questions = 0

    def _at(self, at: At) -> int:
        self.questions += 1
        version = self.version
        if at.isolation == "version":
            self.version = version = max(version, min(at.version, self.coordinator[0]))
            if not version - 1 <= at.version <= version:
                raise StateVersionError(f"Version {at.version} is not held; version {version} is.")
            return at.version
        if at.version > version:
            self.version = self.coordinator[0]
            if self.version < at.version:
                raise StateVersionError(f"Version {at.version} is not completed.")
        return self.version

    def lookup(self, request: LookupRequest, keys: pa.BinaryArray) -> tuple[int, pa.BinaryArray]:
        version = self._at(request.at)
        return version, pa.array([b"%d" % version] * len(keys))

    def lookup_one(self, request: LookupRequest, key: bytes) -> tuple[int, bytes | None]:
        version = self._at(request.at)
        return version, b"%d" % version

    def key_rows(self, request: KeyRowsRequest, keys: pa.BinaryArray) -> StateAnswer:
        version = self._at(request.at)
        rows = pa.record_batch(
            [pa.array(range(len(keys)), pa.int64()), pa.array([str(version)] * len(keys))], ["position", "v"]
        )
        return StateAnswer(version, rows.schema, iter([rows]))

    def scan(self, request: ScanRequest) -> StateAnswer:
        version = self._at(request.at)
        assert request.partitions is not None
        rows = [
            pa.record_batch([pa.array([p] * 10), pa.array([str(version)] * 10)], schema=ROWS)
            for p in request.partitions
        ]
        return StateAnswer(version, ROWS, iter(rows))

    def count(self, request: ScanRequest) -> tuple[int, int]:
        return self._at(request.at), 10 * len(request.partitions or ())

    def await_completed(self, run_id: str, after: int, seconds: float) -> int:
        return self.version


class Memory:
    """Servers of what is in memory, one per host, the partitions among them by turns."""

    def __init__(self, reads: Sequence[Any], partitions: int = 6, **limits: Any) -> None:
        self.reads = reads
        self.servers = [
            KvStateServer(r, OneToken({TOKEN}), ip="127.0.0.1", limits=RequestLimits(**limits), host_id=f"h{i}")
            for i, r in enumerate(reads)
        ]
        for server in self.servers:
            server.start()
        hosts = [HostInfo(f"h{i}", "a", "", "n", "s", s.server_address) for i, s in enumerate(self.servers)]
        owners = tuple(hosts[p % len(hosts)] for p in range(partitions))
        self.location = OperatorLocation(
            "q", "run", "q", OperatorSpec("totals", partitions, TOTALS.to_json()), G, 0, owners
        )

    def close(self) -> None:
        for server in self.servers:
            server.shutdown()


def test_one_version_though_hosts_are_far_apart_and_versions_never_rest(connections: KvConnections) -> None:
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
        with pytest.raises(HostUnavailableError, match="77"):  # somebody has shown it, so it is asked again
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
    """There are three new versions whenever it is asked for one, ``races`` times. What it does not hold comes from
    storage.
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
def test_parts_that_take_long_begin_anew_rather_than_read_storage(
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
        known = KnownOperator.of(location, 0.0, None)
        answer = KeyLookups(router, known, known.view(None), COMPLETED, soon()).key_rows(
            KeyRowsRequest("", "totals"), keys
        )
        found = pa.Table.from_batches(list(answer.batches)).sort_by("position")
        assert found["position"].to_pylist() == list(range(35))
        return answer.version, [v.encode() for v in found["v"].to_pylist()]

    asks = [(values, chunk_module), (rows, chunk_module), (parts, key_lookups)]
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


def test_who_asks_for_the_completed_version_is_told_of_none_that_a_host_does_not_know(
    connections: KvConnections, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator does not answer the host that lags. What was asked can be asked again."""
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


def test_a_completed_scan_is_of_no_version_that_a_host_has_made_up(connections: KvConnections) -> None:
    class Ignorant(Lagging):
        """Has not heard of the run, and could not ask the coordinator."""

        def await_completed(self, run_id: str, after: int, seconds: float) -> int:
            return -1

    memory = Memory([Ignorant([5]), Lagging([5])])
    try:
        with pytest.raises(HostUnavailableError, match="knows no completed version"):
            StateRouter(connections).scan(memory.location, ScanRequest("", "totals"), soon())
        local = StateRouter(connections, local=(memory.servers[0].server_address, memory.reads[0]))
        with pytest.raises(HostUnavailableError, match="knows no completed version"):
            local.scan(memory.location, ScanRequest("", "totals"), soon())
        # What came with the location is completed, even if the owner that is asked has not heard of it.
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
                floor = router.completed_version("run")
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


# -- scans -------------------------------------------------------------------------------------


def test_a_scan_gives_each_row_once(cluster: Cluster, router: StateRouter) -> None:
    location = located(cluster)
    answer = router.scan(location, ScanRequest("", "totals"), soon())
    rows = pa.Table.from_batches(list(answer.batches), answer.schema)
    assert sorted(rows["user"].to_pylist()) == list(range(1000)) == sorted(rows["n"].to_pylist())
    parts = [
        pa.Table.from_batches(list(a.batches), a.schema)["user"].to_pylist()
        for p in range(5)
        for a in [router.scan(location, ScanRequest("", "totals", partitions=[p]), soon())]
    ]
    assert sorted(u for part in parts for u in part) == list(range(1000))
    in_order = router.scan(location, ScanRequest("", "totals", partitions=[4, 0, 3, 1, 2]), soon(), in_order=True)
    given = [u for b in in_order.batches for u in b["user"].to_pylist()]
    assert given == parts[4] + parts[0] + parts[3] + parts[1] + parts[2]
    with pytest.raises(UnknownKvStateKeyGroupLocationError, match="no partition 5; it has 5"):
        router.scan(location, ScanRequest("", "totals", partitions=[5]), soon())
    with pytest.raises(RequestError, match="no partitions"):
        router.scan(location, ScanRequest("", "totals", partitions=[]), soon())


def test_a_limit_counts_over_all_hosts(cluster: Cluster, router: StateRouter) -> None:
    location = located(cluster)
    for limit in (0, 1, 7, 700, 5000):
        answer = router.scan(location, ScanRequest("", "totals", limit=limit), soon())
        users = [u for b in answer.batches for u in b["user"].to_pylist()]
        assert len(users) == len(set(users)) == min(limit, 1000)
        assert router.count(location, ScanRequest("", "totals", limit=limit), soon()) == (1, min(limit, 1000))
    assert answer.schema.names[0] == "user"


def many(count: int) -> list[pa.RecordBatch]:
    wide = "x" * 900
    return [pa.record_batch([pa.array(range(1000)), pa.array([wide] * 1000)], schema=ROWS)] * count


class Counting(MemoryReads):
    """Counts the batches that have been taken from it."""

    taken = 0

    def _rows(self) -> Iterator[pa.RecordBatch]:
        for batch in super()._rows():
            self.taken += 1
            yield batch


def test_a_slow_reader_holds_the_hosts_back_and_closing_ends_them(connections: KvConnections) -> None:
    reads = [Counting(batches=many(60)), Counting(batches=many(60))]
    memory = Memory(reads)
    router = StateRouter(connections)
    try:
        before = pa.total_allocated_bytes()
        answer = router.scan(memory.location, ScanRequest("", "totals"), soon())
        for _ in range(3):
            next(answer.batches)
        eventually(lambda: all(r.taken >= 2 for r in reads))
        time.sleep(0.3)
        assert all(r.taken < 40 for r in reads), "what the sockets hold, and no more"
        assert pa.total_allocated_bytes() - before < 20 << 20
        answer.close()
        eventually(lambda: all(r.open_iterators == 0 for r in reads))
        # One that is forgotten is closed as well, and its connections are not lost.
        for _ in range(70):
            forgotten = router.scan(memory.location, ScanRequest("", "totals"), soon())
            del forgotten
        eventually(lambda: all(r.open_iterators == 0 for r in reads))
        limited = router.scan(memory.location, ScanRequest("", "totals", limit=1500), soon())
        assert sum(b.num_rows for b in limited.batches) == 1500
        eventually(lambda: all(r.open_iterators == 0 for r in reads))
    finally:
        memory.close()


def test_a_quick_host_does_not_wait_for_a_slow_one(connections: KvConnections) -> None:
    go_on = threading.Event()

    class Slow(MemoryReads):
        """Begins, for nobody knows the columns before, and goes on when it is told."""

        def _rows(self) -> Iterator[pa.RecordBatch]:
            for i, batch in enumerate(super()._rows()):
                assert i == 0 or go_on.wait(HANG)
                yield batch

    memory = Memory([Slow(batches=many(3)), MemoryReads(batches=many(20))])
    try:
        answer = StateRouter(connections).scan(memory.location, ScanRequest("", "totals"), soon())
        for _ in range(1 + 20):  # all that can come without the slow one
            next(answer.batches)
        go_on.set()
        assert len(list(answer.batches)) == 2
    finally:
        go_on.set()
        memory.close()


class Partitioned(MemoryReads):
    """Gives any partition, in batches of different sizes each time, but always the same rows in the same order."""

    def __init__(self, rng: random.Random, width: int = 200) -> None:
        super().__init__()
        self.rng = rng
        self.wide = "x" * width

    def scan(self, request: ScanRequest) -> StateAnswer:
        assert request.partitions is not None
        assert request.limit == 0 or request.at in (At("version", 7), At("latest"))
        return StateAnswer(7, ROWS, self._of(request.partitions, 1 << 60 if request.limit is None else request.limit))

    def _of(self, partitions: list[int], left: int) -> Iterator[pa.RecordBatch]:
        for p in partitions:
            begin = 0
            while begin < ROWS_OF[p] and left > 0:
                end = min(ROWS_OF[p], begin + self.rng.randint(0, 300), begin + left)
                keys = pa.array(range(p * 10_000 + begin, p * 10_000 + end), pa.int64())
                yield pa.record_batch([keys, pa.array([self.wide] * (end - begin), pa.string())], schema=ROWS)
                left -= end - begin
                begin = end


ROWS_OF = [1500, 0, 700, 1, 2000, 900]


def relayed(memory: Memory, stack: ExitStack) -> tuple[list[Relay], OperatorLocation]:
    """Wires to all hosts, and the location that has them."""
    relays = {s.server_address: Relay(s.server_address) for s in memory.servers}
    for relay in relays.values():
        stack.callback(relay.close)
    owners = [replace(o, query_address=relays[o.query_address].address) for o in memory.location.owners]
    return list(relays.values()), replace(memory.location, owners=tuple(owners))


@pytest.mark.parametrize("seed", range(effort(3, 8)))
def test_a_scan_goes_on_where_a_broken_stream_ended(seed: int, connections: KvConnections) -> None:
    rng = random.Random(seed)
    with ExitStack() as stack:
        memory = Memory([Partitioned(rng) for _ in range(3)])
        stack.callback(memory.close)
        relays, location = relayed(memory, stack)
        errors: list[Exception] = []

        def relocate(error: Exception) -> OperatorLocation:
            errors.append(error)
            if rng.random() < 0.2:
                raise HostUnavailableError("The coordinator does not answer.")
            for relay in relays:  # most break again
                relay.cut_after = None if len(errors) > 12 else rng.randrange(100, 300_000)
            owners = list(location.owners)
            rng.shuffle(owners)  # partitions move, too
            return replace(location, owners=tuple(owners))

        # A proxy that has them all, in the order in which it is asked.
        via = relays[0].address if seed % 2 else None
        router = StateRouter(connections, via=via, sleep=lambda seconds: None)
        for limit in (None, 3000):
            errors.clear()
            for relay in relays:
                relay.cut_after = rng.randrange(60_000, 200_000)
            answer = None
            while answer is None:
                try:
                    answer = router.scan(location, ScanRequest("", "totals", limit=limit), soon(), relocate)
                except (ConnectionClosedError, HostUnavailableError):
                    continue
            given: dict[int, list[int]] = {}
            for batch in answer.batches:
                for k in batch["k"].to_pylist():
                    given.setdefault(k // 10_000, []).append(k % 10_000)
            assert all(ks == list(range(len(ks))) for ks in given.values()), "each once and in order"
            assert sum(len(ks) for ks in given.values()) == (sum(ROWS_OF) if limit is None else limit)
            assert errors, "nothing has broken"


def test_a_scan_goes_on_at_the_new_owners_of_a_dead_host(tmp_path: Path, connections: KvConnections) -> None:
    cluster = Cluster(tmp_path, hosts=2, partitions=6)
    users = 60_000
    cluster.batch(dict.fromkeys(range(users), (1, "a" * 50)))
    with ExitStack() as stack:
        stack.callback(cluster.close)
        relay = Relay(cluster.hosts[1].address, 1_500_000)
        stack.callback(relay.close)

        def at_relay(location: OperatorLocation) -> OperatorLocation:
            own = {cluster.hosts[1].address: relay.address}
            owners = [replace(o, query_address=own.get(o.query_address, o.query_address)) for o in location.owners]
            return replace(location, owners=tuple(owners))

        moves = []

        def relocate(error: Exception) -> OperatorLocation:
            if not moves:
                cluster.hosts[1].kill()
                cluster.world.now += 11
                cluster.c.driver_heartbeat(cluster.run)
                cluster.hosts[0].host.heartbeat()
                cluster.c.expire()
            moves.append(error)
            return at_relay(located(cluster))

        answer = StateRouter(connections).scan(at_relay(located(cluster)), ScanRequest("", "totals"), soon(), relocate)
        users_given = [u for b in answer.batches for u in b["user"].to_pylist()]
        assert sorted(users_given) == list(range(users))
        assert moves and {o.host_id for o in located(cluster).owners} == {"h0"}


def test_what_cannot_be_resumed_is_an_error(connections: KvConnections) -> None:
    with ExitStack() as stack:
        memory = Memory([Partitioned(random.Random(1)) for _ in range(2)])
        stack.callback(memory.close)
        relays, location = relayed(memory, stack)
        for relay in relays:
            relay.cut_after = 150_000

        def begun(location: OperatorLocation, at: At, relocate: Any) -> Iterator[pa.RecordBatch]:
            router = StateRouter(connections, sleep=lambda seconds: None)
            answer = router.scan(location, ScanRequest("", "totals", at=at), soon(), relocate)
            next(answer.batches)
            return answer.batches

        batches = begun(location, COMPLETED, None)
        with pytest.raises(ConnectionClosedError):
            list(batches)
        assert list(batches) == []
        with pytest.raises(ConnectionClosedError):
            list(begun(location, At("latest"), lambda error: memory.location))
        with pytest.raises(RetiredRunError, match="scan it again"):
            list(begun(location, COMPLETED, lambda error: replace(memory.location, query_id="another")))
        # Of rows that may have a TTL it is not known how many the next look finds.
        unknown = replace(location, operator=replace(location.operator, schema=""))
        with pytest.raises(ConnectionClosedError):
            list(begun(unknown, COMPLETED, lambda error: memory.location))
        assert sum(b.num_rows for b in begun(location, COMPLETED, lambda error: memory.location)) > 4000

        def nowhere(error: Exception) -> OperatorLocation:
            raise HostUnavailableError("The coordinator does not answer.")

        connections.timeout = 0.3
        answer = StateRouter(connections).scan(location, ScanRequest("", "totals"), soon(), nowhere)
        with pytest.raises(QueryTimeoutError, match="coordinator does not answer"):
            list(answer.batches)


# -- plain errors ------------------------------------------------------------------------------


def test_errors_come_as_they_are_and_leave_good_connections(cluster: Cluster, connections: KvConnections) -> None:
    router = StateRouter(connections)
    location = located(cluster)
    swapped = {"h0": location.owners, "h1": location.owners}
    others = {o.host_id: o for o in swapped["h0"]}
    wrong = replace(location, owners=tuple(others["h1" if o.host_id == "h0" else "h0"] for o in location.owners))
    before = [h.proxy.num_connections for h in cluster.hosts]
    for _ in range(3):
        with pytest.raises(NotOwnerError):
            router.lookup(wrong, FAMILY, stored(range(100)), COMPLETED, soon())
        with pytest.raises(NotOwnerError):
            router.scan(wrong, ScanRequest("", "totals"), soon())
        with pytest.raises(NotOwnerError):
            router.count(wrong, ScanRequest("", "totals"), soon())
    assert router.lookup(location, FAMILY, stored(range(100)), COMPLETED, soon())[0] == 1
    assert [h.proxy.num_connections for h in cluster.hosts] <= [n + 1 for n in before]
    silent = replace(location, owners=tuple(replace(o, query_address="") for o in location.owners))
    ask: list[Callable[[], Any]] = [
        lambda: router.lookup(silent, FAMILY, stored(range(9)), COMPLETED, soon()),
        lambda: router.lookup_one(silent, FAMILY, stored([1])[0].as_py(), COMPLETED, soon()),
        lambda: router.scan(silent, ScanRequest("", "totals"), soon()),
    ]
    for call in ask:
        with pytest.raises(UnknownKvStateKeyGroupLocationError, match="h0, h1"):
            call()
    cluster.hosts[1].kill()
    with pytest.raises((HostUnavailableError, ConnectionClosedError)):
        router.lookup(location, FAMILY, stored(range(100)), COMPLETED, soon())
    mine = owned_by(cluster, 0)[:50]
    assert numbers(router.lookup(location, FAMILY, stored(mine), COMPLETED, soon())[1]) == mine


def test_a_proxy_may_be_chosen_anew_for_every_question(cluster: Cluster, connections: KvConnections) -> None:
    addresses = iter([cluster.hosts[0].address, cluster.hosts[1].address, cluster.hosts[0].address])
    router = StateRouter(connections, via=lambda: next(addresses))
    for _ in range(3):
        assert router.lookup(located(cluster), FAMILY, stored(range(100)), COMPLETED, soon())[0] == 1
    eventually(lambda: sum(asked(cluster, "lookup")) == 3 + 3)  # each was forwarded once
