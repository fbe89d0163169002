"""Checkpoints: the messages about them, pending and completed ones, and where completed ones are kept.

After Flink's ``PendingCheckpoint``, ``CompletedCheckpoint``, ``CompletedCheckpointStore`` and its state store of
savepoints. A *task* is one partition of one operator.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol, TypeAlias

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from backends.decoders import convert, json_decoder
from backends.exceptions import DamagedFileError, FileExistsInStorageError, StorageError
from backends.formats.manifest import FORMAT_VERSION
from backends.formats.sealed import seal, unseal
from backends.storage.checkpoint_storage import CheckpointStorage
from coordinator_actor.exceptions import InvalidRequestError

LOG = logging.getLogger(__name__)

TaskKey: TypeAlias = tuple[str, int]
"""(operator, partition)"""


class AcknowledgeCheckpoint(Struct, frozen=True):
    """A task has made its state for a checkpoint durable; ``state`` says where. ``size`` in bytes, ``duration`` in seconds."""

    job_id: str
    task: TaskKey
    checkpoint_id: int
    state: Any = None
    size: int = 0
    duration: float = 0.0


class DeclineCheckpoint(Struct, frozen=True):
    """A task cannot take part in a checkpoint, and why."""

    job_id: str
    task: TaskKey
    checkpoint_id: int
    reason: str = "no reason given"


class Received(Enum):
    """What became of an acknowledgement."""

    PENDING = "pending"  # taken; other tasks have yet to acknowledge
    COMPLETED = "completed"  # taken; it was the last one, and the checkpoint is completed
    ABORTED = "aborted"  # taken; it was the last one, but the checkpoint could not be stored and is given up
    LATE = "late"  # the checkpoint is over already: the message has changed nothing
    UNKNOWN = "unknown"  # no such checkpoint, or not within memory; or the coordinator is shut down


class CancelReason(Enum):
    """Why a checkpoint was given up."""

    EXPIRED = "expired"
    DECLINED = "declined"
    SUBSUMED = "subsumed"
    STOPPED = "stopped"
    SHUTDOWN = "shutdown"
    CANCELLED = "cancelled"
    FAILED = "failed"


class Tasks:
    """The tasks that every checkpoint of one coordinator waits for; shared by all its checkpoints."""

    def __init__(self, tasks: Iterable[TaskKey]) -> None:
        self.keys = tuple(tasks)
        self.index: dict[TaskKey, int] = {key: i for i, key in enumerate(self.keys)}
        if len(self.index) != len(self.keys):
            raise InvalidRequestError(
                f"{len(self.keys) - len(self.index)} of the {len(self.keys)} tasks are named twice."
            )
        self.parallelism: dict[str, int] = _parallelism(self.keys)


def _parallelism(keys: Iterable[TaskKey]) -> dict[str, int]:
    found: dict[str, int] = {}
    for operator, partition in keys:
        found[operator] = max(found.get(operator, 0), partition + 1)
    return found


@dataclass(frozen=True, eq=False)
class TaskFigures:
    """What the tasks of one completed checkpoint reported, by their place in ``tasks``.

    ``durations`` in seconds, ``sizes`` in bytes; ``first`` and ``last`` are when the first and the last one acknowledged.
    """

    tasks: Tasks
    durations: NDArray[np.float32]
    sizes: NDArray[np.int64]
    first: float
    last: float


@dataclass(frozen=True)
class CompletedCheckpoint:
    """A checkpoint that every task has acknowledged.

    ``timestamp`` is the one it was triggered with, ``duration`` the seconds until the last acknowledgement, ``size`` the
    bytes of all tasks. ``states`` has the tasks that reported any. ``parallelism`` is the number of partitions per operator.
    """

    id: int
    timestamp: float
    duration: float
    states: dict[TaskKey, Any]
    size: int = 0
    job_id: str = ""
    parallelism: dict[str, int] = field(default_factory=dict)
    properties: dict[str, Any] = field(default_factory=dict)

    def operators(self) -> dict[str, int]:
        """Number of partitions per operator, taken from the states where it was not recorded."""
        return {**_parallelism(self.states), **self.parallelism}


class PendingCheckpoint:
    """A checkpoint that has been triggered and that some tasks have not acknowledged.

    Its coordinator guards it with its lock; what is read from outside is a copy, or a single value.
    ``started`` is the coordinator's clock when it was triggered, ``properties`` what its starter wants to find again.
    """

    def __init__(
        self,
        job_id: str,
        checkpoint_id: int,
        timestamp: float,
        tasks: Tasks,
        *,
        started: float,
        properties: Mapping[str, Any] | None = None,
    ) -> None:
        self.job_id = job_id
        self.id = checkpoint_id
        self.timestamp = timestamp
        self.started = started
        self.properties = dict(properties or {})
        self.completed: CompletedCheckpoint | None = None
        self.cancelled: tuple[CancelReason, str] | None = None
        self._tasks = tasks
        self._missing = set(tasks.index)
        self._states: dict[TaskKey, Any] = {}
        self._durations = np.zeros(len(tasks.keys), np.float32)
        self._sizes = np.zeros(len(tasks.keys), np.int64)
        self._size = 0
        self._first = self._last = started

    def __repr__(self) -> str:
        total = len(self._tasks.keys)
        return f"PendingCheckpoint(id={self.id}, acknowledged={total - len(self._missing)}/{total})"

    @property
    def is_fully_acknowledged(self) -> bool:
        """Whether every task has acknowledged it."""
        return not self._missing

    @property
    def is_discarded(self) -> bool:
        """Whether it is over: completed or given up."""
        return self.completed is not None or self.cancelled is not None

    @property
    def not_yet_acknowledged(self) -> set[TaskKey]:
        """The tasks that have not acknowledged it."""
        return set(self._missing)

    def lacks(self, task: TaskKey) -> bool:
        """Whether a task has not acknowledged it."""
        return task in self._missing

    @property
    def num_not_yet_acknowledged(self) -> int:
        """How many tasks have not acknowledged it."""
        return len(self._missing)

    @property
    def num_acknowledged(self) -> int:
        """How many tasks have acknowledged it."""
        return len(self._tasks.keys) - len(self._missing)

    @property
    def states(self) -> dict[TaskKey, Any]:
        """The states reported so far."""
        return dict(self._states)

    def acknowledge(
        self, task: TaskKey, state: Any, size: int = 0, duration: float = 0.0, *, at: float, replace: bool = True
    ) -> bool:
        """Take a task's acknowledgement, which came at the time ``at``; returns whether it changed anything.

        A second one of the same task takes the first one's place: the last acknowledged attempt counts. With ``replace``
        False it is ignored, as in Flink. Raises ``InvalidRequestError`` for an unknown task and a discarded checkpoint.
        """
        place = self._place(task)
        if self.is_discarded:
            raise InvalidRequestError(f"Checkpoint {self.id} is over; {task[0]}/{task[1]} cannot acknowledge it.")
        if task not in self._missing and not replace:
            return False
        if len(self._missing) == len(self._tasks.keys):
            self._first = at
        self._last = at
        self._missing.discard(task)
        if state is None:
            self._states.pop(task, None)
        else:
            self._states[task] = state
        self._size += size - int(self._sizes[place])
        self._sizes[place] = size
        self._durations[place] = duration
        return True

    def check_task(self, task: TaskKey) -> None:
        """Raise ``InvalidRequestError`` for a task that is none of this checkpoint's."""
        self._place(task)

    def to_completed(self, now: float) -> CompletedCheckpoint:
        """The completed checkpoint with the states held now; raises ``InvalidRequestError`` while tasks are missing."""
        if self._missing:
            raise InvalidRequestError(f"Checkpoint {self.id} is not complete: {self.describe_missing()}.")
        return CompletedCheckpoint(
            id=self.id,
            timestamp=self.timestamp,
            duration=max(0.0, now - self.started),
            states=dict(self._states),
            size=self._size,
            job_id=self.job_id,
            parallelism=dict(self._tasks.parallelism),
            properties=dict(self.properties),
        )

    def figures(self) -> TaskFigures:
        """What the tasks reported. The arrays are this checkpoint's own: ask when it is over."""
        return TaskFigures(self._tasks, self._durations, self._sizes, self._first, self._last)

    def describe_missing(self) -> str:
        """Which tasks are missing, for messages."""
        missing = sorted(self._missing.copy())
        if not missing:
            return f"all {len(self._tasks.keys)} tasks have acknowledged it, but it is not stored"
        named = ", ".join(f"{operator}/{partition}" for operator, partition in missing[:8])
        return f"{len(missing)} of {len(self._tasks.keys)} tasks have not acknowledged it: {named}" + (
            ", ..." if len(missing) > 8 else ""
        )

    def _place(self, task: TaskKey) -> int:
        place = self._tasks.index.get(task)
        if place is None:
            raise InvalidRequestError(
                f"{task[0]}/{task[1]} is no task of checkpoint {self.id} of {self.job_id}, whose operators "
                f"and partition counts are {self._tasks.parallelism}."
            )
        return place


