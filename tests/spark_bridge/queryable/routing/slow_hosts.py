"""Hosts that answer late, part by part, or not any more.

``Relay`` is a wire between clients and a server that a test can cut.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import pyarrow as pa

from coordinator_actor.messages import HostInfo, OperatorLocation, OperatorSpec
from spark_bridge.exceptions import StateVersionError
from spark_bridge.queryable.protocol import (
    FRAME_PREFIX,
    PROTOCOL,
    At,
    KeyRowsRequest,
    LookupRequest,
    ScanRequest,
    StateAnswer,
    Welcome,
    frame,
)
from spark_bridge.queryable.server.limits import RequestLimits
from spark_bridge.queryable.server.server import KvStateServer
from tests.patience import PATIENCE
from tests.spark_bridge.queryable.client_world import TOKEN, TOTALS, G
from tests.spark_bridge.queryable.memory_reads import ROWS, MemoryReads, OneToken, frame_bytes


class Lagging(MemoryReads):
    """A host that learns of versions late and holds the last two.

    The value of every key, and every row, is the version.
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
    """In-memory servers, one per host, with the partitions assigned round-robin."""

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


@contextmanager
def scripted(*scripts: Callable[[socket.socket], None]) -> Iterator[str]:
    """A peer that greets each connection in turn and then misbehaves as its script says.

    An exception in a script fails the test.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(PATIENCE)
    failures: list[BaseException] = []

    def run() -> None:
        try:
            for script in scripts:
                peer, _ = listener.accept()
                with peer:
                    hear(peer)
                    peer.sendall(frame_bytes(Welcome(PROTOCOL, "h", 1 << 20, 1000)))  # type: ignore[arg-type]
                    script(peer)
        except BaseException as error:  # noqa: BLE001 - shown below
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        with suppress(OSError):  # not connected, say some systems
            listener.shutdown(socket.SHUT_RDWR)  # ends an accept() without a connection
        listener.close()
        thread.join(PATIENCE)
    assert not failures and not thread.is_alive(), failures


def hear(peer: socket.socket) -> bytes:
    peer.settimeout(PATIENCE)
    length, _ = FRAME_PREFIX.unpack(peer.recv(FRAME_PREFIX.size, socket.MSG_WAITALL))
    return peer.recv(length, socket.MSG_WAITALL)


def said(reply: Any, body: bytes = b"") -> bytes:
    return b"".join(frame(reply, body))


class Relay:
    """Passes bytes on to ``address``, and cuts each connection after ``cut_after`` bytes of answers (None: never)."""

    def __init__(self, address: str, cut_after: int | None = None) -> None:
        ip, _, port = address.rpartition(":")
        self.target = (ip, int(port))
        self.cut_after = cut_after
        self.cuts = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(self.target, timeout=10)
            except OSError:
                return
            self._sockets += [client, server]
            threading.Thread(target=self._pass_on, args=(client, server, False), daemon=True).start()
            threading.Thread(target=self._pass_on, args=(server, client, True), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, is_answer: bool) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if is_answer and self.cut_after is not None and passed + len(data) > self.cut_after:
                    target.sendall(data[: self.cut_after - passed])
                    self.cuts += 1
                    break
                target.sendall(data)
                passed += len(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close all connections and refuse new ones."""
        for s in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                s.shutdown(socket.SHUT_RDWR)
            s.close()
