"""Connections of clients: one question, one answer, whatever closes in between; and what importing them needs."""

from __future__ import annotations

import errno
import os
import random
import select
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
import trustme

from spark_bridge.exceptions import (
    AccessDeniedError,
    ConnectionClosedError,
    HostUnavailableError,
    QueryableStateError,
    StateVersionError,
    TlsError,
    UnknownOperatorError,
)
from spark_bridge.queryable import client_connection
from spark_bridge.queryable import connections as connections_module
from spark_bridge.queryable.client_connection import ClientConnection, clock_offset_us
from spark_bridge.queryable.connections import KvConnections
from spark_bridge.queryable.protocol import (
    FRAME_PREFIX,
    EndOfRows,
    LookupReply,
    LookupRequest,
    RowBatchDecoder,
    RowsReply,
    pack_bytes,
    pack_one,
    unpack_bytes,
    unpack_one,
)
from spark_bridge.queryable.server.server import KvStateServer
from tests.patience import HANG, PATIENCE
from tests.spark_bridge.queryable.memory_reads import (
    LOOKUP,
    SCAN,
    TOKEN,
    Holding,
    MemoryReads,
    eventually,
    rows,
    serving,
)
from tests.spark_bridge.queryable.routing.slow_hosts import hear, said, scripted


@pytest.fixture
def connections() -> Iterator[KvConnections]:
    with KvConnections(TOKEN, timeout=PATIENCE) as made:
        yield made


def get(connections: KvConnections, address: str, key: bytes, deadline: float | None = None) -> bytes | None:
    reply, body = connections.request(address, LOOKUP, pack_one(key), deadline)
    assert reply == LookupReply(7)
    return unpack_one(body)


def soon(seconds: float) -> float:
    return time.monotonic() + seconds


def hang_up(server: KvStateServer) -> None:
    """Have it close its connections, as it does with those that are idle for long."""
    for connected in list(server._connections.values()):
        socket.socket.shutdown(connected, socket.SHUT_RDWR)
    eventually(lambda: server.num_connections == 0)


def test_one_connection_serves_one_question_after_the_other(connections: KvConnections) -> None:
    with serving() as (server, _):
        address = server.server_address
        assert [get(connections, address, b"k%d" % i) for i in (1, 2, 999, 1000)] == [b"v1", b"v2", b"v999", None]
        assert server.num_connections == 1
        connection, is_reused = connections.acquire(address, time.monotonic() + PATIENCE)
        assert is_reused and connection.welcome.max_keys == 1_000_000
        connections.release(connection)
        with pytest.raises(UnknownOperatorError, match="there is 'totals'"):
            connections.request(address, LookupRequest("run", "other"), pack_one(b"k"))
        assert get(connections, address, b"k3") == b"v3"
        assert server.num_connections == 1


def test_bodies_of_every_size_arrive_as_they_were_sent(connections: KvConnections) -> None:
    rng = random.Random(3)
    sizes = [0, 1, 7, 100, 16_000, 17_000, 65_000, 65_536, 70_000, 1_000_000, 5_000_000]
    values = {b"k%d" % size: rng.randbytes(size) for size in sizes}
    with serving(MemoryReads(values)) as (server, _):
        address = server.server_address
        kept = []
        for key in [*values, *reversed(values)]:
            _, body = connections.request(address, LOOKUP, pack_bytes(pa.array([key, b"nothing"])))
            kept.append((key, body))
        for key, body in kept:  # what was received stays as it was while the connection is used again
            assert unpack_bytes(body).to_pylist() == [values[key], None]
        long = pa.array([b"%d" % i * 2000 for i in range(500)])
        assert unpack_bytes(connections.request(address, LOOKUP, pack_bytes(long))[1]).null_count == 500


