"""``history/<id>.json``: how the last checkpoints went, for people. It outlives coordinators, hosts and runs.

A file has the last ``MOST_RECORDS`` checkpoints, and is named by the newest of them. So one file is all that must be
read, and files before it may go. State never depends on these files: one that is lost or damaged costs figures only.
The idea is that of Flink's checkpoint history, which its job manager keeps in memory.
"""

from __future__ import annotations

import logging
from itertools import pairwise
from typing import Any

from msgspec import Struct, field, structs

from backends.exceptions import DamagedFileError
from coordinator_actor.durable.record_files import RecordFiles, numbered_path

log = logging.getLogger(__name__)

HISTORY = "history"
MOST_RECORDS = 300
KEPT_FILES = 2
"""The newest file, and the one before it, should the newest be damaged."""


class StepTime(Struct, frozen=True, gc=False):
    """The milliseconds of one step: the sum over all tasks, and those of the slowest task."""

    sum_ms: float
    max_ms: float


class CheckpointRecord(Struct, frozen=True):
    """One completed version: a micro-batch of Spark's.

    Moments are in ms since 1970 by the coordinator's clock, None where no coordinator saw them. They are: ``begun_ms``
    when the first host opened the batch, ``first_acknowledged_ms`` and ``last_acknowledged_ms`` when tasks were done,
    ``prepared_ms`` when the manifest was durable, ``completed_ms`` when Spark's commit was seen. ``delta_bytes`` are
    those of the changelogs; ``full_bytes`` those of all files from which the version is loaded, measured once in a
    maintenance interval. ``retried`` counts acknowledgements of partitions that had acknowledged the version before.
    ``rows``, ``updated``, ``removed``, ``late`` and ``duplicates`` are sums over all tasks. ``requests`` are those to
    checkpoint storage, of hosts and coordinator, since the version before, and ``storage`` the same by kind (put, get,
    head, list, delete), with the bytes of files that were sent and received. ``steps`` are steps of tasks and their
    commits.
    """

    id: int
    version: int
    epoch: int
    run_id: str
    begun_ms: int | None = None
    first_acknowledged_ms: int | None = None
    last_acknowledged_ms: int | None = None
    prepared_ms: int | None = None
    completed_ms: int | None = None
    partitions: int = 0
    delta_bytes: int = 0
    full_bytes: int | None = None
    retried: int = 0
    rows: int = 0
    updated: int = 0
    removed: int = 0
    late: int = 0
    duplicates: int = 0
    requests: int = 0
    storage: dict[str, int] = field(default_factory=dict)
    steps: dict[str, StepTime] = field(default_factory=dict)

    @property
    def phases(self) -> dict[str, int]:
        """Return the milliseconds between the moments, as far as they are known.

        ``tasks``: until the first task was done; ``acknowledge``: until the last was; ``manifest``: until that was
        durable; ``commit``: until Spark's commit was seen.
        """
        moments = (
            ("", self.begun_ms),
            ("tasks", self.first_acknowledged_ms),
            ("acknowledge", self.last_acknowledged_ms),
            ("manifest", self.prepared_ms),
            ("commit", self.completed_ms),
        )
        return {
            name: max(0, until - since)
            for (_, since), (name, until) in pairwise(moments)
            if since is not None and until is not None
        }

    @property
    def duration_ms(self) -> int | None:
        """Return the milliseconds from the begin to the durable manifest; None if they are not known."""
        if self.begun_ms is None or self.prepared_ms is None:
            return None
        return max(0, self.prepared_ms - self.begun_ms)


class HistoryFile(Struct, frozen=True):
    """The content of a file: records by ascending id."""

    records: tuple[CheckpointRecord, ...]


class CheckpointRecords:
    """The files of one query. Not thread-safe."""

    def __init__(self, files: RecordFiles) -> None:
        self._files = files
        self._numbers: list[int] | None = None

    def load(self) -> tuple[CheckpointRecord, ...]:
        """Return the records of the newest file that can be read; none if there is no file."""
        self._numbers = self._files.numbers(HISTORY)
        for number in reversed(self._numbers):
            try:
                found = self._files.read_or_none(numbered_path(HISTORY, number), HistoryFile)
            except DamagedFileError as error:
                log.warning("Checkpoints are missing in the history, which is for people only: %s", error)
                continue
            if found is not None:
                return found.records
        return ()

    def write(self, records: tuple[CheckpointRecord, ...]) -> None:
        """Write a new file durably. Raises ``FileExistsInStorageError`` if one has the same newest checkpoint."""
        newest = records[-1].id
        self._files.create(numbered_path(HISTORY, newest), HistoryFile(records))
        if self._numbers is not None:
            self._numbers.append(newest)

    def obsolete(self) -> list[str]:
        """Return the paths of the files that newer ones replace."""
        known = sorted(self._numbers or ())
        return [numbered_path(HISTORY, number) for number in known[:-KEPT_FILES]]

    def forget(self, paths: list[str]) -> None:
        """Take note that these files are removed."""
        gone = set(paths)
        self._numbers = [n for n in self._numbers or () if numbered_path(HISTORY, n) not in gone]


def as_plain(record: CheckpointRecord) -> dict[str, Any]:
    """Return a record with what follows from it, as JSON types."""
    plain: dict[str, Any] = {**structs.asdict(record), "duration_ms": record.duration_ms, "phases": record.phases}
    plain["steps"] = {name: structs.asdict(step) for name, step in record.steps.items()}
    return plain
