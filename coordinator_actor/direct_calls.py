"""Messages of a host to the coordinator over TCP, which take a fraction of the time of a call of a Ray actor.

Each batch of a host waits for several messages. So the coordinator also listens at an address that its answers to
heartbeats name, and hosts send the messages in ``DIRECT`` there, in MessagePack. All other messages go through the
actor, and so does a message that finds no free connection, or gets no answer over it. It may then arrive twice, as any
message may (``CoordinatorPort``). The decision is in ``docs/decisions/hosts.md``.

A frame is a length and its content. The first frame of a connection has the secret of the cluster. Then the host sends
one message after the other, each after the answer to the last one.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from enum import IntEnum
from inspect import signature
from typing import Any, get_type_hints

import msgspec
from msgspec import Raw, Struct

from backends.decoders import msgpack_decoder
from backends.exceptions import StateStoreError
from coordinator_actor.coordinator_port import CoordinatorPort
from coordinator_actor.exceptions import CoordinatorError, error_of_class

log = logging.getLogger(__name__)

DIRECT = ("open_batch", "acknowledge_many", "see_commit", "completed", "open_for_read", "heartbeat_host")
"""The messages of a host that tasks or readers wait for, or that each batch has."""
RAY_SECONDS = 0.5
"""A heartbeat goes through Ray if the last one that did is older: so a host leaves a coordinator that was replaced."""
MAX_UNCONFIRMED_SECONDS = 3.0
"""All messages go through Ray if its last answer to a heartbeat is older."""
DIRECT_HEARTBEAT_SECONDS = 1.0
"""A heartbeat without an answer goes through Ray after this time: the coordinator's process may be suspended."""
MAX_DIRECT_BYTES = 4 << 20
"""A longer message goes through Ray, and so does a message with a longer answer: one thread has all connections."""
MAX_SECRET_BYTES = 1024
MAX_WITHOUT_SECRET = 64
"""Connections that have not sent the secret yet; further ones are closed."""
MAX_DIRECT_CONNECTIONS = 8
"""The connections of one host, and so its messages at once; further ones go through Ray."""
DIRECT_CONNECT_SECONDS = 2.0
RECONNECT_SECONDS = 1.0
"""The least seconds between two attempts to connect, after one that has failed."""
DIRECT_SILENT_SECONDS = 4
"""A connection ends if the other machine has confirmed nothing for this many whole seconds."""

MAX_SOCKET_SECONDS = 86400.0
"""A time-out in the kernel may not be infinite."""

_LENGTH = struct.Struct("<I")
_TIMES = struct.Struct("@ll")
_encode = msgspec.msgpack.encode


class _Message(Struct, array_like=True):
    method: str
    arguments: Raw


class _Kind(IntEnum):
    ANSWER = 0
    ERROR = 1
    """An error that the coordinator raises on purpose: its class and its text."""
    THROUGH_RAY = 2
    """An unexpected error, whose traceback Ray sends, or an answer that is too long."""


class _Answer(Struct, array_like=True):
    kind: _Kind
    content: Raw


class _Error(Struct, array_like=True):
    name: str
    text: str


_THROUGH_RAY = _Answer(_Kind.THROUGH_RAY, Raw(_encode(None)))


def _arguments_of(method: str) -> type[Struct]:
    """Return the record of a message's arguments."""
    declared = getattr(CoordinatorPort, method)
    hints = get_type_hints(declared)
    parameters = list(signature(declared).parameters.values())[1:]  # without ``self``
    fields = [(p.name, hints[p.name], *(() if p.default is p.empty else (p.default,))) for p in parameters]
    return msgspec.defstruct(method, fields)


_ARGUMENTS = {method: _arguments_of(method) for method in DIRECT}
_ANSWERS = {method: get_type_hints(getattr(CoordinatorPort, method))["return"] for method in DIRECT}


def goes_direct(method: str, seconds: float) -> bool:
    """Return whether a message goes over a connection, ``seconds`` after the last answer to a heartbeat through Ray."""
    return method in DIRECT and seconds < (RAY_SECONDS if method == "heartbeat_host" else MAX_UNCONFIRMED_SECONDS)


# The coordinator's side.


Submit = Callable[[str, Sequence[Any], Mapping[str, Any]], "Future[Any]"]
"""Begins to answer a message, as ``Coordinator.submit``."""
Answered = Callable[[str, Any, float], None]
"""Takes a message's name, its answer, and how many seconds the answer took."""


