"""Resources of a ``KvStateServer``: abandoned scans, slow readers, concurrent requests, memory."""

from __future__ import annotations

import random
import socket
import threading
import time
from types import SimpleNamespace

import pyarrow as pa

from spark_bridge.exceptions import StateVersionError
from spark_bridge.queryable.protocol import (
    PROTOCOL,
    AwaitRequest,
    CountReply,
    CountRequest,
    DescribeReply,
    Hello,
    LookupReply,
    LookupRequest,
    OperatorsRequest,
    RowsReply,
    ScanRequest,
    StateAnswer,
    pack_one,
    unpack_bytes,
)
from spark_bridge.queryable.server import framed_socket, request_handler
from tests.effort import effort
from tests.patience import HANG, PATIENCE
from tests.spark_bridge.queryable.memory_reads import (
    LOOKUP,
    ROWS,
    SCAN,
    Holding,
    MemoryReads,
    RawClient,
    client_of,
    eventually,
    failed_with,
    frame_bytes,
    keys,
    rows,
    serving,
)


def test_a_client_that_leaves_within_a_scan_releases_it():
    reads = MemoryReads(batches=[rows(0, 1000, 1000)] * 500)
    with serving(reads, max_scans=1) as (server, _):
        for reset in (False, True):
            client = RawClient(server.server_address)
            client.say(SCAN)
            assert isinstance(client.hear()[0], RowsReply)
            assert reads.open_iterators == 1
            if reset:
                client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
            client.close()
            eventually(lambda: reads.open_iterators == 0 and server.num_connections == 0)
        with client_of(server) as client:
            assert client.ask(CountRequest(SCAN))[0] == CountReply(7, 500_000)
        assert server.statistics.snapshot()["totals"]["scan"]["failures"] == 0


def test_slow_reader_holds_a_scan_for_a_bounded_time(monkeypatch):
    ahead = 0.0
    monkeypatch.setattr(framed_socket, "SEND_TICK_SECONDS", 0.05)
    monkeypatch.setattr(framed_socket, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + ahead))
    reads = MemoryReads(batches=[rows(0, 1000, 1000)] * 500)
    with (
        serving(reads, max_scans=1, scan_seconds=PATIENCE, wait_seconds=0.05, transfer_seconds=2 * HANG) as (server, _),
        client_of(server) as client,
    ):
        client.say(SCAN)
        eventually(lambda: reads.open_iterators == 1)
        with client_of(server) as other:
            failed_with(other.ask(CountRequest(SCAN))[0], "TooManyRequestsError")
            assert other.ask(LOOKUP, pack_one(b"k1"))[0] == LookupReply(7)
            ahead = HANG  # the time of the scan is over, that of a transfer is not
            eventually(lambda: reads.open_iterators == 0)
            assert other.ask(CountRequest(SCAN))[0] == CountReply(7, 500_000)
        eventually(lambda: server.num_connections == 0)


def test_slow_but_steady_reader_gets_all_rows(monkeypatch):
    monkeypatch.setattr("spark_bridge.queryable.server.framed_socket.SEND_TICK_SECONDS", 0.01)
    reads = MemoryReads({b"big": random.Random(1).randbytes(20 << 20)}, batches=[rows(0, 15_000, 1000)] * 2)
    with serving(reads) as (server, _), client_of(server) as client:
        client.say(LOOKUP, keys(b"big", b"k1"))
        time.sleep(0.1)
        assert unpack_bytes(client.hear()[1]).to_pylist() == [reads.values[b"big"], None]
        client.say(SCAN)
        bodies = []
        while isinstance((heard := client.hear())[0], RowsReply):
            bodies.append(heard[1])
            time.sleep(0.03)
        assert pa.ipc.open_stream(b"".join(bodies)).read_all().equals(pa.Table.from_batches(reads.batches))


