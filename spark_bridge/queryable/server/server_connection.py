"""One connection of a ``KvStateServer``: who is there, what is asked, and an answer to each request, one after the other."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa

from backends.encoding.columns import content_bytes
from backends.exceptions import StateStoreError
from coordinator_actor.exceptions import CoordinatorError
from spark_bridge.exceptions import (
    AccessDeniedError,
    RequestError,
    RequestLimitError,
    SparkBridgeError,
    TooManyRequestsError,
)
from spark_bridge.queryable.protocol.messages import (
    MAX_HEADER_BYTES,
    PROTOCOL,
    Await,
    Batch,
    Changes,
    Count,
    Counted,
    Describe,
    Described,
    End,
    Failure,
    Hello,
    KeyRows,
    Locate,
    Located,
    Lookup,
    Operators,
    Reply,
    Request,
    Scan,
    Values,
    Welcome,
    decode_request,
    frame,
    pack_bytes,
    pack_one,
    unpack_bytes,
    unpack_one,
)
from spark_bridge.queryable.protocol.request_watch import watched
from spark_bridge.queryable.protocol.state_reads import StateAnswer, StateReads
from spark_bridge.queryable.server.framed_socket import ClientGoneError, FramedSocket, IdleClientError
from spark_bridge.queryable.server.limits import Crowd, RequestLimits, Turns, seconds_left
from spark_bridge.queryable.server.request_statistics import RequestStatistics

if TYPE_CHECKING:
    from spark_bridge.queryable.server.token_verifier import TokenVerifier

log = logging.getLogger(__name__)

KNOWN_ERRORS = (SparkBridgeError, CoordinatorError, StateStoreError)

HELLO_SECONDS = 5.0
"""Within which a client must have said who it is."""
MAX_HELLO_BYTES = 4096
TOKEN_SECONDS = 1.0
"""How old the check of a token may be: one that is revoked ends its connections by their next request or batch of rows then."""
MAX_AWAIT_SECONDS = 30.0
AWAIT_SLICE_SECONDS = 1.0
"""How often a waiting thread looks whether the server still runs and the client is still there."""
FRAME_BYTES = 4 << 20
"""What the rows of one ``Batch`` take at most, unless one row is larger."""
SLOW_SECONDS = 5.0
"""Rows of keys that take longer than this to find go on in a turn of the slow ones."""
QUESTIONS = 4
"""So many questions about operators and hosts at once: the coordinator answers them, which has commits to take."""
COMPUTING_BYTES = 1 << 18
"""Lookups of so many bytes of keys are worked on one at a time; of each larger one nobody could say how long it keeps the others waiting."""
COMPUTING_PATIENCE = 0.05
QUIET_SECONDS = 1.0
"""A scan that has found nothing for so long sends an empty batch: the client sees that it goes on, the server that the client is gone."""
LARGE_ANSWER_BYTES = 1 << 16
MAX_MESSAGE_CHARS = 8192
_ONE_KEY = memoryview(b"\x01\x00\x00\x00")
_ABSENT_VALUE = b"\x01\x00\x00\x00\xff\xff\xff\xff"
"""``pack_bytes`` of one null."""

VERBS: dict[type[Any], str] = {
    Locate: "locate",
    Lookup: "lookup",
    KeyRows: "rows",
    Scan: "scan",
    Count: "count",
    Changes: "changes",
    Await: "await",
    Operators: "operators",
    Describe: "describe",
}


@dataclass(frozen=True)
class Serving:
    """What the connections of one server share. ``describe`` answers a ``Describe``."""

    reads: StateReads
    tokens: TokenVerifier
    limits: RequestLimits
    statistics: RequestStatistics
    host_id: str
    describe: Callable[[Describe], dict[str, Any]]
    stopping: threading.Event = field(default_factory=threading.Event)
    lookups: Turns = field(init=False)
    forwarded_lookups: Turns = field(init=False)
    slow: Turns = field(init=False)
    forwarded_slow: Turns = field(init=False)
    locates: Turns = field(init=False)
    questions: Turns = field(init=False)
    forwarded_questions: Turns = field(init=False)
    scans: Turns = field(init=False)
    forwarded_scans: Turns = field(init=False)
    buffered: Turns = field(init=False)
    connections: Turns = field(init=False)
    computing: Crowd = field(default_factory=lambda: Crowd(COMPUTING_PATIENCE))

    def __post_init__(self) -> None:
        limits = self.limits
        for name, turns in (
            ("lookups", Turns(limits.max_requests, "lookups")),
            # Apart: two hosts that forward to each other would wait for each other's turns.
            ("forwarded_lookups", Turns(limits.max_requests, "lookups for other hosts")),
            # Where lookups go on that have to load an old version, or whose rows are many: the others must not wait for them.
            ("slow", Turns(limits.max_scans, "long lookups")),
            ("forwarded_slow", Turns(limits.max_scans, "long lookups for other hosts")),
            # Apart: they may wait for the coordinator, and lookups must not wait for them.
            ("locates", Turns(QUESTIONS, "questions about locations")),
            ("questions", Turns(QUESTIONS, "questions about operators and hosts")),
            ("forwarded_questions", Turns(QUESTIONS, "questions to other hosts")),
            ("scans", Turns(limits.max_scans, "scans")),
            ("forwarded_scans", Turns(limits.max_scans, "scans for other hosts")),
            ("buffered", Turns(limits.max_buffered_bytes, "bytes of large requests and answers")),
            ("connections", Turns(limits.max_connections, "connections")),
        ):
            object.__setattr__(self, name, turns)


class ServerConnection:
    """Answers one client until it leaves, breaks a rule that leaves its further bytes without meaning, or the server stops."""

    def __init__(self, serving: Serving, connected: socket.socket) -> None:
        self._serving = serving
        self._limits = serving.limits
        self._frames = FramedSocket(connected, serving.buffered, serving.limits.wait_seconds)
        self._token = ""
        self._checked_at = 0.0
        self._is_welcome = False

    def serve(self) -> None:
        """Until the connection is over. Raises nothing that a client can cause."""
        try:
            if self._greet():
                while self._serve_one() and not self._serving.stopping.is_set():
                    pass
        except ClientGoneError as error:
            log.debug("A connection ended: %s", error)

    def refuse(self, error: Exception) -> None:
        """Tell a client why nobody will talk to it."""
        try:
            self._fail(error)
            self._frames.linger(MAX_HELLO_BYTES)
        except ClientGoneError:
            log.debug("A client that was refused left first")

    def wake(self) -> None:
        """End what the connection waits for; from any thread."""
        self._frames.wake()

    def close(self) -> None:
        """Release everything."""
        self._frames.close()
        if self._is_welcome:
            self._is_welcome = False
            self._serving.connections.release()

    # -- the beginning -------------------------------------------------------------------------

    def _greet(self) -> bool:
        """Check the token of the first frame. Nothing else is looked at before."""
        started = time.monotonic()
        limits = self._limits
        try:
            try:
                received = self._frames.receive(MAX_HELLO_BYTES, HELLO_SECONDS, HELLO_SECONDS)
                if received is None:
                    return False
                hello = decoded(received[0])
            except (RequestError, RequestLimitError, TooManyRequestsError, IdleClientError) as error:
                raise AccessDeniedError(
                    f"A connection begins with a Hello and a token, within {HELLO_SECONDS:g} s: {error}"
                ) from error
            if not isinstance(hello, Hello):
                raise AccessDeniedError("A connection begins with a Hello and a token.")
            self._token = hello.token
            self._check_token(started)
            if hello.protocol != PROTOCOL:
                raise RequestError(
                    f"The client speaks protocol {hello.protocol}, this host {PROTOCOL}: use the same ray-statestore for both."
                )
            # Only now, so that who has no token takes no place of those who have one.
            self._serving.connections.acquire(0.0)
            self._is_welcome = True
        except ClientGoneError:
            raise
        except Exception as error:  # noqa: BLE001 - the client is told, and the log
            self._observe("", "hello", started, failed=True)
            self._fail(error)
            self._frames.linger(MAX_HELLO_BYTES)
            return False
        self._send(Welcome(PROTOCOL, self._serving.host_id, limits.max_request_bytes, limits.max_keys))
        self._observe("", "hello", started)
        return True

    def _check_token(self, now: float) -> None:
        self._serving.tokens.verify(self._token)
        self._checked_at = now

    def check_client(self, now: float) -> None:
        """Whether the client is still there and may still ask. Raises ``ClientGoneError`` or ``AccessDeniedError``."""
        if self._frames.is_closed_by_client():
            raise ClientGoneError("The client has left.")
        if now - self._checked_at > TOKEN_SECONDS:
            self._check_token(now)

    # -- requests ------------------------------------------------------------------------------

    def _serve_one(self) -> bool:
        """Answer the next request; whether there may be another one."""
        limits = self._limits
        try:
            received = self._frames.receive(
                limits.max_request_bytes + MAX_HEADER_BYTES, limits.idle_seconds, limits.transfer_seconds
            )
        except IdleClientError:
            return False
        except (RequestError, RequestLimitError, TooManyRequestsError) as error:
            self._observe("", "unreadable", time.monotonic(), failed=True)
            self._fail(error)
            self._frames.linger()
            return False
        if received is None:
            return False
        header, body = received
        started = time.monotonic()
        operator, verb, failed = "", "unreadable", True
        try:
            request = decoded(header)
            kind = type(request)
            verb = VERBS.get(kind, verb)
            operator = getattr(request, "operator", None) or ""
            if started - self._checked_at > TOKEN_SECONDS:
                self._check_token(started)
            if kind is Lookup:
                self._lookup(request, body)  # type: ignore[arg-type]
            else:
                operator = self._answer(request, body) or operator
            failed = False
        except ClientGoneError:
            failed = False  # who has seen enough of a scan leaves, too
            raise
        except Exception as error:  # noqa: BLE001 - the client is told, and the log
            self._fail(error)
            if isinstance(error, AccessDeniedError):
                self._frames.linger()
                return False
        finally:
            self._observe(operator, verb, started, failed)
        return True

    def _lookup(self, request: Lookup, body: memoryview) -> None:
        serving = self._serving
        if body[:4] == _ONE_KEY:
            key = unpack_one(body)
            if key is None:
                raise RequestError("A key that is looked up is null.")
            if request.at.isolation == "version":
                with self._watch(request.forward):
                    version, value = serving.reads.lookup_one(request, key)
            else:  # nothing that takes long: without a watch, which would cost a tenth of the time
                turns = serving.forwarded_lookups if request.forward else serving.lookups
                turns.acquire(self._limits.wait_seconds)
                try:
                    version, value = serving.reads.lookup_one(request, key)
                finally:
                    turns.release()
            self._send(Values(version), _ABSENT_VALUE if value is None else pack_one(value))
            return
        is_alone = not request.forward and len(body) <= COMPUTING_BYTES
        with serving.computing if is_alone else nullcontext():
            keys = self._keys(body)
            with self._watch(request.forward) as watch:
                version, values = serving.reads.lookup(request, keys)
                watch.hold_at_least(4 * len(values) + content_bytes(values))
                packed = pack_bytes(values)
        self._send(Values(version), packed)

    def _watch(self, forward: bool, *, may_stay: bool = True) -> _Watch:
        """For a lookup; ``may_stay``: in its turn, however long it takes, unless it loads something."""
        serving = self._serving
        if forward:
            return _Watch(self, serving, serving.forwarded_lookups, serving.forwarded_slow, may_stay)
        return _Watch(self, serving, serving.lookups, serving.slow, may_stay)

    def _scan_watch(self, scan: Scan) -> _Watch:
        return _Watch(self, self._serving, self._serving.forwarded_scans if scan.forward else self._serving.scans)

    def _answer(self, request: Request, body: memoryview) -> str | None:
        """Answer anything but a lookup; returns the operator, where the request has it further inside."""
        serving, wait_seconds = self._serving, self._limits.wait_seconds
        match request:
            case KeyRows():
                keys = self._keys(body)
                with self._watch(request.forward, may_stay=False) as watch:
                    last = self._stream(serving.reads.key_rows(request, keys), watch, is_short=True)
                self._frames.send(last, time.monotonic() + self._limits.transfer_seconds)
            case Scan():
                with self._scan_watch(request) as watch:
                    self._frames.send(self._stream(serving.reads.scan(request), watch), watch.deadline)
            case Count():
                with self._scan_watch(request.scan):
                    version, count = serving.reads.count(request.scan)
                self._send(Counted(version, count))
                return request.scan.operator
            case Changes():
                some_keys = self._keys(body) if len(body) else None
                with _Watch(self, serving, serving.scans) as watch:
                    last = self._stream(serving.reads.changes(request, some_keys), watch)
                    self._frames.send(last, watch.deadline)
            case Await():
                completed = self._await(request)
                self._send(Counted(completed, completed))
            case Locate():
                with serving.locates.turn(wait_seconds):
                    location = serving.reads.locate(request.operator, request.query)
                self._send(Located(), msgspec.json.encode(location))
            case Operators():
                with serving.questions.turn(wait_seconds):
                    operators = serving.reads.operators()
                self._send(Described(), msgspec.json.encode(operators))
            case Describe():
                with (serving.forwarded_questions if request.forward else serving.questions).turn(wait_seconds):
                    described = serving.describe(request)
                self._send(Described(), msgspec.json.encode(described))
            case _:
                raise RequestError("A Hello is only said once, at the beginning.")
        return None

    def _keys(self, body: memoryview) -> pa.BinaryArray:
        count = int.from_bytes(body[:4], "little") if len(body) >= 4 else 0
        if count > self._limits.max_keys:
            raise RequestLimitError(
                f"A request of {count:,} keys is more than the {self._limits.max_keys:,} allowed here: split it."
            )
        keys = unpack_bytes(self._frames.keep(body))
        if keys.null_count:
            raise RequestError(f"{keys.null_count} of {len(keys)} keys are null.")
        return keys

    def _await(self, request: Await) -> int:
        """In slices, and outside of all limits on requests at once: it only waits."""
        deadline = time.monotonic() + min(request.seconds, MAX_AWAIT_SECONDS)
        while True:
            left = seconds_left(deadline)
            slice_seconds = min(left, AWAIT_SLICE_SECONDS)
            completed = self._serving.reads.await_completed(request.run_id, request.after, slice_seconds)
            if completed > request.after or not left:
                return completed
            if self._serving.stopping.is_set() or self._frames.is_closed_by_client():
                return completed

    # -- answers -------------------------------------------------------------------------------

    def _stream(self, answer: StateAnswer, watch: _Watch, is_short: bool = False) -> list[Any]:
        """Send rows as they come, but for what is returned, the end; see ``Batch``. ``is_short``: the last rows go with the end."""
        sent = _SentRows(self._frames, answer, watch, is_short)
        watch.rows = sent
        try:
            for batch in slices(answer.batches):
                watch.check()
                sent.send(batch)
        finally:
            watch.rows = None
            close = getattr(answer.batches, "close", None)
            if close is not None:
                close()
        return sent.last()

    def reserve(self, size: int) -> None:
        """Take a share of what large answers may have until the next request. Raises ``TooManyRequestsError``."""
        self._frames.reserve(size)

    def _send(self, reply: Reply, body: bytes = b"") -> None:
        self._frames.send(frame(reply, body), time.monotonic() + self._limits.transfer_seconds)

    def _fail(self, error: Exception) -> None:
        self._send(failure(error))

    def _observe(self, operator: str, verb: str, started: float, failed: bool = False) -> None:
        self._serving.statistics.observe(operator, verb, time.monotonic() - started, failed)


class _Watch:
    """Looks after one request (``RequestWatch``): its turn, its time, its client, and the memory of its answer.

    In a ``with`` it takes one of ``turns``, and one of ``slow`` instead when the work becomes slow; ``may_stay``: not because of the time.
    """

    def __init__(
        self,
        connection: ServerConnection,
        serving: Serving,
        turns: Turns,
        slow: Turns | None = None,
        may_stay: bool = True,
    ) -> None:
        self.rows: _SentRows | None = None
        self._connection = connection
        self._serving = serving
        self._turns = turns
        self._slow = slow
        self._may_stay = may_stay
        self._held: Turns | None = None
        self._noted = 0
        self._reserved = 0
        self._keep = ExitStack()

    def __enter__(self) -> _Watch:
        self._take(self._turns)
        self._began = self._looked_at = time.monotonic()
        self.deadline = self._began + self._serving.limits.scan_seconds
        self._keep.enter_context(watched(self))
        return self

    def __exit__(self, *_: object) -> None:
        self._keep.close()
        self._release()

    def _take(self, turns: Turns) -> None:
        turns.acquire(self._serving.limits.wait_seconds)
        self._held = turns

    def _release(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            held.release()

    @property
    def is_slow(self) -> bool:
        """Whether it takes none of the turns of those that are fast."""
        return self._slow is None or self._held is self._slow

    def before_slow_work(self) -> None:
        """See ``RequestWatch``."""
        if self._slow is not None and self._held is not self._slow:
            self._release()
            self._take(self._slow)

    def check(self) -> None:
        """See ``RequestWatch``. Raises ``ClientGoneError``, ``RequestLimitError``, and ``AccessDeniedError``."""
        now = time.monotonic()
        if self._serving.stopping.is_set():
            raise ClientGoneError("The server stops.")
        if now > self.deadline:
            so_far = "" if self.rows is None else f", after {self.rows.num_rows:,} rows"
            raise RequestLimitError(
                f"The answer took longer than the {self._serving.limits.scan_seconds:g} s allowed here{so_far}: ask for less, or "
                "read faster."
            )
        if now - self._looked_at < min(QUIET_SECONDS, TOKEN_SECONDS):
            return
        self._looked_at = now
        self._connection.check_client(now)
        if not self._may_stay and now - self._began > SLOW_SECONDS:
            self.before_slow_work()
        if self.rows is not None and self.is_slow:
            self.rows.keep_alive(now)

    def hold(self, nbytes: int) -> None:
        """See ``RequestWatch``. Raises ``RequestLimitError`` or ``TooManyRequestsError``."""
        self._noted += nbytes
        self.hold_at_least(self._noted)

    def hold_at_least(self, nbytes: int) -> None:
        """The same of the whole answer. Small ones take nobody's memory."""
        limit = self._serving.limits.max_buffered_bytes
        if nbytes > LARGE_ANSWER_BYTES and nbytes > self._reserved:
            if nbytes > limit:
                raise RequestLimitError(
                    f"The answer has {nbytes:,} bytes or more, and {limit:,} are allowed here: ask for fewer keys."
                )
            self._connection.reserve(nbytes - self._reserved)
            self._reserved = nbytes


