"""The answers to the requests of one client: each request is admitted, read from ``StateReads``, and answered."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa

from backends.encoding.columns import content_bytes
from spark_bridge.exceptions import RequestError, RequestLimitError
from spark_bridge.queryable import protocol
from spark_bridge.queryable.routing.scopes import ScopedReads
from spark_bridge.queryable.server.framed_socket import ClientGoneError, FramedSocket
from spark_bridge.queryable.server.limits import (
    AdmissionControl,
    AdmissionLimiter,
    RequestLimits,
    RequestStatistics,
    seconds_left,
)

if TYPE_CHECKING:
    from spark_bridge.queryable.server.tokens import Grant, TokenVerifier

# The rows of an answer on their way to the client: ``RowsReply`` frames and the ``EndOfRows``.


FRAME_BYTES = 4 << 20
"""The most bytes that the rows of one ``RowsReply`` take, unless one row is larger."""
QUIET_SECONDS = 1.0
"""A scan that has found nothing for this many seconds sends an empty batch. It shows the client that the scan is
running, and the server whether the client is gone.
"""


@dataclass(eq=False, repr=False)
class RowSender:
    """Sends the rows of one answer until ``deadline``, in the context of the request.

    ``is_short``: the last batch is held back, to be sent together with the end. ``lag_ms`` is that of the version.
    """

    _frames: FramedSocket
    _answer: protocol.StateAnswer
    _deadline: float
    _is_short: bool
    _lag_ms: int
    num_rows: int = 0
    _held: list[Any] = field(default_factory=list)
    _is_begun: bool = False

    def __post_init__(self) -> None:
        self._sent_at = time.monotonic()

    def send(self, batch: pa.RecordBatch) -> None:
        """Send rows. An empty batch is sent only if the client has not heard anything for long."""
        now = time.monotonic()
        if not batch.num_rows and now - self._sent_at < QUIET_SECONDS:
            return
        self.num_rows += batch.num_rows
        self._sent_at = now
        body = batch.serialize()
        if not self._is_begun:
            self._is_begun = True
            body = b"".join((self._answer.schema.serialize(), body))
        if self._held:
            protocol.before_slow_work()  # a client that reads slowly must not keep others from their lookups
            self._frames.send(self._held, self._deadline)
        self._held = protocol.frame(protocol.RowsReply(self._answer.version, self._lag_ms), body)
        if not self._is_short:
            self._frames.send(self._held, self._deadline)
            self._held = []

    def keep_alive(self, now: float) -> None:
        """Send an empty batch if nothing has been sent for long, as a heartbeat."""
        if now - self._sent_at >= QUIET_SECONDS:
            schema = self._answer.schema
            self.send(pa.RecordBatch.from_arrays([pa.nulls(0, f.type) for f in schema], schema=schema))

    def last_frames(self) -> list[Any]:
        """Return the frames that are still to be sent: the rows held back, and the end."""
        answer, lag_ms = self._answer, self._lag_ms
        if not self._is_begun:
            self._held = protocol.frame(protocol.RowsReply(answer.version, lag_ms), answer.schema.serialize())
        return [*self._held, *protocol.frame(protocol.EndOfRows(answer.version, self.num_rows, lag_ms))]


def slices(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the same rows in batches of at most ``FRAME_BYTES``, where single rows are not larger."""
    for batch in batches:
        pieces = -(-batch.nbytes // FRAME_BYTES)
        if pieces <= 1 or batch.num_rows <= 1:
            yield batch
            continue
        rows = max(1, batch.num_rows // pieces)
        for begin in range(0, batch.num_rows, rows):
            yield batch.slice(begin, rows)


# The context of a request that a server answers: its admission, deadline, client, and the memory of its answer.


TOKEN_SECONDS = 1.0
"""A token checked longer ago is checked again: a revoked one ends its connections by the next request or rows."""
SLOW_LOOKUP_SECONDS = 5.0
"""Rows of keys that take longer than this to find continue under the limiter of slow lookups."""
LARGE_ANSWER_BYTES = 1 << 16


@dataclass(eq=False, repr=False)
class ServedRequest(protocol.RequestContext):
    """The ``RequestContext`` of one request, within a ``with``. For the thread of the connection.

    The ``with`` waits until ``limiter`` admits the request. A request that becomes slow moves to the limiter ``slow``:
    when it announces slow work (``before_slow_work``), and unless ``may_stay`` also after ``SLOW_LOOKUP_SECONDS``.
    """

    _handler: RequestHandler
    _limiter: AdmissionLimiter
    _slow: AdmissionLimiter | None = None
    _may_stay: bool = True
    rows: RowSender | None = None
    _admitted_by: AdmissionLimiter | None = None
    _noted: int = 0
    _reserved: int = 0
    _keep: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self._limits = self._handler.server.limits

    def __enter__(self) -> ServedRequest:
        self._admit(self._limiter)
        self._began = self._checked_at = time.monotonic()
        self.deadline = self._began + self._limits.scan_seconds
        self._keep.enter_context(protocol.active_context(self))
        return self

    def __exit__(self, *_: object) -> None:
        self._keep.close()
        self._release()

    def _admit(self, limiter: AdmissionLimiter) -> None:
        limiter.acquire(self._limits.wait_seconds)
        self._admitted_by = limiter

    def _release(self) -> None:
        limiter, self._admitted_by = self._admitted_by, None
        if limiter is not None:
            limiter.release()

    @property
    def is_slow(self) -> bool:
        """Whether the limiter of slow requests has admitted the request, or the server has no such limiter."""
        return self._slow is None or self._admitted_by is self._slow

    def before_slow_work(self) -> None:
        if self._slow is not None and self._admitted_by is not self._slow:
            self._release()
            self._admit(self._slow)

    def raise_if_cancelled(self) -> None:
        """See ``RequestContext``. Raises ``ClientGoneError``, ``RequestLimitError``, and ``AccessDeniedError``."""
        now = time.monotonic()
        if self._handler.server.stopping.is_set():
            raise ClientGoneError("The server stops.")
        if now > self.deadline:
            so_far = "" if self.rows is None else f", after {self.rows.num_rows:,} rows"
            raise RequestLimitError(
                f"The answer took longer than the {self._limits.scan_seconds:g} s allowed here{so_far}: ask for "
                "less, or read faster."
            )
        if now - self._checked_at < min(QUIET_SECONDS, TOKEN_SECONDS):
            return
        self._checked_at = now
        self._handler.check_client(now)
        if not self._may_stay and now - self._began > SLOW_LOOKUP_SECONDS:
            self.before_slow_work()
        if self.rows is not None and self.is_slow:
            self.rows.keep_alive(now)

    def reserve_memory(self, nbytes: int) -> None:
        """See ``RequestContext``. Raises ``RequestLimitError`` or ``TooManyRequestsError``."""
        self._noted += nbytes
        self.reserve_at_least(self._noted)

    def reserve_at_least(self, nbytes: int) -> None:
        """Reserve memory for an answer of ``nbytes`` in all. Small answers reserve nothing."""
        limit = self._limits.max_buffered_bytes
        if nbytes > LARGE_ANSWER_BYTES and nbytes > self._reserved:
            if nbytes > limit:
                raise RequestLimitError(
                    f"The answer has {nbytes:,} bytes or more, and {limit:,} are allowed here: ask for fewer keys."
                )
            self._handler.frames.reserve(nbytes - self._reserved)
            self._reserved = nbytes


MAX_AWAIT_SECONDS = 30.0
AWAIT_SLICE_SECONDS = 1.0
"""Seconds between two checks, by a thread that waits for a version, of the server and the client."""
COMPUTE_SLOT_BYTES = 1 << 18
"""Lookups of at most so many bytes of keys are worked on one at a time: a larger one would keep the others waiting."""
_ONE_KEY = memoryview(b"\x01\x00\x00\x00")
_ABSENT_VALUE = b"\x01\x00\x00\x00\xff\xff\xff\xff"
"""``pack_bytes`` of one null."""


@dataclass(frozen=True)
class ServerContext:
    """The parts that the connections of one server share. ``stopping`` is set when the server stops."""

    reads: protocol.ServedReads
    tokens: TokenVerifier
    limits: RequestLimits
    statistics: RequestStatistics
    host_id: str
    describe: Callable[[protocol.DescribeRequest], dict[str, Any]]
    admission: AdmissionControl
    stopping: threading.Event = field(default_factory=threading.Event)


class RequestHandler:
    """Answers the requests of one connection one by one, in its thread, but none before ``authenticate``.

    Times are of ``time.monotonic``.
    """

    _reads: protocol.ServedReads | ScopedReads

    def __init__(self, server: ServerContext, frames: FramedSocket) -> None:
        self.server = server
        self.frames = frames
        self._limits = server.limits
        self._admission = server.admission
        self._token = ""
        self._checked_at = 0.0

    # -- whether the client's token still allows requests, and whether the client is still there --

    def authenticate(self, token: str, now: float) -> None:
        """Answer from the part of the state that the client's token is for, from now on.

        Raises ``AccessDeniedError``.
        """
        self._token = token
        scope = self._verify(now).scope
        reads, locates = self.server.reads, self._admission.locates
        locating = partial(locates.admitted, self._limits.wait_seconds)
        self._reads = reads if scope.is_all else ScopedReads(scope, reads, locating)

    def check_token(self, now: float) -> None:
        """Check the token again if the last check is ``TOKEN_SECONDS`` old. Raises ``AccessDeniedError``."""
        if now - self._checked_at > TOKEN_SECONDS:
            self._verify(now)

    def _verify(self, now: float) -> Grant:
        grant = self.server.tokens.verify(self._token)
        self._checked_at = now
        return grant

    def check_client(self, now: float) -> None:
        """Raise ``ClientGoneError`` if the client has left, ``AccessDeniedError`` if its token is no longer valid."""
        if self.frames.is_closed_by_client():
            raise ClientGoneError("The client has left.")
        self.check_token(now)

    # -- answers -------------------------------------------------------------------------------

    def handle(self, request: protocol.Request, body: memoryview) -> None:
        """Answer a request. Raises the error to send to the client, and ``ClientGoneError``."""
        reads = self._reads
        if isinstance(reads, ScopedReads):
            reads.prepare(request)
        match request:
            case protocol.LookupRequest():
                self._lookup(request, body)
            case protocol.KeyRowsRequest():
                keys = self._keys(body)
                with self._lookup_context(request.forward, may_stay=False) as context:
                    last = self._send_rows(request.run_id, reads.key_rows(request, keys), context, is_short=True)
                self.frames.send(last, time.monotonic() + self._limits.transfer_seconds)
            case protocol.ScanRequest():
                with self._scan_context(request.forward) as context:
                    self.frames.send(self._send_rows(request.run_id, reads.scan(request), context), context.deadline)
            case protocol.CountRequest():
                with self._scan_context(request.scan.forward):
                    version, count = reads.count(request.scan)
                self.send(protocol.CountReply(version, count, reads.lag_ms(request.scan.run_id)))
            case protocol.ChangesRequest():
                some_keys = self._keys(body) if len(body) else None
                with self._scan_context(False) as context:
                    last = self._send_rows(request.run_id, reads.changes(request, some_keys), context)
                    self.frames.send(last, context.deadline)
            case protocol.AwaitRequest():
                completed = self._await(request)
                self.send(protocol.CountReply(completed, completed, reads.lag_ms(request.run_id)))
            case protocol.LocateOperatorRequest():
                with self._admission.locates.admitted(self._limits.wait_seconds):
                    location = reads.locate(request.operator, request.query)
                self.send(protocol.LocateReply(), msgspec.json.encode(location))
            case protocol.FeaturesRequest():
                self._features(request, body)
            case protocol.ViewsRequest():
                self._describe(self._admission.descriptions, partial(reads.views, request))
            case protocol.OperatorsRequest():
                self._describe(self._admission.descriptions, reads.operators)
            case protocol.DescribeRequest():
                admission = self._admission
                limiter = admission.forwarded_descriptions if request.forward else admission.descriptions
                describe = self.server.describe
                if isinstance(reads, ScopedReads):
                    describe = partial(reads.described, describe)
                self._describe(limiter, partial(describe, request))
            case _:
                raise RequestError("A Hello is only said once, at the beginning.")

    def _lookup(self, request: protocol.LookupRequest, body: memoryview) -> None:
        reads, admission = self._reads, self._admission
        if body[:4] == _ONE_KEY:
            key = protocol.unpack_one(body)
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
                protocol.LookupReply(version, reads.lag_ms(request.run_id)),
                _ABSENT_VALUE if value is None else protocol.pack_one(value),
            )
            return
        takes_slot = not request.forward and len(body) <= COMPUTE_SLOT_BYTES
        with admission.compute_slot if takes_slot else nullcontext():
            keys = self._keys(body)
            with self._lookup_context(request.forward) as context:
                version, values = reads.lookup(request, keys)
                context.reserve_at_least(4 * len(values) + content_bytes(values))
                packed = protocol.pack_bytes(values)
        self.send(protocol.LookupReply(version, reads.lag_ms(request.run_id)), packed)

    def _features(self, request: protocol.FeaturesRequest, body: memoryview) -> None:
        key = protocol.unpack_one(body) if body[:4] == _ONE_KEY else None
        if key is not None and all(at.isolation != "version" for at in request.at):
            # As in ``_lookup``, without a context.
            with self._admission.forwarded_lookups.admitted(self._limits.wait_seconds):
                answer = self._reads.features(request, key)
            packed = answer.body()
        else:
            keys = self._keys(body)
            with self._lookup_context(forward=True) as context:
                answer = self._reads.features(request, keys)
                packed = answer.body()
                context.reserve_at_least(len(packed))
        is_row = isinstance(answer.columns, list)
        has_rows = answer.rows is not None
        self.send(protocol.FeaturesReply(answer.versions, answer.ages_ms, is_row, answer.lag_ms, has_rows), packed)

    def _lookup_context(self, forward: bool, *, may_stay: bool = True) -> ServedRequest:
        admission = self._admission
        if forward:
            return ServedRequest(self, admission.forwarded_lookups, admission.forwarded_slow, may_stay)
        return ServedRequest(self, admission.lookups, admission.slow, may_stay)

    def _scan_context(self, forward: bool) -> ServedRequest:
        return ServedRequest(self, self._admission.forwarded_scans if forward else self._admission.scans)

    def _keys(self, body: memoryview) -> pa.BinaryArray:
        """Return the keys of a body. Raises ``RequestLimitError`` for too many keys, ``RequestError`` for null keys."""
        count = int.from_bytes(body[:4], "little") if len(body) >= 4 else 0
        if count > self._limits.max_keys:
            raise RequestLimitError(
                f"A request of {count:,} keys is more than the {self._limits.max_keys:,} allowed here: split it."
            )
        keys = protocol.unpack_bytes(self.frames.keep(body))
        if keys.null_count:
            raise RequestError(f"{keys.null_count} of {len(keys)} keys are null.")
        return keys

    def _await(self, request: protocol.AwaitRequest) -> int:
        """Wait for a version, in slices. No limiter is needed, because the thread only waits."""
        deadline = time.monotonic() + min(request.seconds, MAX_AWAIT_SECONDS)
        while True:
            left = seconds_left(deadline)
            slice_seconds = min(left, AWAIT_SLICE_SECONDS)
            completed = self._reads.await_completed(request.run_id, request.after, slice_seconds)
            if completed > request.after or not left:
                return completed
            if self.server.stopping.is_set() or self.frames.is_closed_by_client():
                return completed

    def _send_rows(
        self, run_id: str, answer: protocol.StateAnswer, context: ServedRequest, is_short: bool = False
    ) -> list[Any]:
        """Send rows as they come; return the last frames, which are still to be sent.

        ``is_short``: the last rows are among those frames, so that a short answer is one write.
        """
        lag_ms = self._reads.lag_ms(run_id)
        sender = context.rows = RowSender(self.frames, answer, context.deadline, is_short, lag_ms)
        try:
            for batch in slices(answer.batches):
                context.raise_if_cancelled()
                sender.send(batch)
        finally:
            context.rows = None
            answer.close()
        return sender.last_frames()

    def _describe(self, limiter: AdmissionLimiter, describe: Callable[[], object]) -> None:
        with limiter.admitted(self._limits.wait_seconds):
            described = describe()
        self.send(protocol.DescribeReply(), msgspec.json.encode(described))

    def send(self, reply: protocol.Reply, body: bytes | pa.Buffer = b"") -> None:
        """Send an answer of one frame. Raises ``ClientGoneError`` if the client does not take it in time."""
        self.frames.send(protocol.frame(reply, body), time.monotonic() + self._limits.transfer_seconds)
