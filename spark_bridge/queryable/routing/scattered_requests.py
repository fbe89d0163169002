"""The requests that a router sends to several hosts at once, each at a version that is chosen when it is sent."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import NoReturn, Protocol, TypeVar

import pyarrow as pa
from msgspec.structs import replace

from coordinator_actor.messages import OperatorLocation
from spark_bridge.exceptions import ConnectionClosedError
from spark_bridge.queryable.protocol.byte_arrays import pack_bytes, unpack_bytes
from spark_bridge.queryable.protocol.connections import KvConnections
from spark_bridge.queryable.protocol.exchange import KvExchange, KvStream
from spark_bridge.queryable.protocol.messages import (
    At,
    CountReply,
    CountRequest,
    EndOfRows,
    KeyRowsRequest,
    LookupReply,
    LookupRequest,
    Reply,
    RowsReply,
    ScanRequest,
)
from spark_bridge.queryable.protocol.row_batches import RowBatchDecoder
from spark_bridge.queryable.protocol.state_reads import StateReads
from spark_bridge.queryable.routing.routing_table import KeyShare

T_co = TypeVar("T_co", covariant=True)


class ScatteredRequest(Protocol[T_co]):
    """A request to one host. The host answers with the version that it has read, and with what was asked for."""

    @property
    def address(self) -> str:
        """The query address of the host."""

    def send(self, connections: KvConnections, at: At, deadline: float) -> KvExchange:
        """Send the request to the host's server, without waiting for the answer."""

    def receive(self, exchange: KvExchange, deadline: float) -> tuple[int, T_co]:
        """Wait for the server's answer, and return its version and content."""

    def read(self, reads: StateReads, at: At) -> tuple[int, T_co]:
        """Answer the request in this process, from ``reads``."""


@dataclass(frozen=True)
class ScatteredLookup:
    """Ask one host for the stored values of some stored keys."""

    share: KeyShare
    location: OperatorLocation
    family: str
    forward: bool

    @property
    def address(self) -> str:
        """See ``ScatteredRequest``."""
        return self.share.address

    def _request(self, at: At) -> LookupRequest:
        return LookupRequest(self.location.run_id, self.location.operator.name, at, self.family, self.forward)

    def send(self, connections: KvConnections, at: At, deadline: float) -> KvExchange:
        """See ``ScatteredRequest``."""
        return connections.begin(self.address, self._request(at), pack_bytes(self.share.keys), deadline)

    def receive(self, exchange: KvExchange, deadline: float) -> tuple[int, pa.BinaryArray]:
        """See ``ScatteredRequest``."""
        reply, body = exchange.finish()
        if type(reply) is not LookupReply:
            unexpected(exchange.address, reply)
        return reply.version, self._checked(unpack_bytes(body))

    def read(self, reads: StateReads, at: At) -> tuple[int, pa.BinaryArray]:
        """See ``ScatteredRequest``."""
        version, values = reads.lookup(self._request(at), self.share.keys)
        return version, self._checked(values)

    def _checked(self, values: pa.BinaryArray) -> pa.BinaryArray:
        if len(values) != len(self.share.keys):
            raise ConnectionClosedError(
                f"{self.address} answered {len(values)} values for {len(self.share.keys)} keys."
            )
        return values


@dataclass(frozen=True)
class ScatteredKeyRows:
    """Ask one host for the rows of some grouping keys: for their schema and batches."""

    share: KeyShare
    request: KeyRowsRequest

    @property
    def address(self) -> str:
        """See ``ScatteredRequest``."""
        return self.share.address

    def send(self, connections: KvConnections, at: At, deadline: float) -> KvExchange:
        """See ``ScatteredRequest``."""
        return connections.begin(self.address, replace(self.request, at=at), pack_bytes(self.share.keys), deadline)

    def receive(self, exchange: KvExchange, deadline: float) -> tuple[int, tuple[pa.Schema, list[pa.RecordBatch]]]:
        """See ``ScatteredRequest``."""
        decoder = RowBatchDecoder()
        batches = []
        version = 0
        for reply, body in KvStream(exchange, deadline, max(0.0, deadline - time.monotonic())):
            if type(reply) is not RowsReply and type(reply) is not EndOfRows:
                unexpected(exchange.address, reply)
            version = reply.version
            if type(reply) is RowsReply:
                batch = decoder.decode(body)
                if batch is not None and batch.num_rows:
                    batches.append(batch)
        if decoder.schema is None:
            raise ConnectionClosedError(f"{exchange.address} answered rows without a schema.")
        return version, (decoder.schema, batches)

    def read(self, reads: StateReads, at: At) -> tuple[int, tuple[pa.Schema, list[pa.RecordBatch]]]:
        """See ``ScatteredRequest``."""
        answer = reads.key_rows(replace(self.request, at=at), self.share.keys)
        return answer.version, (answer.schema, [batch for batch in answer.batches if batch.num_rows])


@dataclass(frozen=True)
class ScatteredCount:
    """Ask one host how many rows a scan would give."""

    address: str
    request: ScanRequest

    def send(self, connections: KvConnections, at: At, deadline: float) -> KvExchange:
        """See ``ScatteredRequest``."""
        return connections.begin(self.address, CountRequest(replace(self.request, at=at)), b"", deadline)

    def receive(self, exchange: KvExchange, deadline: float) -> tuple[int, int]:
        """See ``ScatteredRequest``."""
        reply, _ = exchange.finish()
        if type(reply) is not CountReply:
            unexpected(exchange.address, reply)
        return reply.version, reply.count

    def read(self, reads: StateReads, at: At) -> tuple[int, int]:
        """See ``ScatteredRequest``."""
        return reads.count(replace(self.request, at=at))


def unexpected(address: str, reply: Reply) -> NoReturn:
    """Raise ``ConnectionClosedError`` for a reply of another kind than the request has."""
    raise ConnectionClosedError(f"{address} answered by an unexpected {type(reply).__name__}.")
