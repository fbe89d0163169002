"""``KvStateServer`` over a store in memory: what it answers, what it refuses, and that nothing is left behind."""

from __future__ import annotations

import contextlib
import random
import socket
import ssl
import threading
import time
from types import SimpleNamespace

import msgspec
import pyarrow as pa
import pytest
import trustme

from spark_bridge.exceptions import StateVersionError
from spark_bridge.queryable.protocol.byte_arrays import pack_bytes, pack_one, unpack_bytes, unpack_one
from spark_bridge.queryable.protocol.messages import (
    FRAME_PREFIX,
    MAX_HEADER_BYTES,
    PROTOCOL,
    At,
    AwaitRequest,
    ChangesRequest,
    CountReply,
    CountRequest,
    DescribeReply,
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
    ScanRequest,
)
from spark_bridge.queryable.protocol.state_reads import StateAnswer
from spark_bridge.queryable.server import (
    client_session,
    framed_socket,
    request_handler,
    row_sender,
    served_request,
    server_connection,
)
from spark_bridge.queryable.server import server as server_module
from spark_bridge.queryable.server.request_limits import RequestLimits
from spark_bridge.queryable.server.server import KvStateServer
from tests.effort import effort
from tests.patience import HANG, PATIENCE
from tests.spark_bridge.queryable.memory_reads import (
    ROWS,
    SECRET,
    MemoryReads,
    OneToken,
    RawClient,
    eventually,
    failed_with,
    frame_bytes,
    rows,
    serving,
    welcomed,
)

LOOKUP = LookupRequest("run", "totals")
SCAN = ScanRequest("run", "totals")


def keys(*given: bytes | None) -> bytes:
    return pack_bytes(pa.array(given, pa.binary()))


def query_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("statestore-quer")]


@contextlib.contextmanager
def client_of(server: KvStateServer):
    with RawClient(server.server_address) as client:
        yield client


class Holding(MemoryReads):
    """Keeps lookups of the key "held" at work until ``go_on`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go_on = threading.Event(), threading.Event()

    def lookup_one(self, request, key):
        if key == b"held":
            self.begun.set()
            assert self.go_on.wait(HANG)
        return super().lookup_one(request, key)


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


def test_a_scan_that_finds_nothing_for_long_says_that_it_is_at_work(monkeypatch):
    now = 1000.0

    class Slow(MemoryReads):
        """Takes two seconds for each batch, by the server's clock."""

        def _rows(self):
            nonlocal now
            for batch in super()._rows():
                now += 2.0
                yield batch

    for module in (request_handler, row_sender, served_request, server_connection):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    for module in (row_sender, served_request):
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


def test_an_error_midway_is_a_failure_and_the_connection_goes_on():
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


# -- who may ask -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sent",
    [
        frame_bytes(Hello(PROTOCOL, "wrong")),
        frame_bytes(Hello(PROTOCOL, "")),
        frame_bytes(LOOKUP, pack_one(b"k1")),
        frame_bytes(Hello(PROTOCOL, "x" * 5000)),
        FRAME_PREFIX.pack(0, 0),
        FRAME_PREFIX.pack(100, 200),
        FRAME_PREFIX.pack(0xFFFFFFFF, 10),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        FRAME_PREFIX.pack(3, 3) + b"\xc1\xc1\xc1",
    ],
)
def test_no_token_no_answer(sent):
    with serving() as (server, _), RawClient(server.server_address, token=None) as client:
        client.socket.sendall(sent)
        failed_with(client.hear()[0], "AccessDeniedError")
        assert client.is_closed()
        assert server.statistics.snapshot()[""]["hello"]["failures"] == 1


def test_who_says_nothing_is_sent_away(monkeypatch):
    monkeypatch.setattr(server_connection, "HELLO_SECONDS", 0.1)
    with serving() as (server, _):
        for sent in (b"", b"\x10", frame_bytes(Hello(PROTOCOL, "right-token"))[:-1]):
            with RawClient(server.server_address, token=None) as client:
                client.socket.sendall(sent)
                assert "within 0.1 s" in failed_with(client.hear()[0], "AccessDeniedError")
        eventually(lambda: server.num_connections == 0)


def test_another_protocol_is_named():
    with serving() as (server, _), RawClient(server.server_address, token=None) as client:
        assert "protocol 99" in failed_with(client.ask(Hello(99, "right-token"))[0], "RequestError")
        assert client.is_closed()


def test_a_token_that_is_revoked_ends_its_connections(monkeypatch):
    monkeypatch.setattr(client_session, "TOKEN_SECONDS", 0.0)
    with serving() as (server, _), client_of(server) as client:
        assert client.ask(LOOKUP, pack_one(b"k1"))[0] == LookupReply(7)
        server._tokens.valid.clear()
        failed_with(client.ask(LOOKUP, pack_one(b"k1"))[0], "AccessDeniedError")
        assert client.is_closed()


def test_a_token_that_is_revoked_ends_its_scans(monkeypatch):
    monkeypatch.setattr(client_session, "TOKEN_SECONDS", 0.0)
    monkeypatch.setattr(served_request, "TOKEN_SECONDS", 0.05)
    reads = MemoryReads(batches=[rows(0, 1)] * 100)
    reads.pause = 0.02
    with serving(reads) as (server, _), client_of(server) as client:
        client.say(SCAN)
        assert isinstance(client.hear()[0], RowsReply)
        server._tokens.valid.clear()
        while isinstance((heard := client.hear())[0], RowsReply):
            pass
        failed_with(heard[0], "AccessDeniedError")
        assert client.is_closed() and reads.open_iterators == 0


