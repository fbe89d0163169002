"""The Arrow Flight server around a ``Host``: the data plane of tasks and query clients.

It only translates. No token, no answer; what arrives is checked by msgspec and Arrow, and never
unpickled (DESIGN, rule 9).
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import pyarrow as pa
from pyarrow import flight

from backends.changelog import Changes
from backends.exceptions import StateStoreError
from coordinator_actor.exceptions import CoordinatorError
from spark_bridge.exceptions import RequestError, SparkBridgeError
from spark_bridge.host import Host
from spark_bridge.protocol import (
    CHANGES_SCHEMA,
    KEYS_SCHEMA,
    VALUES_SCHEMA,
    CommitCommand,
    CoordinatorCall,
    ErrorInfo,
    GetCommand,
    LocateRequest,
    TaskIdentity,
)

log = logging.getLogger(__name__)

KNOWN_ERRORS = (SparkBridgeError, CoordinatorError, StateStoreError)
ENCODE = msgspec.json.encode


class _TokenMiddleware(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Refuses every call that does not carry the token."""

    def __init__(self, token: str) -> None:
        super().__init__()
        self._expected = f"Bearer {token}".encode()

    def start_call(self, info: Any, headers: Mapping[str, list[str]]) -> None:
        given = next((v for k, values in headers.items() if k.lower() == "authorization" for v in values), "")
        if not hmac.compare_digest(given.encode(), self._expected):
            raise flight.FlightUnauthenticatedError("This state store host answers only calls with its token.")


class HostFlightServer(flight.FlightServerBase):  # type: ignore[misc]
    """Serves one host at ``grpc://<ip>:<port>``; ``port`` 0 takes a free one.

    ``call_coordinator(method, args)`` passes on a task's message to the coordinator.
    """

    def __init__(
        self,
        host: Callable[[], Host],
        ip: str,
        token: str,
        call_coordinator: Callable[[str, dict[str, object]], object],
        port: int = 0,
    ) -> None:
        super().__init__(f"grpc://{ip}:{port}", middleware={"token": _TokenMiddleware(token)})
        self._host = host
        self._call_coordinator = call_coordinator

    def do_action(self, context: Any, action: Any) -> Iterator[bytes]:
        """``open``, ``locate``, ``coordinator`` and ``describe``; JSON in, JSON out."""
        body = action.body.to_pybytes()
        with translated_errors():
            host = self._host()
            match action.type:
                case "open":
                    answer: object = host.open(msgspec.json.decode(body, type=TaskIdentity))
                case "locate":
                    request = msgspec.json.decode(body, type=LocateRequest)
                    answer = host.locate(request.operator, request.query)
                case "coordinator":
                    call = msgspec.json.decode(body, type=CoordinatorCall)
                    answer = self._call_coordinator(call.method, call.args)
                case "describe":
                    answer = host.describe()
                case unknown:
                    raise RequestError(
                        f"Unknown action {unknown!r}; this host knows open, locate, coordinator, describe."
                    )
            return iter([ENCODE(answer)])

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        """Bulk get: batches of keys in, a batch of values for each, in the same order."""
        with translated_errors():
            command = msgspec.json.decode(descriptor.command, type=GetCommand)
            host = self._host()
            writer.begin(VALUES_SCHEMA)
            for chunk in reader:
                if chunk.data is None:
                    continue
                check_schema(chunk.data.schema, KEYS_SCHEMA)
                values = host.get_many(
                    command.run_id, command.operator, command.partition, command.version, chunk.data.column(0)
                )
                writer.write_batch(pa.record_batch([values], schema=VALUES_SCHEMA))

    def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        """Commit: one stream of sorted changes in, the coordinator's acknowledgement out."""
        with translated_errors():
            command = msgspec.json.decode(descriptor.command, type=CommitCommand)
            check_schema(reader.schema, CHANGES_SCHEMA)
            table = reader.read_all().combine_chunks()
            batches = table.to_batches()
            batch = batches[0] if batches else pa.RecordBatch.from_pylist([], schema=CHANGES_SCHEMA)
            changes = Changes.of(batch.column(0), batch.column(1))
            answer = self._host().commit(command.task, changes, command.timings)
            writer.write(pa.py_buffer(ENCODE(answer)))


def check_schema(given: pa.Schema, expected: pa.Schema) -> None:
    """Refuse a stream of other columns than expected."""
    if given.names != expected.names or given.types != expected.types:
        raise RequestError(f"Expected a stream of {expected}, got {given}.".replace("\n", ", "))


class translated_errors:
    """Our errors become Flight errors that carry class name and message; anything else is logged and named."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(error, flight.FlightError):
            return
        if isinstance(error, msgspec.MsgspecError):
            error = RequestError(f"The request was malformed: {error}")
        if not isinstance(error, KNOWN_ERRORS):
            log.error("Unexpected error while answering a request", exc_info=error)
        info = ErrorInfo(type(error).__name__, str(error))
        raise flight.FlightServerError(f"{info.error}: {info.message}", extra_info=ENCODE(info)) from error
