"""Who looks after a request while it is worked on: whether it is still wanted, what memory it takes, and whose turn it uses.

What reads for long says so here, between its pieces and as deep inside as it likes: iterators within iterators need not pass anything on. A
request is answered in one thread, which is how its watch is found. Without a watch, as in a client, nothing happens.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class RequestWatch(Protocol):
    """What a server wants to know of a request that it answers. Every method may raise, which ends the request."""

    def check(self) -> None:
        """A piece of the work is done, and more is to come."""

    def before_slow_work(self) -> None:
        """Something is next that may take long, such as loading from storage."""

    def hold(self, nbytes: int) -> None:
        """So many bytes more are kept until the request is answered."""


class _Here(threading.local):
    watch: RequestWatch | None = None


_here = _Here()


@contextmanager
def watched(watch: RequestWatch) -> Iterator[None]:
    """Have ``watch`` look after what this thread does meanwhile."""
    before, _here.watch = _here.watch, watch
    try:
        yield
    finally:
        _here.watch = before


def check_request() -> None:
    """Call between the pieces of long work; costs next to nothing. Raises what the watch raises if nobody wants it any more."""
    watch = _here.watch
    if watch is not None:
        watch.check()


def before_slow_work() -> None:
    """Call before what may take long. Raises what the watch raises, as ``TooManyRequestsError``."""
    watch = _here.watch
    if watch is not None:
        watch.before_slow_work()


def hold(nbytes: int) -> None:
    """Call with what is read for an answer, before more is. Raises what the watch raises, as ``RequestLimitError``."""
    watch = _here.watch
    if watch is not None:
        watch.hold(nbytes)
