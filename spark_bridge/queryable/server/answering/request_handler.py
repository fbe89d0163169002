"""The answers to the requests of one client: each request is admitted, read from ``StateReads``, and answered."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa

from backends.encoding.columns import content_bytes
from spark_bridge.exceptions import RequestError, RequestLimitError
from spark_bridge.queryable.protocol.byte_arrays import pack_bytes, pack_one, unpack_bytes, unpack_one
from spark_bridge.queryable.protocol.messages import (
    AwaitRequest,
    ChangesRequest,
    CountReply,
    CountRequest,
    DescribeReply,
    DescribeRequest,
    KeyRowsRequest,
    LocateOperatorRequest,
    LocateReply,
    LookupReply,
    LookupRequest,
    OperatorsRequest,
    Reply,
    Request,
    ScanRequest,
    frame,
)
from spark_bridge.queryable.protocol.state_reads import StateAnswer, StateReads
from spark_bridge.queryable.server.answering.row_sender import RowSender, slices
from spark_bridge.queryable.server.answering.served_request import ServedRequest
from spark_bridge.queryable.server.connection.client_session import ClientSession
from spark_bridge.queryable.server.connection.framed_socket import FramedSocket
from spark_bridge.queryable.server.limits.admission import AdmissionControl, AdmissionLimiter, seconds_left
from spark_bridge.queryable.server.limits.request_limits import RequestLimits
from spark_bridge.queryable.server.limits.request_statistics import RequestStatistics

if TYPE_CHECKING:
    from spark_bridge.queryable.server.tokens.token_verifier import TokenVerifier

MAX_AWAIT_SECONDS = 30.0
AWAIT_SLICE_SECONDS = 1.0
"""A thread that waits for a version checks so often whether the server still runs and the client is still there."""
COMPUTE_SLOT_BYTES = 1 << 18
"""Lookups of at most this many bytes of keys are worked on one at a time. A larger one would keep the others waiting
for too long.
"""
_ONE_KEY = memoryview(b"\x01\x00\x00\x00")
_ABSENT_VALUE = b"\x01\x00\x00\x00\xff\xff\xff\xff"
"""``pack_bytes`` of one null."""


@dataclass(frozen=True)
class ServerContext:
    """The parts that the connections of one server share.

    ``describe`` answers a ``DescribeRequest``; ``stopping`` is set when the server stops.
    """

    reads: StateReads
    tokens: TokenVerifier
    limits: RequestLimits
    statistics: RequestStatistics
    host_id: str
    describe: Callable[[DescribeRequest], dict[str, Any]]
    admission: AdmissionControl
    stopping: threading.Event = field(default_factory=threading.Event)


class RequestHandler:
    """Answers the requests of one connection, one after the other, in the connection's thread."""

    def __init__(self, server: ServerContext, frames: FramedSocket, session: ClientSession) -> None:
        self._server = server
        self._limits = server.limits
        self._admission = server.admission
        self._frames = frames
        self._session = session

    def handle(self, request: Request, body: memoryview) -> None:
        """Answer a request. Raises what the client is to be told, and ``ClientGoneError``."""
        reads, wait_seconds = self._server.reads, self._limits.wait_seconds
        match request:
            case LookupRequest():
                self._lookup(request, body)
            case KeyRowsRequest():
                keys = self._keys(body)
                with self._lookup_context(request.forward, may_stay=False) as context:
                    last = self._send_rows(request.run_id, reads.key_rows(request, keys), context, is_short=True)
                self._frames.send(last, time.monotonic() + self._limits.transfer_seconds)
            case ScanRequest():
                with self._scan_context(request.forward) as context:
                    self._frames.send(self._send_rows(request.run_id, reads.scan(request), context), context.deadline)
            case CountRequest():
                with self._scan_context(request.scan.forward):
                    version, count = reads.count(request.scan)
                self.send(CountReply(version, count, reads.lag_ms(request.scan.run_id)))
            case ChangesRequest():
                some_keys = self._keys(body) if len(body) else None
                with self._scan_context(False) as context:
                    last = self._send_rows(request.run_id, reads.changes(request, some_keys), context)
                    self._frames.send(last, context.deadline)
            case AwaitRequest():
                completed = self._await(request)
                self.send(CountReply(completed, completed, reads.lag_ms(request.run_id)))
            case LocateOperatorRequest():
                with self._admission.locates.admitted(wait_seconds):
                    location = reads.locate(request.operator, request.query)
                self.send(LocateReply(), msgspec.json.encode(location))
            case OperatorsRequest():
                with self._admission.descriptions.admitted(wait_seconds):
                    operators = reads.operators()
                self.send(DescribeReply(), msgspec.json.encode(operators))
            case DescribeRequest():
                admission = self._admission
                limiter = admission.forwarded_descriptions if request.forward else admission.descriptions
                with limiter.admitted(wait_seconds):
                    described = self._server.describe(request)
                self.send(DescribeReply(), msgspec.json.encode(described))
            case _:
                raise RequestError("A Hello is only said once, at the beginning.")

    def _lookup(self, request: LookupRequest, body: memoryview) -> None:
        reads, admission = self._server.reads, self._admission
        if body[:4] == _ONE_KEY:
            key = unpack_one(body)
            if key is None:
                raise RequestError("A key that is looked up is null.")
            if request.at.isolation == "version":
                with self._lookup_context(request.forward):
                    version, value = reads.lookup_one(request, key)
            else:  # no work that takes long, so no context, which would cost a tenth of the time
                limiter = admission.forwarded_lookups if request.forward else admission.lookups
                limiter.acquire(self._limits.wait_seconds)
                try:
                    version, value = reads.lookup_one(request, key)
                finally:
                    limiter.release()
            self.send(
                LookupReply(version, reads.lag_ms(request.run_id)), _ABSENT_VALUE if value is None else pack_one(value)
            )
            return
        takes_slot = not request.forward and len(body) <= COMPUTE_SLOT_BYTES
        with admission.compute_slot if takes_slot else nullcontext():
            keys = self._keys(body)
            with self._lookup_context(request.forward) as context:
                version, values = reads.lookup(request, keys)
                context.reserve_at_least(4 * len(values) + content_bytes(values))
                packed = pack_bytes(values)
        self.send(LookupReply(version, reads.lag_ms(request.run_id)), packed)

    def _lookup_context(self, forward: bool, *, may_stay: bool = True) -> ServedRequest:
        admission = self._admission
        if forward:
            return self._context(admission.forwarded_lookups, admission.forwarded_slow, may_stay)
        return self._context(admission.lookups, admission.slow, may_stay)

    def _scan_context(self, forward: bool) -> ServedRequest:
        return self._context(self._admission.forwarded_scans if forward else self._admission.scans)

    def _context(
        self, limiter: AdmissionLimiter, slow: AdmissionLimiter | None = None, may_stay: bool = True
    ) -> ServedRequest:
        stopping = self._server.stopping
        return ServedRequest(self._session, self._frames, self._limits, stopping, limiter, slow, may_stay)

    def _keys(self, body: memoryview) -> pa.BinaryArray:
        """Return the keys of a body. Raises ``RequestLimitError`` for too many keys, ``RequestError`` for null keys."""
        count = int.from_bytes(body[:4], "little") if len(body) >= 4 else 0
        if count > self._limits.max_keys:
            raise RequestLimitError(
                f"A request of {count:,} keys is more than the {self._limits.max_keys:,} allowed here: split it."
            )
        keys = unpack_bytes(self._frames.keep(body))
        if keys.null_count:
            raise RequestError(f"{keys.null_count} of {len(keys)} keys are null.")
        return keys

    def _await(self, request: AwaitRequest) -> int:
        """Wait for a version, in slices. No limiter is needed, because the thread only waits."""
        deadline = time.monotonic() + min(request.seconds, MAX_AWAIT_SECONDS)
        while True:
            left = seconds_left(deadline)
            slice_seconds = min(left, AWAIT_SLICE_SECONDS)
            completed = self._server.reads.await_completed(request.run_id, request.after, slice_seconds)
            if completed > request.after or not left:
                return completed
            if self._server.stopping.is_set() or self._frames.is_closed_by_client():
                return completed

    def _send_rows(self, run_id: str, answer: StateAnswer, context: ServedRequest, is_short: bool = False) -> list[Any]:
        """Send rows as they come; return the last frames, which are still to be sent.

        ``is_short``: the last rows are among those frames, so that a short answer is one write.
        """
        lag_ms = self._server.reads.lag_ms(run_id)
        sender = context.rows = RowSender(self._frames, answer, context.deadline, is_short, lag_ms)
        try:
            for batch in slices(answer.batches):
                context.raise_if_cancelled()
                sender.send(batch)
        finally:
            context.rows = None
            answer.close()
        return sender.last_frames()

    def send(self, reply: Reply, body: bytes = b"") -> None:
        """Send an answer of one frame. Raises ``ClientGoneError`` if the client does not take it in time."""
        self._frames.send(frame(reply, body), time.monotonic() + self._limits.transfer_seconds)
