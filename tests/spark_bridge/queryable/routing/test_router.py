"""Routing over real hosts: whatever is asked of whomever, one answer of one version, and each row once."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from msgspec.structs import replace

from backends.encoding.operator_schema import OperatorSchema, StateVariable
from backends.encoding.schema import StateSchema
from spark_bridge.exceptions import (
    ConnectionClosedError,
    HostUnavailableError,
    NotOwnerError,
    RequestError,
    UnknownKeyOrNamespaceError,
    UnknownKvStateKeyGroupLocationError,
)
from spark_bridge.queryable.connections import KvConnections
from spark_bridge.queryable.protocol import KeyRowsRequest, ScanRequest
from spark_bridge.queryable.routing import router as chunk_module
from spark_bridge.queryable.routing.router import StateRouter
from spark_bridge.queryable.routing.scatter_gather import is_stable
from tests.patience import HANG, PATIENCE
from tests.spark_bridge.queryable.client_world import KEYS, TOTALS, Cluster
from tests.spark_bridge.queryable.memory_reads import MemoryReads, eventually
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


def test_invalid_stored_keys_are_rejected(cluster: Cluster, connections: KvConnections) -> None:
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
    monkeypatch.setattr(chunk_module, "SMALL_LOOKUP_SECONDS", 0.05)
    go_on = threading.Event()

    class Hanging(MemoryReads):
        def check(self, operator: str) -> None:
            assert go_on.wait(HANG)

    memory = Memory([Hanging()])
    router = StateRouter(connections)
    started = time.monotonic()
    try:
        # On a slow machine there may be no time left by the time of asking.
        with pytest.raises(HostUnavailableError, match=r"in time|timeout ended"):
            router.lookup_one(memory.location, FAMILY, stored([1])[0].as_py(), COMPLETED, soon(HANG))
        with pytest.raises(HostUnavailableError, match=r"in time|timeout ended"):
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
    # A host sees a moment later that a connection is closed.
    eventually(lambda: all(h.proxy.num_connections <= n + 1 for h, n in zip(cluster.hosts, before, strict=True)))
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


def test_proxy_may_change_with_every_request(cluster: Cluster, connections: KvConnections) -> None:
    addresses = iter([cluster.hosts[0].address, cluster.hosts[1].address, cluster.hosts[0].address])
    router = StateRouter(connections, via=lambda: next(addresses))
    for _ in range(3):
        assert router.lookup(located(cluster), FAMILY, stored(range(100)), COMPLETED, soon())[0] == 1
    eventually(lambda: sum(asked(cluster, "lookup")) == 3 + 3)  # each was forwarded once
