"""The client of a host's Flight server: calls to one host, whose errors are raised again here."""

from __future__ import annotations

import errno
import logging
import math
import os
import select
import socket
import stat
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
from pyarrow import flight

from backends import spans
from backends.background_loop import BackgroundLoop
from backends.conf import StateStoreProviderId
from backends.decoders import convert, json_decoder
from backends.encoding.columns import aligned_batch, aligned_binary
from backends.encoding.keys import KeyRange
from coordinator_actor.messages import Acknowledged, OperatorLocation
from spark_bridge import exceptions
from spark_bridge.transport import protocol
from spark_bridge.transport.tls import TlsConf

# Gives up hosts that have fallen silent: a machine that is dead or cut off sends no reset, and a call would wait.
#
# A call of Arrow Flight cannot be interrupted. gRPC's own pings do not help: pyarrow's server cannot be told to allow
# them, and closes connections that ping more than three times in five quiet minutes. So one thread of a process
# watches the calls that are in progress. When a call takes long, the thread connects to the host's port, which the
# host's kernel answers however busy the host is. After two failed connections, the thread shuts down all connections
# of this process to that port, and gRPC fails their calls at once: within 2 s. A task connects in this way before it
# opens its partition at a host that has been quiet. The coordinator gives the partitions of a silent machine to others
# after 4 s. A host that was given up wrongly is found again, and the task repeats its call.


log = logging.getLogger(__name__)

SILENT_SECONDS = 0.5
"""After this many seconds of waiting for a host, the thread checks whether the host is alive."""
CALL_WATCH_SECONDS = 0.25
"""Seconds between two looks at the running calls."""
PROBE_SECONDS = 0.5
"""A host has this many seconds to take a connection."""
MAX_UNANSWERED_SECONDS = 1.0
"""A host that has answered no call for longer must take a connection before a task calls it again."""
FAILED_PROBES = 2
"""After this many consecutive probes without an answer a host counts as silent."""

_IPV4_IN_IPV6 = "::ffff:"


class CallUnderWay:
    """A call to the host at ``ip`` and ``port``; ``since`` is when its caller began to wait, by ``time.monotonic``."""

    __slots__ = ("place", "since")

    def __init__(self, place: tuple[str, int]) -> None:
        self.place = place
        self.since = time.monotonic()

    def pause(self) -> None:
        """Record that the caller is not waiting: it processes a reply of the host."""
        self.since = math.inf

    def go_on(self) -> None:
        self.since = time.monotonic()


class SilentHosts:
    """Watches the calls of this process. Thread-safe: calls come and go in single steps, and one loop watches them all.

    The work of a look grows with the calls under way and, for slow ones, with their hosts, which are probed side by
    side. While no call is slow, nothing is sent.
    """

    def __init__(self) -> None:
        self._calls: dict[int, CallUnderWay] = {}
        self._answered: dict[tuple[str, int], float] = {}
        """When each host has answered last. As many as there were hosts."""
        self._failed: dict[tuple[str, int], int] = {}
        self._loop: BackgroundLoop | None = None
        self._starting = threading.Lock()

    def begin_anew(self) -> None:
        """Forget calls and loop: this process is the child of a fork, which has neither."""
        self._calls, self._answered, self._failed, self._loop = {}, {}, {}, None
        self._starting = threading.Lock()  # another thread of the parent may have held it

    def answers(self, place: tuple[str, int]) -> bool:
        """Return False if a host has answered no call for ``MAX_UNANSWERED_SECONDS`` and takes no connection now."""
        answered = self._answered.get(place)
        if answered is None or time.monotonic() - answered < MAX_UNANSWERED_SECONDS:
            return True
        if all(silent_places({place}) for _ in range(FAILED_PROBES)):  # a single packet may be lost
            return False
        self._answered[place] = time.monotonic()
        return True

    @contextmanager
    def watched(self, place: tuple[str, int]) -> Iterator[CallUnderWay]:
        """Watch a call to the host at that IP address and port until the block ends."""
        call = CallUnderWay(place)
        self._calls[id(call)] = call
        if self._loop is None:
            self._start_loop()
        try:
            yield call
        finally:
            self._calls.pop(id(call), None)  # not there after a fork in the midst of the call
        self._answered[place] = time.monotonic()

    def _start_loop(self) -> None:
        with self._starting:  # two loops would take two probes at once for consecutive ones
            if self._loop is None:
                self._loop = BackgroundLoop(
                    self.look,
                    CALL_WATCH_SECONDS,
                    name="statestore-silent-hosts",
                    what="probe the hosts of slow calls: calls to a dead machine end only when TCP gives up",
                    remedy="Look at the log of this process.",
                    most_seconds=8 * CALL_WATCH_SECONDS,
                ).start()

    def look(self) -> None:
        """Probe the hosts of slow calls; shut down the connections to those that are silent."""
        before = time.monotonic() - SILENT_SECONDS
        slow = {call.place for call in list(self._calls.values()) if call.since < before}
        silent = silent_places(slow) if slow else set()
        self._failed = {place: self._failed.get(place, 0) + 1 for place in silent}
        for place, times in self._failed.items():
            if times >= FAILED_PROBES:
                log.warning("No answer from %s:%d; calls there are given up", *place)
                shut_down_connections(place)


