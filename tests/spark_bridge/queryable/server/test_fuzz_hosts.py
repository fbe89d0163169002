"""Requests that are well-formed and make little sense, to real hosts: an answer, or an error of ours that says what
is wrong.
"""

from __future__ import annotations

import functools
import gc
import logging
import random
import threading
from collections.abc import Iterator
from typing import Any

import psutil
import pyarrow as pa
import pytest

from spark_bridge.queryable.protocol import (
    At,
    AwaitRequest,
    ChangesRequest,
    Comparison,
    CountReply,
    CountRequest,
    DescribeRequest,
    EndOfRows,
    Failure,
    KeyRowsRequest,
    LocateOperatorRequest,
    LookupReply,
    LookupRequest,
    OperatorsRequest,
    Request,
    RowsReply,
    ScanRequest,
    pack_bytes,
)
from spark_bridge.queryable.reads.host_reads import HostReads
from spark_bridge.queryable.server import proxy, request_handler
from spark_bridge.queryable.server.limits import RequestLimits
from spark_bridge.queryable.server.proxy import ForwardingReads
from tests.effort import only_thorough
from tests.spark_bridge.queryable import client_world
from tests.spark_bridge.queryable.client_world import TOKEN, Cluster
from tests.spark_bridge.queryable.memory_reads import RawClient, eventually

ROUNDS = pytest.mark.parametrize("rounds", [200, only_thorough(5000)])


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request_handler, "MAX_AWAIT_SECONDS", 0.001)
        # Many of the versions asked for will never be.
        patch.setattr(client_world, "HostReads", lambda host, **_: HostReads(host, wait_seconds=0.001))
        patch.setattr(proxy, "ForwardingReads", functools.partial(ForwardingReads, patience=0.05))
        made = Cluster(tmp_path_factory.mktemp("fuzz"), limits=RequestLimits(max_keys=1000, max_request_bytes=1 << 20))
        for batch in range(3):
            made.batch({i: (i + batch, f"user {i}") for i in range(batch, 60)})
        yield made
        made.close()


class Odd:
    """Values that are right often enough to get deep, and wrong in every way that the types allow."""

    def __init__(self, seed: str, stored: list[bytes]) -> None:
        self.rng = random.Random(seed)
        self.stored = stored

    def one(self, *given: Any) -> Any:
        return self.rng.choice(given)

    def mostly(self, right: Any, *odd: Any) -> Any:
        return right if self.rng.random() < 0.85 else self.rng.choice(odd)

    def run(self) -> str:
        return self.mostly("run1", "run2", "", "\x00", "é" * 200)

    def operator(self) -> str:
        return self.mostly("totals", "other", "", "../totals", "t" * 5000)

    def number(self) -> int:
        return self.one(0, 1, 2, 3, 3, 4, 63, 64, 1 << 31, (1 << 63) - 1)

    def at(self) -> At:
        return At(
            self.mostly("completed", "latest", "version"), self.mostly(0, self.number()), self.mostly(False, True)
        )

    def state(self) -> str | None:
        return self.mostly(None, "value", "default", "", "nothing", "timers", "n", "\x00")

    def bound(self) -> bytes | None:
        key = self.rng.choice(self.stored)
        noise = self.rng.randbytes(self.rng.randrange(12))
        return self.mostly(None, b"", b"\xff" * 20, key[2:], key[2:7], key, noise)

    def columns(self) -> list[str] | None:
        return self.mostly(self.one(None, ["user"], ["n"], ["name", "user"]), ["n", "n"], [], ["nothing"], [""])

    def where(self) -> list[Comparison]:
        def comparison() -> Comparison:
            values = [self.one("x", "", 1, -1, 1 << 63, 1.5, 1e308, float("nan"), True, "1", "2020-01-01", "\x00")]
            values *= self.rng.choice([0, 1, 1, 1, 3])
            said = self.one("=", "!=", "<", "<=", ">", ">=", "in", "is null", "is not null")
            return Comparison(self.one("user", "n", "name", "nothing", ""), said, values)

        return [comparison() for _ in range(self.mostly(0, 1, 1, 2))]

    def partitions(self) -> list[int] | None:
        return self.mostly(self.one(None, None, [0], [3, 1]), [], [1, 1], [4], [1 << 40], list(range(4)))

    def scan(self) -> ScanRequest:
        return ScanRequest(
            self.run(),
            self.operator(),
            self.state(),
            self.at(),
            self.bound(),
            self.bound(),
            self.columns(),
            self.where(),
            self.one(None, None, 0, 1, 7, (1 << 63) - 1),
            self.one(False, False, True),
            self.partitions(),
            self.one(False, True),
        )

    def body(self) -> bytes:
        right = self.rng.choices(self.stored, k=self.rng.choice([1, 1, 2, 20]))
        match self.rng.randrange(6):
            case 0:
                return pack_bytes(
                    pa.array(
                        [self.rng.randbytes(self.rng.randrange(14)) for _ in range(self.one(0, 1, 5))], pa.binary()
                    )
                )
            case 1:
                return pack_bytes(pa.array([k[: self.rng.randrange(len(k) + 1)] for k in right], pa.binary()))
            case 2:
                return b""
        return pack_bytes(pa.array(right, pa.binary()))

    def request(self) -> tuple[Request, bytes]:
        match self.rng.randrange(12):
            case 0 | 1 | 2:
                family = self.mostly("default", "", "nothing", "a" * 3000)
                return LookupRequest(self.run(), self.operator(), self.at(), family, self.one(False, True)), self.body()
            case 3 | 4:
                request = KeyRowsRequest(
                    self.run(),
                    self.operator(),
                    self.state(),
                    self.at(),
                    self.columns(),
                    self.one(False, True),
                    self.partitions(),
                )
                return request, self.body()
            case 5 | 6 | 7:
                return self.scan(), b""
            case 8:
                return CountRequest(self.scan()), b""
            case 9:
                changes = ChangesRequest(self.run(), self.operator(), self.number(), self.number(), self.state())
                return changes, self.one(b"", self.body())
            case 10:
                return AwaitRequest(self.run(), self.number(), self.one(0.0, 0.001, 1e300)), b""
        query = self.one(None, "run1", "q", "name", "nothing", "")
        return self.one(
            (LocateOperatorRequest(self.operator(), query), b""),
            (OperatorsRequest(), b""),
            (DescribeRequest(self.one(None, self.operator()), query, self.one(False, True)), b""),
        )


