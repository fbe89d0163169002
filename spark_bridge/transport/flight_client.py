"""The client of a host's Flight server: calls to one host, whose errors are raised here as they were raised there."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import pyarrow as pa
from pyarrow import flight

from backends.decoders import json_decoder
from backends.encoding.columns import aligned_batch, aligned_binary
from backends.encoding.keys import KeyRange
from backends.tracing import spans
from coordinator_actor.messages import Acknowledged, OperatorLocation
from spark_bridge.exceptions import AccessDeniedError, HostUnavailableError, SparkBridgeError, TlsError
from spark_bridge.transport.error_codec import rebuilt_error
from spark_bridge.transport.protocol import (
    COMMIT_SCHEMA,
    END_OF_CHANGES,
    KEYS_SCHEMA,
    RANGES_SCHEMA,
    CommitCommand,
    CoordinatorCall,
    ErrorInfo,
    GetCommand,
    LocateRequest,
    OpenAndGetCommand,
    OpenReply,
    ScanCommand,
    TaskIdentity,
)
from spark_bridge.transport.silent_hosts import calls, silent_places
from spark_bridge.transport.tls import TlsConf

UNREACHABLE = (
    flight.FlightUnavailableError,
    flight.FlightTimedOutError,
    flight.FlightCancelledError,
    flight.FlightInternalError,
)

CONNECT_MS = 3000
"""A host has this many seconds to take a connection: the first packet is sent again after 1 s."""
SILENT_AGAIN_SECONDS = 0.5
"""A host that was given up has this many seconds to take a connection before it is called again."""
REFUSED = (flight.FlightUnauthenticatedError, flight.FlightUnauthorizedError)


def _error_of(error: flight.FlightError) -> Exception:
    """Return the error that the host raised, rebuilt by name and message; else one of ours for the Flight error."""
    extra = getattr(error, "extra_info", None)
    if extra:
        info = json_decoder(ErrorInfo).decode(bytes(extra))
        return rebuilt_error(info.error, info.message)
    said = str(error).split("\n", 1)[0]
    if isinstance(error, REFUSED):
        return AccessDeniedError(said)
    if isinstance(error, UNREACHABLE):
        return HostUnavailableError(said)
    return SparkBridgeError(said)


class HostClient:
    """Calls to the host at ``address``, each bounded by ``timeout`` seconds. ``grpc+tls://`` needs ``tls``.

    Every method raises the host's own errors, and ``HostUnavailableError`` when the host does not answer: after some
    8 s if nobody is there any more who takes connections (``silent_hosts.py``).
    """

    def __init__(self, address: str, token: str, timeout: float = 60.0, tls: TlsConf | None = None) -> None:
        self.address = address
        if tls is None and address.startswith("grpc+tls:"):
            raise TlsError(f"{address} is to be called with TLS, and it is not said which certificates to trust.")
        arguments = {} if tls is None else tls.flight_client_arguments()
        # Without the first two gRPC shares one channel between clients, and its back-off outlives a restarted host. The
        # third is the time to connect, else 20 s: a machine that is gone does not even refuse a connection.
        options = [
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.max_reconnect_backoff_ms", 200),
            ("grpc.min_reconnect_backoff_ms", CONNECT_MS),
        ]
        self._place = _place_of(address)
        self._client = flight.FlightClient(address, generic_options=options, **arguments)
        self._timeout = timeout
        self._token = (b"authorization", f"Bearer {token}".encode())
        self._untraced = flight.FlightCallOptions(timeout=timeout, headers=[self._token])

    def _options(self) -> flight.FlightCallOptions:
        """Return the options of a call, which names the current span while there are spans."""
        headers = spans.headers()
        if not headers:
            return self._untraced
        return flight.FlightCallOptions(timeout=self._timeout, headers=[self._token, *headers])

    def _action(self, name: str, body: object, answer: Any) -> Any:
        try:
            with calls.watched(self._place):
                results = list(self._client.do_action(flight.Action(name, msgspec.json.encode(body)), self._options()))
        except flight.FlightError as error:
            raise _error_of(error) from None
        except pa.ArrowException as error:
            raise HostUnavailableError(f"{self.address}: {error}") from None
        return json_decoder(answer).decode(results[0].body.to_pybytes())

    def open(self, task: TaskIdentity) -> OpenReply:
        """Open a task's partition, or return the address of its owner."""
        opened: OpenReply = self._action("open", task, OpenReply)
        return opened

    def locate(self, operator: str, query: str | None = None) -> OperatorLocation:
        """Return where an operator's partitions are."""
        location: OperatorLocation = self._action("locate", LocateRequest(operator, query), OperatorLocation)
        return location

    def call_coordinator(self, method: str, args: dict[str, object]) -> Any:
        """Have the host pass on a message to the coordinator; return the coordinator's answer."""
        return self._action("coordinator", CoordinatorCall(method, args), Any)

    def describe(self) -> dict[str, Any]:
        """Return the description of the host."""
        described: dict[str, Any] = self._action("describe", {}, dict[str, Any])
        return described

    def get_many(self, command: GetCommand, keys: pa.BinaryArray) -> pa.BinaryArray:
        """Return the values of keys, in the order of the keys; null where a key has none."""
        values, _ = self._get(command, keys)
        return self._of_all(values, keys)

    def open_and_get(
        self, task: TaskIdentity, keys: pa.BinaryArray, column_family: str
    ) -> tuple[OpenReply, pa.BinaryArray]:
        """Open a partition and return the values of keys at the version opened, in one call.

        There are no values if another host is the owner, or if the partition is still being loaded.
        """
        values, metadata = self._get(OpenAndGetCommand(task, column_family), keys)
        if metadata is None:
            raise HostUnavailableError(f"{self.address} did not say what it has opened.")
        opened = json_decoder(OpenReply).decode(metadata)
        return opened, self._of_all(values, keys) if opened.is_open else values

    def _get(
        self, command: GetCommand | OpenAndGetCommand, keys: pa.BinaryArray
    ) -> tuple[pa.BinaryArray, bytes | None]:
        """Return the values, and the metadata of their first batch."""
        descriptor = flight.FlightDescriptor.for_command(msgspec.json.encode(command))
        try:
            with calls.watched(self._place):
                writer, reader = self._client.do_exchange(descriptor, self._options())
                with writer:
                    writer.begin(KEYS_SCHEMA)
                    writer.write_batch(pa.record_batch([keys], schema=KEYS_SCHEMA))
                    writer.done_writing()
                    chunks = list(reader)
        except flight.FlightError as error:
            raise _error_of(error) from None
        except pa.ArrowException as error:
            raise HostUnavailableError(f"{self.address}: {error}") from None
        values = [aligned_binary(chunk.data.column(0)) for chunk in chunks if chunk.data is not None]
        metadata = chunks[0].app_metadata if chunks else None
        column = values[0] if len(values) == 1 else pa.chunked_array(values, pa.binary()).combine_chunks()
        return column, None if metadata is None else metadata.to_pybytes()

    def _of_all(self, values: pa.BinaryArray, keys: pa.BinaryArray) -> pa.BinaryArray:
        if len(values) != len(keys):
            raise HostUnavailableError(f"{self.address} answered {len(values)} values for {len(keys)} keys.")
        return values

    def scan(self, command: ScanCommand, ranges: Sequence[KeyRange]) -> Iterator[pa.RecordBatch]:
        """Give the pairs of ranges of keys, in batches as they come; closing the iterator early ends the call."""
        descriptor = flight.FlightDescriptor.for_command(msgspec.json.encode(command))
        is_stopped = False
        try:
            with calls.watched(self._place) as call:
                writer, reader = self._client.do_exchange(descriptor, self._options())
                with writer:
                    writer.begin(RANGES_SCHEMA)
                    bounds = [pa.array([r[i] for r in ranges], pa.binary()) for i in range(2)]
                    writer.write_batch(pa.record_batch(bounds, schema=RANGES_SCHEMA))
                    writer.done_writing()
                    try:
                        for chunk in reader:
                            call.pause()
                            if chunk.data is not None and chunk.data.num_rows:
                                yield aligned_batch(chunk.data)
                            call.go_on()
                    except GeneratorExit:
                        # Else closing the writer would read the rest of the answer.
                        reader.cancel()
                        is_stopped = True
                        raise
        except flight.FlightError as error:
            if is_stopped:
                return
            raise _error_of(error) from None
        except pa.ArrowException as error:
            raise HostUnavailableError(f"{self.address}: {error}") from None

    def commit(self, command: CommitCommand, changes: Iterable[tuple[str, pa.RecordBatch]]) -> Acknowledged:
        """Commit a task's changes: column families and batches of ``COMMIT_SCHEMA``, fastest if sorted by key."""
        descriptor = flight.FlightDescriptor.for_command(msgspec.json.encode(command))
        try:
            with calls.watched(self._place):
                writer, reader = self._client.do_put(descriptor, COMMIT_SCHEMA, self._options())
                with writer:
                    for family, batch in changes:
                        writer.write_with_metadata(batch, family.encode())
                    writer.write_metadata(END_OF_CHANGES)
                    writer.done_writing()
                    answer = reader.read()
        except flight.FlightError as error:
            # If ``changes`` raised, that is why the host was not told the end of the changes.
            raise _error_of(error) from error.__context__
        except pa.ArrowException as error:
            raise HostUnavailableError(f"{self.address}: {error}") from None
        if answer is None:
            raise HostUnavailableError(f"{self.address} closed the commit without an answer.")
        return json_decoder(Acknowledged).decode(answer.to_pybytes())

    def close(self) -> None:
        """Close the connection. No other thread may be using it: see ``forget_client``."""
        self._client.close()