class _SentRows:
    """The rows of one answer as they go out. ``is_short``: the last batch is held back, to be sent with the end."""

    def __init__(self, frames: FramedSocket, answer: StateAnswer, watch: _Watch, is_short: bool) -> None:
        self.num_rows = 0
        self._frames = frames
        self._answer = answer
        self._watch = watch
        self._is_short = is_short
        self._held: list[Any] = []
        self._is_begun = False
        self._sent_at = time.monotonic()

    def send(self, batch: pa.RecordBatch) -> None:
        """Send rows; none only if the client has not heard anything for long."""
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
            self._watch.before_slow_work()  # whoever reads slowly must not keep others from their lookups
            self._frames.send(self._held, self._watch.deadline)
        self._held = frame(Batch(self._answer.version), body)
        if not self._is_short:
            self._frames.send(self._held, self._watch.deadline)
            self._held = []

    def keep_alive(self, now: float) -> None:
        """Say that there is still work, if nothing has been said for long."""
        if now - self._sent_at >= QUIET_SECONDS:
            schema = self._answer.schema
            self.send(pa.RecordBatch.from_arrays([pa.nulls(0, f.type) for f in schema], schema=schema))

    def last(self) -> list[Any]:
        """What is left to be sent."""
        if not self._is_begun:
            self._held = frame(Batch(self._answer.version), self._answer.schema.serialize())
        return [*self._held, *frame(End(self._answer.version, self.num_rows))]


def decoded(header: memoryview) -> Request:
    """A request. Raises ``RequestError`` if it is none."""
    try:
        request: Request = decode_request(header)
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors, as those of UTF-8 are
        raise RequestError(f"The request is malformed: {error}") from error
    return request


def slices(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows in batches of ``FRAME_BYTES`` at most, where rows are not larger."""
    for batch in batches:
        pieces = -(-batch.nbytes // FRAME_BYTES)
        if pieces <= 1 or batch.num_rows <= 1:
            yield batch
            continue
        rows = max(1, batch.num_rows // pieces)
        for begin in range(0, batch.num_rows, rows):
            yield batch.slice(begin, rows)


def failure(error: Exception) -> Failure:
    """How an error crosses the network: our own as they are; of others only the class, for messages may say too much."""
    name = type(error).__name__
    if isinstance(error, KNOWN_ERRORS):
        message = str(error)
        if len(message) > MAX_MESSAGE_CHARS:
            message = f"{message[:MAX_MESSAGE_CHARS]} ... ({len(message):,} characters)"
        return Failure(name, message)
    log.error("Unexpected error while answering a request", exc_info=error)
    return Failure(name, "The host failed to answer; its log says why.")