def stored_keys(cluster: Cluster) -> list[bytes]:
    keys: list[bytes] = []
    for h in cluster.hosts:
        for instance in h.host.cache.instances.values():
            for pairs in instance.state.reads.scan():
                keys += pairs.column(0).to_pylist()
    return keys


def last_of(client: RawClient) -> Any:
    reply: Any = RowsReply(0)
    while isinstance(reply, RowsReply):
        reply, _ = client.hear()
    return reply


@ROUNDS
def test_hosts_name_the_error_of_a_request(cluster, rounds, caplog):
    odd = Odd(f"hosts {rounds}", stored_keys(cluster))
    clients = [RawClient(h.address, token=TOKEN) for h in cluster.hosts]
    answered: dict[str, int] = {}
    for _ in range(rounds):
        request, body = odd.request()
        client = odd.rng.choice(clients)
        client.say(request, body)
        reply = last_of(client)
        kind = reply.error if isinstance(reply, Failure) else type(reply).__name__
        answered[f"{type(request).__name__}: {kind}"] = answered.get(f"{type(request).__name__}: {kind}", 0) + 1
    unexpected = {f"{r.exc_info and r.exc_info[1]!r}" for r in caplog.records if r.levelno >= logging.ERROR}
    assert unexpected == set()
    ends = {LookupRequest: LookupReply, ScanRequest: EndOfRows, KeyRowsRequest: EndOfRows, CountRequest: CountReply}
    expected = {f"{request.__name__}: {reply.__name__}" for request, reply in ends.items()}
    assert expected <= set(answered), answered
    for client in clients:
        reply, _ = client.ask(CountRequest(ScanRequest("run1", "totals", forward=True)))
        assert (reply.version, reply.count) == (3, 60)
        client.say(ScanRequest("run1", "totals", forward=True))
        assert last_of(client) == EndOfRows(3, 60)
        client.close()


def test_proxy_ignores_versions_invented_by_a_client(cluster):
    """Once, it asked the hosts for them ever after."""
    client = RawClient(cluster.hosts[0].address, token=TOKEN)
    ahead = At("completed", 1 << 40)
    for request in (
        ScanRequest("run1", "totals", at=ahead, forward=True),
        CountRequest(ScanRequest("run1", "totals", at=ahead, forward=True)),
        KeyRowsRequest("run1", "totals", at=ahead, forward=True),
        LookupRequest("run1", "totals", ahead, forward=True),
    ):
        client.say(request, pack_bytes(pa.array(stored_keys(cluster)[:9], pa.binary())))
        assert isinstance(last_of(client), Failure)
        client.say(ScanRequest("run1", "totals", forward=True))
        assert last_of(client) == EndOfRows(3, 60)
    client.close()


def test_scans_that_are_left_leave_nothing(cluster):
    def figures() -> tuple[int, int, int]:
        gc.collect()
        taken = 0
        for h in cluster.hosts:
            running = h.proxy._running
            assert running is not None
            admission = running.admission
            taken += admission.scans.taken + admission.forwarded_scans.taken + admission.lookups.taken
        return threading.active_count(), psutil.Process().num_fds(), taken

    odd = Odd("left", stored_keys(cluster))

    def leave(times: int) -> None:
        for _ in range(times):
            client = RawClient(odd.rng.choice(cluster.hosts).address, token=TOKEN)
            for _ in range(odd.rng.randrange(1, 4)):
                request, body = odd.request()
                client.say(request, body)
            if odd.rng.random() < 0.5:
                client.hear()
            client.close()

    def is_quiet() -> bool:
        return all(h.proxy.num_connections <= 1 for h in cluster.hosts) or figures()[2] == 0

    leave(15)
    eventually(is_quiet)
    before = figures()
    leave(25)
    eventually(lambda: figures()[2] == 0 and figures()[1] <= before[1] + 6 and figures()[0] <= before[0] + 6)
