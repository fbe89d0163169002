"""The Arrow Flight server around a ``Host``: tasks open, read and commit their partitions here.

The server only translates. A call without the cluster's token gets no answer. msgspec and Arrow check what arrives;
nothing that arrives is unpickled, for unpickling runs code that the sender chooses.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import pyarrow as pa
from pyarrow import flight

from backends import spans
from backends.conf import DEFAULT_FAMILY, check_name
from backends.decoders import json_decoder
from backends.encoding.columns import aligned_batch, aligned_binary
from backends.encoding.keys import KeyRange
from backends.encoding.sorted_pairs import PAIRS_SCHEMA, SortedPairs, to_bytes_list
from backends.formats.changelog import Changes
from backends.host_memory import REQUESTS, HostMemory
from coordinator_actor.access_tokens import is_issued
from spark_bridge.exceptions import STATESTORE_ERRORS, RequestError, StateTooLargeError
from spark_bridge.host.host import Host
from spark_bridge.transport import protocol
from spark_bridge.transport.tls import TlsConf

# The changes of a task's commit, as they arrive over Arrow Flight; until then they count in the host's memory.


def received_changes(reader: Any, task: protocol.TaskIdentity, memory: HostMemory) -> Changes:
    """Return the changes of a stream of batches, each with its column family as its metadata.

    Received bytes are counted with each batch. Raises ``RequestError`` if the stream breaks off, and as ``changes_of``
    does.
    """
    received: dict[str, list[pa.RecordBatch]] = {DEFAULT_FAMILY: []}
    is_complete = False
    nbytes, claim = 0, memory.note(REQUESTS, 0)
    for chunk in reader:
        metadata = None if chunk.app_metadata is None else chunk.app_metadata.to_pybytes()
        is_complete = chunk.data is None and metadata == protocol.END_OF_CHANGES
        if chunk.data is not None:
            family = DEFAULT_FAMILY if metadata is None else metadata.decode(errors="replace")
            received.setdefault(check_name("a column family", family), []).append(aligned_batch(chunk.data))
            nbytes += chunk.data.nbytes
            memory.resize(claim, nbytes)
    if not is_complete:
        # Flight ends the stream of a client that was killed in the same way as a complete stream.
        raise RequestError(
            f"The changes of partition {task.partition} of operator {task.operator!r} (attempt {task.attempt}) "
            "broke off; nothing is committed."
        )
    # The batches of a family go when they have become one.
    families = {}
    for family in list(received):
        copied = sum(batch.nbytes for batch in received[family])
        memory.resize(claim, nbytes + copied)
        families[family] = changes_of(received.pop(family))
        memory.resize(claim, nbytes)
    return Changes(families)


def changes_of(batches: list[pa.RecordBatch]) -> SortedPairs:
    """Return the changes of one column family from its batches, in their order.

    If a key occurs several times, its last change counts. Raises ``StateTooLargeError`` for more than 2 GiB,
    ``RequestError`` for null keys.
    """
    if not batches:
        return SortedPairs.empty()
    if len(batches) == 1:
        keys, values = batches[0].columns
    else:
        try:
            keys, values = (pa.concat_arrays([b.column(i) for b in batches]) for i in range(2))
        except pa.ArrowInvalid as error:
            raise StateTooLargeError(
                f"The changes of one partition and batch have more than 2 GiB in one column family ({error}): use more "
                "partitions (num_partitions=), or smaller batches."
            ) from error
    if keys.null_count:
        raise RequestError(f"{keys.null_count} of {len(keys)} changed keys are null.")
    return SortedPairs.last_wins(keys, values)


log = logging.getLogger(__name__)

ENCODE = msgspec.json.encode
CALLER = "caller"
TURN_SECONDS = 30.0
"""A commit waits at most this many seconds for its turn, then its task asks again: less than the task waits for an
answer.
"""
LONGEST_ERROR_BYTES, MESSAGE_BYTES = 4_500, 300
"""The most bytes of an error as JSON, and of its short form. gRPC sends both in the metadata of the answer, and drops
an answer with more than 8 KiB of metadata: the caller would take the host for gone, and call again and again.
"""
NO_VALUES = pa.record_batch([pa.nulls(0, pa.binary())], schema=protocol.VALUES_SCHEMA)


class _TokenMiddleware(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Refuses every call that does not carry the cluster's token: a caller that may call at all may commit."""

    def __init__(self, token: str) -> None:
        super().__init__()
        self._expected = f"Bearer {token}".encode()

    def start_call(self, info: Any, headers: Mapping[str, list[str]]) -> None:
        authorization = next((v for k, values in headers.items() if k.lower() == "authorization" for v in values), "")
        if not hmac.compare_digest(authorization.encode(), self._expected):
            raise flight.FlightUnauthenticatedError(_refused(authorization.removeprefix("Bearer ")))


