"""The partitions and runs that a host holds: tables in memory, without any work on state."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from msgspec import to_builtins
from msgspec.structs import replace

from backends.formats.changelog import Changes
from backends.partition.partition_state import PartitionState
from coordinator_actor.messages import Acknowledge, HostReport, OperatorFigures, OperatorSpec, QueryRegistration

# ``Instance``: one partition of one operator, as it is loaded in a host (Spark: a loaded ``StateStoreProvider``).


REMEMBERED_COMMITS = 4
"""A host keeps the figures of at most this many commits: progress is often asked for when the next batch has begun."""
InstanceKey = tuple[str, str, int]
"""State location, operator, partition. A copy of a checkpoint has the original's query id at another location."""
RunKey = tuple[str, str, int]
"""Run id, operator, partition."""


class KeyWindows(Protocol):
    """Follows which windows the keys of a partition's rows have."""

    def add(self, base: str | None, head: str, changes: Changes) -> None:
        """Apply the changes that lead from the version with head ``base`` to the version with head ``head``."""


@dataclass
class Instance:
    """One loaded partition.

    ``commit_lock`` is held by the thread that commits, completes, loads or destroys ``state``. It also guards
    changes of ``acknowledged``, which reports copy without it, and of ``keys_at``, which is replaced as a whole. The
    lock of ``HeldPartitions`` guards ``invocations``, ``invocations_of``, ``opened_at``, ``commits`` and
    ``dropped_elements``. The thread that loads the partition writes ``epoch`` and ``loaded_at``. Loading and the upload
    of a snapshot write ``snapshot_version`` and ``rescaled_at``, each as a whole and without a lock.
    """

    registration: QueryRegistration
    operator: str
    partition: int
    state: PartitionState
    commit_lock: threading.Lock = field(default_factory=threading.Lock)
    epoch: int = 0
    """The coordinator's epoch that granted the partition last: a lower one belongs to an older run."""
    invocations: dict[str, str] = field(default_factory=dict)
    """By task attempt, which invocation opened the partition, in batch ``invocations_of``."""
    invocations_of: int = -1
    opened_at: float = -math.inf
    """When the first task of that batch has asked for the partition, by the host's clock."""
    loaded_at: int = -1
    """The version that was loaded last. In the batch that begins with it, another host may have had the partition."""
    acknowledged: dict[int, Acknowledge] = field(default_factory=dict)
    """By version, the accepted commits that are not completed yet: a restarted coordinator needs them."""
    commits: dict[int, tuple[dict[str, float], OperatorFigures]] = field(default_factory=dict)
    """By version, milliseconds by step and the operator's figures, of the last ``REMEMBERED_COMMITS`` commits."""
    dropped_elements: int | None = None
    """The elements that limits of lists have dropped since the partition was loaded; None if no list has a limit."""
    keys_at: dict[int, int | None] = field(default_factory=dict)
    """By version, the number of keys, None if they are not counted, of the last ``REMEMBERED_COMMITS`` versions."""
    snapshot_version: int = 0
    """The version of the newest snapshot in storage."""
    rescaled_at: int | None = None
    """The version at which the partition was built from files of another layout; None once it has a snapshot."""
    seen_version: int = -1
    """The version at the last maintenance, which alone writes this and ``written_out``; -1 before the first one."""
    written_out: int = -1
    """The version at which the engine flushed its memory to files to make room for other partitions."""
    is_read: bool = True
    """Whether a query has read the partition since the last maintenance, which unloads unread partitions of ended
    queries.
    """
    key_windows: KeyWindows | None = None
    kept_since: float = 0.0
    """When the last unfinished load of the partition ended, by the host's clock. The partition's loading lock guards
    it.
    """

    @property
    def key(self) -> InstanceKey:
        """Identify the partition of a state, independent of the run of its query."""
        return key_of(self.registration, self.operator, self.partition)

    @property
    def run_key(self) -> RunKey:
        """Identify the partition of one run of the query."""
        return self.registration.run_id, self.operator, self.partition

    @property
    def spec(self) -> OperatorSpec:
        """Return the operator as the query has registered it."""
        return spec_of(self.registration, self.operator)

    def __str__(self) -> str:
        return f"StateStoreId[operator={self.operator}, partition={self.partition}]"

    def size(self) -> dict[str, int]:
        """Return the number of keys and the bytes in memory.

        Raises ``StoreClosedError`` while the partition is unloaded.
        """
        figures = self.state.metrics()
        return {"keys": figures.num_keys, "memory_bytes": figures.memory_bytes}

    def describe(self) -> dict[str, object]:
        """Return version, size and last commits, as JSON types. Raises ``StoreClosedError`` as ``size`` does.

        A commit has ``keys``, the number of keys after it, once it is applied: readers see a version before that.
        """
        commits, keys_at = self.commits, self.keys_at
        keys = {v: {"keys": keys_at[v]} for v in commits if v in keys_at}
        return {
            "query_id": self.registration.query_id,
            "run_id": self.registration.run_id,
            "operator": self.operator,
            "partition": self.partition,
            "num_partitions": self.spec.num_partitions,
            "version": self.state.version,
            "snapshot_version": self.snapshot_version,
            **self.size(),
            "dropped_elements": self.dropped_elements,
            "last_commit": {"version": max(commits), **commits[max(commits)][0]} if commits else {},
            "commits": {v: {"ms": ms, **keys.get(v, {}), **to_builtins(f)} for v, (ms, f) in commits.items()},
        }


