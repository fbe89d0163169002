"""``Instance``: one partition of one operator, as a host has loaded it; and the figures of a host for people."""

from __future__ import annotations

import itertools
import logging
import math
import shutil
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from dataclasses import replace as with_changes
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from msgspec import to_builtins

from backends.conf import StateStoreConf
from backends.engines.engine import writing_to
from backends.exceptions import ConcurrentCommitError
from backends.formats.changelog import Changes
from backends.formats.manifest import partition_directory
from backends.host_memory import COPIES, LAST_READS, BoundedDict, Claim, host_memory
from backends.partition.partition_state import PartitionState, open_partition
from backends.storage.checkpoint_storage import CheckpointStorage, OpenStorage
from backends.storage.object_files import SharedObjects
from backends.storage.requests import RequestCounts
from coordinator_actor.messages import Acknowledge, OperatorFigures, OperatorSpec, QueryRegistration

_uses = itertools.count(1)
REMEMBERED_COMMITS = 4
"""A host keeps the figures of at most this many commits: progress is often asked for when the next batch has begun."""
InstanceKey = tuple[str, str, int]
"""State location, operator, partition. A copy of a checkpoint has the original's query id at another location."""
RunKey = tuple[str, str, int]
"""Run id, operator, partition."""


class KeyWindows(Protocol):
    """Follows which windows the keys of a partition's rows have."""

    def follow_changes(self, base: str | None, head: str, changes: Changes) -> None:
        """Apply the changes that lead from the version with head ``base`` to the version with head ``head``."""


@dataclass
class Instance:
    """One loaded partition (Spark: a loaded ``StateStoreProvider``).

    ``commit_lock`` is held by the thread that commits, completes, loads or destroys ``state``. It also guards
    changes of ``acknowledged``, which reports copy without it, and of ``keys_at``, which is replaced as a whole. The
    lock of ``PartitionCache`` guards ``invocations``, ``invocations_of``, ``opened_at``, ``commits`` and
    ``dropped_elements``. The thread that loads the partition writes ``epoch`` and ``loaded_at``. Loading and the upload
    of a snapshot write ``snapshot_version``, ``snapshot_bytes`` and ``rescaled_at``, each as a whole and without a
    lock.
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
    snapshot_bytes: int = 0
    """The part of ``state.changelog_bytes`` that the newest snapshot has."""
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
    last_use: int = 0
    """Grows with each use by a task or a reader: the least recently used partition has the lowest number."""
    in_use_until: float = -math.inf
    """Until when a task is expected to commit, by the host's clock; not evicted before, if anything else can be."""
    key_windows: KeyWindows | None = None
    kept_since: float = 0.0
    """When the last unfinished load of the partition ended, by the host's clock. The partition's loading lock guards
    it.
    """

    @property
    def key(self) -> InstanceKey:
        """Identify the partition of a state, independent of the run of its query."""
        return key_of(self.registration, self.operator, self.partition)

    def note_use(self) -> None:
        """Record that a task uses the partition."""
        self.last_use = next(_uses)

    def note_read(self) -> None:
        """Record that a query reads the partition."""
        self.is_read, self.last_use = True, next(_uses)

    @property
    def run_key(self) -> RunKey:
        """Identify the partition of one run of the query."""
        return self.registration.run_id, self.operator, self.partition

    @property
    def spec(self) -> OperatorSpec:
        return spec_of(self.registration, self.operator)

    @property
    def is_whole_copy(self) -> bool:
        """Whether the kept files are open, and a load has left them whole: they are at one version, and can follow."""
        state = self.state
        return not state.is_closed and not state.is_loading and self.loaded_at <= state.version and state.is_whole

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


# The counters of a host, for its description.


