"""Sends all requests to storage.

Each attempt is counted and timed, waits for its turn (``pace.py``), is repeated where that may help, has a second
request where it is late (``hedges.py``), and is made with new credentials where the old ones have expired.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TypeVar

from obstore.exceptions import BaseError

from backends.exceptions import StorageError
from backends.storage.sending.failures import first_line, is_expired, is_throttling, is_transient
from backends.storage.sending.request_counts import KINDS, RequestCounts
from backends.storage.sending.traffic import Traffic
from backends.tracing import spans
from backends.tracing.spans import Span

T = TypeVar("T")

_FIRST_WAIT_SECONDS = 0.1
_LONGEST_WAIT_SECONDS = 5.0
_EXPIRED_REMEDY = (
    "The credentials have expired, and new ones were not to be had. Keys with a session token that stand in the "
    "options or in the environment end with that token: start the query again with new ones. What renews itself are "
    "credentials that the process fetches: from an instance profile, a container's endpoint or a web identity."
)


class RequestSender:
    """Sends the requests to one location. Many threads may share one.

    ``traffic`` is what the bucket's requests share, None for a local disk. ``renew`` makes the following calls use new
    credentials, if there are any.
    """

    def __init__(
        self,
        location: str,
        *,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
        retry_seconds: float,
        counts: RequestCounts,
        traffic: Traffic | None,
        renew: Callable[[], None],
    ) -> None:
        self._location = location
        self._clock = clock
        self._sleep = sleep
        self._retry_seconds = retry_seconds
        self._counts = counts
        self._traffic = traffic
        self._renew = renew

    def send(
        self,
        verb: str,
        path: str,
        call: Callable[[], T],
        *,
        on_second: Callable[[], None] | None = None,
        progress: Callable[[], int] = lambda: 0,
    ) -> T:
        """Return the result of ``call``, which makes a request, and is repeated while an error may pass.

        Raises ``StorageError`` once it has been repeated for ``retry_seconds`` without ``progress`` changing, and at
        once for an error that will not pass. ``FileExistsError`` passes through. With ``on_second`` the request may be
        made twice at the same time: see ``Hedges.first_answer``.
        """
        with spans.step(f"storage.{KINDS[verb]}", file=path) as span:
            return self._sent(verb, path, call, on_second, progress, span)

    def _sent(
        self,
        verb: str,
        path: str,
        call: Callable[[], T],
        on_second: Callable[[], None] | None,
        progress: Callable[[], int],
        span: Span,
    ) -> T:
        started, wait = self._clock(), _FIRST_WAIT_SECONDS
        before, is_renewed = progress(), False
        self._wait(0.0)
        while True:
            try:
                return self._attempt(verb, call, on_second)
            except FileExistsError:
                raise
            except (BaseError, OSError) as error:
                span.event("failed", error=spans.error_name(error))
                has_expired = self._traffic is not None and is_expired(error, has_body=verb != "look up")
                if has_expired and not is_renewed:
                    is_renewed = True
                    self._renew()
                    continue
                if progress() != before:
                    started, wait, before = self._clock(), _FIRST_WAIT_SECONDS, progress()
                elapsed = self._clock() - started
                failed = f"Could not {verb} {self._location}/{path}"
                if not is_transient(error, is_local=self._traffic is None):
                    remedy = f". {_EXPIRED_REMEDY}" if has_expired else ""
                    raise StorageError(f"{failed}: {first_line(error)}{remedy}") from error
                if elapsed + wait > self._retry_seconds:
                    raise StorageError(f"{failed}, tried for {elapsed:.1f} s: {first_line(error)}") from error
                # Jitter keeps many hosts that failed together from coming back together.
                pause = wait * random.uniform(0.5, 1.0)
                if self._traffic is not None and is_throttling(error):
                    self._traffic.pace.refused(pause)
            self._wait(pause)
            wait = min(wait * 2, _LONGEST_WAIT_SECONDS)

    def _wait(self, seconds: float) -> None:
        """Wait for ``seconds``, and until it is the turn of a request of this bucket."""
        turn = 0.0 if self._traffic is None else self._traffic.pace.wait_seconds()
        if max(seconds, turn) > 0:
            self._sleep(max(seconds, turn))

    def _attempt(self, verb: str, call: Callable[[], T], on_second: Callable[[], None] | None) -> T:
        traffic = self._traffic
        hedges = None if traffic is None or on_second is None or traffic.pace.is_slowed else traffic.hedges

        def attempt() -> T:
            self._counts.note(verb, self._location)
            asked = self._clock()
            failure: Exception | None = None
            number = self._counts.trouble.began(KINDS[verb], self._location)
            try:
                answer = call()
            except FileExistsError:
                raise
            except (BaseError, OSError) as error:
                failure = error
                raise
            finally:
                self._counts.took(verb, self._clock() - asked, failure is not None)
                self._counts.trouble.ended(number, failure)
            if hedges is not None:
                hedges.took(verb, self._clock() - asked)
            return answer

        if hedges is None or on_second is None:
            return attempt()
        return hedges.first_answer(verb, attempt, on_second)
