"""One connection of a ``KvStateServer``: who is there, what is asked, and an answer to each request, one after the other."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa

from backends.exceptions import StateStoreError
from coordinator_actor.exceptions import CoordinatorError
from spark_bridge.exceptions import (
    AccessDeniedError,
    RequestError,
    RequestLimitError,
    SparkBridgeError,
    TooManyRequestsError,
)
from spark_bridge.queryable.framed_socket import ClientGoneError, FramedSocket, IdleClientError
from spark_bridge.queryable.limits import RequestLimits, Turns, seconds_left
from spark_bridge.queryable.reads import StateAnswer, StateReads
from spark_bridge.queryable.request_statistics import RequestStatistics
from spark_bridge.queryable.wire import (
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

if TYPE_CHECKING:
    from spark_bridge.queryable.access import TokenVerifier

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
    questions: Turns = field(init=False)
    scans: Turns = field(init=False)
    forwarded_scans: Turns = field(init=False)
    buffered: Turns = field(init=False)

    def __post_init__(self) -> None:
        limits = self.limits
        for name, turns in (
            ("lookups", Turns(limits.max_requests, "lookups")),
            # Apart: two hosts that forward to each other would wait for each other's turns.
            ("forwarded_lookups", Turns(limits.max_requests, "lookups for other hosts")),
            # Apart: they may wait for the coordinator, and lookups must not wait for them.
            ("questions", Turns(limits.max_requests, "questions about operators and hosts")),
            ("scans", Turns(limits.max_scans, "scans")),
            ("forwarded_scans", Turns(limits.max_scans, "scans for other hosts")),
            ("buffered", Turns(limits.max_buffered_bytes, "bytes of large requests and answers")),
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
        turns = serving.forwarded_lookups if request.forward else serving.lookups
        if body[:4] == _ONE_KEY:
            key = unpack_one(body)
            if key is None:
                raise RequestError("A key that is looked up is null.")
            turns.acquire(self._limits.wait_seconds)
            try:
                version, value = serving.reads.lookup_one(request, key)
            finally:
                turns.release()
            self._send(Values(version), _ABSENT_VALUE if value is None else pack_one(value))
            return
        keys = self._keys(body)
        with turns.turn(self._limits.wait_seconds):
            version, values = serving.reads.lookup(request, keys)
            self._reserve(values.nbytes)
            packed = pack_bytes(values)
        self._send(Values(version), packed)

    def _answer(self, request: Request, body: memoryview) -> str | None:
        """Answer anything but a lookup; returns the operator, where the request has it further inside."""
        serving, wait_seconds = self._serving, self._limits.wait_seconds
        match request:
            case KeyRows():
                keys = self._keys(body)
                turns = serving.forwarded_lookups if request.forward else serving.lookups
                with turns.turn(wait_seconds):
                    self._stream(serving.reads.key_rows(request, keys), is_short=True)
            case Scan():
                with self._scan_turns(request).turn(wait_seconds):
                    self._stream(serving.reads.scan(request))
            case Count():
                with self._scan_turns(request.scan).turn(wait_seconds):
                    version, count = serving.reads.count(request.scan)
                self._send(Counted(version, count))
                return request.scan.operator
            case Changes():
                some_keys = self._keys(body) if len(body) else None
                with serving.scans.turn(wait_seconds):
                    self._stream(serving.reads.changes(request, some_keys))
            case Await():
                completed = self._await(request)
                self._send(Counted(completed, completed))
            case Locate():
                with serving.questions.turn(wait_seconds):
                    location = serving.reads.locate(request.operator, request.query)
                self._send(Located(), msgspec.json.encode(location))
            case Operators():
                with serving.questions.turn(wait_seconds):
                    operators = serving.reads.operators()
                self._send(Described(), msgspec.json.encode(operators))
            case Describe():
                with serving.questions.turn(wait_seconds):
                    described = serving.describe(request)
                self._send(Described(), msgspec.json.encode(described))
            case _:
                raise RequestError("A Hello is only said once, at the beginning.")
        return None

    def _scan_turns(self, scan: Scan) -> Turns:
        return self._serving.forwarded_scans if scan.forward else self._serving.scans

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

    def _stream(self, answer: StateAnswer, is_short: bool = False) -> None:
        """Send rows as they come; see ``Batch``. ``is_short``: the end is sent with the last rows, for which one batch is held back."""
        batches = answer.batches
        deadline = time.monotonic() + self._limits.scan_seconds
        try:
            self._send_rows(answer, deadline, is_short)
        finally:
            close = getattr(batches, "close", None)
            if close is not None:
                close()

    def _send_rows(self, answer: StateAnswer, deadline: float, is_short: bool) -> None:
        rows = 0
        held: list[Any] = []
        schema: pa.Buffer | None = None
        header = Batch(answer.version)
        sent_at = time.monotonic()
        for batch in slices(answer.batches):
            now = time.monotonic()
            if self._serving.stopping.is_set():
                raise ClientGoneError("The server stops.")
            if now > deadline:
                raise RequestLimitError(
                    f"The answer took longer than the {self._limits.scan_seconds:g} s allowed here, after {rows:,} rows: ask for "
                    "less, or read faster."
                )
            if now - self._checked_at > TOKEN_SECONDS:
                self._check_token(now)
            if not batch.num_rows and (schema is None or now - sent_at < QUIET_SECONDS):
                continue
            rows += batch.num_rows
            body = batch.serialize()
            if schema is None:
                schema = answer.schema.serialize()
                body = b"".join((schema, body))
            if held:
                self._frames.send(held, deadline)
            held = frame(header, body)
            if not is_short:
                self._frames.send(held, deadline)
                held = []
            sent_at = now
        if schema is None:
            held = frame(header, answer.schema.serialize())
        self._frames.send([*held, *frame(End(answer.version, rows))], deadline)

    def _reserve(self, size: int) -> None:
        if size > self._limits.max_buffered_bytes:
            raise RequestLimitError(
                f"The answer has {size:,} bytes, more than the {self._limits.max_buffered_bytes:,} allowed here: ask for fewer keys."
            )
        if size > LARGE_ANSWER_BYTES:
            self._frames.reserve(size)

    def _send(self, reply: Reply, body: bytes = b"") -> None:
        self._frames.send(frame(reply, body), time.monotonic() + self._limits.transfer_seconds)

    def _fail(self, error: Exception) -> None:
        self._send(failure(error))

    def _observe(self, operator: str, verb: str, started: float, failed: bool = False) -> None:
        self._serving.statistics.observe(operator, verb, time.monotonic() - started, failed)


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
