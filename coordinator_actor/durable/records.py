"""Records next to the state: ``history/``, ``audit/``, ``lookups/``, ``feature-views/``, and begun savepoints.

``history/<id>.json`` has figures of the last checkpoints, for people. They outlive coordinators, hosts and runs. A file
has the last ``MAX_RECORDS`` checkpoints, and is named by the newest of them. So a reader needs only one file,
and earlier files may be removed. State never depends on these files: a lost or damaged one costs only figures. The idea
is that of Flink's checkpoint history, which its job manager keeps in memory.
"""

from __future__ import annotations

import getpass
import socket
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from msgspec import Struct, field, structs

from backends.conf import check_name
from backends.exceptions import FileExistsInStorageError, VersionNotFoundError
from backends.storage.checkpoint_storage import CheckpointStorage
from coordinator_actor.durable.fencing import RecordFiles, numbered_path, numbers_of
from coordinator_actor.feature_views import FeatureView

HISTORY = "history"
MAX_RECORDS = 300
KEPT_FILES = 2
"""The newest file, and the one before it, in case the newest is damaged."""


class StepTime(Struct, frozen=True, gc=False):
    """The milliseconds of one step: the sum over all tasks, and those of the slowest task."""

    sum_ms: float
    max_ms: float


class CheckpointRecord(Struct, frozen=True):
    """One completed version: a micro-batch of Spark's.

    Moments are in ms since 1970 by the coordinator's clock, None if no coordinator saw them. They are: ``begun_ms``
    when the first host opened the batch, ``first_acknowledged_ms`` and ``last_acknowledged_ms`` when tasks were done,
    ``prepared_ms`` when the manifest was durable, ``completed_ms`` when Spark's commit was seen. ``delta_bytes`` are
    those of the changelogs; ``full_bytes`` those of all files that the version is loaded from, measured once in a
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
        self._numbers: list[int] = []

    def load(self) -> tuple[CheckpointRecord, ...]:
        """Return the records of the newest readable file; none if there is no file."""
        self._numbers = self._files.numbers(HISTORY)
        lost = "Checkpoints are missing in the history, which is for people only"
        content = self._files.newest(HISTORY, self._numbers, HistoryFile, lost)
        return () if content is None else content.records

    def write(self, records: tuple[CheckpointRecord, ...]) -> None:
        """Write a new file durably. Raises ``FileExistsInStorageError`` if one has the same newest checkpoint."""
        newest = records[-1].id
        self._files.create(numbered_path(HISTORY, newest), HistoryFile(records))
        self._numbers.append(newest)

    def remove_obsolete(self) -> None:
        """Remove the files that newer ones replace. Raises ``StorageError``; then the next call retries."""
        numbers = sorted(self._numbers)
        if obsolete := [numbered_path(HISTORY, number) for number in numbers[:-KEPT_FILES]]:
            self._files.storage.delete_all(obsolete)
            self._numbers = numbers[-KEPT_FILES:]


def as_plain(record: CheckpointRecord) -> dict[str, Any]:
    """Return a record and its derived figures, as JSON types."""
    plain: dict[str, Any] = {**structs.asdict(record), "duration_ms": record.duration_ms, "phases": record.phases}
    plain["steps"] = {name: structs.asdict(step) for name, step in record.steps.items()}
    return plain


# ``audit/<n>.json``: manual changes to a query's state: what, when and by whom. Records are never removed.


AUDIT = "audit"


class AuditRecord(Struct, frozen=True):
    """One entry. ``what`` is the name of the function, ``status`` "begun" or "done", ``at_ms`` is in ms since 1970.

    ``by`` is the user and the machine. ``version`` is the newest version that it concerns. ``counts`` are numbers of
    keys, rows and files. ``reference`` is given by the caller, for example the number of a request. No record has a
    key.
    """

    what: str
    status: str
    at_ms: int
    by: str
    operators: tuple[str, ...]
    version: int
    counts: dict[str, int] = field(default_factory=dict)
    reference: str | None = None
    details: dict[str, str] = field(default_factory=dict)


def append_audit_record(storage: CheckpointStorage, record: AuditRecord) -> None:
    """Write an audit record of a state durably after the last one. Raises ``StorageError``."""
    RecordFiles(storage).append(AUDIT, record)


def read_audit_records(storage: CheckpointStorage) -> list[AuditRecord]:
    """Return all audit records of a state, the oldest first. Raises ``DamagedFileError``."""
    files = RecordFiles(storage)
    return files.read_all([numbered_path(AUDIT, n) for n in files.numbers(AUDIT)], AuditRecord)


def caller() -> str:
    """Return the user and the machine of this process, as records name them."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "unknown"
    return f"{user}@{socket.gethostname()}"


