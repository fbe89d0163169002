"""``KvConnections``: connections to ``KvStateServer``s by address, kept and shared between threads."""

from __future__ import annotations

import os
import ssl
import time
from typing import Any

from spark_bridge.exceptions import QueryableStateError
from spark_bridge.queryable.protocol.client_connection import FrameBody
from spark_bridge.queryable.protocol.connection_pool import ConnectionPool
from spark_bridge.queryable.protocol.exchange import KvExchange, KvStream
from spark_bridge.queryable.protocol.messages import (
    Reply,
    Request,
    Welcome,
)


class KvConnections:
    """Connections by address (``ip:port``), made when needed, for any number of threads, and for processes that fork.

    ``timeout`` is the seconds that an answer may take where no deadline is given. A ``deadline`` is a time of
    ``time.monotonic``. Every method raises the host's own error, ``HostUnavailableError`` if no host answers in time,
    ``ConnectionClosedError`` if the connection breaks, and ``AccessDeniedError``.
    """

    def __init__(self, token: str, tls: ssl.SSLContext | None = None, timeout: float = 30.0) -> None:
        self.timeout = timeout
        self._token = token
        self._tls = tls
        self._pools: dict[str, ConnectionPool] = {}
        self._pid = os.getpid()
        self._is_closed = False

    def _pool(self, address: str) -> ConnectionPool:
        if self._pid != os.getpid():
            # After a fork: the sockets belong to the parent process, and threads that are not here may hold its locks.
            self._pools, self._pid = {}, os.getpid()
        pool = self._pools.get(address)
        if pool is None:
            if self._is_closed:
                raise QueryableStateError("The connections have been closed; connect again.")
            pool = self._pools.setdefault(address, ConnectionPool(address, self._token, self._tls))
        return pool

    @property
    def lag_ms(self) -> int:
        """The lag in the last answer, in ms; 0 for none."""
        newest = max(list(self._pools.values()), key=lambda pool: pool.answered_at, default=None)
        return 0 if newest is None else newest.lag_ms

    def begin(self, address: str, header: Request, body: FrameBody = b"", deadline: float | None = None) -> KvExchange:
        """Send a request without waiting for the answer, so that several hosts can be asked at once."""
        if deadline is None:
            deadline = time.monotonic() + self.timeout
        return KvExchange(address, self._pool(address), header, body, deadline)

    def request(
        self, address: str, header: Request, body: FrameBody = b"", deadline: float | None = None
    ) -> tuple[Reply, memoryview]:
        """Send a request, and wait for its answer of one frame."""
        return self.begin(address, header, body, deadline).finish()

    def stream(self, address: str, header: Request, body: FrameBody = b"", deadline: float | None = None) -> KvStream:
        """Send a scan, and return the frames of its answer.

        ``deadline`` is for the first frame; each further frame may take ``timeout`` seconds.
        """
        if deadline is None:
            deadline = time.monotonic() + self.timeout
        return KvStream(self.begin(address, header, body, deadline), deadline, self.timeout)

    def welcome(self, address: str, deadline: float | None = None) -> Welcome:
        """Return the greeting of a host: its id, and its limits on requests."""
        pool = self._pool(address)
        connection, _ = pool.take(time.monotonic() + self.timeout if deadline is None else deadline)
        welcome = connection.welcome
        pool.give_back(connection)
        return welcome

    def close(self) -> None:
        """Close all connections for good. Requests of other threads may fail."""
        self._is_closed = True
        self.drop()

    def drop(self) -> None:
        """Close all connections; later requests open new ones."""
        pools, self._pools = self._pools, {}
        for pool in list(pools.values()):
            pool.close()

    def __enter__(self) -> KvConnections:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