def key_of(registration: QueryRegistration, operator: str, partition: int) -> InstanceKey:
    """Return the key of a partition of the state that a run works on."""
    return registration.state_location, operator, partition


def spec_of(registration: QueryRegistration, operator: str) -> OperatorSpec:
    """Return an operator as its query has registered it."""
    return next(o for o in registration.operators if o.name == operator)


NOTHING_HELD = 1 << 62
"""The version reported of a run that a host knows, but has no partition of: no version is newer."""


class HeldPartitions:
    """The loaded partitions of a host, and the runs that it has, or has had, partitions of.

    ``lock`` guards all tables here, and ``invocations`` and ``commits`` of every ``Instance``. ``instance`` and
    ``registration`` read one table without the lock. A thread that holds ``lock`` takes no other lock but those of
    ``CompletedVersions``, ``Grants`` and ``VersionRequests``.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.instances: dict[InstanceKey, Instance] = {}
        self.registrations: dict[str, QueryRegistration] = {}
        self._by_run: dict[RunKey, Instance] = {}
        self._opened: dict[str, int] = {}
        self._ended_run_hooks: list[Callable[[str | None], None]] = []
        self._exchange_hooks: list[Callable[[str], None]] = []
        self._exchanged: dict[str, str] = {}

    def instance(self, run_id: str, operator: str, partition: int) -> Instance | None:
        """Return a partition as it is loaded here, if it is."""
        return self._by_run.get((run_id, operator, partition))

    def registration(self, run_id: str) -> QueryRegistration | None:
        """Return a run that this host has, or has had, partitions of."""
        return self.registrations.get(run_id)

    def all(self) -> list[Instance]:
        """Return all loaded partitions."""
        with self.lock:
            return list(self.instances.values())

    def of_run(self, run_id: str, operator: str | None = None) -> list[Instance]:
        """Return the loaded partitions of a run, of one operator or of all."""
        return [i for i in self.all() if i.registration.run_id == run_id and operator in (None, i.operator)]

    def holds(self, instance: Instance) -> bool:
        """Return whether this is the instance that is found."""
        with self.lock:
            return self.instances.get(instance.key) is instance

    def put(self, instance: Instance) -> None:
        """Register a loaded partition."""
        with self.lock:
            self.instances[instance.key] = instance
            self._by_run[instance.run_key] = instance

    def remove(self, instance: Instance) -> bool:
        """Unregister a partition; return whether this instance was registered."""
        with self.lock:
            if self.instances.get(instance.key) is not instance:
                return False
            del self.instances[instance.key]
            self._by_run.pop(instance.run_key, None)
            return True

    def note_opened(self, registration: QueryRegistration, batch_id: int) -> None:
        """Record that a task of a batch has opened a partition: a restarted coordinator must know the batch."""
        run_id = registration.run_id
        with self.lock:
            self.registrations[run_id] = registration
            self._opened[run_id] = max(batch_id, self._opened.get(run_id, 0))

    def note_ended(self, run_ids: Sequence[str]) -> None:
        """Record that queries have ended: a restarted coordinator must know, and no snapshot is due."""
        with self.lock:
            for run_id in run_ids:
                registration = self.registrations.get(run_id)
                if registration is not None and not registration.ended:
                    self.registrations[run_id] = replace(registration, ended=True)

    def has_ended(self, run_id: str) -> bool:
        """Return whether the query of a run is known to have ended. Its last version is read on."""
        registration = self.registrations.get(run_id)
        return registration is not None and registration.ended

    def forget_run(self, run_id: str) -> None:
        """Forget a run that is over; its partitions are removed separately."""
        with self.lock:
            self.registrations.pop(run_id, None)
            self._opened.pop(run_id, None)
            self._exchanged.pop(run_id, None)

    def report(self) -> HostReport:
        """Return the report of this host to a restarted coordinator."""
        with self.lock:
            pending = tuple(a for i in self.instances.values() for a in list(i.acknowledged.values()))
            held: dict[str, dict[str, list[int]]] = {}
            for i in self.instances.values():
                held.setdefault(i.registration.run_id, {}).setdefault(i.operator, []).append(i.partition)
            return HostReport(tuple(self.registrations.values()), pending, dict(self._opened), held)

    def versions(self) -> dict[str, int]:
        """Return by run id the lowest version of the partitions that are loaded here."""
        with self.lock:
            held = dict.fromkeys(self.registrations, NOTHING_HELD)
            for i in self.instances.values():
                held[i.registration.run_id] = min(i.state.version, held.get(i.registration.run_id, i.state.version))
            return held

    def on_files_exchanged(self, hook: Callable[[str], None]) -> None:
        """Call ``hook`` with the id of each run whose files were rewritten: older copies are no longer valid."""
        self._exchange_hooks.append(hook)

    def tell_exchanged(self, run_id: str) -> None:
        """Call the hooks of ``on_files_exchanged``."""
        for hook in self._exchange_hooks:
            hook(run_id)

    def note_exchanged(self, run_id: str, exchange: str) -> None:
        """Note that nothing of a run from before an exchange of files is held here any more."""
        with self.lock:
            if run_id in self.registrations:
                self._exchanged[run_id] = exchange

    def last_exchange(self, run_id: str) -> str:
        """Return the last exchange of a run after which this host holds nothing older; "" if there was none."""
        with self.lock:
            return self._exchanged.get(run_id, "")

    def exchanged(self) -> dict[str, str]:
        """Return by run the last exchange after which this host holds nothing older, for the heartbeat."""
        with self.lock:
            return dict(self._exchanged)

    def on_run_ended(self, hook: Callable[[str | None], None]) -> None:
        """Have ``hook`` called with the id of each run that is over here, and with None when the host closes."""
        self._ended_run_hooks.append(hook)

    def tell_ended(self, run_id: str | None) -> None:
        """Call the hooks of ``on_run_ended``, in the order of registration."""
        for hook in self._ended_run_hooks:
            hook(run_id)


# The counters of a host, for its description.


class Counters:
    """Counts since the host started.

    Thread-safe: the lock is held for one addition, and no other lock is taken while it is held.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = {"opens": 0, "commits": 0, "keys_written": 0, "keys_read": 0, "loads": 0, "snapshots": 0}

    def add(self, name: str, number: int = 1) -> None:
        """Add to one count."""
        with self._lock:
            self._counts[name] += number

    def read(self) -> dict[str, int]:
        """Return all counts by name."""
        with self._lock:
            return dict(self._counts)


# A host's partitions for an overview, in columns, since there may be thousands of them.


INSTANCE_COLUMNS = (
    "run_id",
    "operator",
    "partition",
    "version",
    "keys",
    "memory_bytes",
    "snapshot_version",
    "dropped_elements",
)


def in_columns(described: Mapping[str, Any]) -> dict[str, Any]:
    """Return an answer of ``Host.describe`` with ``partitions`` in place of ``instances``.

    The partitions are columns of one length: ``INSTANCE_COLUMNS`` as in the instances, ``rows`` of the last commit, and
    by name the ms of its ``steps``. None stands for a value that a partition does not have.
    """
    instances = described["instances"]
    last = [instance["last_commit"] for instance in instances]
    steps = dict.fromkeys(name for commit in last for name in commit if name != "version")
    columns: dict[str, Any] = {name: [instance[name] for instance in instances] for name in INSTANCE_COLUMNS}
    columns["rows"] = [
        instance["commits"].get(commit.get("version"), {}).get("num_rows")
        for instance, commit in zip(instances, last, strict=True)
    ]
    columns["steps"] = {name: [commit.get(name) for commit in last] for name in steps}
    return {**{name: value for name, value in described.items() if name != "instances"}, "partitions": columns}
