"""Failed and late requests to storage: what an error means, which locations fail, and second requests.

obstore gives HTTP statuses and the service's codes only in its error messages.
"""

from __future__ import annotations

import errno
import itertools
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from obstore.exceptions import AlreadyExistsError, BaseError, GenericError, UnauthenticatedError

from backends.host_memory import BoundedDict

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_OUT_OF_RANGE = re.compile(r"status code: 416|StartTooLarge")
_REFUSED = re.compile(r"request failed for key .*\(code: (\w+)\)")
"""S3's answer to a bulk removal says 200, and names those that it has not removed."""
_WORD = re.compile(r"\S+")
_THROTTLING = {"SlowDown", "ServiceUnavailable", "ServerBusy"}
_PASSING = {"InternalError", *_THROTTLING}
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"}
_TRANSIENT_ERRNOS = {errno.EAGAIN, errno.EINTR, errno.EBUSY, errno.ESTALE, errno.ETIMEDOUT}


def is_transient(error: BaseError | OSError, *, is_local: bool) -> bool:
    """Return whether the same request may succeed later."""
    if isinstance(error, OSError):
        # The answer to the last part of a large file was lost, and obstore tried to abort a complete upload.
        if code(error) == "NoSuchUpload":
            return True
        return error.errno in _TRANSIENT_ERRNOS or isinstance(error, TimeoutError | ConnectionError)
    if is_local:
        return False
    if isinstance(error, AlreadyExistsError):
        return True
    refused = _REFUSED.search(str(error))
    if refused is not None:
        return refused[1] in _PASSING
    status = _status(error)
    if not status:
        return isinstance(error, GenericError) and "redirect" not in str(error)
    # S3 answers 400 to a request that arrived too slowly.
    return status[0] == "5" or status in ("408", "429") or code(error) == "RequestTimeout"


def is_throttling(error: BaseException) -> bool:
    """Return whether the service throttles: S3's SlowDown, or 503 or 429 without a body."""
    refused = _REFUSED.search(str(error))
    told = refused[1] if refused is not None else code(error)
    return told in _THROTTLING or (not told and _status(error) in ("503", "429"))


def is_expired(error: BaseException, *, has_body: bool) -> bool:
    """Return whether the credentials of a request were once valid and may have expired.

    The answer to HEAD has no body with a code: S3 answers 400 if the token has expired, and in hardly any other case.
    """
    if isinstance(error, UnauthenticatedError) or code(error) in _EXPIRED:
        return True
    return not has_body and _status(error) == "400"


def is_out_of_range(error: BaseException) -> bool:
    """Return whether a range begins after the end of the file. If a range only ends after it, storage shortens it."""
    return _OUT_OF_RANGE.search(str(error)) is not None


def check_bucket(error: FileNotFoundError) -> None:
    """Raise the error again if the bucket is missing: then nothing is known about the file."""
    if code(error) == "NoSuchBucket":
        raise error


def code(error: BaseException) -> str:
    """Return the service's code of an error, "" if there is none."""
    match = _CODE.search(str(error))
    return match[1] if match else ""


def first_line(error: BaseException) -> str:
    """Return the message of an error, shortened for use in another message."""
    line = str(error).split("\n", 1)[0].split("<?xml", 1)[0].rstrip(": ")
    return f"{line}: {code(error)}" if code(error) else line


def for_people(text: str, most: int) -> str:
    """Return a string about storage as it may be shown: not longer than ``most``, and addresses without parameters.

    The parameters may include a signature. A long string loses its middle: services put the cause at the end.
    """
    shown = _WORD.sub(lambda word: _without_parameters(word[0]), text)
    half = (most - 5) // 2
    return shown if len(shown) <= most else f"{shown[:half]} ... {shown[-half:]}"


def _without_parameters(word: str) -> str:
    address = word.find("://")
    at = word.find("?", address)
    return word if -1 in (address, at) else f"{word[:at]}?..."