# ``lookups/``: which version of this state another query's batch has looked up, so that the batch reads it again.
#
# A record is made once, by create-if-absent, before the batch reads anything. Spark may run a batch any number of
# times, on any executors, and in any order of its tasks: all of them find the same record.


LOOKUPS = "lookups"


class LookupRecord(Struct, frozen=True):
    """A batch has looked up ``version``, which run ``made_by`` has made ("": no run, the empty version 0).

    ``at_ms`` is when it first did so, in ms since 1970: rows that had expired by then are left out of every repeated
    look-up.
    """

    version: int
    made_by: str
    at_ms: int

    def require_made_by(self, run_id: str) -> None:
        """Raise ``VersionNotFoundError`` unless ``run_id`` ("": none) made the version that was looked up.

        Another run may have rolled back, and made the version again with other rows.
        """
        if not self.made_by or run_id == self.made_by:
            return
        what = f"Version {self.version} was looked up as run {self.made_by} had made it"
        if run_id:
            why = f"The query has rolled back since, and run {run_id} has replaced the version"
        else:
            why = "It is not kept any more"
        raise VersionNotFoundError(f"{what}. {why}. Call lookup again to read a version that is kept.")


class LookupRecords:
    """The records of lookups in one state. ``by`` is the id of the query that looks up."""

    def __init__(self, storage: CheckpointStorage) -> None:
        self._files = RecordFiles(storage)

    @staticmethod
    def path(by: str, batch_id: int) -> str:
        """Return the path of a record. Raises ``InvalidStateStoreArgument`` for an id that no directory can have."""
        check_name("a query that looks up", by)
        return numbered_path(f"{LOOKUPS}/{by}", batch_id)

    def full_location(self, by: str, batch_id: int) -> str:
        """Return the address of a record, for messages."""
        return self._files.storage.full_location(self.path(by, batch_id))

    def find(self, by: str, batch_id: int) -> LookupRecord | None:
        """Return the record of a batch, or None. Raises ``DamagedFileError``, ``StorageError``."""
        return self._files.read_or_none(self.path(by, batch_id), LookupRecord)

    def make(self, by: str, batch_id: int, record: LookupRecord) -> LookupRecord:
        """Write the record of a batch, and return the one that counts: that of another writer, if it was first."""
        path = self.path(by, batch_id)
        try:
            self._files.create(path, record)
        except FileExistsInStorageError:
            return self._files.read(path, LookupRecord)
        return record

    def batches(self) -> dict[str, list[int]]:
        """List the batches that have records, ascending, by the query that looked up. One listing."""
        by_query: dict[str, list[int]] = {}
        for path, _ in self._files.storage.list(f"{LOOKUPS}/"):
            _, by, name = path.split("/", 2)
            number = name.removesuffix(".json")
            if name.endswith(".json") and number.isdecimal():
                by_query.setdefault(by, []).append(int(number))
        return {by: sorted(batches) for by, batches in by_query.items()}

    def remove(self, by: str, batches: Sequence[int]) -> None:
        self._files.storage.delete_all([self.path(by, batch_id) for batch_id in batches])


