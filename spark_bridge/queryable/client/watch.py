"""``client.watch``: the changes of each version, as the version completes (a change feed)."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from spark_bridge import exceptions
from spark_bridge.queryable import protocol
from spark_bridge.queryable.client.discovery import ClusterAccess, KnownOperator
from spark_bridge.queryable.client.results import whole
from spark_bridge.queryable.connections import KvExchange
from spark_bridge.queryable.routing.scatter_gather import Attempts
from spark_bridge.state_format.stored_changes import VariableChanges
from spark_bridge.state_format.stored_rows import VariableRows

AWAIT_SECONDS = 2.0
"""A host waits so long for the next version before it answers that there is none: then a ``close`` is noticed."""
VERSIONS_AT_ONCE = 64
"""A watch that is far behind asks for at most this many versions at a time."""
LAST_COLUMNS = 2
"""Key group and partition, which come after all other columns."""


@dataclass(frozen=True)
class StateChange:
    """The changes of the watched state in one version.

    ``batch`` has a row per key, element, entry, window or timer that changed: ``version``, ``change_type`` ("insert",
    "update" or "delete"), the columns of the key and of a map's user key, and the structs ``before`` and ``after`` of
    the values. Keys that were written again with the same value are not in it.
    """

    version: int
    batch: pa.RecordBatch


class StateWatch:
    """The changes of an operator's state, version by version: in order, no version skipped and none twice.

    Iterate over it.

        with client.watch("user_totals", keys=[42, 43]) as changes:
            for change in changes:
                print(change.version, change.batch.to_pylist())

    It begins after ``from_version``, by default at the version that is completed now, and waits for the next version
    without end. Versions that changed nothing of the watched state are left out. To continue later, or after an error,
    make another watch with the ``version`` of the last change as ``from_version`` (or with ``position``, which also
    counts versions that changed nothing), and with ``run_id`` as ``from_run``: the new watch then notices if the query
    was rolled back between the two. With ``every_version``, a version that changed nothing comes with an empty batch;
    of several that were completed at once, the last one.

    A watch outlives hosts, coordinator and restarts of the query, if they come back within the ``timeout``. Otherwise
    it raises ``QueryTimeoutError``. If the query has ended and has not come back, the iteration ends after its last
    version. It raises ``QueryEndedError`` at the beginning if the query has ended and is not read on. It
    raises ``StateVersionError`` if the next versions are no longer retained, or if the query was rolled back to an
    older version than the watch has returned: the later versions are then invalid. Use a watch from one thread at a
    time; ``close`` is thread-safe.
    """

    def __init__(
        self,
        access: ClusterAccess,
        operator: str,
        keys: Any,
        state: str | None,
        query: str | None,
        from_version: int | None,
        timeout: float | None,
        from_run: str | None = None,
        every_version: bool = False,
    ) -> None:
        self._access = access
        self._ref = (operator, query)
        self._keys = keys
        self._state = state
        self._timeout = access.timeout if timeout is None else timeout
        self._position = from_version
        self._run_id: str | None = None
        self._given_by = from_run or ""
        self._every_version = every_version
        self._closed = threading.Event()
        self._stream: KvExchange | None = None
        self._reading = threading.Lock()
        self._changes = self._all_changes()

    @property
    def position(self) -> int | None:
        """The last version that was read; None before the first one, if no ``from_version`` was given."""
        return self._position

    @property
    def run_id(self) -> str | None:
        """The run of the query that gave the changes up to ``position``; None if it is not known."""
        return self._given_by or None

    def __iter__(self) -> Iterator[StateChange]:
        return self

    def __next__(self) -> StateChange:
        try:
            with self._reading:
                return next(self._changes)
        finally:
            if self._closed.is_set():
                self._release()

    def close(self) -> None:
        """End the watch, and release what it holds at the hosts. A waiting thread notices within ``AWAIT_SECONDS``."""
        self._closed.set()
        self._release()

    def _release(self) -> None:
        if self._reading.acquire(blocking=False):
            try:
                self._changes.close()
            finally:
                self._reading.release()
        elif (stream := self._stream) is not None:
            stream.cut()  # the thread that reads it releases the rest

    def __enter__(self) -> StateWatch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _attempts(self) -> Attempts:
        operator, _ = self._ref
        deadline = time.monotonic() + self._timeout
        return Attempts(f"watch({operator!r})", deadline, had_answer=self._run_id is not None)

    def _all_changes(self) -> Generator[StateChange, None, None]:
        attempts, has_ended = self._attempts(), False
        while not self._closed.is_set():
            begun = self._position
            try:
                yield from self._next_changes(attempts.deadline)
            except exceptions.RequestLimitError:
                if self._position == begun:
                    raise
                attempts = self._attempts()  # the caller took long over the changes: the rest is another answer
            except Exception as error:  # noqa: BLE001 - delay raises errors that no attempt can help
                if self._closed.is_set():
                    return
                if self._position != begun:
                    attempts = self._attempts()
                has_ended = has_ended or (isinstance(error, exceptions.QueryEndedError) and self._run_id is not None)
                try:
                    delay = attempts.delay(error)
                except (exceptions.QueryEndedError, exceptions.QueryTimeoutError):
                    # Any error after the end counts as the end: the last request may have had too little time.
                    if has_ended:
                        return
                    raise
                self._access.moved(self._ref, error)
                self._closed.wait(delay)
            else:
                attempts, has_ended = self._attempts(), False

    def _next_changes(self, deadline: float) -> Iterator[StateChange]:
        """Yield the versions completed since the position, which advances with them; wait a while for one."""
        target = self._access.known(self._ref, deadline)
        position = self._begin(target, deadline)
        completed = self._completed(target, position, min(AWAIT_SECONDS, self._timeout / 2), deadline)
        while position < completed and not self._closed.is_set():
            until = min(completed, position + VERSIONS_AT_ONCE)
            # ``closing`` ends the stream of a watch that is closed at a ``yield``.
            with closing(self._changes_until(target, position, until, time.monotonic() + self._timeout)) as changes:
                for change in changes:
                    self._position, self._given_by = change.version, target.location.run_id
                    yield change
                    if self._closed.is_set():
                        return
            if self._closed.is_set():
                return  # perhaps without changes of versions that come before ``until``
            is_last_empty = self._position != until
            self._position, self._given_by = until, target.location.run_id
            if is_last_empty and self._every_version:
                variable = VariableChanges(VariableRows(target.schema, target.view(self._state).variable))
                yield StateChange(until, without_last_columns([pa.RecordBatch.from_pylist([], variable.output)]))
            position = until

    def _begin(self, target: KnownOperator, deadline: float) -> int:
        """Return the position: it is set at the beginning, and proved when the query has been restarted."""
        location = target.location
        if self._position is None:
            self._position = max(location.completed_version, self._completed(target, 0, 0.0, deadline))
            self._given_by = location.run_id
        elif location.run_id != self._run_id and location.completed_version < self._position:
            self._prove(target, self._position, deadline)
        if not self._given_by:
            # The given version is one of this run's history now: a rollback before the first change counts as well.
            self._given_by = location.run_id
        self._run_id = location.run_id
        return self._position

    def _prove(self, target: KnownOperator, position: int, deadline: float) -> None:
        """Raise ``StateVersionError`` if a run begins before the position."""
        location = target.location
        is_first = self._run_id is None
        # A location may be slightly stale, but a new run is located at its first version or later.
        try:
            completed = self._completed(target, max(0, position - 1), AWAIT_SECONDS if is_first else 0.0, deadline)
        except exceptions.QueryEndedError:
            completed = location.completed_version  # no later one comes
        if completed >= position:
            return
        operator, _ = self._ref
        query = f"{location.query_name or 'unnamed'}, {location.query_id}, run {location.run_id}"
        of = f"operator {operator!r} (query {query})"
        if is_first:
            raise exceptions.StateVersionError(
                f"from_version={position} of {of} is not completed: the last completed version is {completed}. If the "
                "query was rolled back, read its state again and watch from there."
            )
        raise exceptions.StateVersionError(
            f"The query was rolled back: {of} continued from version {completed}, but changes up to version {position} "
            "were already returned and are now invalid. Read the state again and watch from there."
        )

    # -- requests ------------------------------------------------------------------------------

    def _completed(self, target: KnownOperator, after: int, seconds: float, deadline: float) -> int:
        """Return the completed version once it is after ``after``, or the one that there is after ``seconds``."""
        reply = self._access.ask_host(protocol.AwaitRequest(target.location.run_id, after, seconds), deadline)
        if not isinstance(reply, protocol.CountReply):
            kind = type(reply).__name__
            raise exceptions.ConnectionClosedError(f"A host answered a question for its version by {kind}.")
        return reply.count

    def _changes_until(
        self, target: KnownOperator, after: int, until: int, deadline: float
    ) -> Generator[StateChange, None, None]:
        """Yield the changes of each version up to ``until``, each once all changes of the version have arrived."""
        location = target.location
        view = target.view(self._state)
        body = b""
        if self._keys is not None:
            codec = view.without_window
            body = protocol.pack_bytes(codec.encode(codec.columns(self._keys)).unique())
        # A run that begins below the position may be past it by now: the host knows which run has made the version.
        previous_run = self._given_by if self._given_by != location.run_id else ""
        request = protocol.ChangesRequest(
            location.run_id, location.operator.name, after, until, view.variable.name, previous_run
        )
        decoder = protocol.RowBatchDecoder()
        version, parts = after, list[pa.RecordBatch]()
        self._stream = stream = self._access.stream(request, body, deadline)
        try:
            if self._closed.is_set():
                return  # ``close`` came before there was a stream to cut
            for reply, content in stream:
                rows = decoder.decode(content) if isinstance(reply, protocol.RowsReply) else None
                for part in () if rows is None else _by_version(rows):
                    first_version = part.column(0)[0].as_py()
                    if first_version != version and parts:
                        yield StateChange(version, without_last_columns(parts))
                        parts = []
                    version = first_version
                    parts.append(part)
        finally:
            self._stream = None
            stream.close()
        if parts:
            yield StateChange(version, without_last_columns(parts))


def _by_version(rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yield the rows of each version, by the first column."""
    versions = np.asarray(rows.column(0))
    bounds = [0, *(1 + np.flatnonzero(versions[1:] != versions[:-1])).tolist(), len(versions)]
    for begin, end in itertools.pairwise(bounds):
        if end > begin:
            yield rows.slice(begin, end - begin)


def without_last_columns(parts: list[pa.RecordBatch]) -> pa.RecordBatch:
    """Return the rows of all parts as one batch, without key group and partition.

    Raises ``RequestLimitError`` if a column has more bytes than an Arrow array can.
    """
    wanted = list(range(parts[0].num_columns - LAST_COLUMNS))
    if len(parts) == 1:
        return parts[0].select(wanted)
    rows = pa.Table.from_batches(parts).select(wanted)
    return pa.RecordBatch.from_arrays([whole(column) for column in rows.columns], schema=rows.schema)
