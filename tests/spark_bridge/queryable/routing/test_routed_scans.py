"""Scans of many hosts: each row once, no faster than it is read, and on where a host has died."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from msgspec.structs import replace

from coordinator_actor.exceptions import RetiredRunError
from coordinator_actor.messages import OperatorLocation
from spark_bridge.exceptions import (
    ConnectionClosedError,
    HostUnavailableError,
    QueryTimeoutError,
    RequestError,
    UnknownKvStateKeyGroupLocationError,
)
from spark_bridge.queryable.connections import KvConnections
from spark_bridge.queryable.protocol import At, ScanRequest, StateAnswer
from spark_bridge.queryable.routing.router import StateRouter
from tests.effort import effort
from tests.patience import HANG
from tests.spark_bridge.queryable.client_world import Cluster
from tests.spark_bridge.queryable.memory_reads import ROWS, MemoryReads, eventually
from tests.spark_bridge.queryable.routing.router_world import (
    COMPLETED,
    located,
    soon,
)
from tests.spark_bridge.queryable.routing.slow_hosts import Memory, Relay


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
        assert all(r.taken < 40 for r in reads), "as many as the sockets buffer"
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
        """Sends its first batch, as the columns are unknown before, and the rest when the test says so."""

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
def test_scan_resumes_where_a_broken_stream_ended(seed: int, connections: KvConnections) -> None:
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

        # A proxy that has all of them, in the requested order.
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


def test_scan_resumes_at_the_new_owners_of_a_dead_host(tmp_path: Path, connections: KvConnections) -> None:
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


def test_unresumable_scan_is_an_error(connections: KvConnections) -> None:
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