def test_frames_that_come_in_pieces_and_several_at_once_are_taken_apart(connections: KvConnections) -> None:
    def in_pieces(peer: socket.socket) -> None:
        hear(peer)
        frames = b"".join(
            said(RowsReply(7), bytes([i]) * size) for i, size in enumerate((3, 70_000, 0, 40_000, 40_000))
        )
        frames += said(EndOfRows(7, 5))
        rng = random.Random(1)
        while frames:
            size = rng.choice((1, 5, 9, 13, 1000, 65_000, 130_000))
            peer.sendall(frames[:size])
            frames = frames[size:]
            time.sleep(0.001)
        assert hear(peer)
        peer.sendall(said(LookupReply(7), pack_one(b"x")))

    with scripted(in_pieces) as address:
        bodies = [bytes(body) for reply, body in connections.stream(address, SCAN) if type(reply) is RowsReply]
        assert bodies == [bytes([i]) * size for i, size in enumerate((3, 70_000, 0, 40_000, 40_000))]
        assert get(connections, address, b"k") == b"x"  # on the same connection: there is only one


def test_an_answer_is_taken_in_pieces_without_a_wait(connections: KvConnections) -> None:
    body = random.Random(2).randbytes(300_000)
    answer, go_on = said(RowsReply(7), b"row") + said(RowsReply(7), body) + said(EndOfRows(7, 2)), threading.Event()
    cuts = (0, 3, 40, 70_000, len(answer) - 5)

    def in_pieces(peer: socket.socket) -> None:
        hear(peer)
        for begin, end in pairwise(cuts):
            peer.sendall(answer[begin:end])
            assert go_on.wait(PATIENCE)
            go_on.clear()
        peer.sendall(answer[cuts[-1] :])
        hear(peer)
        peer.sendall(said(LookupReply(7), pack_one(b"x")))

    with scripted(in_pieces) as address:
        exchange = connections.begin(address, SCAN)
        for _ in cuts[1:]:
            select.select([exchange], [], [], PATIENCE)
            assert not exchange.has_answer()
            go_on.set()
        eventually(exchange.has_answer)
        assert [bytes(body) for _, body in exchange] == [b"row", body, b""]
        assert get(connections, address, b"k") == b"x"  # on the same connection


def test_the_connection_of_an_abandoned_exchange_is_used_again(connections: KvConnections) -> None:
    with serving(Holding()) as (server, reads):
        address = server.server_address
        exchange = connections.begin(address, LOOKUP, pack_one(b"held"))
        exchange.abandon()
        assert get(connections, address, b"k1") == b"v1"
        assert server.num_connections == 2, "the other answer has not come"
        other = connections._pools[address].pop_idle()
        reads.go_on.set()
        select.select([exchange], [], [], PATIENCE)
        assert [get(connections, address, b"k%d" % i) for i in range(3)] == [b"v0", b"v1", b"v2"]
        assert server.num_connections == 2 and connections._pools[address].num_open == 2
        assert other is not None
        connections.release(other)


def test_abandoned_exchanges_are_closed_if_they_are_too_many_or_too_old(
    connections: KvConnections, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections_module, "MAX_ABANDONED", 2)
    with serving(Holding()) as (server, reads):
        address = server.server_address
        for _ in range(4):
            connections.begin(address, LOOKUP, pack_one(b"held")).abandon()
        assert connections._pools[address].num_open == 2
        for exchange in connections._abandoned:
            exchange._deadline = soon(-1)
        assert get(connections, address, b"k1") == b"v1"
        assert connections._pools[address].num_open == 1 and not connections._abandoned
        exchange = connections.begin(address, LOOKUP, pack_one(b"held"))
        exchange.abandon()
        connections.close()
        assert exchange.fileno() == -1
        reads.go_on.set()


