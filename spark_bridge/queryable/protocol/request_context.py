"""The context of a request while a thread works on it: deadline, cancellation, memory, and admission of slow work.

Long work calls the functions of this module between its pieces, as deep inside as it likes: nested iterators need not
pass a context on. One thread answers a request, and the context is found by the thread. Without a context, as in a
client, the functions do nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class RequestContext(Protocol):
    """Tells a server how the work on a request goes. Every method may raise, which ends the request."""

    def raise_if_cancelled(self) -> None:
        """Raise if the deadline is over, the client has left, or its token no longer allows the request."""

    def before_slow_work(self) -> None:
        """Prepare for work that may take long, such as loading from storage."""

    def reserve_memory(self, nbytes: int) -> None:
        """Reserve ``nbytes`` bytes more, until the request is answered."""


class _OfThread(threading.local):
    context: RequestContext | None = None


_of_thread = _OfThread()


@contextmanager
def active_context(context: RequestContext) -> Iterator[None]:
    """Make ``context`` that of this thread's work within the ``with``."""
    before, _of_thread.context = _of_thread.context, context
    try:
        yield
    finally:
        _of_thread.context = before


def raise_if_cancelled() -> None:
    """Check deadline and cancellation; to be called between the pieces of long work, at next to no cost.

    Raises what the context raises if the answer is no longer wanted.
    """
    context = _of_thread.context
    if context is not None:
        context.raise_if_cancelled()


def before_slow_work() -> None:
    """Say that work comes next that may take long. Raises what the context raises, as ``TooManyRequestsError``."""
    context = _of_thread.context
    if context is not None:
        context.before_slow_work()


def reserve_memory(nbytes: int) -> None:
    """Reserve memory for a part of an answer, before more is read.

    Raises what the context raises, as ``RequestLimitError``.
    """
    context = _of_thread.context
    if context is not None:
        context.reserve_memory(nbytes)