class CompletedCheckpointStore(Protocol):
    """Where a coordinator keeps its completed checkpoints. Used by many threads."""

    def recover(self) -> None:
        """Find again what an earlier process has kept."""
        ...

    def add(self, completed: CompletedCheckpoint) -> None:
        """Keep a checkpoint; if that raises, it is not completed."""
        ...

    def latest(self) -> CompletedCheckpoint | None:
        """The one with the highest id."""
        ...

    def all(self) -> list[CompletedCheckpoint]:
        """Those that are kept, by ascending id."""
        ...

    @property
    def num_retained(self) -> int:
        """How many are kept."""
        ...

    def shutdown(self) -> None:
        """The coordinator is shut down."""
        ...


class MemoryCheckpointStore:
    """The last ``max_retained`` completed checkpoints, in memory (Flink: ``StandaloneCompletedCheckpointStore``).

    ``discard`` is called, without any lock, with each one that is no longer kept; at shutdown with all of them, for nobody
    could find them again. What it raises is logged.
    """

    def __init__(self, max_retained: int = 1, discard: Callable[[CompletedCheckpoint], None] | None = None) -> None:
        _check_retained(max_retained)
        self._max = max_retained
        self._discard = discard
        self._held: dict[int, CompletedCheckpoint] = {}
        self._lock = threading.Lock()

    def recover(self) -> None:
        """Nothing outlives the process: what is here stays."""

    def add(self, completed: CompletedCheckpoint) -> None:
        """Keep a checkpoint, and let go of the ones with the lowest ids if there are too many."""
        with self._lock:
            self._held[completed.id] = completed
            gone = [self._held.pop(i) for i in sorted(self._held)[: -self._max]]
        self._discarded(gone)

    def latest(self) -> CompletedCheckpoint | None:
        """The one with the highest id."""
        with self._lock:
            return self._held[max(self._held)] if self._held else None

    def all(self) -> list[CompletedCheckpoint]:
        """Those that are kept, by ascending id."""
        with self._lock:
            return [self._held[i] for i in sorted(self._held)]

    @property
    def num_retained(self) -> int:
        """How many are kept."""
        return len(self._held)

    def shutdown(self) -> None:
        """Let go of all."""
        with self._lock:
            gone = [self._held[i] for i in sorted(self._held)]
            self._held.clear()
        self._discarded(gone)

    def _discarded(self, gone: list[CompletedCheckpoint]) -> None:
        if self._discard is None:
            return
        for completed in gone:
            try:
                self._discard(completed)
            except Exception:
                LOG.exception("Discarding checkpoint %d failed", completed.id)