def test_only_connecting_has_the_limit_for_connecting(
    connections: KvConnections, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, send = [], ClientConnection.send

    def recorded(self: Any, header: Any, body: Any, deadline: float) -> None:
        sent.append((type(header).__name__, deadline - time.monotonic() > PATIENCE / 2))
        send(self, header, body, deadline)

    monkeypatch.setattr(ClientConnection, "send", recorded)
    with serving() as (server, _):
        connections.begin(server.server_address, LOOKUP, pack_one(b"k1"), soon(PATIENCE), PATIENCE / 4).finish()
    assert sent == [("Hello", False), ("LookupRequest", True)]


def test_connection_closed_by_the_host_is_replaced_silently(connections: KvConnections) -> None:
    with serving() as (server, _):
        address = server.server_address
        assert get(connections, address, b"k1") == b"v1"
        hang_up(server)
        assert get(connections, address, b"k2") == b"v2"
        first = [bytes(b) for r, b in connections.stream(address, SCAN) if type(r) is RowsReply]
        hang_up(server)
        assert [bytes(b) for r, b in connections.stream(address, SCAN) if type(r) is RowsReply] == first


def test_old_connections_are_dropped_after_a_restart(connections: KvConnections) -> None:
    with serving() as (server, _):
        address = server.server_address
        held = [connections.begin(address, LOOKUP, pack_one(b"k1")) for _ in range(5)]
        for exchange in held:
            exchange.finish()
        assert server.num_connections == 5
        server.shutdown()
        server.start()
        assert get(connections, address, b"k1") == b"v1"
        assert connections._pools[address].num_open == 1
        assert [get(connections, address, b"k%d" % i) for i in range(20)] == [b"v%d" % i for i in range(20)]
        assert server.num_connections == 1


def test_a_new_connection_that_is_closed_at_once_is_an_error_and_not_tried_for_ever(
    connections: KvConnections,
) -> None:
    def answer_once(peer: socket.socket) -> None:
        hear(peer)
        peer.sendall(said(LookupReply(7), pack_one(b"x")))

    with scripted(answer_once, hear, answer_once) as address:
        assert get(connections, address, b"k") == b"x"
        with pytest.raises(ConnectionClosedError, match=address):
            get(connections, address, b"k")  # replaced once
        assert get(connections, address, b"k") == b"x"


def test_broken_answer_is_an_error_and_leaves_nothing(connections: KvConnections) -> None:
    def break_off(peer: socket.socket) -> None:
        hear(peer)
        peer.sendall(said(LookupReply(7), pack_one(b"x" * 1000))[:200])

    with scripted(break_off, break_off) as address:
        for _ in range(2):
            with pytest.raises(ConnectionClosedError, match="middle of an answer"):
                get(connections, address, b"k")


@pytest.mark.parametrize(
    "nonsense",
    [
        b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n" * 10,
        FRAME_PREFIX.pack(8, 9) + b"x" * 20,
        FRAME_PREFIX.pack(8, 8) + b"\xff" * 8,
        said(LookupReply(7), pack_one(b"x")) + b"more",
        said(LookupReply(7)) + said(LookupReply(7)),
    ],
)
def test_invalid_frames_close_the_connection(connections: KvConnections, nonsense: bytes) -> None:
    def talk(peer: socket.socket) -> None:
        hear(peer)
        peer.sendall(nonsense)
        peer.settimeout(PATIENCE)
        assert peer.recv(1) == b"", "the client hangs up"

    with scripted(talk) as address:
        with pytest.raises(ConnectionClosedError, match=address):
            connections.request(address, LOOKUP, pack_one(b"k"))
        assert not connections._pools[address].idle


def test_a_host_that_does_not_answer_costs_the_deadline_and_the_connection(connections: KvConnections) -> None:
    go_on = threading.Event()

    class Hanging(MemoryReads):
        def lookup_one(self, request: LookupRequest, key: bytes) -> tuple[int, bytes | None]:
            assert key != b"k9" or go_on.wait(HANG)
            return super().lookup_one(request, key)

    with serving(Hanging()) as (server, _):
        address = server.server_address
        get(connections, address, b"k1")
        started = time.monotonic()
        try:
            with pytest.raises(HostUnavailableError, match="in time"):
                get(connections, address, b"k9", soon(0.1))
            assert 0.09 < time.monotonic() - started < PATIENCE
        finally:
            go_on.set()
        assert get(connections, address, b"k2", soon(PATIENCE)) == b"v2", "not the late answer to the first question"
        with pytest.raises(HostUnavailableError, match="timeout ended"):
            get(connections, address, b"k1", soon(-1))


def test_a_long_deadline_behind_a_short_one_counts(connections: KvConnections, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    # The clock stands still: no deadline passes, only time-outs of the socket.
    for module in (client_connection, connections_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    with serving() as (server, reads):
        address = server.server_address
        get(connections, address, b"k1")
        get(connections, address, b"k1", now + 0.1)
        reads.pause = 0.2
        assert get(connections, address, b"k1", now + 3) == b"v1"
        # One that is little longer is waited for with the time-out of the one before, and then again.
        reads.pause = 0.0
        get(connections, address, b"k1", now + 0.1)
        reads.pause = 0.12
        assert get(connections, address, b"k1", now + 0.15) == b"v1"


def test_no_listener_and_no_token(connections: KvConnections) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        free = f"127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(HostUnavailableError, match=r"does not answer: nothing listens there.*`statestore hosts`"):
        get(connections, free, b"k")
    with pytest.raises(QueryableStateError, match="not an address of the form"):
        get(connections, "nonsense", b"k")
    with serving() as (server, _), KvConnections("wrong") as strangers:
        for _ in range(100):  # none of these connections counts as open
            with pytest.raises(AccessDeniedError, match="wrong, or was revoked"):
                get(strangers, server.server_address, b"k")


def test_the_address_that_takes_no_connection_is_remembered_once(connections: KvConnections) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(HostUnavailableError):
        get(connections, address, b"k")
    assert connections.take_unreachable() == address
    assert connections.take_unreachable() == ""


def test_a_request_to_a_silent_machine_is_not_sent_there_again(connections: KvConnections) -> None:
    """The kernel reports ``ETIMEDOUT`` when its packets are not acknowledged for 4 s."""

    class Silent:
        def __init__(self, connected: socket.socket) -> None:
            self._connected = connected

        def recv_into(self, into: Any) -> int:
            raise OSError(errno.ETIMEDOUT, "Connection timed out")

        def __getattr__(self, name: str) -> Any:
            return getattr(self._connected, name)

    with serving(MemoryReads({b"k": b"v"})) as (server, _):
        address = server.server_address
        assert get(connections, address, b"k") == b"v"
        (connection,) = connections._pools[address].idle
        connection._sock = Silent(connection._sock)  # type: ignore[assignment]
        with pytest.raises(HostUnavailableError, match="does not answer any more"):
            get(connections, address, b"k")
        assert connections._pools[address].num_open == 0, "no new connection was opened"
        assert connections.take_unreachable() == address


def test_kernel_gives_up_a_silent_machine_within_four_seconds(connections: KvConnections) -> None:
    with serving(MemoryReads({b"k": b"v"})) as (server, _):
        address = server.server_address
        get(connections, address, b"k")
        (connection,) = connections._pools[address].idle

        def option(name: str) -> int:
            return connection._sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))

        assert connection._sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert option("TCP_USER_TIMEOUT") == 4000
        assert option("TCP_KEEPIDLE") + option("TCP_KEEPCNT") * option("TCP_KEEPINTVL") <= 4


def test_a_stream_gives_its_rows_and_its_connection_back(connections: KvConnections) -> None:
    given = [rows(i * 1000, (i + 1) * 1000, 50) for i in range(20)]
    with serving(MemoryReads(batches=given)) as (server, _):
        for _ in range(3):
            decoder = RowBatchDecoder()
            frames = list(connections.stream(server.server_address, SCAN))
            assert type(frames[-1][0]) is EndOfRows
            batches = [decoder.decode(body) for reply, body in frames if type(reply) is RowsReply]
            assert pa.Table.from_batches([b for b in batches if b is not None]) == pa.Table.from_batches(given)
        assert server.num_connections == 1


def test_a_stream_that_is_closed_early_ends_at_the_host(connections: KvConnections) -> None:
    with serving(MemoryReads(batches=[rows(0, 20_000, 50)] * 500)) as (server, reads):
        stream = connections.stream(server.server_address, SCAN)
        next(stream)
        assert reads.open_iterators == 1
        stream.close()
        eventually(lambda: reads.open_iterators == 0)
        assert get(connections, server.server_address, b"k1") == b"v1"
        assert list(stream) == []


def test_a_stream_that_fails_in_the_middle_raises_the_hosts_error_and_the_connection_stays(
    connections: KvConnections,
) -> None:
    reads = MemoryReads(batches=[rows(0, 10)] * 5)
    reads.fail_after = 3
    with serving(reads) as (server, _):
        seen = 0
        with pytest.raises(StateVersionError, match="no longer held"):
            for reply, _body in connections.stream(server.server_address, SCAN):
                seen += type(reply) is RowsReply
        assert seen == 3
        assert get(connections, server.server_address, b"k1") == b"v1"
        assert server.num_connections == 1


def test_stream_timeout_applies_to_each_frame(connections: KvConnections, monkeypatch: pytest.MonkeyPatch) -> None:
    connections.timeout = 0.2
    ahead = 0.0
    for module in (client_connection, connections_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + ahead))

    def pause(peer: socket.socket) -> None:
        hear(peer)
        peer.sendall(said(RowsReply(7), b"x") * 4)
        peer.recv(1)

    with scripted(pause) as address:
        stream = connections.stream(address, SCAN, deadline=soon(PATIENCE))
        for _ in range(4):
            next(stream)
            # Neither the deadline, which is only for the first frame, nor the time of one frame counts for the next.
            ahead += HANG
        started = time.monotonic()
        with pytest.raises(HostUnavailableError, match="in time"):
            next(stream)
        assert 0.19 < time.monotonic() - started < PATIENCE


