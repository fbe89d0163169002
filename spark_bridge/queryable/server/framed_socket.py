"""The server's end of a connection: frames in and out with few system calls, and bounds on bytes and seconds.

A plain socket stays blocking and has its time-outs in the kernel. With Python's own time-outs each call polls first,
and releases the interpreter's lock twice.
"""

from __future__ import annotations

import contextlib
import logging
import math
import select
import socket
import ssl
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spark_bridge.exceptions import STATESTORE_ERRORS, RequestError, RequestLimitError, TlsError
from spark_bridge.queryable.protocol import FRAME_PREFIX, MAX_HEADER_BYTES, Failure, frame
from spark_bridge.queryable.server.limits import AdmissionLimiter, seconds_left
from spark_bridge.transport.tls import NO_TLS

RECEIVE_BUFFER_BYTES = 1 << 16
"""The most bytes that one ``recv`` returns, usually whole frames. A larger frame gets its own memory."""
SEND_TICK_SECONDS = 1.0
"""Seconds between two checks of the deadline by a send that makes no progress."""
LINGER_SECONDS = 1.0
LINGER_BYTES = 64 << 20

_TIMES = struct.Struct("@ll")


class ClientGoneError(Exception):
    """The client has left, or takes no answers. Unlike errors of forwarded requests, it does not cross the network."""


class IdleClientError(ClientGoneError):
    """The client has asked for nothing for long."""


class FramedSocket:
    """Frames over a connected socket, for one thread; others may only shut the socket down.

    ``buffered`` limits the bytes of all large frames in this process; a frame waits ``wait_seconds`` for its share.
    """

    def __init__(self, connected: socket.socket, buffered: AdmissionLimiter, wait_seconds: float) -> None:
        self._socket = connected
        self._is_tls = isinstance(connected, ssl.SSLSocket)
        self._buffer = memoryview(bytearray(RECEIVE_BUFFER_BYTES))
        self._begin = 0
        self._end = 0
        self._buffered = buffered
        self._wait_seconds = wait_seconds
        self._reserved = 0
        self._receive_seconds = 0.0
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)):
            if hasattr(socket, option):
                connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        if not self._is_tls:
            connected.settimeout(None)
            self._set_time(socket.SO_SNDTIMEO, SEND_TICK_SECONDS)

    # -- receiving -----------------------------------------------------------------------------

    def receive(
        self, max_bytes: int, idle_seconds: float, transfer_seconds: float
    ) -> tuple[memoryview, memoryview] | None:
        """Return header and body of the next frame; None if the other side has closed the connection between frames.

        Both are valid until the next call; ``keep`` makes a body last. Waits ``idle_seconds`` for the frame to begin,
        and ``transfer_seconds`` for the rest of it. Nothing more can be received after an error. Raises
        ``RequestLimitError`` if the frame is larger than ``max_bytes``, before more than its lengths have been read,
        ``RequestError`` if its lengths make no sense, ``TooManyRequestsError`` if large frames take all the memory that
        they may, and ``ClientGoneError``.
        """
        if self._reserved:
            self._give_back()
        begin, end = self._begin, self._end
        if begin == end:
            if self._receive_seconds != idle_seconds:
                self._set_receive_seconds(idle_seconds)
            begin, end = 0, self._receive_into(self._buffer)
            if not end:
                return None
        deadline = math.inf
        if end - begin < FRAME_PREFIX.size:
            deadline = time.monotonic() + transfer_seconds
            begin, end = self._fill(begin, end, FRAME_PREFIX.size, deadline)
        length, header_length = FRAME_PREFIX.unpack_from(self._buffer, begin)
        if length > max_bytes:
            raise RequestLimitError(
                f"A request of {length:,} bytes is more than the {max_bytes:,} allowed here: ask for less at once."
            )
        if not 0 < header_length <= min(length, MAX_HEADER_BYTES):
            raise RequestError(
                f"A frame of {length:,} bytes cannot have a header of {header_length:,}; a header has at least 1 and "
                f"at most {MAX_HEADER_BYTES:,}."
            )
        frame_length = FRAME_PREFIX.size + length
        if end - begin < frame_length:
            if deadline == math.inf:
                deadline = time.monotonic() + transfer_seconds
            if frame_length > RECEIVE_BUFFER_BYTES:
                return self._receive_large(begin + FRAME_PREFIX.size, end, length, header_length, deadline)
            begin, end = self._fill(begin, end, frame_length, deadline)
        self._begin, self._end = begin + frame_length, end
        body = begin + FRAME_PREFIX.size + header_length
        return self._buffer[begin + FRAME_PREFIX.size : body], self._buffer[body : begin + frame_length]

    def keep(self, body: memoryview) -> memoryview:
        """Return a body that stays as it is when more is received."""
        return memoryview(bytes(body)) if body.obj is self._buffer.obj else body

    def _fill(self, begin: int, end: int, wanted: int, deadline: float) -> tuple[int, int]:
        """Receive until ``wanted`` bytes are in the buffer; return their start and end."""
        if begin + wanted > RECEIVE_BUFFER_BYTES:
            self._buffer[: end - begin] = self._buffer[begin:end]
            begin, end = 0, end - begin
        while end - begin < wanted:
            end += self._receive_by(self._buffer[end:], deadline)
        return begin, end

    def _receive_large(
        self, begin: int, end: int, length: int, header_length: int, deadline: float
    ) -> tuple[memoryview, memoryview]:
        self.reserve(length)
        # The system provides this memory as bytes arrive: a client that announces much and sends little costs little.
        memory = np.empty(length, np.uint8).data
        filled = end - begin
        memory[:filled] = self._buffer[begin:end]
        self._begin = self._end = 0
        while filled < length:
            filled += self._receive_by(memory[filled:], deadline)
        return memory[:header_length], memory[header_length:]

    def _receive_by(self, memory: memoryview, deadline: float) -> int:
        left = seconds_left(deadline)
        self._set_receive_seconds(max(left, 0.001))
        try:
            received = self._receive_into(memory) if left else 0
        except IdleClientError:
            received = left = 0
        if not left:
            raise RequestError("A request had not arrived completely when its time was over.")
        if not received:
            raise ClientGoneError("The connection was closed within a request.")
        return received

    def _receive_into(self, memory: memoryview) -> int:
        try:
            return self._socket.recv_into(memory)
        except (BlockingIOError, TimeoutError):
            raise IdleClientError("Nothing arrived in time.") from None
        except OSError as error:
            raise ClientGoneError(str(error)) from error

    # -- sending -------------------------------------------------------------------------------

    def send(self, parts: Sequence[Any], deadline: float = math.inf) -> None:
        """Send bytes-like objects one by one. Raises ``ClientGoneError`` if they are not taken by ``deadline``."""
        size = sum(map(len, parts))
        if size <= RECEIVE_BUFFER_BYTES:
            data = b"".join(parts)
            sent = self._send_once(lambda: self._socket.send(data), deadline)
            if sent == size:
                return
            left = [memoryview(data)[sent:]]
        else:
            left = [memoryview(p).cast("B") for p in parts if len(p)]
        while left:
            if self._is_tls:
                sent = self._send_once(lambda: self._socket.send(left[0]), deadline)
            else:
                sent = self._send_once(lambda: self._socket.sendmsg(left), deadline)
            while left and sent >= len(left[0]):
                sent -= len(left.pop(0))
            if sent:
                left[0] = left[0][sent:]

    def _send_once(self, send: Callable[[], int], deadline: float) -> int:
        while True:
            try:
                if self._is_tls:
                    self._socket.settimeout(SEND_TICK_SECONDS)
                    self._receive_seconds = SEND_TICK_SECONDS
                return send()
            except (BlockingIOError, TimeoutError):
                if time.monotonic() > deadline:
                    raise ClientGoneError("The client did not take the answer in time.") from None
            except OSError as error:
                raise ClientGoneError(str(error)) from error

    def reserve(self, amount: int) -> None:
        """Reserve a share of the memory of large frames until the next ``receive``. Raises ``TooManyRequestsError``."""
        self._buffered.acquire(self._wait_seconds, amount)
        self._reserved += amount

    def _give_back(self) -> None:
        reserved, self._reserved = self._reserved, 0
        self._buffered.release(reserved)

    # -- the end -------------------------------------------------------------------------------

    def is_closed_by_client(self) -> bool:
        """Return whether the client has closed its side, or the connection is broken. Does not wait."""
        poll = select.poll()
        poll.register(self._socket, getattr(select, "POLLRDHUP", select.POLLHUP))
        return bool(poll.poll(0))

    def linger(self, max_bytes: int = LINGER_BYTES) -> None:
        """Wait until the client, which still sends, has read a last answer: closing at once would discard it."""
        deadline = time.monotonic() + LINGER_SECONDS
        with contextlib.suppress(OSError, ClientGoneError, RequestError):
            socket.socket.shutdown(self._socket, socket.SHUT_WR)
            while max_bytes > 0:
                max_bytes -= self._receive_by(self._buffer, deadline)

    def close(self) -> None:
        if self._reserved:
            self._give_back()
        self._socket.close()

    def _set_receive_seconds(self, seconds: float) -> None:
        self._receive_seconds = seconds
        if self._is_tls:
            self._socket.settimeout(seconds)
        else:
            self._set_time(socket.SO_RCVTIMEO, seconds)

    def _set_time(self, option: int, seconds: float) -> None:
        whole = int(seconds)
        self._socket.setsockopt(socket.SOL_SOCKET, option, _TIMES.pack(whole, int((seconds - whole) * 1e6)))


