"""Sources of the rows of a routed scan: a stream of another host, or an iterator of this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import pyarrow as pa

from spark_bridge.exceptions import ConnectionClosedError
from spark_bridge.queryable.protocol.exchange import KvStream
from spark_bridge.queryable.protocol.messages import EndOfRows, RowsReply
from spark_bridge.queryable.protocol.row_batches import RowBatchDecoder
from spark_bridge.queryable.protocol.state_reads import StateAnswer
from spark_bridge.queryable.routing.scattered_requests import unexpected

PendingScan: TypeAlias = KvStream | Callable[[], StateAnswer]
"""A scan that a server has been asked for; or a function that begins the scan in this process."""


class RemoteRows:
    """The rows that come over a connection.

    The constructor waits for the first frame: then version and schema are known.
    """

    def __init__(self, stream: KvStream) -> None:
        self.stream = stream
        self._decoder = RowBatchDecoder()
        self._first: pa.RecordBatch | None = None
        self.version = 0
        self._is_over = False
        self._first = self._next()
        if self._decoder.schema is None:
            stream.close()
            raise ConnectionClosedError(f"{stream.address} answered rows without a schema.")
        self.schema: pa.Schema = self._decoder.schema

    def read(self) -> pa.RecordBatch | None:
        """Wait for the next rows; None at the end."""
        if self._first is not None:
            first, self._first = self._first, None
            return first
        return None if self._is_over else self._next()

    def _next(self) -> pa.RecordBatch | None:
        while True:
            reply, body = next(self.stream)
            if type(reply) is EndOfRows:
                self._is_over = True
                self.version = reply.version
                return None
            if type(reply) is not RowsReply:
                self.stream.close()
                unexpected(self.stream.address, reply)
            self.version = reply.version
            try:
                batch = self._decoder.decode(body)
            except ConnectionClosedError:
                self.stream.close()
                raise
            if batch is not None:
                return batch

    @property
    def has_buffered(self) -> bool:
        """Whether ``read`` has something that ``poll`` would not see."""
        return self._first is not None or self._is_over or self.stream.has_buffered()

    def close(self) -> None:
        """Close the connection, so that the host stops."""
        self.stream.close()


class LocalRows:
    """The rows that an iterator of this process gives."""

    def __init__(self, version: int, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> None:
        self.version = version
        self.schema = schema
        self._answer = StateAnswer(version, schema, batches)

    def read(self) -> pa.RecordBatch | None:
        """Return the next rows; None at the end."""
        return next(self._answer.batches, None)

    def close(self) -> None:
        """Release what the iterator holds."""
        self._answer.close()


ScanSource: TypeAlias = RemoteRows | LocalRows


def scan_source(pending: PendingScan) -> ScanSource:
    """Wait until a scan that has been asked for begins, and return its rows."""
    if isinstance(pending, KvStream):
        return RemoteRows(pending)
    answer = pending()
    return LocalRows(answer.version, answer.schema, answer.batches)
