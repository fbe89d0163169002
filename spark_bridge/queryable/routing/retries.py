"""Retries: which failed requests are repeated, after how long, and when they are given up."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

from coordinator_actor.exceptions import (
    QueryBusyError,
    RetiredRunError,
    StaleOwnerError,
    UnknownHostError,
    UnknownRunError,
)
from spark_bridge.exceptions import (
    AccessDeniedError,
    ConnectionClosedError,
    HostUnavailableError,
    NotOwnerError,
    QueryEndedError,
    QueryTimeoutError,
    TooManyRequestsError,
    UnknownKvStateKeyGroupLocationError,
    UnknownOperatorError,
    WrongOperatorError,
)

T = TypeVar("T")

MOVED = (
    ConnectionClosedError,
    HostUnavailableError,
    NotOwnerError,
    OSError,
    RetiredRunError,
    StaleOwnerError,
    UnknownHostError,
    UnknownKvStateKeyGroupLocationError,
    UnknownRunError,
)
"""Errors after which a new look-up of the location may help: a host has moved or died, the query or the coordinator was
restarted.
"""
BUSY = (QueryBusyError, TooManyRequestsError)
"""Errors that pass by waiting: nothing has moved, and whoever was asked takes no more for the moment."""
PERMANENT = (AccessDeniedError, QueryTimeoutError, WrongOperatorError)
"""Errors that no attempt helps, though their base classes may pass."""
FINAL_ERRORS = (QueryEndedError, UnknownOperatorError)
"""Errors that are final for a client that asks for the first time.

A client that has had answers of the operator waits until its deadline for the query to be started again.
"""
FIRST_RETRY_DELAY = 0.02
"""In seconds. The delay doubles with each failure up to ``LONGEST_RETRY_DELAY``, and up to half of it is random."""
LONGEST_RETRY_DELAY = 0.5


def should_locate(error: Exception) -> bool:
    """Return whether an error says that what is known of the owners is wrong or old."""
    return isinstance(error, (*MOVED, *FINAL_ERRORS)) and not isinstance(error, PERMANENT)


class Attempts:
    """The attempts at one answer until ``deadline``, a time of ``clock``. ``begun`` is when they began, by default now.

    ``what`` begins the message of a ``QueryTimeoutError``. ``had_answer``: this client has had answers of that operator
    before. The class does not wait itself, so that threads and coroutines can both use it; ``retrying`` waits.
    """

    def __init__(
        self,
        what: str,
        deadline: float,
        *,
        had_answer: bool = False,
        begun: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        rng: Callable[[], float] = random.random,
    ) -> None:
        self.deadline = deadline
        self._what = what
        self._had_answer = had_answer
        self._clock = clock
        self._rng = rng
        self._begun = clock() if begun is None else begun
        self._failures = 0

    def delay(self, error: Exception) -> float:
        """Return the seconds to wait until the next attempt.

        Raises ``error`` itself if another attempt does not help. If there is no time for one, raises
        ``QueryTimeoutError``, or ``error`` if it is one of ``FINAL_ERRORS``, because that the query has not come back
        is an answer.
        """
        if not self._may_help(error):
            raise error
        self._failures += 1
        longest = min(LONGEST_RETRY_DELAY, FIRST_RETRY_DELAY * 2 ** min(self._failures - 1, 10))
        delay: float = longest * (0.5 + 0.5 * self._rng())
        now = self._clock()
        if now + delay >= self.deadline:
            if isinstance(error, FINAL_ERRORS):
                raise error
            raise QueryTimeoutError(
                f"{self._what} was not answered within {max(0.0, self.deadline - self._begun):.1f} s, in "
                f"{self._failures} "
                f"attempts; last failure: {type(error).__name__}: {error}"
            ) from error
        return delay

    def _may_help(self, error: Exception) -> bool:
        if isinstance(error, PERMANENT):
            return False
        if isinstance(error, FINAL_ERRORS):
            return self._had_answer
        return isinstance(error, (*MOVED, *BUSY))


def retrying(
    call: Callable[[], T],
    attempts: Attempts,
    *,
    relocate: Callable[[Exception], None] = lambda error: None,
    sleep: Callable[[float], None] = time.sleep,
    failure: Exception | None = None,
) -> T:
    """Repeat ``call`` until it returns.

    Before each further attempt ``relocate`` forgets the location, if that may help. ``failure`` is that of a first
    attempt that the caller has made itself. Raises what ``Attempts.delay`` does. ``call`` must look up a forgotten
    location itself, because the look-up may fail in the same ways.
    """
    while True:
        try:
            if failure is not None:
                raise failure
            return call()
        except Exception as error:  # noqa: BLE001 - delay raises errors that no attempt can help
            failure = None
            delay = attempts.delay(error)
            if should_locate(error):
                relocate(error)
        sleep(delay)
