"""The history of one run's checkpoints: counted while they are made, and kept in ``history/`` for people.

No batch waits for it: records are counted in memory, and written some seconds later by one of the query's threads, many
versions at once.
"""

from __future__ import annotations

import threading
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import structs

from backends.exceptions import FileExistsInStorageError
from backends.formats.manifest import Manifest
from backends.formats.manifest_chain import delta_bytes
from backends.storage.requests import num_requests, used_since, used_together
from coordinator_actor.checkpoints.pending_checkpoint import PendingCheckpoint, TaskKey
from coordinator_actor.durable.records import MAX_RECORDS, CheckpointRecord, CheckpointRecords, StepTime, as_plain
from coordinator_actor.messages import MAX_STEPS, Acknowledge, CommitFigures, InputPace

WRITE_SECONDS = 10.0
"""How long a record may wait to be written. A coordinator that is killed loses this much of the history."""


@dataclass
class _Counted:
    """Counts and times of a version that is not completed yet. Moments are in seconds since 1970."""

    begun: float
    first: float | None = None
    last: float | None = None
    prepared: float | None = None
    retried: int = 0
    storage: Counter[str] = field(default_factory=Counter)
    figures: dict[TaskKey, CommitFigures | None] = field(default_factory=dict)


class CheckpointHistory:
    """The last checkpoints of a query, including those of earlier runs and coordinators.

    Moments are seconds since 1970.

    The lock of the run guards the counts, and must be held for ``begun``, ``acknowledged``, ``prepared`` and
    ``completed``. ``_lock`` guards the records, and is held for nothing else. ``_writing`` is held over storage, by the
    thread that writes or cleans up the history, and is taken for nothing else.
    """

    def __init__(self, files: CheckpointRecords, now: float, used: Callable[[], dict[str, int]] = dict) -> None:
        self._files = files
        self._used = used
        self._counted: dict[int, _Counted] = {}
        self._used_before = used()
        self._records: dict[int, CheckpointRecord] = {}
        self._changed: dict[int, int] = {}  # the number of the last change of each record
        self._num_changes = 0
        self._name = uuid.uuid4().hex  # marks of another coordinator's history are unknown to this one
        self._unwritten = False
        self._is_loaded = False
        self._written = now
        self._lock = threading.Lock()
        self._writing = threading.Lock()

    # -- counting ------------------------------------------------------------------------------

    def begun(self, version: int, now: float) -> None:
        """Record that a host has opened the batch that makes a version."""
        self._counted.setdefault(version, _Counted(now))

    def acknowledged(self, version: int, messages: Sequence[Acknowledge], now: float) -> None:
        """Record accepted changes. The last ones of a partition count, as in the manifest."""
        counted = self._counted.setdefault(version, _Counted(now))
        counted.first = now if counted.first is None else counted.first
        counted.last = now
        for message in messages:
            task = (message.operator, message.partition)
            counted.retried += task in counted.figures
            counted.figures[task] = message.figures
            if message.figures is not None:
                counted.storage.update(message.figures.storage)

    def prepared(self, version: int, now: float) -> None:
        """Record that a manifest of the version is durable."""
        self._counted.setdefault(version, _Counted(now)).prepared = now

    def completed(self, manifest: Manifest, now: float) -> None:
        """Make the record of a version that Spark has committed."""
        counted = self._counted.get(manifest.version)
        self._counted = {v: c for v, c in self._counted.items() if v > manifest.version}
        used = self._used()
        record = _record(manifest, counted, used_since(used, self._used_before), now)
        self._used_before = used
        with self._lock:
            self._put_record(record)
            self._forget_oldest()
            self._unwritten = True

    def measured(self, manifest: Manifest, full_bytes: int | None) -> None:
        """Record the number of bytes that a load of a completed version reads. It is written with the next record."""
        with self._lock:
            record = self._records.get(manifest.id)
            if record is not None:
                self._put_record(structs.replace(record, full_bytes=full_bytes))

    # -- reading -------------------------------------------------------------------------------

    def records(self) -> tuple[CheckpointRecord, ...]:
        """Return the last checkpoints by ascending id. Waits for no storage."""
        with self._lock:
            return tuple(self._records.values())

    def changed_since(self, mark: str) -> dict[str, Any]:
        """Return the checkpoints that are new or changed since the answer with that mark; all for an unknown mark.

        The keys are those of ``CoordinatorPort.checkpoint_stats``.
        """
        name, _, number = mark.partition(":")
        is_known = name == self._name and number.isdecimal()
        since = int(number) if is_known else -1
        with self._lock:
            records = [record for i, record in self._records.items() if self._changed[i] > since]
            first, new_mark = min(self._records, default=None), f"{self._name}:{self._num_changes}"
        return {
            "history": [as_plain(record) for record in records],
            "history_first": first,
            "history_mark": new_mark,
            "history_is_all": not is_known,
        }

    # -- storage -------------------------------------------------------------------------------

    def is_due(self, now: float) -> bool:
        """Return whether there is something to read or write."""
        with self._lock:
            return not self._is_loaded or (self._unwritten and not 0 <= now - self._written < WRITE_SECONDS)

    @property
    def is_unwritten(self) -> bool:
        """Return whether there are records that storage does not have."""
        with self._lock:
            return self._unwritten

    def write(self, now: float) -> None:
        """Read the records of earlier coordinators, if that was not done yet, and write those that are not written.

        Raises ``StorageError``; then nothing is forgotten, and the next call retries.
        """
        with self._writing:
            if not self._is_loaded:
                self._load()
            with self._lock:
                records = tuple(self._records.values())
                is_needed, self._unwritten = self._unwritten, False
            if not is_needed:
                return
            try:
                self._files.write(records)
            except FileExistsInStorageError:
                # Another coordinator has seen the completion of the same version.
                self._load()
            except BaseException:
                with self._lock:
                    self._unwritten = True
                raise
            with self._lock:
                self._written = now

    def _load(self) -> None:
        earlier = {record.id: record for record in self._files.load()}
        with self._lock:
            for record in earlier.values():
                if record.id not in self._records:
                    self._put_record(record)
            self._forget_oldest()
            self._is_loaded = True

    def _put_record(self, record: CheckpointRecord) -> None:
        self._num_changes += 1
        self._records[record.id] = record
        self._changed[record.id] = self._num_changes

    def _forget_oldest(self) -> None:
        self._records = {i: self._records[i] for i in sorted(self._records)[-MAX_RECORDS:]}
        self._changed = {i: self._changed[i] for i in self._records}

    def tidy_up(self) -> None:
        """Remove the files that newer ones replace."""
        with self._writing:
            self._files.remove_obsolete()


