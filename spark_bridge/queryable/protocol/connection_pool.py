"""The connections of a client to one address, shared by its threads."""

from __future__ import annotations

import ssl
import threading
import time
from collections import deque

from spark_bridge.exceptions import HostUnavailableError, QueryableStateError
from spark_bridge.queryable.protocol.client_connection import ClientConnection

MAX_CONNECTIONS = 64
"""Connections to one address at the same time; a thread that needs one more waits for it."""
MAX_IDLE_SECONDS = 300.0
"""A connection that was not used for this many seconds is closed. Hosts close idle connections too, later."""


class ConnectionPool:
    """The connections to one address.

    The connection used last is used next, so that surplus connections become old and are closed. ``_free`` guards the
    number of open connections and wakes waiting threads; ``_idle`` is a deque, which needs no lock. ``lag_ms`` is the
    lag in the last answer from there, which came ``answered_at`` (of ``time.monotonic``).
    """

    def __init__(self, address: str, token: str, tls: ssl.SSLContext | None) -> None:
        self.lag_ms = 0
        self.answered_at = 0.0
        self._address = address
        self._token = token
        self._tls = tls
        self._idle: deque[ClientConnection] = deque()
        self._free = threading.Condition()
        self._open = 0
        self._waiting = 0
        self._is_closed = False

    def take(self, deadline: float) -> tuple[ClientConnection, bool]:
        """Return a connection, and whether it has been used before. Wait for one until ``deadline``."""
        try:
            return self._idle.pop(), True
        except IndexError:
            pass
        with self._free:
            # Counted before the look at ``_idle``: ``give_back`` adds to ``_idle`` first, and looks at the count then.
            self._waiting += 1
            try:
                while True:
                    if self._is_closed:
                        raise QueryableStateError("The connections have been closed; connect again.")
                    if self._idle:
                        try:
                            return self._idle.pop(), True
                        except IndexError:
                            continue
                    if self._open < MAX_CONNECTIONS:
                        self._open += 1
                        break
                    left = deadline - time.monotonic()
                    if left <= 0:
                        raise HostUnavailableError(f"All {MAX_CONNECTIONS} connections to {self._address} were in use.")
                    self._free.wait(left)
            finally:
                self._waiting -= 1
        return self._new(deadline), False

    def _new(self, deadline: float) -> ClientConnection:
        try:
            return ClientConnection(self._address, self._token, self._tls, deadline)
        except BaseException:
            self._forget()
            raise

    def replace(self, stale: ClientConnection, deadline: float) -> ClientConnection:
        """Return a new connection instead of one that the host has closed.

        Close the idle ones too, which are no better.
        """
        stale.close()
        while self._idle:
            try:
                self._idle.pop().close()
            except IndexError:
                break
            self._forget()
        return self._new(deadline)

    def give_back(self, connection: ClientConnection) -> None:
        """Make a connection free for other threads."""
        now = connection.used_at = time.monotonic()
        idle = self._idle
        idle.append(connection)
        if self._waiting:
            with self._free:
                self._free.notify()
        elif now - idle[0].used_at > MAX_IDLE_SECONDS:
            self._drop_oldest(now)
        if self._is_closed:
            self.close()

    def _drop_oldest(self, now: float) -> None:
        try:
            oldest = self._idle.popleft()
        except IndexError:
            return
        if now - oldest.used_at > MAX_IDLE_SECONDS:
            oldest.close()
            self._forget()
        else:
            self._idle.appendleft(oldest)

    def discard(self, connection: ClientConnection) -> None:
        """Close a connection that cannot be used again."""
        connection.close()
        self._forget()

    def _forget(self) -> None:
        with self._free:
            self._open -= 1
            self._free.notify()

    def close(self) -> None:
        """Close all connections. A connection in use is closed when it is given back."""
        with self._free:
            self._is_closed = True
            self._free.notify_all()
        while self._idle:
            try:
                self._idle.pop().close()
            except IndexError:
                return