class NoCheckpointStore:
    """Keeps nothing: savepoints belong to the user (Flink: ``IgnoreCompletedCheckpointsStore``)."""

    num_retained = 0

    def recover(self) -> None:
        """Nothing to find."""

    def add(self, completed: CompletedCheckpoint) -> None:
        """Nothing is kept."""

    def latest(self) -> CompletedCheckpoint | None:
        """None."""
        return None

    def all(self) -> list[CompletedCheckpoint]:
        """None."""
        return []

    def shutdown(self) -> None:
        """Nothing to let go of."""


class StoredCheckpoint(Struct, frozen=True):
    """A completed checkpoint as a file; states as (operator, partition, state)."""

    id: int
    job_id: str
    timestamp: float
    duration: float
    size: int
    parallelism: dict[str, int]
    properties: dict[str, Any]
    states: list[tuple[str, int, Any]]
    format_version: int = FORMAT_VERSION


class _CheckpointFiles:
    """Completed checkpoints as sealed JSON files.

    States come back as ``state_type``. With the default they come back as what JSON makes of them: structs as dicts, tuples
    as lists, bytes as base64 text.
    """

    def __init__(self, storage: CheckpointStorage, prefix: str, state_type: Any) -> None:
        self._storage = storage
        self._prefix = prefix.strip("/")
        self._state_type = state_type

    def _path(self, name: str) -> str:
        return f"{self._prefix}/{name}" if self._prefix else name

    def _paths(self) -> list[str]:
        """The files directly in the directory that are named as ours are; others are left alone."""
        found = [path for path, _ in self._storage.list(self._prefix)]
        return [p for p in found if p == self._path(p.rpartition("/")[2]) and p.endswith(".json")]

    def _write(self, path: str, completed: CompletedCheckpoint) -> None:
        states = [(operator, partition, state) for (operator, partition), state in completed.states.items()]
        record = StoredCheckpoint(
            completed.id,
            completed.job_id,
            completed.timestamp,
            completed.duration,
            completed.size,
            completed.operators(),
            completed.properties,
            sorted(states, key=lambda state: state[:2]),
        )
        try:
            data = seal(record)
        except (TypeError, ValueError, OverflowError, NotImplementedError) as error:
            raise InvalidRequestError(
                f"Checkpoint {completed.id} has a state or property that cannot be written as JSON: {error}. "
                "States must be numbers, texts, lists, dicts, dataclasses or msgspec structs."
            ) from error
        self._storage.put_new(path, data)

    def _read(self, path: str) -> CompletedCheckpoint:
        """Raises ``DamagedFileError`` or ``MissingFileError``, naming the file."""
        name = self._storage.full_location(path)
        record = unseal(self._storage.get(path), StoredCheckpoint, name)
        try:
            states = {(o, p): convert(state, self._state_type) for o, p, state in record.states}
        except msgspec.ValidationError as error:
            raise DamagedFileError(f"{name} has a state that is no {self._state_type}: {error}") from error
        return CompletedCheckpoint(
            id=record.id,
            timestamp=record.timestamp,
            duration=record.duration,
            states=states,
            size=record.size,
            job_id=record.job_id,
            parallelism=record.parallelism,
            properties=record.properties,
        )


