"""Spans for the steps of the state store. While tracing is off, a span costs one comparison, and nothing is imported.

``tracing.py`` switches tracing on; ``open_telemetry.py`` makes the spans then. Attributes are named
``statestore.<name>``; those that are None are left out. Never give one a user's key or value.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import wraps
from hashlib import sha256
from typing import NamedTuple, ParamSpec, Protocol, TypeVar

# Subjects of traces, and the ids that are derived from a subject: every process derives the same ids without exchanging
# them.
#
# A trace has a root span, which one process makes, often after other processes have made their spans. These spans name
# the root as their parent, by an id that is a hash as well.


class Trace(NamedTuple):
    """The subject of a trace: a micro-batch, a savepoint, or the start of a run.

    ``number`` is the version that the batch makes, the id of the savepoint, or 0.
    """

    kind: str
    run_id: str
    number: int = 0

    @property
    def ids(self) -> tuple[int, int]:
        """Return the id of the trace (128 bits) and the id of its root span (64 bits). Neither is 0."""
        digest = sha256(f"{self.kind}/{self.run_id}/{self.number}".encode()).digest()
        return int.from_bytes(digest[:16], "big") or 1, int.from_bytes(digest[16:24], "big") or 1


def batch(run_id: str, version: int) -> Trace:
    """Return the trace of the batch that makes a version, with all its attempts."""
    return Trace("batch", run_id, version)


def run(run_id: str) -> Trace:
    """Return the trace of the start of a run, and of every recovery of the run by a coordinator."""
    return Trace("run", run_id)


def savepoint(run_id: str, savepoint_id: int) -> Trace:
    """Return the trace of a savepoint."""
    return Trace("savepoint", run_id, savepoint_id)


P = ParamSpec("P")
T = TypeVar("T")

Attribute = str | int | float | bool | None


class Span:
    """A no-op span: what all functions here return while tracing is off.

    As a context manager a span is the current one of its thread; it ends with the block, and an error that leaves the
    block is its status.
    """

    __slots__ = ()

    def __enter__(self) -> Span:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        return None

    def note(self, **attributes: Attribute) -> None:
        """Add attributes to the span."""

    def event(self, name: str, **attributes: Attribute) -> None:
        """Record an event within the span, at the current time."""


class Tracer(Protocol):
    """Makes spans while tracing is on. None of the methods raises an error or waits for an exporter."""

    def span(self, name: str, trace: Trace | None, attributes: dict[str, Attribute], *, is_root: bool) -> Span:
        """Begin a span: see ``span`` below. Without a trace it is a child of the current span, or begins a trace."""

    def finished(
        self,
        name: str,
        trace: Trace,
        times: tuple[int, int],
        attributes: dict[str, Attribute],
        *,
        is_root: bool,
        failure: str | None,
    ) -> None:
        """Make a span that is over: see ``finished`` below."""

    def has_current(self) -> bool:
        """Return whether this thread has a current span."""

    def carried(self, work: Callable[P, T]) -> Callable[P, T]:
        """Return work that has the current span of this thread, wherever it runs."""

    def header(self) -> bytes | None:
        """Return the current span as the W3C's ``traceparent``; None if there is none."""

    def under(self, header: str) -> Span:
        """Return a block whose current span is another process's."""


OFF = Span()
TRACEPARENT = "traceparent"
_tracer: Tracer | None = None


def set_tracer(tracer: Tracer | None) -> None:
    """Set the tracer that makes spans from now on; None switches tracing off."""
    global _tracer
    _tracer = tracer


def is_on() -> bool:
    """Return whether this process makes spans."""
    return _tracer is not None


def span(name: str, trace: Trace, /, *, is_root: bool = False, **attributes: Attribute) -> Span:
    """Begin a span of a trace. Its parent is the current span if that is of the same trace, else the root.

    ``is_root``: the span is the root of the trace.
    """
    return OFF if _tracer is None else _tracer.span(name, trace, attributes, is_root=is_root)


def step(name: str, /, **attributes: Attribute) -> Span:
    """Begin a span below the current span. Without a current span there is none."""
    return OFF if _tracer is None or not _tracer.has_current() else _tracer.span(name, None, attributes, is_root=False)


def alone(name: str, /, **attributes: Attribute) -> Span:
    """Begin a span as a child of the current span, or else a new trace."""
    return OFF if _tracer is None else _tracer.span(name, None, attributes, is_root=False)


def finished(
    name: str,
    trace: Trace,
    began: int,
    /,
    ended: int = 0,
    *,
    is_root: bool = False,
    failure: str | None = None,
    **attributes: Attribute,
) -> None:
    """Make a span that is over already. Times are in ns since 1970; 0 is now. ``failure`` is the name of an error."""
    if _tracer is not None:
        times = (began or now(), ended or now())
        _tracer.finished(name, trace, times, attributes, is_root=is_root, failure=failure)


def now() -> int:
    """Return the time for ``finished``, in ns since 1970; 0 while tracing is off."""
    return 0 if _tracer is None else time.time_ns()


def carried(work: Callable[P, T]) -> Callable[P, T]:
    """Return work to be done in another thread, below the span that is current here now."""
    return work if _tracer is None else _tracer.carried(work)


def traced(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Make each call of a function a span, as ``alone`` does."""

    def declare(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> T:
            with alone(name):
                return function(*args, **kwargs)

        return called

    return declare


class Pool(ThreadPoolExecutor):
    """Threads whose work belongs to the span that was current when the work was submitted."""

    def submit(self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Begin some work."""
        return super().submit(carried(work), *args, **kwargs)


def headers() -> Sequence[tuple[bytes, bytes]]:
    """Return the headers that name the current span in a call over the network."""
    header = None if _tracer is None else _tracer.header()
    return () if header is None else ((TRACEPARENT.encode(), header),)


def under(header: str | None) -> Span:
    """Return a block for a call that came over the network with that header. The caller's span is current within it."""
    return OFF if _tracer is None or header is None else _tracer.under(header)


def error_name(error: BaseException) -> str:
    """Return the label of an error in a span: its class. The message may quote a user's data, and is in the logs."""
    return type(error).__name__