def _place_of(address: str) -> tuple[str, int]:
    ip, _, port = address.rpartition("//")[2].rpartition(":")
    return ip.strip("[]"), int(port)


_clients: dict[tuple[str, str], HostClient] = {}
_given_up: set[str] = set()
"""The addresses of hosts that did not answer, and have not been called since. As many as there were hosts."""
_clients_lock = threading.Lock()


def client_for(address: str, token: str, tls: TlsConf | None = None) -> HostClient:
    """Return this process's connection to a host. Connections are kept: a PySpark worker runs many tasks.

    A host that was given up is called again where somebody takes connections there; otherwise raises
    ``HostUnavailableError`` at once, since each task would find out anew and take ``CONNECT_MS`` for it.
    """
    if address in _given_up:
        if silent_places({_place_of(address)}, seconds=SILENT_AGAIN_SECONDS):
            raise HostUnavailableError(f"Nobody takes connections at {address}, where a call was given up before.")
        _given_up.discard(address)
    with _clients_lock:
        client = _clients.get((address, token))
        if client is None:
            client = _clients[(address, token)] = HostClient(address, token, tls=tls)
        return client


def forget_client(address: str, token: str) -> None:
    """Drop the connection to a host that did not answer; it is closed when nobody uses it any more.

    It must not be closed here: to close it while another thread begins a call ends the process (gRPC reads what has
    been freed).
    """
    _given_up.add(address)
    with _clients_lock:
        _clients.pop((address, token), None)