class FileCheckpointStore(_CheckpointFiles):
    """The last ``max_retained`` completed checkpoints, each a file ``<prefix>/<id>.json``, written once.

    They outlive the process: ``recover`` finds them, and shutdown leaves them. A file that is no longer needed and cannot be
    removed is logged, and tried again after the next checkpoint.
    """

    def __init__(
        self, storage: CheckpointStorage, prefix: str = "checkpoints", *, max_retained: int = 1, state_type: Any = Any
    ) -> None:
        _check_retained(max_retained)
        super().__init__(storage, prefix, state_type)
        self._max = max_retained
        self._held: dict[int, CompletedCheckpoint] = {}
        self._litter: set[int] = set()
        self._lock = threading.Lock()
        self._writing = threading.Lock()

    def recover(self) -> None:
        """Read what is there. Raises ``DamagedFileError`` naming every damaged file; then nothing has changed."""
        with self._writing:
            self._recover()

    def _recover(self) -> None:
        found: dict[int, CompletedCheckpoint] = {}
        damaged: list[str] = []
        for path in self._paths():
            number = path.rpartition("/")[2].removesuffix(".json")
            if not number.isdecimal():
                continue
            try:
                completed = self._read(path)
            except DamagedFileError as error:
                damaged.append(str(error))
                continue
            if completed.id != int(number):
                damaged.append(f"{self._storage.full_location(path)} holds checkpoint {completed.id}.")
                continue
            found[completed.id] = completed
        if damaged:
            raise DamagedFileError(
                f"{len(damaged)} completed checkpoints cannot be read: {' '.join(damaged)} "
                "Restore the files from a copy, or remove them to go on without these checkpoints."
            )
        with self._lock:
            self._litter = set(sorted(found)[: -self._max])
            self._held = {i: c for i, c in found.items() if i not in self._litter}

    def add(self, completed: CompletedCheckpoint) -> None:
        """Write a checkpoint, then remove those that are no longer kept.

        Raises ``FileExistsInStorageError`` if another one with its id is there, ``StorageError`` if the storage fails.
        """
        with self._writing:
            self._add(completed)

    def _add(self, completed: CompletedCheckpoint) -> None:
        path = self._path(f"{completed.id:020d}.json")
        try:
            self._write(path, completed)
        except FileExistsInStorageError:
            # An earlier attempt may have been written although its answer was lost.
            there = self._read(path)
            if (there.job_id, there.timestamp, there.parallelism) != (
                completed.job_id,
                completed.timestamp,
                completed.operators(),
            ) or there.states != self._as_read(completed):
                raise
        with self._lock:
            self._held[completed.id] = completed
            for i in sorted(self._held)[: -self._max]:
                del self._held[i]
                self._litter.add(i)
            litter = sorted(self._litter)
        for i in litter:
            try:
                self._storage.delete(self._path(f"{i:020d}.json"))
            except StorageError:
                LOG.exception("Checkpoint %d is no longer kept, but could not be removed; tried again later", i)
            else:
                with self._lock:
                    self._litter.discard(i)

    def latest(self) -> CompletedCheckpoint | None:
        """The one with the highest id."""
        with self._lock:
            return self._held[max(self._held)] if self._held else None

    def all(self) -> list[CompletedCheckpoint]:
        """Those that are kept, by ascending id."""
        with self._lock:
            return [self._held[i] for i in sorted(self._held)]

    @property
    def num_retained(self) -> int:
        """How many are kept."""
        return len(self._held)

    def shutdown(self) -> None:
        """The files stay."""

    def _as_read(self, completed: CompletedCheckpoint) -> dict[TaskKey, Any]:
        return {
            key: convert(json_decoder(Any).decode(msgspec.json.encode(state)), self._state_type)
            for key, state in completed.states.items()
        }