def silent_places(
    places: Collection[tuple[str, int]], *, refusals: bool = True, seconds: float = PROBE_SECONDS
) -> set[tuple[str, int]]:
    """Return the places that do not accept a connection within ``seconds``.

    Without ``refusals``, places that refuse one are not included: their machine is alive.
    """
    connecting: dict[int, tuple[socket.socket, tuple[str, int]]] = {}
    silent = set(places)
    try:
        poll = select.poll()
        for place in places:
            probe = socket.socket(socket.AF_INET6 if ":" in place[0] else socket.AF_INET, socket.SOCK_STREAM)
            connecting[probe.fileno()] = probe, place
            probe.setblocking(False)
            error = probe.connect_ex(place)
            if error in (0, errno.EINPROGRESS):
                poll.register(probe, select.POLLOUT)
            else:  # such as a network that is not to be reached
                del connecting[probe.fileno()]
                probe.close()
                # EADDRNOTAVAIL: all ports of this machine are in use, which says nothing about the other one.
                if error == errno.EADDRNOTAVAIL or (error == errno.ECONNREFUSED and not refusals):
                    silent.discard(place)
        deadline = time.monotonic() + seconds
        left = len(connecting)
        while left:
            wait = max(0.0, deadline - time.monotonic())
            answers = poll.poll(wait * 1e3)
            if not answers and not wait:  # polled after the end as well: this process may have stood still
                break
            for descriptor, _ in answers:
                poll.unregister(descriptor)
                left -= 1
                probe, place = connecting[descriptor]
                error = probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if error == 0 or (error == errno.ECONNREFUSED and not refusals):
                    silent.discard(place)
    finally:
        for probe, _ in connecting.values():
            probe.close()
    return silent


def shut_down_connections(place: tuple[str, int]) -> None:
    """Shut down this process's connections to an IP address and port, whichever code has made them."""
    for entry in list(Path("/dev/fd").iterdir()):
        with suppress(OSError):  # closed since, or a connection that is not made yet
            descriptor = os.dup(int(entry.name))
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                os.close(descriptor)
                continue
            with socket.socket(fileno=descriptor) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    ip, port = connection.getpeername()[:2]
                    if (ip.removeprefix(_IPV4_IN_IPV6), port) == place:
                        connection.shutdown(socket.SHUT_RDWR)


calls = SilentHosts()
"""The calls of this process."""

os.register_at_fork(after_in_child=calls.begin_anew)


UNREACHABLE = (
    flight.FlightUnavailableError,
    flight.FlightTimedOutError,
    flight.FlightCancelledError,
    flight.FlightInternalError,
)

CONNECT_MS = 1500
"""A host has this many milliseconds to take a connection: the first packet is sent again after 1 s."""
REFUSED = (flight.FlightUnauthenticatedError, flight.FlightUnauthorizedError)


def _error_of(error: flight.FlightError) -> Exception:
    """Return the error that the host raised, rebuilt by name and message; else one of ours for the Flight error."""
    extra = getattr(error, "extra_info", None)
    if extra:
        info = json_decoder(protocol.ErrorInfo).decode(bytes(extra))
        return exceptions.rebuilt_error(info.error, info.message)
    first_line = str(error).split("\n", 1)[0]
    if isinstance(error, REFUSED):
        return exceptions.AccessDeniedError(first_line)
    if isinstance(error, UNREACHABLE):
        return exceptions.HostUnavailableError(first_line)
    return exceptions.SparkBridgeError(first_line)