def _record(manifest: Manifest, counted: _Counted | None, used: dict[str, int], now: float) -> CheckpointRecord:
    record = CheckpointRecord(
        id=manifest.id,
        version=manifest.version,
        epoch=manifest.epoch,
        run_id=manifest.run_id,
        completed_ms=_ms(now),
        partitions=sum(len(operator.partitions) for operator in manifest.operators.values()),
        delta_bytes=delta_bytes(manifest),
        requests=num_requests(used),
        storage=used,
    )
    if counted is None:
        return record
    figures = [f for f in counted.figures.values() if f is not None]
    times: dict[str, StepTime] = {}
    for each in figures:
        for name, ms in each.steps.items():
            before = times.get(name)
            if before is not None:
                times[name] = StepTime(before.sum_ms + ms, max(before.max_ms, ms))
            elif len(times) < MAX_STEPS:
                times[name] = StepTime(ms, ms)
    used = used_together(used, counted.storage)
    return structs.replace(
        record,
        begun_ms=_ms(counted.begun),
        first_acknowledged_ms=_ms(counted.first),
        last_acknowledged_ms=_ms(counted.last),
        prepared_ms=_ms(counted.prepared),
        retried=counted.retried,
        rows=sum(f.rows for f in figures),
        updated=sum(f.updated for f in figures),
        removed=sum(f.removed for f in figures),
        late=sum(f.late for f in figures),
        duplicates=sum(f.duplicates for f in figures),
        requests=num_requests(used),
        storage=used,
        steps=times,
    )


def _ms(seconds: float | None) -> int | None:
    return None if seconds is None else int(seconds * 1000)


# The time since Spark began to work on a batch, as the driver reports it.
#
# The checkpoint of a batch begins when a task opens the state. Before that Spark plans the batch and reads the source;
# after the last acknowledgement the sink writes. The checkpoint alone would suggest that no batch runs in these phases.


class SparkAtWork:
    """The reports of a run's driver, in a heartbeat a second. Only ``record_heartbeat`` needs the lock of the run."""

    def __init__(self) -> None:
        self.pace: InputPace | None = None
        """The pace of the input in the last batch that the driver knows."""
        # The completed version, and since when Spark is at the batch after it;
        self._running: tuple[int, float] | None = None
        # the version that was completed last, and since when Spark was at its batch.
        self._last: tuple[int, float] | None = None

    def record_heartbeat(self, is_at_work: bool, completed: int, now: float) -> None:
        """Record a heartbeat. ``completed`` is the completed version: after it, another batch is at work."""
        running = self._running
        if running is not None and completed == running[0] + 1:
            self._last = (completed, running[1])
        if not is_at_work:
            self._running = None
        elif running is None or running[0] != completed:
            self._running = (completed, now)

    def began(self, completed: int, pending: PendingCheckpoint | None) -> float | None:
        """Return when the batch after the completed version began, at the latest; None if there is none."""
        moments = [] if pending is None else [pending.started]
        running = self._running
        if running is not None and running[0] == completed:
            moments.append(running[1])
        return min(moments, default=None)

    def began_of(self, version: int) -> float | None:
        """Return when the batch of the newest completed version began; None for one that heartbeats did not see."""
        last = self._last
        return last[1] if last is not None and last[0] == version else None
