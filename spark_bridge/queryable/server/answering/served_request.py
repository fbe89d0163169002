"""The context of a request that a server answers: its admission, deadline, client, and the memory of its answer."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack

from spark_bridge.exceptions import RequestLimitError
from spark_bridge.queryable.protocol.request_context import active_context
from spark_bridge.queryable.server.answering.row_sender import QUIET_SECONDS, RowSender
from spark_bridge.queryable.server.connection.client_session import TOKEN_SECONDS, ClientSession
from spark_bridge.queryable.server.connection.framed_socket import ClientGoneError, FramedSocket
from spark_bridge.queryable.server.limits.admission import AdmissionLimiter
from spark_bridge.queryable.server.limits.request_limits import RequestLimits

SLOW_LOOKUP_SECONDS = 5.0
"""Rows of keys that take longer than this to find go on under the limiter of slow lookups."""
LARGE_ANSWER_BYTES = 1 << 16


class ServedRequest:
    """Implements ``RequestContext`` for one request, within a ``with``. For the thread of the connection.

    The ``with`` waits until ``limiter`` admits the request. When the work becomes slow the request moves to the limiter
    ``slow``: when it says so (``before_slow_work``), and unless ``may_stay`` also after ``SLOW_LOOKUP_SECONDS``.
    ``stopping`` is set when the server stops.
    """

    def __init__(
        self,
        session: ClientSession,
        frames: FramedSocket,
        limits: RequestLimits,
        stopping: threading.Event,
        limiter: AdmissionLimiter,
        slow: AdmissionLimiter | None = None,
        may_stay: bool = True,
    ) -> None:
        self.rows: RowSender | None = None
        self._session = session
        self._frames = frames
        self._limits = limits
        self._stopping = stopping
        self._limiter = limiter
        self._slow = slow
        self._may_stay = may_stay
        self._admitted_by: AdmissionLimiter | None = None
        self._noted = 0
        self._reserved = 0
        self._keep = ExitStack()

    def __enter__(self) -> ServedRequest:
        self._admit(self._limiter)
        self._began = self._checked_at = time.monotonic()
        self.deadline = self._began + self._limits.scan_seconds
        self._keep.enter_context(active_context(self))
        return self

    def __exit__(self, *_: object) -> None:
        self._keep.close()
        self._release()

    def _admit(self, limiter: AdmissionLimiter) -> None:
        limiter.acquire(self._limits.wait_seconds)
        self._admitted_by = limiter

    def _release(self) -> None:
        limiter, self._admitted_by = self._admitted_by, None
        if limiter is not None:
            limiter.release()

    @property
    def is_slow(self) -> bool:
        """Whether the request takes no room of the fast ones."""
        return self._slow is None or self._admitted_by is self._slow

    def before_slow_work(self) -> None:
        """See ``RequestContext``."""
        if self._slow is not None and self._admitted_by is not self._slow:
            self._release()
            self._admit(self._slow)

    def raise_if_cancelled(self) -> None:
        """See ``RequestContext``. Raises ``ClientGoneError``, ``RequestLimitError``, and ``AccessDeniedError``."""
        now = time.monotonic()
        if self._stopping.is_set():
            raise ClientGoneError("The server stops.")
        if now > self.deadline:
            so_far = "" if self.rows is None else f", after {self.rows.num_rows:,} rows"
            raise RequestLimitError(
                f"The answer took longer than the {self._limits.scan_seconds:g} s allowed here{so_far}: ask for "
                "less, or "
                "read faster."
            )
        if now - self._checked_at < min(QUIET_SECONDS, TOKEN_SECONDS):
            return
        self._checked_at = now
        self._session.check_client(now)
        if not self._may_stay and now - self._began > SLOW_LOOKUP_SECONDS:
            self.before_slow_work()
        if self.rows is not None and self.is_slow:
            self.rows.keep_alive(now)

    def reserve_memory(self, nbytes: int) -> None:
        """See ``RequestContext``. Raises ``RequestLimitError`` or ``TooManyRequestsError``."""
        self._noted += nbytes
        self.reserve_at_least(self._noted)

    def reserve_at_least(self, nbytes: int) -> None:
        """Reserve memory for an answer of ``nbytes`` in all. Small answers reserve nothing."""
        limit = self._limits.max_buffered_bytes
        if nbytes > LARGE_ANSWER_BYTES and nbytes > self._reserved:
            if nbytes > limit:
                raise RequestLimitError(
                    f"The answer has {nbytes:,} bytes or more, and {limit:,} are allowed here: ask for fewer keys."
                )
            self._frames.reserve(nbytes - self._reserved)
            self._reserved = nbytes