class HostClient:
    """Calls to the host at ``address``, each bounded by ``timeout`` seconds. ``grpc+tls://`` needs ``tls``.

    Every method raises the host's own errors, and ``HostUnavailableError`` when the host does not answer: within 2 s
    if the host accepts no connections any more (``SilentHosts``).
    """

    def __init__(self, address: str, token: str, timeout: float = 60.0, tls: TlsConf | None = None) -> None:
        self.address = address
        if tls is None and address.startswith("grpc+tls:"):
            raise exceptions.TlsError(f"{address} must be called with TLS: set which certificates to trust.")
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
            raise exceptions.HostUnavailableError(f"{self.address}: {error}") from None
        return json_decoder(answer).decode(results[0].body.to_pybytes())

    def open(self, task: protocol.TaskIdentity) -> protocol.OpenReply:
        """Open a task's partition, or return the address of its owner."""
        opened: protocol.OpenReply = self._action("open", task, protocol.OpenReply)
        return opened

    def locate(self, operator: str, query: str | None = None) -> OperatorLocation:
        location: OperatorLocation = self._action("locate", protocol.LocateRequest(operator, query), OperatorLocation)
        return location

    def call_coordinator(self, method: str, args: dict[str, object]) -> Any:
        """Send a message to the coordinator through the host; return the coordinator's answer."""
        return self._action("coordinator", protocol.CoordinatorCall(method, args), Any)

    def describe(self) -> dict[str, Any]:
        described: dict[str, Any] = self._action("describe", {}, dict[str, Any])
        return described

    def get_many(self, command: protocol.GetCommand, keys: pa.BinaryArray) -> pa.BinaryArray:
        """Return the values of keys, in the order of the keys; null for keys without a value."""
        values, _ = self._get(command, keys)
        return self._of_all(values, keys)

    def open_and_get(
        self, task: protocol.TaskIdentity, keys: pa.BinaryArray, column_family: str
    ) -> tuple[protocol.OpenReply, pa.BinaryArray]:
        """Open a partition and return the values of keys at the version opened, in one call.

        There are no values if another host is the owner, or if the partition is still being loaded.
        """
        values, metadata = self._get(protocol.OpenAndGetCommand(task, column_family), keys)
        if metadata is None:
            raise exceptions.HostUnavailableError(f"{self.address} did not return the version that it has opened.")
        opened = json_decoder(protocol.OpenReply).decode(metadata)
        return opened, self._of_all(values, keys) if opened.is_open else values

    def _get(
        self, command: protocol.GetCommand | protocol.OpenAndGetCommand, keys: pa.BinaryArray
    ) -> tuple[pa.BinaryArray, bytes | None]:
        """Return the values, and the metadata of their first batch."""
        descriptor = flight.FlightDescriptor.for_command(msgspec.json.encode(command))
        try:
            with calls.watched(self._place):
                writer, reader = self._client.do_exchange(descriptor, self._options())
                with writer:
                    writer.begin(protocol.KEYS_SCHEMA)
                    writer.write_batch(pa.record_batch([keys], schema=protocol.KEYS_SCHEMA))
                    writer.done_writing()
                    chunks = list(reader)
        except flight.FlightError as error:
            raise _error_of(error) from None
        except pa.ArrowException as error:
            raise exceptions.HostUnavailableError(f"{self.address}: {error}") from None
        values = [aligned_binary(chunk.data.column(0)) for chunk in chunks if chunk.data is not None]
        metadata = chunks[0].app_metadata if chunks else None
        column = values[0] if len(values) == 1 else pa.chunked_array(values, pa.binary()).combine_chunks()
        return column, None if metadata is None else metadata.to_pybytes()

    def _of_all(self, values: pa.BinaryArray, keys: pa.BinaryArray) -> pa.BinaryArray:
        if len(values) != len(keys):
            raise exceptions.HostUnavailableError(f"{self.address} answered {len(values)} values for {len(keys)} keys.")
        return values

    def scan(self, command: protocol.ScanCommand, ranges: Sequence[KeyRange]) -> Iterator[pa.RecordBatch]:
        """Yield the pairs of ranges of keys, as a stream of batches; closing the iterator early ends the call."""
        descriptor = flight.FlightDescriptor.for_command(msgspec.json.encode(command))
        is_stopped = False
        try:
            with calls.watched(self._place) as call:
                writer, reader = self._client.do_exchange(descriptor, self._options())
                with writer:
                    writer.begin(protocol.RANGES_SCHEMA)
                    bounds = [pa.array([r[i] for r in ranges], pa.binary()) for i in range(2)]
                    writer.write_batch(pa.record_batch(bounds, schema=protocol.RANGES_SCHEMA))
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
            raise exceptions.HostUnavailableError(f"{self.address}: {error}") from None

    def commit(self, command: protocol.CommitCommand, changes: Iterable[tuple[str, pa.RecordBatch]]) -> Acknowledged:
        """Commit a task's changes: column families and batches of ``COMMIT_SCHEMA``, fastest if sorted by key.

        Raises errors of ``changes`` as they are; then nothing is committed.
        """
        descriptor = flight.FlightDescriptor.for_command(msgspec.json.encode(command))
        own_errors: list[Exception] = []

        def watched_changes() -> Iterator[tuple[str, pa.RecordBatch]]:
            try:
                yield from changes
            except Exception as error:
                own_errors.append(error)
                raise

        try:
            with calls.watched(self._place):
                writer, reader = self._client.do_put(descriptor, protocol.COMMIT_SCHEMA, self._options())
                with writer:
                    for family, batch in watched_changes():
                        writer.write_with_metadata(batch, family.encode())
                    writer.write_metadata(protocol.END_OF_CHANGES)
                    writer.done_writing()
                    answer = reader.read()
        except (flight.FlightError, pa.ArrowException) as error:
            if own_errors:  # the host has not received the end of the changes, and refuses the commit.
                raise own_errors[0] from None
            if isinstance(error, flight.FlightError):
                raise _error_of(error) from None
            raise exceptions.HostUnavailableError(f"{self.address}: {error}") from None
        if answer is None:
            raise exceptions.HostUnavailableError(f"{self.address} closed the commit without an answer.")
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

    A host that was given up, or has been quiet, is called again if it accepts connections; otherwise raises
    ``HostUnavailableError``, since each task would need ``CONNECT_MS`` to find that out.
    """
    place = _place_of(address)
    if address in _given_up:
        if silent_places({place}):
            raise exceptions.HostUnavailableError(f"No connection to {address}, where a call was given up before.")
        _given_up.discard(address)
    elif not calls.answers(place):
        raise exceptions.HostUnavailableError(
            f"{address} took none of {FAILED_PROBES} connections within {PROBE_SECONDS:g} s each."
        )
    with _clients_lock:
        client = _clients.get((address, token))
        if client is None:
            client = _clients[(address, token)] = HostClient(address, token, tls=tls)
        return client


def forget_client(address: str, token: str) -> None:
    """Drop the connection to a host that did not answer; it is closed when its last user is done.

    It must not be closed here: closing it while another thread begins a call crashes the process (gRPC reads freed
    memory).
    """
    _given_up.add(address)
    with _clients_lock:
        _clients.pop((address, token), None)


# Messages of tasks to the coordinator that a host passes on, and their arguments as JSON.


METHODS = frozenset(
    {
        "deactivate_instances",
        "get_location",
        "get_locations",
        "locate",
        "look_up",
        "report_active_instance",
        "verify_if_instance_active",
    }
)
"""The messages that a task may send."""
SEVERAL = ("other_provider_ids", "provider_ids")
"""Arguments that are several provider ids; ``provider_id`` is one."""


def to_wire(args: dict[str, Any]) -> dict[str, Any]:
    """Return arguments as JSON can carry them."""
    plain = dict(args)
    if "provider_id" in plain:
        plain["provider_id"] = asdict(plain["provider_id"])
    for name in SEVERAL:
        if name in plain:
            plain[name] = [asdict(p) for p in plain[name]]
    return plain


def from_wire(provider_id: Any) -> StateStoreProviderId:
    """Return a provider id that came as JSON. Raises ``RequestError``."""
    try:
        return convert(provider_id, StateStoreProviderId)
    except msgspec.ValidationError as error:
        raise exceptions.RequestError(f"{provider_id!r} is not a provider id: {error}") from error


def checked_call(method: str, args: dict[str, Any]) -> dict[str, Any]:
    """Return the typed arguments of a task's message. Raises ``RequestError`` for one that no task may send."""
    if method not in METHODS:
        raise exceptions.RequestError(
            f"A task may not send {method!r} to the coordinator; it may send {', '.join(sorted(METHODS))}."
        )
    typed = dict(args)
    if "provider_id" in typed:
        typed["provider_id"] = from_wire(typed["provider_id"])
    for name in SEVERAL:
        if name in typed:
            typed[name] = tuple(from_wire(p) for p in typed[name])
    return typed
