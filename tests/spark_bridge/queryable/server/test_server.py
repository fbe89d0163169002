"""``KvStateServer`` over an in-memory store: its answers, its refusals, and that it leaves nothing behind."""

from __future__ import annotations

import random
import socket
import threading
import time
from types import SimpleNamespace
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from backends.background_loop import failing_loops
from spark_bridge.queryable.protocol import (
    FRAME_PREFIX,
    MAX_HEADER_BYTES,
    PROTOCOL,
    At,
    AwaitRequest,
    ChangesRequest,
    CountReply,
    CountRequest,
    DescribeRequest,
    EndOfRows,
    Failure,
    Hello,
    KeyRowsRequest,
    LocateOperatorRequest,
    LookupReply,
    LookupRequest,
    OperatorsRequest,
    RowsReply,
    pack_one,
    unpack_bytes,
    unpack_one,
)
from spark_bridge.queryable.server import request_handler
from spark_bridge.queryable.server import server as server_module
from spark_bridge.queryable.server.limits import RequestLimits
from spark_bridge.queryable.server.server import KvStateServer
from tests.patience import HANG, PATIENCE
from tests.spark_bridge.queryable.memory_reads import (
    LOOKUP,
    ROWS,
    SCAN,
    SECRET,
    MemoryReads,
    OneToken,
    RawClient,
    client_of,
    eventually,
    failed_with,
    frame_bytes,
    keys,
    query_threads,
    rows,
    serving,
    welcomed,
)

# -- answers ---------------------------------------------------------------------------------------


def test_lookups_are_answered_with_the_version():
    with serving(max_keys=1000, max_request_bytes=1 << 20) as (server, _), client_of(server) as client:
        welcome = welcomed(client.welcome)
        assert (welcome.host_id, welcome.max_keys, welcome.max_request_bytes) == ("h0", 1000, 1 << 20)
        reply, body = client.ask(LOOKUP, pack_one(b"k3"))
        assert (reply, unpack_one(body)) == (LookupReply(7), b"v3")
        reply, body = client.ask(LOOKUP, pack_one(b"nobody"))
        assert (reply, unpack_one(body)) == (LookupReply(7), None)
        reply, body = client.ask(LOOKUP, keys(b"k9", b"nobody", b"k1", b"k9"))
        assert (reply, unpack_bytes(body).to_pylist()) == (LookupReply(7), [b"v9", None, b"v1", b"v9"])
        reply, body = client.ask(LOOKUP, keys())
        assert (reply, unpack_bytes(body).to_pylist()) == (LookupReply(7), [])


def test_other_questions_are_answered():
    with serving() as (server, _), client_of(server) as client:
        location = msgspec.json.decode(client.ask(LocateOperatorRequest("totals", "q1"))[1])
        assert (location["query_name"], location["operator"]["name"]) == ("q1", "totals")
        assert client.ask(CountRequest(SCAN))[0] == CountReply(7, 20)
        assert msgspec.json.decode(client.ask(OperatorsRequest())[1]) == [{"operator": "totals"}]
        described = msgspec.json.decode(client.ask(DescribeRequest())[1])
        assert described["partitions"] == 1
        assert described["requests"]["totals"]["count"]["requests"] == 1
        assert list(msgspec.json.decode(client.ask(DescribeRequest("totals"))[1])["requests"]) == ["totals"]


@pytest.mark.parametrize("request_", [SCAN, KeyRowsRequest("run", "totals"), ChangesRequest("run", "totals", 0, 7)])
@pytest.mark.parametrize("batches", [[], [rows(0, 0)], [rows(0, 5)], [rows(0, 5), rows(5, 5), rows(5, 9)]])
def test_rows_come_as_one_ipc_stream(request_, batches):
    with serving(MemoryReads(batches=batches)) as (server, _), client_of(server) as client:
        for _ in range(2):
            table, end = client.stream(request_, keys(b"a") if isinstance(request_, KeyRowsRequest) else b"")
            expected = pa.Table.from_batches(batches, ROWS)
            assert end == EndOfRows(7, expected.num_rows)
            assert table.schema == ROWS and table.equals(expected)