def test_many_threads_share_a_bounded_number_of_connections(
    connections: KvConnections, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections_module, "MAX_CONNECTIONS", 4)
    failures: list[BaseException] = []

    def ask(thread: int, address: str) -> None:
        rng = random.Random(thread)
        try:
            for _ in range(60):
                i = rng.randrange(1000)
                assert get(connections, address, b"k%d" % i) == b"v%d" % i
        except BaseException as error:  # noqa: BLE001 - shown below
            failures.append(error)

    with serving() as (server, reads):
        reads.pause = 0.0002
        threads = [threading.Thread(target=ask, args=(i, server.server_address)) for i in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert not failures
        assert 1 <= server.num_connections <= 4
        held = [connections.begin(server.server_address, LOOKUP, pack_one(b"k")) for _ in range(4)]
        with pytest.raises(HostUnavailableError, match="All 4 connections"):
            get(connections, server.server_address, b"k", soon(0.05))
        for exchange in held:
            exchange.close()
        assert get(connections, server.server_address, b"k1") == b"v1"


def test_idle_connections_in_the_pool_are_closed(connections: KvConnections, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections_module, "MAX_IDLE_SECONDS", 0.05)
    with serving() as (server, _):
        held = [connections.begin(server.server_address, LOOKUP, pack_one(b"k1")) for _ in range(6)]
        for exchange in held:
            exchange.finish()
        time.sleep(0.06)
        for _ in range(6):
            get(connections, server.server_address, b"k1")
        eventually(lambda: server.num_connections == 1)
        assert connections._pools[server.server_address].num_open == 1


def test_idle_connections_to_a_host_that_is_not_asked_any_more_are_closed(
    connections: KvConnections, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving() as (left, _), serving() as (other, _):
        held = [connections.begin(left.server_address, LOOKUP, pack_one(b"k1")) for _ in range(6)]
        for exchange in held:
            exchange.finish()
        monkeypatch.setattr(connections_module, "MAX_IDLE_SECONDS", -1.0)  # each of them is idle for too long
        assert get(connections, other.server_address, b"k1") == b"v1"  # the partitions have moved there
        eventually(lambda: left.num_connections == 0)
        assert connections._pools[left.server_address].num_open == 0
        assert get(connections, left.server_address, b"k1") == b"v1"


def test_forked_process_has_its_own_connections(connections: KvConnections) -> None:
    with serving() as (server, _):
        address = server.server_address
        pending = connections.begin(address, LOOKUP, pack_one(b"k2"))
        get(connections, address, b"k1")  # on another connection, which is idle now
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = 0 if all(get(connections, address, b"k%d" % i) == b"v%d" % i for i in range(200)) else 2
            finally:
                os._exit(code)
        for i in range(200, 400):
            assert get(connections, address, b"k%d" % i) == b"v%d" % i
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert unpack_one(pending.finish()[1]) == b"v2"
        assert get(connections, address, b"k3") == b"v3"


def test_closed_connections_answer_nothing(connections: KvConnections) -> None:
    with serving() as (server, _):
        get(connections, server.server_address, b"k1")
        pending = connections.begin(server.server_address, LOOKUP, pack_one(b"k2"))
        connections.close()
        assert unpack_one(pending.finish()[1]) == b"v2"
        eventually(lambda: server.num_connections == 0)
        with pytest.raises(QueryableStateError, match="connect again"):
            get(connections, server.server_address, b"k1")


def test_tls_and_its_failures() -> None:
    authority, other = trustme.CA(), trustme.CA()
    ours = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(ours)
    theirs, strangers = ssl.create_default_context(), ssl.create_default_context()
    authority.configure_trust(theirs)
    other.configure_trust(strangers)
    values = {b"k": random.Random(5).randbytes(300_000)}
    batches = [rows(0, 2000, 100)] * 20
    with serving(MemoryReads(values, batches), tls=ours) as (server, _):
        address = server.server_address
        with KvConnections(TOKEN, theirs, timeout=PATIENCE) as connections:
            for _ in range(3):
                assert get(connections, address, b"k") == values[b"k"]
            exchange = connections.begin(address, LOOKUP, pack_one(b"k"))
            eventually(exchange.has_answer)
            assert unpack_one(exchange.finish()[1]) == values[b"k"]
            stream = connections.stream(address, SCAN)
            assert sum(type(reply) is RowsReply for reply, _ in stream) == 20
            server.shutdown()
            server.start()
            assert get(connections, address, b"k") == values[b"k"], "a restart is made up for here too"
        with KvConnections(TOKEN, strangers) as connections, pytest.raises(TlsError, match="not accepted"):
            get(connections, address, b"k")
        with (
            KvConnections(TOKEN, timeout=PATIENCE) as connections,
            pytest.raises(TlsError, match="answers by TLS only"),
        ):
            get(connections, address, b"k")
    with (
        serving() as (server, _),
        KvConnections(TOKEN, theirs) as connections,
        pytest.raises((TlsError, HostUnavailableError)),
    ):
        get(connections, server.server_address, b"k")


@pytest.mark.thorough  # otherwise: test_a_process_with_neither_ray_nor_spark_nor_rocksdb of the client
def test_clients_need_neither_ray_nor_spark_nor_a_store() -> None:
    program = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("ray", "raydp", "pyspark", "py4j", "rocksdict", "obstore", "pandas"):
            raise ImportError(f"{name} was imported")
        if name == "pyarrow.flight":
            raise ImportError(f"{name} was imported")
sys.meta_path.insert(0, Blocked())
import spark_bridge.queryable.connections, spark_bridge.queryable.protocol
import spark_bridge.queryable.routing.router, spark_bridge.queryable.routing.scatter_gather
import coordinator_actor.messages, backends.encoding.keys, backends.encoding.operator_schema
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("host_us", "offset"),
    [(1_000, 0), (1_900, 0), (2_000, 0), (2_500, 500), (700, -300)],
)
def test_a_slow_round_trip_moves_no_clock(host_us: int, offset: int) -> None:
    """A host's time within the round trip equals the client's own. Outside, the distance to the round trip counts."""
    assert clock_offset_us(host_us, 1_000, 2_000) == offset
