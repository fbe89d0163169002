"""Parts of tests that ask a ``KvStateServer``: requests, a client, a store that holds its answers."""

from __future__ import annotations

import contextlib
import threading

import pyarrow as pa

from spark_bridge.queryable.protocol import LookupRequest, ScanRequest, pack_bytes
from spark_bridge.queryable.server.server import KvStateServer
from tests.patience import HANG
from tests.spark_bridge.queryable.memory_reads import (
    MemoryReads,
    RawClient,
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