class _CallerFactory(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Notes of each call which span of its caller it belongs to."""

    def start_call(self, info: Any, headers: Mapping[str, list[str]]) -> _Caller:
        authorization = (v for k, values in headers.items() if k.lower() == spans.TRACEPARENT for v in values)
        return _Caller(next(authorization, None))


class _Caller(flight.ServerMiddleware):  # type: ignore[misc]
    def __init__(self, header: str | None) -> None:
        self.header = header


def _under_caller(context: Any) -> spans.Span:
    """Return a context in which the caller's span is the current one."""
    caller = context.get_middleware(CALLER) if spans.is_on() else None
    return spans.under(None if caller is None else caller.header)


def _refused(token: str) -> str:
    only = "This state store host answers here only calls with the cluster's token"
    if is_issued(token):
        return f"{only}; a read-only token is for its query address alone."
    return f"{only}; {'this one has another' if token else 'this one has none'}."


class HostFlightServer(flight.FlightServerBase):  # type: ignore[misc]
    """Serves one host at ``address``, with a free port: ``grpc://<ip>:<port>``, or ``grpc+tls://...`` with ``tls``.

    ``call_coordinator(method, args)`` passes on a task's message to the coordinator.
    Raises ``TlsError``.
    """

    def __init__(
        self,
        host: Callable[[], Host],
        ip: str,
        token: str,
        call_coordinator: Callable[[str, dict[str, object]], object],
        tls: TlsConf | None = None,
    ) -> None:
        scheme = "grpc" if tls is None else "grpc+tls"
        arguments = {} if tls is None else tls.flight_server_arguments()
        middleware: dict[str, Any] = {"token": _TokenMiddleware(token)}
        if spans.is_on():
            middleware[CALLER] = _CallerFactory()
        super().__init__(f"{scheme}://{ip}:0", middleware=middleware, **arguments)
        self.address = f"{scheme}://{ip}:{self.port}"
        self._host = host
        self._call_coordinator = call_coordinator

    def do_action(self, context: Any, action: Any) -> Iterator[bytes]:
        """Answer ``open``, ``locate``, ``coordinator`` or ``describe``; JSON in, JSON out."""
        body = action.body.to_pybytes()
        with translated_errors(), _under_caller(context):
            host = self._host()
            match action.type:
                case "open":
                    answer: object = host.open(decoded(body, protocol.TaskIdentity))
                case "locate":
                    request = decoded(body, protocol.LocateRequest)
                    answer = host.coordinator.locate(request.operator, request.query)
                case "coordinator":
                    call = decoded(body, protocol.CoordinatorCall)
                    answer = self._call_coordinator(call.method, call.args)
                case "describe":
                    answer = host.describe()
                case unknown:
                    raise RequestError(
                        f"Unknown action {unknown!r}; this host knows open, locate, coordinator, describe."
                    )
            return iter([ENCODE(answer)])

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        """Answer a bulk get or a scan.

        Bulk get: batches of keys in, for each a batch of values in the same order out. Scan: ranges in, pairs out.
        """
        with translated_errors(), _under_caller(context):
            command = decoded(
                descriptor.command, protocol.GetCommand | protocol.OpenAndGetCommand | protocol.ScanCommand
            )
            host = self._host()
            if isinstance(command, protocol.ScanCommand):
                ranges = [r for c in reader if c.data is not None for r in key_ranges(c.data)]
                writer.begin(PAIRS_SCHEMA)
                with spans.step("host.scan", operator=command.operator, partition=command.partition):
                    for pairs in host.reads.scan(command, ranges):
                        writer.write_batch(pairs)
                return
            writer.begin(protocol.VALUES_SCHEMA)
            for chunk in reader:
                if chunk.data is None:
                    continue
                check_schema(chunk.data.schema, protocol.KEYS_SCHEMA)
                claim = host.memory.note(REQUESTS, chunk.data.nbytes)
                opened = None
                if isinstance(command, protocol.OpenAndGetCommand):
                    # Only after the keys have arrived: a refused client must not be still sending them.
                    task = command.task
                    opened = host.open(task)
                    if not opened.is_open:
                        writer.write_with_metadata(NO_VALUES, ENCODE(opened))
                        return
                    command = protocol.GetCommand(
                        task.run_id, task.operator, task.partition, task.batch_id, command.column_family
                    )
                with spans.step("host.read", operator=command.operator, partition=command.partition):
                    values = host.reads.get_many(command, aligned_binary(chunk.data.column(0)))
                batch = pa.record_batch([values], schema=protocol.VALUES_SCHEMA)
                del chunk, claim
                if opened is None:
                    writer.write_batch(batch)
                else:
                    writer.write_with_metadata(batch, ENCODE(opened))

    def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        """Commit a task: one stream of changes in, the coordinator's acknowledgement out."""
        with translated_errors(), _under_caller(context):
            command = decoded(descriptor.command, protocol.CommitCommand)
            check_schema(reader.schema, protocol.COMMIT_SCHEMA)
            host = self._host()
            task = command.task
            what = f"The commit of batch {task.batch_id} of partition {task.partition} of operator {task.operator!r}"
            # Before the changes are read: until then they wait at the task.
            with host.memory.admitted(task.run_id, max(0, command.nbytes), what, TURN_SECONDS):
                changes = received_changes(reader, task, host.memory)
                answer = host.commit(task, changes, command.timings, command.figures)
            writer.write(pa.py_buffer(ENCODE(answer)))


def decoded(message: bytes, kind: Any) -> Any:
    """Return the command of type ``kind`` that came as JSON. Raises ``RequestError`` if it is malformed."""
    try:
        return json_decoder(kind).decode(message)
    except (ValueError, RecursionError) as error:  # msgspec's and UTF-8's errors are ValueErrors
        raise RequestError(f"The request was malformed: {error}") from error


def key_ranges(batch: pa.RecordBatch) -> list[KeyRange]:
    """Return the ranges of a scan from a batch of ``RANGES_SCHEMA``.

    Raises ``RequestError`` for another schema, and for a range without a start.
    """
    check_schema(batch.schema, protocol.RANGES_SCHEMA)
    if batch.column(0).null_count:
        raise RequestError("A range of a scan has no start: b'' is the start of the first key.")
    starts, ends = (to_bytes_list(batch.column(i)) for i in range(2))
    return list(zip(starts, ends, strict=True))  # type: ignore[arg-type]


def check_schema(schema: pa.Schema, expected: pa.Schema) -> None:
    """Raise ``RequestError`` if a stream has other columns than expected."""
    if schema.names != expected.names or schema.types != expected.types:
        raise RequestError(f"Expected a stream of {expected}, got {schema}.".replace("\n", ", "))


class translated_errors:
    """Raises every error as a Flight error that carries class name and message, and logs errors that are not ours."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(error, flight.FlightError):
            return
        if isinstance(error, msgspec.MsgspecError):
            error = RequestError(f"The request was malformed: {error}")
        if not isinstance(error, STATESTORE_ERRORS):
            log.error("Unexpected error while answering a request", exc_info=error)
        name, text = type(error).__name__, str(error).encode(errors="replace").decode()  # it may name any bytes
        extra, most = ENCODE(protocol.ErrorInfo(name, text)), LONGEST_ERROR_BYTES
        while len(extra) > LONGEST_ERROR_BYTES:
            most = most * 3 // 4  # JSON may take more bytes than the text
            extra = ENCODE(protocol.ErrorInfo(name, _shortened(text, most)))
        # Clients read ``extra_info``; the message is for other programs.
        raise flight.FlightServerError(f"{name}: {_shortened(text, MESSAGE_BYTES)}", extra_info=extra) from error


def _shortened(text: str, most: int) -> str:
    """Shorten a message to ``most`` bytes of UTF-8. It loses its middle, because its end may be the remedy."""
    encoded = text.encode()
    if len(encoded) <= most:
        return text
    half = (most - 5) // 2
    return f"{encoded[:half].decode(errors='ignore')} ... {encoded[-half:].decode(errors='ignore')}"