def test_connections_can_be_encrypted(monkeypatch):
    authority = trustme.CA()
    ours = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(ours)
    theirs = ssl.create_default_context()
    authority.configure_trust(theirs)
    reads = MemoryReads(batches=[rows(0, 5000, 1000)] * 3)
    with serving(tls=ours, idle_seconds=0.1) as (server, _), RawClient(server.server_address, tls=theirs) as client:
        assert client.is_closed()
    with serving(reads, tls=ours) as (server, _):
        with RawClient(server.server_address, tls=theirs) as client:
            assert unpack_one(client.ask(LOOKUP, pack_one(b"k1"))[1]) == b"v1"
            some = [b"k%d" % (i % 2000) for i in range(50_000)]
            _, body = client.ask(LOOKUP, keys(*some))
            assert unpack_bytes(body).to_pylist() == [reads.values.get(k) for k in some]
            assert client.stream(SCAN)[1] == EndOfRows(7, 15_000)
        with RawClient(server.server_address, token=None) as client:
            client.socket.sendall(frame_bytes(Hello(PROTOCOL, "right-token")))
            assert "TLS only" in failed_with(client.hear()[0], "TlsError")
            assert client.is_closed()
        with RawClient(server.server_address, tls=theirs) as client:
            client.say(SCAN)
        eventually(lambda: reads.open_iterators == 0 and server.num_connections == 0)
        monkeypatch.setattr(server_module, "HELLO_SECONDS", HANG)
        monkeypatch.setattr(server_module, "SHUTDOWN_SECONDS", HANG)
        with RawClient(server.server_address, token=None):  # says nothing, not even in the handshake
            eventually(lambda: server.num_connections == 1)
            began = time.monotonic()
            server.shutdown()
            assert time.monotonic() - began < PATIENCE, "nobody has waited for the handshake"


def test_a_shutdown_ends_a_connection_that_is_just_being_encrypted(monkeypatch):
    monkeypatch.setattr(server_module, "HELLO_SECONDS", HANG)
    monkeypatch.setattr(server_module, "SHUTDOWN_SECONDS", HANG)
    context, is_wrapped, may_go_on = (
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH),
        threading.Event(),
        threading.Event(),
    )
    wrap = context.wrap_socket

    def wrap_slowly(*args, **kwargs):
        wrapped = wrap(*args, **kwargs)
        is_wrapped.set()
        assert may_go_on.wait(HANG)
        return wrapped

    monkeypatch.setattr(context, "wrap_socket", wrap_slowly)
    with serving(MemoryReads(), tls=context) as (server, _), RawClient(server.server_address, token=None):
        assert is_wrapped.wait(PATIENCE)
        stopping = threading.Thread(target=server.shutdown)
        stopping.start()
        eventually(lambda: server._running is None or server._running.stopping.is_set())
        time.sleep(0.2)  # it has woken whom it knows
        may_go_on.set()
        stopping.join(PATIENCE)
        assert not stopping.is_alive(), "nobody waits for the handshake"


# -- what is refused -------------------------------------------------------------------------------


def test_a_frame_that_is_too_large_is_refused_unread():
    with serving(max_request_bytes=10_000) as (server, _):
        for length in (10_001 + MAX_HEADER_BYTES, 0xFFFFFFFF):
            with client_of(server) as client:
                client.socket.sendall(FRAME_PREFIX.pack(length, 10))
                assert f"{length:,} bytes" in failed_with(client.hear()[0], "RequestLimitError")
                assert client.is_closed()


def test_who_still_sends_reads_why_it_was_refused():
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


def test_malformed_requests_are_refused_and_the_connection_goes_on():
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


def test_errors_of_ours_travel_and_others_say_nothing(caplog):
    with serving() as (server, _), client_of(server) as client:
        assert "'nothing'" in failed_with(client.ask(LocateOperatorRequest("nothing"))[0], "UnknownOperatorError")
        # of a host that a proxy asked: not the end of this connection
        failed_with(client.ask(LookupRequest("run", "gone"), pack_one(b"k"))[0], "ConnectionClosedError")
        message = failed_with(client.ask(LookupRequest("run", "broken"), pack_one(b"k"))[0], "ZeroDivisionError")
        assert SECRET not in message and SECRET in caplog.text and "Traceback" in caplog.text
        assert "xxx" in failed_with(client.ask(LocateOperatorRequest("x" * 1000))[0], "UnknownOperatorError")
        assert "length" in failed_with(client.ask(LocateOperatorRequest("x" * 100_000))[0], "RequestError")
        assert client.ask(LOOKUP, pack_one(b"k1"))[0] == LookupReply(7)


# -- bounds ----------------------------------------------------------------------------------------


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


def test_who_reads_slowly_holds_a_scan_for_a_bounded_time(monkeypatch):
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


def test_who_reads_slowly_but_steadily_gets_all(monkeypatch):
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


def test_what_is_no_generator_is_closed_too():
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


def test_a_scan_that_takes_too_long_says_so():
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


def test_forwarded_requests_have_turns_of_their_own():
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


def test_one_connection_too_many_is_told_so():
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


def test_large_requests_share_what_memory_they_may_have():
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


def test_nobody_waits_for_a_version_for_ever(monkeypatch):
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


# -- life ------------------------------------------------------------------------------------------


def test_shutdown_leaves_nothing_and_can_be_followed_by_a_start(monkeypatch):
    monkeypatch.setattr(request_handler, "AWAIT_SLICE_SECONDS", 0.1)
    monkeypatch.setattr(request_handler, "MAX_AWAIT_SECONDS", HANG)
    monkeypatch.setattr(server_connection, "HELLO_SECONDS", HANG)
    monkeypatch.setattr(server_module, "SHUTDOWN_SECONDS", HANG)
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
        assert time.monotonic() - began < PATIENCE, "nobody has waited for the clients"
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
