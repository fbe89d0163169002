"""A store in memory that a ``KvStateServer`` can answer from, and a client that says any bytes to it.

Also requests to it, and a store that holds its answers.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from backends.encoding.schema import StateSchema
from coordinator_actor.messages import HostInfo, OperatorLocation, OperatorSpec
from spark_bridge.exceptions import AccessDeniedError, ConnectionClosedError, StateVersionError, UnknownOperatorError
from spark_bridge.queryable.protocol import (
    FRAME_PREFIX,
    PROTOCOL,
    ChangesRequest,
    EndOfRows,
    Failure,
    Hello,
    KeyRowsRequest,
    LookupRequest,
    Reply,
    Request,
    RowsReply,
    ScanRequest,
    StateAnswer,
    Welcome,
    decode_reply,
    frame,
    pack_bytes,
)
from spark_bridge.queryable.server.limits import RequestLimits
from spark_bridge.queryable.server.server import KvStateServer
from spark_bridge.queryable.server.tokens import Grant
from tests.patience import HANG, PATIENCE

TOKEN = "right-token"
ROWS = pa.schema([pa.field("k", pa.int64()), pa.field("v", pa.string())])
SECRET = "the password is 1234"


@dataclass(frozen=True)
class OneToken:
    """A verifier (``access.TokenVerifier``) that knows the tokens in ``valid``."""

    valid: set[str] = field(default_factory=lambda: {TOKEN})

    def verify(self, token: str) -> Grant:
        if token not in self.valid:
            raise AccessDeniedError("This token is wrong, or was revoked.")
        return Grant("one", read_only=True)


class MemoryReads:
    """Operator "totals" has a dict of keys and values, and ``batches``; "broken" has a bug, "gone" a host that left."""

    def __init__(self, values: dict[bytes, bytes] | None = None, batches: list[pa.RecordBatch] | None = None) -> None:
        self.values = values if values is not None else {b"k%d" % i: b"v%d" % i for i in range(1000)}
        self.batches = batches if batches is not None else [rows(0, 10), rows(10, 20)]
        self.version = 7
        self.completed = threading.Condition()
        self.open_iterators = 0
        self.at_work = 0
        self.most_at_work = 0
        self.pause = 0.0
        self.fail_after: int | None = None
        self._lock = threading.Lock()

    def check(self, operator: str) -> None:
        if operator == "broken":
            raise ZeroDivisionError(SECRET)
        if operator == "gone":
            raise ConnectionClosedError("Another host closed the connection.")
        if operator != "totals":
            raise UnknownOperatorError(f"No running query has operator {operator!r}; there is 'totals'.")

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        with self._lock:
            self.at_work += 1
            self.most_at_work = max(self.most_at_work, self.at_work)
        try:
            if self.pause:
                time.sleep(self.pause)
            yield
        finally:
            with self._lock:
                self.at_work -= 1

    def locate(self, operator: str, query: str | None) -> OperatorLocation:
        self.check(operator)
        schema = StateSchema(pa.schema([("k", pa.int64())]), pa.schema([("n", pa.int64())])).to_json()
        info = HostInfo("h0", "a", "grpc://127.0.0.1:1", "node", "s")
        return OperatorLocation("q", "run", query, OperatorSpec(operator, 1, schema), 1024, self.version, (info,))

    def lookup(self, request: LookupRequest, keys: pa.BinaryArray) -> tuple[int, pa.BinaryArray]:
        self.check(request.operator)
        with self.working():
            return self.version, pa.array([self.values.get(k) for k in keys.to_pylist()], pa.binary())

    def lookup_one(self, request: LookupRequest, key: bytes) -> tuple[int, bytes | None]:
        self.check(request.operator)
        with self.working():
            return self.version, self.values.get(key)

    def _rows(self) -> Iterator[pa.RecordBatch]:
        with self._lock:
            self.open_iterators += 1
        try:
            for i, batch in enumerate(self.batches):
                if i == self.fail_after:
                    raise StateVersionError("Version 7 is no longer held.")
                if self.pause:
                    time.sleep(self.pause)
                yield batch
        finally:
            with self._lock:
                self.open_iterators -= 1

    def key_rows(self, request: KeyRowsRequest, keys: pa.BinaryArray) -> StateAnswer:
        self.check(request.operator)
        return StateAnswer(self.version, ROWS, self._rows())

    def scan(self, request: ScanRequest) -> StateAnswer:
        self.check(request.operator)
        return StateAnswer(self.version, ROWS, self._rows())

    def count(self, request: ScanRequest) -> tuple[int, int]:
        self.check(request.operator)
        return self.version, sum(b.num_rows for b in self.batches)

    def changes(self, request: ChangesRequest, keys: pa.BinaryArray | None) -> StateAnswer:
        self.check(request.operator)
        return StateAnswer(self.version, ROWS, self._rows())

    def await_completed(self, run_id: str, after: int, seconds: float) -> int:
        with self.completed:
            self.completed.wait_for(lambda: self.version > after, seconds)
            return self.version

    def lag_ms(self, run_id: str) -> int:
        return 0

    def operators(self) -> list[dict[str, Any]]:
        return [{"operator": "totals"}]

    def describe(self, operator: str | None, query: str | None) -> dict[str, Any]:
        if operator is not None:
            self.check(operator)
        return {"partitions": 1}


def rows(begin: int, end: int, width: int = 1) -> pa.RecordBatch:
    return pa.record_batch([pa.array(range(begin, end)), pa.array(["x" * width] * (end - begin))], schema=ROWS)


class RawClient:
    """Says frames, or any bytes."""

    def __init__(self, address: str, *, token: str | None = TOKEN, tls: ssl.SSLContext | None = None) -> None:
        ip, port = address.rsplit(":", 1)
        self.socket = socket.create_connection((ip, int(port)), timeout=PATIENCE)
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_hostname=ip)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if token is not None:
            self.welcome = self.ask(Hello(PROTOCOL, token))[0]

    def say(self, request: Request, body: Any = b"") -> None:
        self.socket.sendall(frame_bytes(request, body))

    def hear(self) -> tuple[Reply, bytes]:
        """Raises ``EOFError`` if the server has closed."""
        length, header_length = FRAME_PREFIX.unpack(self._exactly(FRAME_PREFIX.size))
        received = self._exactly(length)
        return decode_reply(received[:header_length]), received[header_length:]

    def _exactly(self, size: int) -> bytes:
        found = bytearray()
        while len(found) < size:
            try:
                part = self.socket.recv(size - len(found))
            except ConnectionResetError:
                part = b""
            if not part:
                raise EOFError(bytes(found))
            found += part
        return bytes(found)

    def ask(self, request: Request, body: Any = b"") -> tuple[Reply, bytes]:
        self.say(request, body)
        return self.hear()

    def stream(self, request: Request, body: Any = b"") -> tuple[pa.Table | None, Reply]:
        """Return all rows, by the rule of ``RowsReply``, and the last reply."""
        self.say(request, body)
        bodies = []
        while True:
            reply, part = self.hear()
            if not isinstance(reply, RowsReply):
                break
            bodies.append(part)
        table = pa.ipc.open_stream(b"".join(bodies)).read_all() if isinstance(reply, EndOfRows) else None
        return table, reply

    def is_closed(self) -> bool:
        """Whether the server closes; waits for it."""
        try:
            self.hear()
        except EOFError:
            return True
        return False

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def frame_bytes(request: Request, body: Any = b"") -> bytes:
    return b"".join(frame(request, body))


@contextlib.contextmanager
def serving(reads: Any = None, tls: ssl.SSLContext | None = None, **limits: Any) -> Iterator[tuple[KvStateServer, Any]]:
    """A server that is shut down, and its store."""
    reads = MemoryReads() if reads is None else reads
    server = KvStateServer(reads, OneToken(), ip="127.0.0.1", limits=RequestLimits(**limits), tls=tls, host_id="h0")
    server.start()
    try:
        yield server, reads
    finally:
        server.shutdown()


def eventually(condition: Any, seconds: float = PATIENCE) -> None:
    """Wait until it holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never became true"
        time.sleep(0.005)


def failed_with(reply: Reply, error: str) -> str:
    assert isinstance(reply, Failure), reply
    assert reply.error == error, reply
    return reply.message


def welcomed(reply: Reply) -> Welcome:
    assert isinstance(reply, Welcome), reply
    return reply


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