class Counters:
    """Counts since the host started.

    Thread-safe: the lock is held for one addition, and no other lock is taken while it is held.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        names = ("opens", "commits", "keys_written", "keys_read", "loads", "snapshots", "followed")
        self._counts = dict.fromkeys(names, 0)

    def count(self, name: str, number: int = 1) -> None:
        with self._lock:
            self._counts[name] += number

    def read(self) -> dict[str, int]:
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


# Opens partitions on a host's local disk, over the durable files of their query.


log = logging.getLogger(__name__)

MAX_STORAGES = 64
"""At most this many storages are remembered: one for each running query, and those of runs before."""


class PartitionFiles:
    """The local directory of one host, below which an incarnation that was killed may have left its state.

    ``<query id>/<run id>/<partition>`` are the host's own partitions, ``copies`` and ``savepoints`` copies for a while.
    ``requests`` counts the requests to the storage that this class opens, unless ``open_storage`` is given.
    """

    def __init__(
        self, local_dir: Path, incarnation: str, conf: StateStoreConf, open_storage: OpenStorage | None
    ) -> None:
        self.local_dir = local_dir
        self._incarnation = incarnation
        self._conf = conf
        self.requests = requests = RequestCounts()
        self.open_storage: OpenStorage = open_storage or (
            lambda location, options: CheckpointStorage.open(location, options, fsync=conf.fsync, requests=requests)
        )
        self._lock = threading.Lock()
        self._storages: BoundedDict[tuple[str, tuple[tuple[str, str], ...]], CheckpointStorage] = BoundedDict(
            MAX_STORAGES
        )
        self.shared = SharedObjects(partial(host_memory(conf).spare, LAST_READS))
        self.copies = local_dir / "copies"
        self.savepoints = local_dir / "savepoints"
        shutil.rmtree(self.copies, ignore_errors=True)  # of an incarnation of this host that was killed

    def open_own(
        self,
        registration: QueryRegistration,
        spec: OperatorSpec,
        partition: int,
        runs_in_use: Callable[[], Collection[str]],
    ) -> PartitionState:
        """Open a partition where an earlier incarnation may have left it: valid files are used.

        Removes the files of other runs of the query that are not in use.
        """
        runs = self.local_dir / registration.query_id
        # Listed first: a run that begins during this call is recorded before it has a directory.
        listed = list(runs.iterdir()) if runs.exists() else []
        used = {*runs_in_use(), registration.run_id} if listed else set()
        for left in listed:
            if left.name not in used:
                shutil.rmtree(left, ignore_errors=True)  # of an incarnation that was killed
        directory = partition_directory(spec.name, spec.num_partitions, partition)
        local = self._local(registration, spec, partition)
        storage = self.storage_of(registration)
        conf = with_changes(self._conf, provider=spec.backend)
        with writing_to(local):
            try:
                return open_partition(local, storage, directory, conf)
            except ConcurrentCommitError:
                # That incarnation is not quite dead.
                return open_partition(local.with_name(f"{local.name}-{self._incarnation}"), storage, directory, conf)

    def hand_on(
        self, left: PartitionState, registration: QueryRegistration, spec: OperatorSpec, partition: int
    ) -> bool:
        """Move the local files of a closed partition to where ``open_own`` looks for them; return whether they exist.

        They belong to an older run of the query, or to this one. A head names the commit that made a version, even if
        another run continues from it: ``PartitionState.load`` checks whether the files belong to the run's lineage.
        """
        local = self._local(registration, spec, partition)
        if left.local_dir == local:
            return True
        shutil.rmtree(local, ignore_errors=True)
        try:
            local.parent.mkdir(parents=True, exist_ok=True)
            left.local_dir.rename(local)
        except OSError as error:  # the disk is full, say, or the directory of the run that is over was removed
            log.warning("%s could not be moved to %s, so the partition is loaded: %s", left.local_dir, local, error)
            return False
        return True

    def _local(self, registration: QueryRegistration, spec: OperatorSpec, partition: int) -> Path:
        directory = partition_directory(spec.name, spec.num_partitions, partition)
        return self.local_dir / registration.query_id / registration.run_id / directory

    def open_copy(self, registration: QueryRegistration, directory: str, backend: str, local: Path) -> PartitionState:
        """Open an empty state in ``local``, into which versions of the partition in ``directory`` can be loaded.

        The copy keeps one version and does not count its keys: to count, replaying would look up every key that it
        writes.
        """
        storage = self.storage_of(registration)
        conf = with_changes(self._conf, provider=backend, track_total_number_of_rows=False, max_versions_in_memory=0)
        return open_partition(local, storage, directory, conf)

    def note_copies(self, nbytes: int) -> Claim:
        """Count bytes that copies hold, until the claim is released."""
        return host_memory(self._conf).note(COPIES, nbytes)

    def storage_of(self, registration: QueryRegistration) -> CheckpointStorage:
        """Return the storage of a query's state, one for all partitions: each storage opens its own connections."""
        key = (registration.state_location, tuple(sorted(registration.storage_options.items())))
        with self._lock:  # opening does no I/O
            storage = self._storages.get(key)
            if storage is None:
                storage = self._storages[key] = self.open_storage(
                    registration.state_location, registration.storage_options
                )
                if not storage.is_local:
                    storage.shared = self.shared
        return storage

    def remove_run(self, run_id: str) -> None:
        """Remove the files that an incarnation which was killed has left of a run."""
        for left in self.local_dir.glob(f"*/{run_id}"):
            shutil.rmtree(left, ignore_errors=True)