def test_large_batches_are_sent_in_frames_of_bounded_size():
    batch = rows(0, 30_000, width=1000)
    with serving(MemoryReads(batches=[batch])) as (server, _), client_of(server) as client:
        client.say(SCAN)
        bodies = []
        while isinstance((heard := client.hear())[0], RowsReply):
            bodies.append(heard[1])
        assert max(map(len, bodies)) < 5 << 20 and len(bodies) >= 6
        assert pa.ipc.open_stream(b"".join(bodies)).read_all().equals(pa.Table.from_batches([batch]))


def test_scan_without_matches_sends_empty_replies(monkeypatch):
    now = 1000.0

    class Slow(MemoryReads):
        """Takes two seconds for each batch, by the server's clock."""

        def _rows(self):
            nonlocal now
            for batch in super()._rows():
                now += 2.0
                yield batch

    for module in (request_handler, request_handler, request_handler, server_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    for module in (request_handler, request_handler):
        monkeypatch.setattr(module, "QUIET_SECONDS", 5.0)
    with (
        serving(Slow(batches=[rows(0, 1), *[rows(0, 0)] * 10, rows(1, 2)])) as (server, _),
        client_of(server) as client,
    ):
        client.say(SCAN)
        bodies = []
        while isinstance((heard := client.hear())[0], RowsReply):
            bodies.append(heard[1])
        # One every six seconds: the first that come after five.
        assert [b.num_rows for b in pa.ipc.open_stream(b"".join(bodies))] == [1, 0, 0, 0, 1]


def test_error_midway_fails_the_request_and_keeps_the_connection():
    for request in (SCAN, KeyRowsRequest("run", "totals")):
        reads = MemoryReads()
        reads.fail_after = 1
        with serving(reads) as (server, _), client_of(server) as client:
            assert "no longer held" in failed_with(client.stream(request, keys(b"a"))[1], "StateVersionError")
            assert unpack_one(client.ask(LOOKUP, pack_one(b"k3"))[1]) == b"v3"
            assert reads.open_iterators == 0


# -- bytes as they come ----------------------------------------------------------------------------


def test_pipelined_requests_are_answered_in_order():
    with serving() as (server, _), client_of(server) as client:
        client.socket.sendall(b"".join(frame_bytes(LOOKUP, pack_one(b"k%d" % i)) for i in range(500)))
        assert [unpack_one(client.hear()[1]) for _ in range(500)] == [b"v%d" % i for i in range(500)]


def test_the_greeting_and_requests_may_come_in_one_packet():
    with serving() as (server, _), RawClient(server.server_address, token=None) as client:
        client.socket.sendall(frame_bytes(Hello(PROTOCOL, "right-token")) + frame_bytes(LOOKUP, pack_one(b"k1")))
        welcomed(client.hear()[0])
        assert unpack_one(client.hear()[1]) == b"v1"


def test_a_sender_of_single_bytes_is_understood():
    with serving() as (server, _), RawClient(server.server_address, token=None) as client:
        for byte in frame_bytes(Hello(PROTOCOL, "right-token")):
            client.socket.sendall(bytes([byte]))
            time.sleep(0.0002)
        welcomed(client.hear()[0])
        for byte in frame_bytes(LOOKUP, pack_one(b"k1")) + frame_bytes(LOOKUP, keys(b"k2", b"k3")):
            client.socket.sendall(bytes([byte]))
        assert unpack_one(client.hear()[1]) == b"v1"
        assert unpack_bytes(client.hear()[1]).to_pylist() == [b"v2", b"v3"]


def test_frames_of_all_sizes_cut_anywhere_are_understood():
    rng = random.Random(3)
    asked = []
    for _ in range(60):
        size = rng.choice([0, 1, 1, 10, 2000, 6000, 12_000])
        asked.append([b"k%d" % rng.randrange(2000) for _ in range(size)])
    sent = b"".join(frame_bytes(LOOKUP, keys(*some)) for some in asked)
    reads = MemoryReads()
    with serving(reads) as (server, _), client_of(server) as client:

        def send():
            begin = 0
            while begin < len(sent):
                end = begin + rng.choice([1, 7, 100, 65_535, 65_536, 200_000])
                client.socket.sendall(sent[begin:end])
                begin = end

        sender = threading.Thread(target=send)
        sender.start()
        for some in asked:
            reply, body = client.hear()
            assert reply == LookupReply(7)
            assert unpack_bytes(body).to_pylist() == [reads.values.get(k) for k in some]
        sender.join()


def test_keys_that_a_store_keeps_stay_as_they_are():
    class Keeping(MemoryReads):
        kept: list[pa.BinaryArray] = []

        def lookup(self, request, keys):
            self.kept.append(keys)
            return super().lookup(request, keys)

    with serving(Keeping()) as (server, reads), client_of(server) as client:
        for i in range(3):
            client.ask(LOOKUP, keys(b"k%d" % i, b"x"))
        assert [k.to_pylist() for k in reads.kept] == [[b"k%d" % i, b"x"] for i in range(3)]


def test_a_client_that_closes_its_sending_half_gets_all_answers():
    with serving(MemoryReads(batches=[rows(0, 2000, 1000)] * 5)) as (server, _), client_of(server) as client:
        client.socket.sendall(frame_bytes(LOOKUP, pack_one(b"k1")) * 3 + frame_bytes(SCAN))
        client.socket.shutdown(socket.SHUT_WR)
        assert [unpack_one(client.hear()[1]) for _ in range(3)] == [b"v1"] * 3
        while isinstance((heard := client.hear())[0], RowsReply):
            pass
        assert heard[0] == EndOfRows(7, 10_000)
        assert client.is_closed()


# -- what is refused -------------------------------------------------------------------------------


def test_a_frame_that_is_too_large_is_refused_unread():
    with serving(max_request_bytes=10_000) as (server, _):
        for length in (10_001 + MAX_HEADER_BYTES, 0xFFFFFFFF):
            with client_of(server) as client:
                client.socket.sendall(FRAME_PREFIX.pack(length, 10))
                assert f"{length:,} bytes" in failed_with(client.hear()[0], "RequestLimitError")
                assert client.is_closed()


def test_client_that_still_sends_can_read_the_error():
    with serving(max_request_bytes=10_000) as (server, _), client_of(server) as client:
        client.socket.sendall(frame_bytes(LOOKUP, b"x" * (8 << 20)))
        failed_with(client.hear()[0], "RequestLimitError")
        assert client.is_closed()


@pytest.mark.parametrize("lengths", [(0, 0), (10, 0), (10, 11), (MAX_HEADER_BYTES + 5, MAX_HEADER_BYTES + 1)])
def test_lengths_that_make_no_sense_end_the_connection(lengths):
    with serving() as (server, _), client_of(server) as client:
        client.socket.sendall(FRAME_PREFIX.pack(*lengths))
        failed_with(client.hear()[0], "RequestError")
        assert client.is_closed()


def test_malformed_requests_are_rejected_and_the_connection_stays():
    def framed(header: bytes, body: bytes = b"") -> bytes:
        return FRAME_PREFIX.pack(len(header) + len(body), len(header)) + header + body

    bad = [
        framed(b"\xc1"),
        framed(b"\x91" * 5000),
        framed(b"\x93\xa6lookup\xa1\xff\xa1a"),
        framed(msgspec.msgpack.encode(["nonsense", 1])),
        framed(msgspec.msgpack.encode(["scan", "run", "totals", None, ["version", -1]])),
        framed(msgspec.msgpack.encode(["scan", "run", "totals", None, ["version", 1 << 63]])),
        framed(msgspec.msgpack.encode(["await", "run", 0, float("nan")])),
        framed(msgspec.msgpack.encode(["await", "run", 0, -1.0])),
        frame_bytes(Hello(PROTOCOL, "right-token")),
        frame_bytes(LOOKUP),
        frame_bytes(LOOKUP, b"\x01\x00\x00\x00"),
        frame_bytes(LOOKUP, b"\x01\x00\x00\x00\xff\xff\xff\xff"),
        frame_bytes(LOOKUP, pack_one(b"k1") + b"more"),
        frame_bytes(LOOKUP, keys(b"k1", None)),
        frame_bytes(LOOKUP, b"\xff\xff\x00\x00"),
        frame_bytes(LOOKUP, b"\x02\x00\x00\x00\xfe\xff\xff\xff\x02\x00\x00\x00ab"),
        frame_bytes(KeyRowsRequest("run", "totals")),
        frame_bytes(ChangesRequest("run", "totals", 0, 1), b"x"),
    ]
    with serving() as (server, _), client_of(server) as client:
        for sent in bad:
            client.socket.sendall(sent)
            failed_with(client.hear()[0], "RequestError")
        assert unpack_one(client.ask(LOOKUP, pack_one(b"k1"))[1]) == b"v1"
        assert server.statistics.snapshot()[""]["unreadable"]["failures"] == 9


def test_too_many_keys_are_refused():
    with serving(max_keys=3) as (server, _), client_of(server) as client:
        assert client.ask(LOOKUP, keys(b"a", b"b", b"c"))[0] == LookupReply(7)
        assert "4 keys" in failed_with(client.ask(LOOKUP, keys(b"a", b"b", b"c", b"d"))[0], "RequestLimitError")
        assert client.ask(LOOKUP, keys(b"a"))[0] == LookupReply(7)


def test_an_answer_that_is_too_large_is_refused():
    reads = MemoryReads({b"big": bytes(3 << 20)})
    with (
        serving(reads, max_buffered_bytes=2 << 20, max_request_bytes=1 << 20) as (server, _),
        client_of(server) as client,
    ):
        failed_with(client.ask(LOOKUP, keys(b"big", b"big"))[0], "RequestLimitError")
        assert unpack_bytes(client.ask(LOOKUP, keys(b"other", b"other"))[1]).to_pylist() == [None, None]


def test_own_errors_are_sent_and_others_are_hidden(caplog):
    with serving() as (server, _), client_of(server) as client:
        assert "'nothing'" in failed_with(client.ask(LocateOperatorRequest("nothing"))[0], "UnknownOperatorError")
        # of a host that a proxy asked: not the end of this connection
        failed_with(client.ask(LookupRequest("run", "gone"), pack_one(b"k"))[0], "ConnectionClosedError")
        message = failed_with(client.ask(LookupRequest("run", "broken"), pack_one(b"k"))[0], "ZeroDivisionError")
        assert SECRET not in message and SECRET in caplog.text and "Traceback" in caplog.text
        assert "xxx" in failed_with(client.ask(LocateOperatorRequest("x" * 1000))[0], "UnknownOperatorError")
        assert "length" in failed_with(client.ask(LocateOperatorRequest("x" * 100_000))[0], "RequestError")
        assert client.ask(LOOKUP, pack_one(b"k1"))[0] == LookupReply(7)


# -- life ------------------------------------------------------------------------------------------


def test_shutdown_leaves_nothing_and_can_be_followed_by_a_start(monkeypatch):
    monkeypatch.setattr(request_handler, "AWAIT_SLICE_SECONDS", 0.1)
    monkeypatch.setattr(request_handler, "MAX_AWAIT_SECONDS", HANG)
    monkeypatch.setattr(server_module, "HELLO_SECONDS", HANG)
    monkeypatch.setattr(server_module, "SHUTDOWN_SECONDS", HANG)
    eventually(lambda: query_threads() == [])  # those of earlier tests
    reads = MemoryReads(batches=[rows(0, 1000, 1000)] * 500)
    server = KvStateServer(reads, OneToken(), ip="127.0.0.1")
    address = server.server_address
    with pytest.raises(ConnectionRefusedError):
        RawClient(address)  # not yet
    for _ in range(2):
        server.start()
        server.start()
        assert server.server_address == address
        idle, scanning, waiting, silent = (RawClient(address, token=t) for t in ["right-token"] * 3 + [None])
        scanning.say(SCAN)
        waiting.say(AwaitRequest("run", 7, HANG))
        eventually(lambda: reads.open_iterators == 1 and server.num_connections == 4)
        began = time.monotonic()
        server.shutdown()
        server.shutdown()
        assert time.monotonic() - began < PATIENCE, "the shutdown has not waited for clients"
        assert query_threads() == [] and reads.open_iterators == 0 and server.num_connections == 0
        for client in (idle, silent):
            assert client.is_closed()
        for client in (idle, scanning, waiting, silent):
            client.close()
        with pytest.raises(ConnectionRefusedError):
            RawClient(address)
    another = KvStateServer(MemoryReads(), OneToken(), ip="127.0.0.1", port=int(address.rsplit(":", 1)[1]))
    another.start()
    with RawClient(address) as client:
        assert client.ask(LOOKUP, pack_one(b"k1"))[0] == LookupReply(7)
    another.shutdown()


def test_a_port_that_is_taken_is_an_error():
    with serving() as (server, _), pytest.raises(OSError, match="in use"):
        KvStateServer(MemoryReads(), OneToken(), ip="127.0.0.1", port=int(server.server_address.rsplit(":", 1)[1]))


def test_a_server_that_never_started_can_be_shut_down():
    KvStateServer(MemoryReads(), OneToken(), ip="127.0.0.1").shutdown()


def test_ipv6_addresses_have_brackets():
    try:
        server = KvStateServer(MemoryReads(), OneToken(), ip="::1")
    except OSError:
        pytest.skip("no IPv6 here")
    assert server.server_address.startswith("[::1]:")
    server.shutdown()


def test_descriptions_can_be_replaced():
    class Proxy(KvStateServer):
        def describe(self, request):
            return {"forwarded": request.forward}

    server = Proxy(MemoryReads(), OneToken(), ip="127.0.0.1", limits=RequestLimits(max_requests=1))
    server.start()
    with RawClient(server.server_address) as client:
        assert msgspec.json.decode(client.ask(DescribeRequest(forward=True))[1]) == {"forwarded": True}
    server.shutdown()


def test_the_version_asked_for_reaches_the_store():
    class Seen(MemoryReads):
        def lookup_one(self, request, key):
            return request.at.version, None if request.at.held_only else key

    with serving(Seen()) as (server, _), client_of(server) as client:
        reply, body = client.ask(LookupRequest("run", "totals", At("version", 12, False)), pack_one(b"k"))
        assert (reply, unpack_one(body)) == (LookupReply(12), b"k")
        assert not isinstance(reply, Failure)


def test_port_stays_open_after_any_error(monkeypatch: pytest.MonkeyPatch) -> None:
    accept, errors = KvStateServer._accept_one, [KeyError("a"), MemoryError("no more threads")]

    def failing(self: KvStateServer, *args: Any) -> None:
        if errors:
            raise errors.pop()
        accept(self, *args)

    monkeypatch.setattr(KvStateServer, "_accept_one", failing)
    with serving() as (server, _):
        eventually(lambda: not errors)
        with RawClient(server.server_address) as client:
            assert type(client.ask(LOOKUP, pack_one(b"k1"))[0]) is LookupReply
        eventually(lambda: not [loop for loop in failing_loops.now() if server.server_address in loop.what])