# Errors on their way to a client.


log = logging.getLogger(__name__)

MAX_MESSAGE_CHARS = 8192


def failure_of(error: Exception) -> Failure:
    """Return the ``Failure`` that reports an error to a client.

    The project's own errors cross the network with their text. Of other errors only the class is sent, because their
    text may disclose too much.
    """
    name = type(error).__name__
    if isinstance(error, STATESTORE_ERRORS):
        message = str(error)
        if len(message) > MAX_MESSAGE_CHARS:
            message = f"{message[:MAX_MESSAGE_CHARS]} ... ({len(message):,} characters)"
        return Failure(name, message)
    log.error("Unexpected error while answering a request", exc_info=error)
    return Failure(name, "The host failed to answer; its log says why.")


# The answer to a client whose TLS handshake has failed: why it failed.


LINGER_READS = 16


def refuse_handshake(connected: socket.socket, error: ssl.SSLError) -> None:
    """Tell a client why its handshake failed, and wait a moment.

    If the socket were closed while the client still sends, the client would not get the reason. The caller closes it.
    """
    deadline = time.monotonic() + LINGER_SECONDS
    with contextlib.suppress(OSError):
        if error.reason in NO_TLS:
            # A client without TLS understands frames and no TLS alerts, so use the plain socket below.
            failure = Failure(TlsError.__name__, "This host answers by TLS only: give tls= to connect.")
            socket.socket.sendall(connected, b"".join(frame(failure)))
        socket.socket.shutdown(connected, socket.SHUT_WR)
        for _ in range(LINGER_READS):
            connected.settimeout(max(deadline - time.monotonic(), 0.001))
            if not socket.socket.recv(connected, 1 << 12):
                return