def _status(error: BaseException) -> str:
    match = _STATUS.search(str(error))
    return match[1] if match else ""


# Faults of storage, for people: the requests of a process that fail, and those that get no answer.


FAILURE_SECONDS = 60.0
"""A failure is reported for this many seconds."""
WAITING_SECONDS = 5.0
"""A request that has had no answer for this many seconds is reported."""
MAX_TRACKED_LOCATIONS = 1_000
MAX_FAILURES = 100
LONGEST_TEXT = 300


@dataclass
class _Place:
    """One location: when its last requests failed and how, and when a request of each kind was last answered."""

    failed: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_FAILURES))
    error: str = ""
    kind: str = ""
    """Kind of the last request that failed. Storage may reject writes and answer reads: a full disk, a lost permission.
    """
    answered: dict[str, float] = field(default_factory=dict)


class TroubleTracker:
    """Knows the last failures by location, and the requests that are under way. Many threads may share one.

    It holds one entry for each request under way, and ``MAX_FAILURES`` moments for each location that has failed.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._under_way: dict[int, tuple[str, str, float]] = {}
        self._places: BoundedDict[str, _Place] = BoundedDict(MAX_TRACKED_LOCATIONS)

    def began(self, kind: str, location: str) -> int:
        """Record a request to a location. Return its number, which ``ended`` must be called with."""
        with self._lock:
            number = next(self._numbers)
            self._under_way[number] = (kind, location, self._clock())
            return number

    def ended(self, number: int, error: BaseException | None) -> None:
        """Record that a request was answered, or failed."""
        text = "" if error is None else for_people(first_line(error), LONGEST_TEXT)
        with self._lock:
            kind, location, _ = self._under_way.pop(number)
            if error is None:
                of_place = self._places.get(location)
                if of_place is not None:
                    of_place.answered[kind] = self._clock()
                return
            place = self._places.setdefault(location, _Place())
            place.failed.append(self._clock())
            place.kind, place.error = kind, f"{kind}: {text}"

    def read(self) -> list[dict[str, Any]]:
        """Return the troubles by location, as JSON types; none for storage that answers.

        ``failures`` of the last minute (``MAX_FAILURES`` at most), the last with ``error``, ``failed_seconds`` ago;
        ``answered_since``: a request of its kind was answered after that failure; ``waiting`` requests have had no
        answer for ``WAITING_SECONDS``, the longest for ``waiting_seconds``.
        """
        with self._lock:
            now = self._clock()
            waiting: dict[str, list[float]] = {}
            for _, location, began in self._under_way.values():
                if now - began >= WAITING_SECONDS:
                    waiting.setdefault(location, []).append(now - began)
            failed = {at: p for at, p in self._places.items() if p.failed and now - p.failed[-1] < FAILURE_SECONDS}
            troubles = []
            for location in sorted({*waiting, *failed}):
                place, seconds = failed.get(location, _Place()), waiting.get(location, [])
                last = place.failed[-1] if place.failed else now
                troubles.append(
                    {
                        "location": location,
                        "failures": sum(now - at < FAILURE_SECONDS for at in place.failed),
                        "error": place.error,
                        "failed_seconds": round(now - last, 1),
                        "answered_since": place.answered.get(place.kind, last) > last,
                        "waiting": len(seconds),
                        "waiting_seconds": round(max(seconds, default=0.0), 1),
                    }
                )
            return troubles


# Hedged requests: a request that takes far longer than usual is sent a second time, and the first answer wins.
#
# Occasionally a request takes ten times as long as others, because it has met a slow server, and the same request
# repeated takes the usual time. The idea is that of "The Tail at Scale" (Dean and Barroso, 2013). Only small,
# idempotent requests are hedged: a large request takes long because of its size, and a second one would slow it down
# further.


T = TypeVar("T")
DoneOf: TypeAlias = Callable[[Collection[Future[Any]], float | None], Collection[Future[Any]]]

HEDGED_BYTES = 1 << 20
"""Larger requests are never sent twice."""
REMEMBERED = 128
"""The usual duration is computed from this many durations of each kind."""
FEWEST = 32
"""Nothing is usual before this many requests."""
USUAL_SHARE, TIMES_USUAL = 0.95, 1.5
"""A request is late after ``TIMES_USUAL`` times the duration that ``USUAL_SHARE`` of its kind do not exceed."""
MIN_SECONDS = 0.05
"""No request is late before this many seconds."""
SHARE, MAX_AT_ONCE = 0.05, 8.0
"""Limits of second requests: a share of all requests, and a number in a row. All are late if storage hangs."""
HEDGE_THREADS = 32
"""At most this many requests run in threads that can be abandoned; further requests are never sent twice."""


class Hedges:
    """The second requests of a process to one bucket. Many threads may share one.

    Memory: ``REMEMBERED`` numbers a kind, and at most ``HEDGE_THREADS`` threads. ``done_of(requests, seconds)`` waits
    until a request is done, and returns the requests that are done. It waits ``seconds`` at most; None: without limit.
    """

    def __init__(self, done_of: DoneOf | None = None) -> None:
        self._done_of = _done_of if done_of is None else done_of
        self._lock = threading.Lock()
        self._durations: dict[str, deque[float]] = {}
        self._credit = MAX_AT_ONCE
        self._under_way = 0
        self._pool: ThreadPoolExecutor | None = None

    def took(self, kind: str, seconds: float) -> None:
        """Record the duration of a small request that succeeded."""
        with self._lock:
            self._durations.setdefault(kind, deque(maxlen=REMEMBERED)).append(seconds)

    def late_after(self, kind: str) -> float | None:
        """Return after how many seconds a request of a kind is late; None while that is not known."""
        with self._lock:
            durations = sorted(self._durations.get(kind, ()))
        if len(durations) < FEWEST:
            return None
        return max(MIN_SECONDS, TIMES_USUAL * durations[int(USUAL_SHARE * len(durations))])

    def first_answer(self, kind: str, attempt: Callable[[], T], on_second: Callable[[], None]) -> T:
        """Return the result of ``attempt``. If the first call is late, another thread calls it a second time.

        ``on_second`` is called before the second call. The first call that returns wins; the other one continues in its
        thread until it ends. Raises what the first call has raised if neither returns.
        """
        late = self.late_after(kind)
        first = None if late is None else self._started(attempt)
        if first is None:
            return attempt()
        calls = [first]
        if not self._done_of(calls, late) and self._may_have_second():
            on_second()
            second = self._started(attempt)
            if second is not None:
                calls.append(second)
        while calls:
            done = self._done_of(calls, None)
            answered = [call for call in calls if call in done and call.exception() is None]
            if answered:
                return answered[0].result()
            calls = [call for call in calls if call not in done]
        return first.result()

    def _may_have_second(self) -> bool:
        with self._lock:
            if self._credit < 1:
                return False
            self._credit -= 1
            return True

    def _started(self, attempt: Callable[[], T]) -> Future[T] | None:
        """Call ``attempt`` in another thread; None if all are busy."""
        with self._lock:
            if self._under_way >= HEDGE_THREADS:
                return None
            self._under_way += 1
            self._credit = min(MAX_AT_ONCE, self._credit + SHARE)
            if self._pool is None:
                self._pool = ThreadPoolExecutor(HEDGE_THREADS, thread_name_prefix="statestore-storage")
        call = self._pool.submit(attempt)
        call.add_done_callback(self._ended)
        return call

    def _ended(self, _: Future[Any]) -> None:
        with self._lock:
            self._under_way -= 1


def _done_of(calls: Collection[Future[Any]], seconds: float | None) -> Collection[Future[Any]]:
    return wait(calls, seconds, return_when=FIRST_COMPLETED).done