class FileSavepointStore(_CheckpointFiles):
    """Savepoints, each a file of its own that only its owner removes (Flink: ``StateStore<Savepoint>``)."""

    def __init__(self, storage: CheckpointStorage, prefix: str = "", *, state_type: Any = Any) -> None:
        super().__init__(storage, prefix, state_type)

    def store(self, completed: CompletedCheckpoint) -> str:
        """Write a savepoint under a new name; returns its address."""
        path = self._path(f"savepoint-{completed.id}-{uuid.uuid4().hex[:12]}.json")
        self._write(path, completed)
        return self._storage.full_location(path)

    def load(self, path: str) -> CompletedCheckpoint:
        """Read one by its address; raises ``MissingFileError``, ``DamagedFileError`` or ``InvalidRequestError``."""
        return self._read(self._relative(path))

    def all(self) -> list[str]:
        """The addresses of all savepoints in the directory."""
        ours = [p for p in self._paths() if p.rpartition("/")[2].startswith("savepoint-")]
        return [self._storage.full_location(p) for p in ours]

    def dispose(self, path: str) -> None:
        """Remove one; it is no error if there is none."""
        self._storage.delete(self._relative(path))

    def _relative(self, path: str) -> str:
        relative = path.removeprefix(f"{self._storage.location}/")
        directory, _, name = relative.rpartition("/")
        if relative == path or directory != self._prefix or not name.startswith("savepoint-"):
            raise InvalidRequestError(
                f"{path} is no savepoint in {self._storage.full_location(self._prefix).rstrip('/')}: "
                "pass an address that was returned when it was made."
            )
        return relative


def _check_retained(max_retained: int) -> None:
    if max_retained < 1:
        raise InvalidRequestError(f"max_retained is {max_retained}; at least one checkpoint must be kept.")