class CallServer:
    """Answers messages at ``address``, ``ip:port``; "" if this process cannot listen there.

    One thread serves all connections, at most ``MAX_DIRECT_CONNECTIONS`` of each host. It waits for no answer.
    ``num_messages`` counts the messages by name.
    """

    def __init__(self, ip: str, secret: str, submit: Submit, answered: Answered) -> None:
        self.address = ""
        self.num_messages = Counter[str]()
        self._secret = secret.encode()
        self._submit = submit
        self._answered = answered
        self._num_without_secret = 0
        try:
            listener = socket.create_server((ip, 0), family=socket.AF_INET6 if ":" in ip else socket.AF_INET)
        except OSError as error:
            log.warning("The coordinator cannot listen at %s, so all messages go through Ray: %s", ip, error)
            return
        self.address = f"{ip}:{listener.getsockname()[1]}"
        serve = self._serve(listener)
        threading.Thread(target=asyncio.run, args=(serve,), name="statestore-calls", daemon=True).start()

    async def _serve(self, listener: socket.socket) -> None:
        server = await asyncio.start_server(self._answer_all, sock=listener)
        await server.serve_forever()

    async def _answer_all(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if not await self._has_secret(reader):
                return
            _set_up(writer.get_extra_info("socket"))
            while True:
                content = _encode(await self._answer(await _received(reader, MAX_DIRECT_BYTES)))
                writer.write(_LENGTH.pack(len(content)) + content)
                await writer.drain()
        except (OSError, EOFError, asyncio.TimeoutError) as error:
            log.debug("A connection has ended: %s", error)  # its host sends through Ray, or connects again
        except msgspec.MsgspecError as error:
            log.warning("A message from %s is malformed: %s", writer.get_extra_info("peername"), error)
        finally:
            writer.close()

    async def _has_secret(self, reader: asyncio.StreamReader) -> bool:
        if self._num_without_secret >= MAX_WITHOUT_SECRET:
            return False
        self._num_without_secret += 1
        try:
            secret = await asyncio.wait_for(_received(reader, MAX_SECRET_BYTES), DIRECT_CONNECT_SECONDS)
        finally:
            self._num_without_secret -= 1
        return hmac.compare_digest(secret, self._secret)

    async def _answer(self, frame: bytes) -> _Answer:
        """Answer a message. Raises ``msgspec.MsgspecError`` if it is malformed."""
        message = msgpack_decoder(_Message).decode(frame)
        method, began = message.method, time.perf_counter()
        if method not in DIRECT:
            return _THROUGH_RAY
        arguments = msgspec.structs.asdict(msgpack_decoder(_ARGUMENTS[method]).decode(message.arguments))
        self.num_messages[method] += 1
        try:
            future = self._submit(method, (), arguments)
            answer = future.result() if future.done() else await asyncio.wrap_future(future)
            self._answered(method, answer, time.perf_counter() - began)
            content = _encode(answer)
        except (CoordinatorError, StateStoreError) as error:
            return _Answer(_Kind.ERROR, Raw(_encode(_Error(type(error).__name__, str(error)))))
        except Exception:
            log.exception("Unexpected error while answering %s; it is sent again through Ray", method)
            return _THROUGH_RAY
        return _Answer(_Kind.ANSWER, Raw(content)) if len(content) <= MAX_DIRECT_BYTES else _THROUGH_RAY


async def _received(reader: asyncio.StreamReader, most: int) -> bytes:
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if length > most:
        raise EOFError(f"A frame has {length:,} bytes, and at most {most:,} are allowed.")
    return await reader.readexactly(length)


def _set_up(connected: socket.socket) -> None:
    """Send each frame at once, and end a connection whose other machine is silent."""
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    keepalive = (("TCP_KEEPIDLE", 1), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", DIRECT_SILENT_SECONDS - 1))
    for name, value in (*keepalive, ("TCP_USER_TIMEOUT", DIRECT_SILENT_SECONDS * 1000)):
        if hasattr(socket, name):  # not all systems have all of them
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


# The side of a host.


class NotDirectError(Exception):
    """A message got no answer over a connection: send it through Ray."""


class DirectCalls:
    """The connections of a host. Thread-safe: ``_lock`` guards the fields, and is free during network calls.

    No message waits for a connection: a thread makes the first one after ``follow``, and another one after a message
    that found none free. ``_open`` are all connections to the present coordinator, ``_idle`` those without a message.
    ``_followed`` is when ``follow`` was called last, ``_tried`` when the last attempt to connect failed, both by
    ``time.monotonic``.
    """

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()
        self._lock = threading.Lock()
        self._address = ""
        self._open: set[socket.socket] = set()
        self._idle: list[socket.socket] = []
        self._is_connecting = False
        self._followed = self._tried = -math.inf

    def follow(self, address: str) -> None:
        """Send to the coordinator at ``address``, ``ip:port``, from now on. "" is none: all messages go through Ray.

        A message that waits for the answer of a coordinator at another address ends with ``NotDirectError``.
        """
        with self._lock:
            self._followed = time.monotonic()
            if address != self._address:
                self._address, self._tried = address, -math.inf
                for connected in self._open:
                    if connected in self._idle:
                        connected.close()
                    else:
                        with suppress(OSError):
                            connected.shutdown(socket.SHUT_RDWR)
                self._open.clear()
                self._idle.clear()
            has_none = not self._open
        if has_none:
            self._connect_apart()

    def takes(self, method: str) -> bool:
        """Return whether a message goes over a connection now, if one is free."""
        return bool(self._address) and goes_direct(method, time.monotonic() - self._followed)

    @property
    def num_connections(self) -> int:
        return len(self._open)

    def call(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], seconds: float) -> Any:
        """Send a message of ``DIRECT`` and return the answer, or raise the coordinator's error.

        Raises ``NotDirectError`` if no connection is free or the answer does not come over it, and ``TimeoutError`` if
        there is no answer within ``seconds``.
        """
        is_heartbeat = method == "heartbeat_host"
        deadline = time.monotonic() + (min(seconds, DIRECT_HEARTBEAT_SECONDS) if is_heartbeat else seconds)
        try:
            content = _encode(_Message(method, Raw(_encode(_ARGUMENTS[method](*args, **kwargs)))))
        except (TypeError, ValueError, OverflowError) as error:
            raise NotDirectError(f"{method} cannot be encoded: {error}") from error
        if len(content) > MAX_DIRECT_BYTES:
            raise NotDirectError(f"{method} has {len(content):,} bytes, and at most {MAX_DIRECT_BYTES:,} are allowed")
        with self._lock:
            connected = self._idle.pop() if self._idle else None
        if connected is None:
            self._connect_apart()
            raise NotDirectError(f"no connection is free for {method}")
        received: bytes | None = None
        try:
            received = _exchanged(connected, content, deadline)
        except TimeoutError as error:
            if is_heartbeat:
                raise NotDirectError(f"{method}: {error}") from error
            raise
        except (OSError, EOFError) as error:
            raise NotDirectError(f"{method}: {error}") from error
        finally:
            self._give_back(connected, is_usable=received is not None)
        try:
            answer = msgpack_decoder(_Answer).decode(received)
            if answer.kind is _Kind.ANSWER:
                return msgpack_decoder(_ANSWERS[method]).decode(answer.content)
            refusal = msgpack_decoder(_Error | None).decode(answer.content)
        except msgspec.MsgspecError as error:
            raise NotDirectError(f"the answer to {method} is malformed: {error}") from error
        if refusal is None:
            raise NotDirectError(f"the coordinator answers {method} through Ray only")
        raise error_of_class(refusal.name, refusal.text)

    def _give_back(self, connected: socket.socket, *, is_usable: bool) -> None:
        with self._lock:
            if is_usable and connected in self._open:
                self._idle.append(connected)
                return
            self._open.discard(connected)
        connected.close()

    def _connect_apart(self) -> None:
        with self._lock:
            address, is_due = self._address, time.monotonic() >= self._tried + RECONNECT_SECONDS
            if not address or not is_due or self._is_connecting or len(self._open) >= MAX_DIRECT_CONNECTIONS:
                return
            self._is_connecting = True
        try:
            threading.Thread(target=self._connect, args=(address,), name="statestore-connect", daemon=True).start()
        except RuntimeError as error:  # the process has no more threads
            self._connected(address, None, error)

    def _connect(self, address: str) -> None:
        ip, _, port = address.rpartition(":")
        connected, failure = None, None
        try:
            connected = socket.create_connection((ip, int(port)), timeout=DIRECT_CONNECT_SECONDS)
            _set_up(connected)
            connected.sendall(_LENGTH.pack(len(self._secret)) + self._secret)
            # From now on in the kernel (``_limit``): Python's own time-outs poll before each call.
            connected.settimeout(None)
        except (OSError, ValueError) as error:
            failure = error
        self._connected(address, connected, failure)

    def _connected(self, address: str, connected: socket.socket | None, failure: Exception | None) -> None:
        with self._lock:
            self._is_connecting = False
            is_current = address == self._address
            if failure is not None and is_current:
                if self._tried == -math.inf:  # once for each address
                    log.warning("No connection to the coordinator at %s; messages go through Ray: %s", address, failure)
                self._tried = time.monotonic()
            if failure is None and is_current and connected is not None:
                self._open.add(connected)
                self._idle.append(connected)
                return
        if connected is not None:
            connected.close()


def _exchanged(connected: socket.socket, content: bytes, deadline: float) -> bytes:
    """Send a frame, and return the content of the next one. Raises ``TimeoutError``, ``EOFError`` or ``OSError``."""
    received = bytearray()
    try:
        _limit(connected, socket.SO_SNDTIMEO, deadline)
        connected.sendall(_LENGTH.pack(len(content)) + content)
        while len(received) < _LENGTH.size or len(received) < _LENGTH.size + _LENGTH.unpack_from(received)[0]:
            _limit(connected, socket.SO_RCVTIMEO, deadline)
            more = connected.recv(1 << 16)
            if not more:
                raise EOFError("the coordinator has ended the connection")
            received += more
    except BlockingIOError as error:
        raise TimeoutError("no answer in time") from error
    return bytes(memoryview(received)[_LENGTH.size :])


def _limit(connected: socket.socket, option: int, deadline: float) -> None:
    """Let calls of the socket wait until ``deadline`` at most, a time of ``time.monotonic``."""
    left = max(0.001, min(deadline - time.monotonic(), MAX_SOCKET_SECONDS))
    connected.setsockopt(socket.SOL_SOCKET, option, _TIMES.pack(int(left), int(left % 1 * 1e6)))