# ``feature-views/<n>.json``: the feature views that were declared over this state. The highest number counts.


FEATURE_VIEWS = "feature-views"


class FeatureViewsFile(Struct, frozen=True):
    """All feature views whose first operator is in this state."""

    views: tuple[FeatureView, ...]


def read_feature_views(storage: CheckpointStorage) -> tuple[FeatureView, ...]:
    """Return the feature views of a state, from the newest readable file; none if there is no file."""
    files, lost = RecordFiles(storage), "The last declaration of feature views is lost, declare it again"
    content = files.newest(FEATURE_VIEWS, files.numbers(FEATURE_VIEWS), FeatureViewsFile, lost)
    return () if content is None else content.views


def write_feature_views(storage: CheckpointStorage, views: tuple[FeatureView, ...]) -> None:
    """Write a new file durably, and remove the ones before the last. Raises ``StorageError``."""
    files = RecordFiles(storage)
    numbers = files.numbers(FEATURE_VIEWS)
    files.append(FEATURE_VIEWS, FeatureViewsFile(views))
    storage.delete_all([numbered_path(FEATURE_VIEWS, n) for n in numbers[: 1 - KEPT_FILES]])


# Records of begun savepoints. They also hold a run that is being stopped with a savepoint.


DIRECTORY = "savepoint-ids"
RELEASED = ".released"
KEPT_RECORDS = 20
"""At most this many records are kept. The newest one says which ids are taken; a hold is the last, or nearly."""


class SavepointRecord(Struct, frozen=True):
    """``savepoint-ids/<id>.json``: a savepoint was begun. Its own metadata file says whether it was finished.

    With ``stop``, no batch of the run ``run_id`` after the version may run until the driver of the run allows it.
    """

    checkpoint_id: int
    version: int
    location: str
    created_ms: int
    run_id: str
    stop: bool


def savepoint_record_path(checkpoint_id: int) -> str:
    """Return the path of the record of a savepoint."""
    return numbered_path(DIRECTORY, checkpoint_id)


def _released_path(checkpoint_id: int) -> str:
    return savepoint_record_path(checkpoint_id).removesuffix(".json") + RELEASED


class SavepointRecords:
    """The savepoint records of one query."""

    def __init__(self, files: RecordFiles) -> None:
        self._files = files

    def create(self, record: SavepointRecord) -> None:
        """Write durably that a savepoint takes a checkpoint id. Raises ``FileExistsInStorageError``."""
        self._files.create(savepoint_record_path(record.checkpoint_id), record)

    def ids(self) -> list[int]:
        """Return the checkpoint ids that savepoints have taken, ascending."""
        return self._files.numbers(DIRECTORY)

    def all(self) -> list[SavepointRecord]:
        """Return the records of the last begun savepoints, by ascending id."""
        return self._read(self.ids())

    def _read(self, ids: list[int]) -> list[SavepointRecord]:
        return self._files.read_all([savepoint_record_path(i) for i in ids], SavepointRecord)

    def hold_of(self, run_id: str) -> SavepointRecord | None:
        """Return the savepoint that a run was being stopped with. None if there is none, or if it was released.

        The run may do no batch after the version of that savepoint.
        """
        paths = [path for path, _ in self._files.storage.list(f"{DIRECTORY}/")]
        holds = [r for r in self._read(numbers_of(paths)) if r.stop and r.run_id == run_id]
        return next((r for r in reversed(holds) if _released_path(r.checkpoint_id) not in paths), None)

    def obsolete(self, stopping: int | None) -> list[str]:
        """Return the paths of the records that are not kept; ``stopping`` is always kept."""
        old = [i for i in self.ids()[:-KEPT_RECORDS] if i != stopping]
        return [path for i in old for path in (savepoint_record_path(i), _released_path(i))]

    def release(self, checkpoint_id: int) -> None:
        """Write durably that the stop-with-savepoint of the run has failed. The run continues."""
        self._files.ensure(_released_path(checkpoint_id), b"")
