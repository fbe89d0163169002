"""Who may ask a ``KvStateServer``: tokens, greetings, encrypted connections."""

from __future__ import annotations

import ssl
import threading
import time

import pytest
import trustme

from spark_bridge.queryable.protocol import (
    FRAME_PREFIX,
    PROTOCOL,
    EndOfRows,
    Hello,
    LookupReply,
    RowsReply,
    pack_one,
    unpack_bytes,
    unpack_one,
)
from spark_bridge.queryable.server import request_handler
from spark_bridge.queryable.server import server as server_module
from tests.patience import HANG, PATIENCE
from tests.spark_bridge.queryable.memory_reads import (
    LOOKUP,
    SCAN,
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


def test_silent_connection_is_closed(monkeypatch):
    monkeypatch.setattr(server_module, "HELLO_SECONDS", 0.1)
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
    monkeypatch.setattr(request_handler, "TOKEN_SECONDS", 0.0)
    with serving() as (server, _), client_of(server) as client:
        assert client.ask(LOOKUP, pack_one(b"k1"))[0] == LookupReply(7)
        server._tokens.valid.clear()
        failed_with(client.ask(LOOKUP, pack_one(b"k1"))[0], "AccessDeniedError")
        assert client.is_closed()


def test_a_token_that_is_revoked_ends_its_scans(monkeypatch):
    monkeypatch.setattr(request_handler, "TOKEN_SECONDS", 0.05)
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
            assert time.monotonic() - began < PATIENCE, "the shutdown has not waited for the handshake"


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
    has_woken, seconds_left, waits = threading.Event(), server_module.seconds_left, []

    def noted(deadline):  # the shutdown waits for the accepting thread, wakes all connections, and waits for each
        waits.append(deadline)
        if len(waits) == 2:
            has_woken.set()
        return seconds_left(deadline)

    monkeypatch.setattr(server_module, "seconds_left", noted)
    with serving(MemoryReads(), tls=context) as (server, _), RawClient(server.server_address, token=None):
        assert is_wrapped.wait(PATIENCE)
        stopping = threading.Thread(target=server.shutdown)
        stopping.start()
        assert has_woken.wait(PATIENCE)
        may_go_on.set()
        stopping.join(PATIENCE)
        assert not stopping.is_alive(), "the shutdown does not wait for the handshake"
