"""The threads that answer messages, chosen so that a query whose storage hangs keeps no other message from its answer.

Messages about leases and locations wait for no storage and for no lock that is held over storage: they are answered at
once, by the thread that takes the messages of their group. Registrations have threads of their own. All others are
answered in the threads of the query that they are about (``query_threads.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from inspect import signature
from typing import Any

from backends.tracing import spans
from coordinator_actor.coordinator_port import GROUPS, CoordinatorPort, Group
from coordinator_actor.threads.query_threads import QueryThreads, in_place

REGISTRATION_THREADS = 32
"""A registration waits for a second where the storage of a query hangs."""

_NAMES = {method: list(signature(getattr(CoordinatorPort, method)).parameters)[1:] for method in GROUPS}


class Dispatcher:
    """Answers messages in the threads of their groups."""

    def __init__(self, coordinator: CoordinatorPort, queries: QueryThreads) -> None:
        self._coordinator = coordinator
        self._queries = queries
        self._registrations = ThreadPoolExecutor(REGISTRATION_THREADS, thread_name_prefix="statestore-registrations")

    def submit(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Future[Any]:
        """Begin to answer a message. Return its future, which is done if the message waits for nothing.

        Raises ``QueryBusyError`` if too many messages about the same query wait, ``KeyError`` for an unknown message.
        """
        # Below the span of Ray's own tracing, where that is on.
        answer = spans.carried(partial(self._coordinator.call, method, *args, **kwargs))
        group = GROUPS[method]
        if group is Group.QUERIES:
            return self._queries.submit(query_of(method, args, kwargs), answer)
        if group is Group.REGISTRATIONS:
            return self._registrations.submit(answer)
        return in_place(method, answer)


def query_of(method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return the run, or the query by its name, that a message is about; the message's own name if it is about none."""
    given = {**dict(zip(_NAMES[method], args, strict=False)), **kwargs}
    for name in ("run_id", "query"):
        if given.get(name) is not None:
            return str(given[name])
    record = next((given[name] for name in ("registration", "request", "message") if name in given), None)
    return method if record is None else str(record.run_id)
