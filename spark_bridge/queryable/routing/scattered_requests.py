"""What a router asks one host: at a version that is still to be said, of a server or of this very process."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import NoReturn, Protocol, TypeVar

import pyarrow as pa
from msgspec.structs import replace

from coordinator_actor.messages import OperatorLocation
from spark_bridge.exceptions import ConnectionClosedError
from spark_bridge.queryable.protocol.connections import KvConnections, KvExchange, KvStream
from spark_bridge.queryable.protocol.messages import (
    At,
    Batch,
    Count,
    Counted,
    End,
    KeyRows,
    Lookup,
    Reply,
    Scan,
    Values,
    pack_bytes,
    unpack_bytes,
)
from spark_bridge.queryable.protocol.row_batches import BatchDecoder
from spark_bridge.queryable.protocol.state_reads import StateReads
from spark_bridge.queryable.routing.routing_table import KeyShare

T_co = TypeVar("T_co", covariant=True)


class Question(Protocol[T_co]):
    """What one host is asked, at a version that is still to be said; it answers with the version and what was asked for."""

    @property
    def address(self) -> str:
        """Who is asked."""

    def send(self, connections: KvConnections, at: At, deadline: float) -> KvExchange:
        """Ask a server."""

    def receive(self, exchange: KvExchange, deadline: float) -> tuple[int, T_co]:
        """What a server answers."""

    def read(self, reads: StateReads, at: At) -> tuple[int, T_co]:
        """Ask this very process."""


@dataclass(frozen=True)
class LookupQuestion:
    """The values of some keys."""

    share: KeyShare
    location: OperatorLocation
    family: str
    forward: bool

    @property
    def address(self) -> str:
        """Who is asked."""
        return self.share.address

    def _request(self, at: At) -> Lookup:
        return Lookup(self.location.run_id, self.location.operator.name, at, self.family, self.forward)

    def send(self, connections: KvConnections, at: At, deadline: float) -> KvExchange:
        """Ask a server."""
        body = pack_bytes(self.share.keys)
        return connections.begin(self.share.address, self._request(at), body, deadline)

    def receive(self, exchange: KvExchange, deadline: float) -> tuple[int, pa.BinaryArray]:
        """What a server answers."""
        reply, body = exchange.finish()
        if type(reply) is not Values:
            unexpected(exchange.address, reply)
        return reply.version, self._checked(unpack_bytes(body))

    def read(self, reads: StateReads, at: At) -> tuple[int, pa.BinaryArray]:
        """Ask this very process."""
        version, values = reads.lookup(self._request(at), self.share.keys)
        return version, self._checked(values)

    def _checked(self, values: pa.BinaryArray) -> pa.BinaryArray:
        if len(values) != len(self.share.keys):
            raise ConnectionClosedError(
                f"{self.address} answered {len(values)} values for {len(self.share.keys)} keys."
            )
        return values


@dataclass(frozen=True)
class KeyRowsQuestion:
    """The rows of some keys: their schema and batches."""

    share: KeyShare
    request: KeyRows

    @property
    def address(self) -> str:
        """Who is asked."""
        return self.share.address

    def send(self, connections: KvConnections, at: At, deadline: float) -> KvExchange:
        """Ask a server."""
        return connections.begin(
            self.share.address, replace(self.request, at=at), pack_bytes(self.share.keys), deadline
        )

    def receive(self, exchange: KvExchange, deadline: float) -> tuple[int, tuple[pa.Schema, list[pa.RecordBatch]]]:
        """What a server answers."""
        decoder = BatchDecoder()
        batches = []
        version = 0
        for reply, body in KvStream(exchange, deadline, max(0.0, deadline - time.monotonic())):
            if type(reply) is not Batch and type(reply) is not End:
                unexpected(exchange.address, reply)
            version = reply.version
            if type(reply) is Batch:
                batch = decoder.decode(body)
                if batch is not None and batch.num_rows:
                    batches.append(batch)
        if decoder.schema is None:
            raise ConnectionClosedError(f"{exchange.address} answered rows without a schema.")
        return version, (decoder.schema, batches)

    def read(self, reads: StateReads, at: At) -> tuple[int, tuple[pa.Schema, list[pa.RecordBatch]]]:
        """Ask this very process."""
        answer = reads.key_rows(replace(self.request, at=at), self.share.keys)
        return answer.version, (answer.schema, [batch for batch in answer.batches if batch.num_rows])


@dataclass(frozen=True)
class CountQuestion:
    """How many rows a scan would give."""

    address: str
    request: Scan

    def send(self, connections: KvConnections, at: At, deadline: float) -> KvExchange:
        """Ask a server."""
        return connections.begin(self.address, Count(replace(self.request, at=at)), b"", deadline)

    def receive(self, exchange: KvExchange, deadline: float) -> tuple[int, int]:
        """What a server answers."""
        reply, _ = exchange.finish()
        if type(reply) is not Counted:
            unexpected(exchange.address, reply)
        return reply.version, reply.count

    def read(self, reads: StateReads, at: At) -> tuple[int, int]:
        """Ask this very process."""
        return reads.count(replace(self.request, at=at))


def unexpected(address: str, reply: Reply) -> NoReturn:
    """Raise ``ConnectionClosedError`` for an answer to another question."""
    raise ConnectionClosedError(f"{address} answered by an unexpected {type(reply).__name__}.")