def test_non_generator_iterators_are_closed_too():
    class Batches:
        closed = 0

        def __iter__(self):
            return self

        def __next__(self):
            raise StateVersionError("no longer held")

        def close(self):
            self.closed += 1

    class Reads(MemoryReads):
        given = Batches()

        def scan(self, request):
            return StateAnswer(7, ROWS, self.given)

    with serving(Reads()) as (server, reads), client_of(server) as client:
        failed_with(client.stream(SCAN)[1], "StateVersionError")
        assert reads.given.closed == 1


def test_scan_that_takes_too_long_times_out():
    reads = MemoryReads(batches=[rows(0, 1)] * 50)
    reads.pause = 0.02
    with serving(reads, scan_seconds=0.2) as (server, _), client_of(server) as client:
        assert "0.2 s" in failed_with(client.stream(SCAN)[1], "RequestLimitError")
        assert reads.open_iterators == 0


def test_requests_at_once_are_bounded_and_wait_for_their_turn():
    reads = MemoryReads()
    reads.pause = 0.02
    answers = []

    def ask(address: str) -> None:
        with RawClient(address) as client:
            for _ in range(3):
                answers.append(client.ask(LOOKUP, pack_one(b"k1"))[0])

    with serving(reads, max_requests=2, wait_seconds=PATIENCE) as (server, _):
        threads = [threading.Thread(target=ask, args=(server.server_address,)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert answers == [LookupReply(7)] * 24 and reads.most_at_work == 2


def test_requests_that_wait_too_long_are_refused():
    limits = {"max_requests": 1, "wait_seconds": 0.05}
    with serving(Holding(), **limits) as (server, reads), client_of(server) as first, client_of(server) as second:
        try:
            first.say(LOOKUP, pack_one(b"held"))
            assert reads.begun.wait(PATIENCE)
            failed_with(second.ask(LOOKUP, pack_one(b"k1"))[0], "TooManyRequestsError")
        finally:
            reads.go_on.set()
        assert first.hear()[0] == LookupReply(7)
        assert second.ask(LOOKUP, pack_one(b"k1"))[0] == LookupReply(7)


def test_forwarded_requests_have_separate_turns():
    reads = MemoryReads(batches=[rows(0, 1000, 1000)] * 500)
    limits = {"max_requests": 1, "max_scans": 1, "wait_seconds": 0.05}
    with serving(reads, **limits) as (server, _), client_of(server) as first, client_of(server) as second:
        first.say(ScanRequest("run", "totals", forward=True))
        eventually(lambda: reads.open_iterators == 1)
        failed_with(second.ask(CountRequest(ScanRequest("run", "totals", forward=True)))[0], "TooManyRequestsError")
        assert second.ask(CountRequest(SCAN))[0] == CountReply(7, 500_000)
    with serving(Holding(), **limits) as (server, holding), client_of(server) as first, client_of(server) as second:
        try:
            first.say(LookupRequest("run", "totals", forward=True), pack_one(b"held"))
            assert holding.begun.wait(PATIENCE)
            assert second.ask(LOOKUP, pack_one(b"k1"))[0] == LookupReply(7)
        finally:
            holding.go_on.set()


def test_one_connection_too_many_gets_an_error():
    with serving(max_connections=2) as (server, _):
        with client_of(server), client_of(server) as second:
            with RawClient(server.server_address, token=None) as third:
                third.say(Hello(PROTOCOL, "right-token"))
                failed_with(third.hear()[0], "TooManyRequestsError")
                assert third.is_closed()
            assert second.ask(LOOKUP, pack_one(b"k1"))[0] == LookupReply(7)
        eventually(lambda: server.num_connections == 0)
        with client_of(server) as client:
            assert client.ask(LOOKUP, pack_one(b"k1"))[0] == LookupReply(7)


def test_idle_connections_are_closed_and_slow_requests_refused():
    with serving(idle_seconds=0.15) as (server, _), client_of(server) as client:
        assert client.is_closed()
    with serving(idle_seconds=HANG, transfer_seconds=0.15) as (server, _):
        for sent in (b"\x10\x00", frame_bytes(LOOKUP, pack_one(b"k1"))[:-1], frame_bytes(LOOKUP, bytes(100_000))[:-1]):
            with client_of(server) as client:
                client.socket.sendall(sent)
                failed_with(client.hear()[0], "RequestError")
                assert client.is_closed()
        eventually(lambda: server.num_connections == 0)


def test_large_requests_share_a_memory_budget():
    limits = {"max_request_bytes": 1 << 20, "max_buffered_bytes": (2 << 20) + 4096, "wait_seconds": 0.05}
    with serving(**limits) as (server, _), client_of(server) as first, client_of(server) as second:
        sent = frame_bytes(LOOKUP, keys(*[bytes(1000)] * 1000))
        first.socket.sendall(sent[:-1])
        second.socket.sendall(sent[:-1])
        eventually(lambda: server._running is not None and server._running.admission.buffered_bytes.taken > 2_000_000)
        with client_of(server) as third:
            third.socket.sendall(sent[:-1])
            failed_with(third.hear()[0], "TooManyRequestsError")
        for client in (first, second):
            client.socket.sendall(sent[-1:])
            assert client.hear()[0] == LookupReply(7)
        eventually(lambda: server._running is not None and server._running.admission.buffered_bytes.taken == 0)
        with client_of(server) as third:
            assert third.ask(LOOKUP, keys(*[bytes(1000)] * 1000))[0] == LookupReply(7)


def test_waiting_for_a_version_takes_no_turn(monkeypatch):
    monkeypatch.setattr(request_handler, "AWAIT_SLICE_SECONDS", 0.05)
    with serving(max_requests=1, wait_seconds=0.05) as (server, reads), client_of(server) as client:
        assert client.ask(AwaitRequest("run", 3, 20.0))[0] == CountReply(7, 7)
        assert client.ask(AwaitRequest("run", 7, 0.1))[0] == CountReply(7, 7)
        waiting = [RawClient(server.server_address) for _ in range(5)]
        for one in waiting:
            one.say(AwaitRequest("run", 7, 1e300))
        waiting[-1].say(LOOKUP, pack_one(b"k1"))
        assert client.ask(LOOKUP, pack_one(b"k1"))[0] == LookupReply(7)
        assert isinstance(client.ask(OperatorsRequest())[0], DescribeReply)
        waiting.pop().close()
        eventually(lambda: server.num_connections == 5)  # who leaves is not waited for
        with reads.completed:
            reads.version = 8
            reads.completed.notify_all()
        for one in waiting:
            assert one.hear()[0] == CountReply(8, 8)
            one.close()


def test_wait_for_a_version_times_out(monkeypatch):
    monkeypatch.setattr(request_handler, "MAX_AWAIT_SECONDS", 0.1)
    with serving() as (server, _), client_of(server) as client:
        assert client.ask(AwaitRequest("run", 7, 1e300))[0] == CountReply(7, 7)


def test_many_clients_at_once():
    requests = effort(8, 20)
    failures = []

    def ask(address: str, seed: int) -> None:
        rng = random.Random(seed)
        with RawClient(address) as client:
            for _ in range(requests):
                some = [b"k%d" % rng.randrange(1200) for _ in range(rng.choice([1, 1, 3, 100]))]
                found = unpack_bytes(client.ask(LOOKUP, keys(*some))[1]).to_pylist()
                if found != [b"v" + k[1:] if int(k[1:]) < 1000 else None for k in some]:
                    failures.append((some, found))

    with serving() as (server, _):
        threads = [threading.Thread(target=ask, args=(server.server_address, i)) for i in range(50)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        eventually(lambda: server.num_connections == 0)  # a request is counted once its answer is sent
        figures = server.statistics.snapshot()
        assert figures["totals"]["lookup"]["requests"] == 50 * requests and figures[""]["hello"]["requests"] == 50
