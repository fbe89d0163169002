"""The versions of one run's state: which files make up each version, and which versions can be read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import msgspec

from backends.exceptions import DamagedFileError, VersionNotFoundError
from backends.formats import manifest_chain
from backends.formats.manifest import ChangelogRef, Lineage, Manifest, PartitionEntry, SnapshotDescriptor, SnapshotRef
from backends.formats.manifest_chain import Layout, Retention
from coordinator_actor.checkpoints.pending_checkpoint import TaskKey
from coordinator_actor.durable.records import LookupRecord, LookupRecords

log = logging.getLogger(__name__)

Snapshots = dict[TaskKey, tuple[SnapshotRef, ...]]
MAX_VERSIONS_BY_TIME = 20_000
"""``min_seconds_to_retain`` keeps at most this many versions: each takes memory, and time of every snapshot."""


class QueryVersions:
    """The versions of one run along the chain of manifests. The lock of the run guards everything here.

    ``chain`` has a manifest per version. ``completed`` is the version after the last batch that Spark has committed;
    the chain may have one more, prepared version. ``layouts`` are those of the run, by operator. ``unnamed`` are
    snapshots that no manifest of a completed version names yet. ``planned`` is the retention for the next manifest,
    ``recorded`` the retention of the last manifest. ``descriptors`` has the contents of snapshots by path.
    """

    def __init__(self, layouts: Mapping[str, Layout], key_groups: int) -> None:
        self.layouts = layouts
        self.completed = 0
        self.chain: dict[int, Manifest] = {}
        self.unnamed: Snapshots = {}
        self.planned: Retention | None = None
        self.recorded: Retention | None = None
        self.descriptors: dict[str, SnapshotDescriptor] = {}
        self._key_groups = key_groups
        self._pinned: dict[int | str, int] = {}

    # -- reading -------------------------------------------------------------------------------

    def head(self, version: int, operator: str, partition: int) -> str | None:
        """Return the path of the changelog that made a partition's state at a version; None for the empty version 0."""
        return self.head_in(self.layouts[operator], partition, version)

    def head_in(self, layout: Layout, partition: int, version: int) -> str | None:
        """Return the same as ``head`` for a partition of another layout."""
        return manifest_chain.head_of(self.chain, version, layout, partition, self._key_groups)

    def created_ms(self, version: int) -> int:
        """Return when a version was prepared, in ms since 1970; 0 of the empty version 0."""
        manifest = self.chain.get(version)
        return 0 if manifest is None else manifest.created_ms

    def heads(self, version: int, tasks: Iterable[TaskKey]) -> dict[str, dict[int, str]]:
        """Return the heads of some partitions: operator to partition to path, without those of the empty version 0."""
        heads: dict[str, dict[int, str]] = {name: {} for name in self.layouts}
        for operator, partition in tasks:
            head = self.head(version, operator, partition)
            if head is not None:
                heads[operator][partition] = head
        return heads

    @property
    def oldest(self) -> int:
        """Return the oldest version that is kept, apart from the empty version 0."""
        return self.chain[max(self.chain)].oldest if self.chain else 0

    @property
    def readable(self) -> range:
        """Return the completed versions that are kept. The empty version 0 is one until something is removed."""
        chain, completed = self.chain, self.completed
        if not chain:
            return range(completed, completed + 1)
        lowest = min(chain)
        oldest = chain[max(chain)].oldest or (0 if lowest <= 1 else lowest)
        return range(min(oldest, completed), completed + 1)

    @property
    def completed_chain(self) -> dict[int, Manifest]:
        return {v: m for v, m in self.chain.items() if v <= self.completed}

    def is_in_layout(self, version: int, operator: str) -> bool:
        """Return whether a version of the chain is in the layout that the run declares."""
        manifest = self.chain.get(version)
        entry = manifest.operators.get(operator) if manifest else None
        return entry is not None and manifest_chain.layout_of(operator, entry) == self.layouts[operator]

    @property
    def is_rescaled(self) -> bool:
        """Return whether the last completed version is in another layout than the run declares."""
        return self.completed in self.chain and not all(self.is_in_layout(self.completed, o) for o in self.layouts)

    def snapshots(self, operator: str, partition: int, version: int) -> tuple[SnapshotRef, ...]:
        """Return a partition's snapshots of versions up to ``version``, ascending, in the layout of the run.

        They include those that no manifest names yet.
        """
        segments = manifest_chain.segments(self.chain, operator, version)
        named: list[SnapshotRef] = []
        if segments and segments[0].layout == self.layouts[operator]:
            named = manifest_chain.snapshots(self.completed_chain, segments[0], of=partition).get(partition, [])
        by_path = {s.file.path: s for s in (*named, *self.unnamed.get((operator, partition), ()))}
        return tuple(sorted((s for s in by_path.values() if s.version <= version), key=lambda s: s.version))

    def lineage(self, operator: str, partition: int, version: int) -> Lineage:
        lineage = manifest_chain.lineage(self.chain, version, self.layouts[operator], partition, self._key_groups)
        return msgspec.structs.replace(lineage, snapshots=self.snapshots(operator, partition, version))

    def changelogs(self, operator: str, partition: int, after: int) -> tuple[ChangelogRef, ...]:
        """Return the changelogs that lead from version ``after`` to the completed one. Needs no lock of the run.

        Empty if a version lacks one: it is not kept any more, or has another layout.
        """
        chain, completed = self.chain, self.completed
        refs: list[ChangelogRef] = []
        for version in range(after + 1, completed + 1):
            manifest = chain.get(version)
            entry = None if manifest is None else manifest.operators.get(operator)
            if entry is None or manifest_chain.layout_of(operator, entry) != self.layouts[operator]:
                return ()
            changed = entry.partitions.get(partition)
            if changed is None:
                return ()
            refs.append(ChangelogRef(version, changed.changelog))
        return tuple(refs)

    # -- snapshots that no manifest names yet --------------------------------------------------

    def add_snapshot(
        self, task: TaskKey, new: SnapshotRef, reused: SnapshotRef | None, descriptor: SnapshotDescriptor | None = None
    ) -> bool:
        """Add an uploaded snapshot. Return False if it is useless: of another lineage, or not of a kept version.

        ``reused`` is the earlier snapshot that it shares files with, ``descriptor`` its content, if known.
        """
        paths = {s.file.path for s in self.snapshots(*task, self.completed)}
        counts = (
            self.is_in_layout(new.version, task[0])
            and self.oldest < new.version <= self.completed
            and self.head(new.version, *task) == new.head
            and new.file.path not in paths
            and (reused is None or reused.file.path in paths)
        )
        if counts:
            self.unnamed[task] = (*self.unnamed.get(task, ()), new)
            if descriptor is not None and descriptor.path == new.file.path:
                self.descriptors[new.file.path] = descriptor
        return counts

    def unnamed_in(self, layout: Layout, partition: int) -> tuple[SnapshotRef, ...]:
        """Return the unnamed snapshots of a partition of a layout; none if the layout is not the run's."""
        if layout != self.layouts[layout.operator]:
            return ()
        return self.unnamed.get((layout.operator, partition), ())

    def carry_snapshots(self) -> None:
        """Add the snapshots that only manifests above the completed version name.

        These manifests may be replaced.
        """
        for task, refs in self.named_only_above().items():
            if self.is_in_layout(self.completed, task[0]):
                self.unnamed[task] = refs

    def named_only_above(self) -> Snapshots:
        """Return the snapshots of completed versions that only manifests above the completed version name."""
        below = self.completed_chain
        lost: Snapshots = {}
        for operator in self.layouts:
            for segment in manifest_chain.segments(below, operator)[:1]:
                named = manifest_chain.snapshots(below, segment)
                for partition, refs in manifest_chain.snapshots(below, segment, self.chain.values()).items():
                    if lost_refs := tuple(s for s in refs if s not in named.get(partition, ())):
                        lost[(operator, partition)] = lost_refs
        return lost

    # -- retention -----------------------------------------------------------------------------

    def pin(self, holder: int | str, version: int) -> None:
        """Keep a version for a savepoint (``holder`` is its checkpoint id) or for lookups, whatever retention says."""
        self._pinned[holder] = version

    def unpin(self, holder: int | str) -> None:
        """Release the version that was kept for a savepoint or for lookups."""
        self._pinned.pop(holder, None)

    def plan_retention(
        self, min_versions_to_retain: int, is_sound: Callable[[SnapshotRef], bool], newest_at_ms: float | None = None
    ) -> None:
        """Decide which versions the next manifest keeps. ``is_sound`` returns whether a snapshot can be loaded.

        ``newest_at_ms``: the version that was the newest completed one at that time is kept, with all later ones, but
        for no more than ``MAX_VERSIONS_BY_TIME``.
        """
        target = max(0, self.completed - min_versions_to_retain - 1)
        if newest_at_ms is not None:
            target = max(self._newest_at(newest_at_ms, target), min(target, self.completed - MAX_VERSIONS_BY_TIME))
        target = min((target, *self._pinned.values()))
        self.planned = manifest_chain.retain(self.completed_chain, self.layouts, target, self.oldest, is_sound)

    def _newest_at(self, ms: float, below: int) -> int:
        """Return the newest version up to ``below`` that was completed by a time; the oldest kept one if none was.

        Without the time of its completion, that of the next manifest counts: it is later.
        """
        oldest = min(self.chain, default=below)
        for version in range(below, oldest, -1):
            following = self.chain.get(version + 1)
            if following is None:
                continue
            completed_ms = following.parent_completed_ms
            if (following.created_ms if completed_ms is None else completed_ms) <= ms:
                return version
        return min(oldest, below)

    # -- advancing --------------------------------------------------------------------------------

    def load(self, chain: dict[int, Manifest], completed: int | None = None) -> None:
        """Load the chain from storage, and the version that Spark has committed, if it is given."""
        self.chain = chain
        if completed is not None:
            self.completed = completed

    def drop_plan(self) -> None:
        """Drop the planned retention: the snapshots that it relies on have been exchanged."""
        self.planned = None

    def append_manifest(self, manifest: Manifest) -> None:
        """Add a manifest that was written, as the newest one."""
        kept = {v: m for v, m in self.chain.items() if manifest.chain_from <= v < manifest.version}
        self.chain = {**kept, manifest.version: manifest}

    def complete(self, version: int) -> None:
        """Mark a version of the chain as completed. From now on its manifest names its snapshots permanently."""
        self.completed = version
        for name, operator in self.chain[version].operators.items():
            for partition, named in operator.partitions.snapshots.items():
                left = tuple(s for s in self.unnamed.pop((name, partition), ()) if s not in named)
                if left:
                    self.unnamed[(name, partition)] = left


def tasks_of(layouts: Mapping[str, Layout]) -> list[TaskKey]:
    """Return every partition of every operator."""
    return [(name, p) for name, layout in layouts.items() for p in range(layout.num_partitions)]


def changes_in(manifest: Manifest) -> dict[TaskKey, PartitionEntry]:
    """Return the changes that the partitions contributed to a version, without snapshots."""
    return {
        (name, p): PartitionEntry(e.attempt, e.changelog)
        for name, operator in manifest.operators.items()
        for p, e in operator.partitions.items()
    }


# The versions that other queries' batches look up: each is recorded, and kept while its batch may run again.


PINNED_BATCHES = 2
"""The versions that a query's last batches looked up are kept: Spark may run the batch before the newest one again."""
KEPT_BATCHES = 100
"""Records kept of each query: as many as the batches that a user can roll back to (Spark's default)."""
REMOVED_EVERY = 16
PIN_SECONDS = 24 * 3600.0
"""A query that has not looked anything up for this many seconds keeps no version any more."""
LOOKUP_RECORD_SECONDS = 30 * PIN_SECONDS
"""The records of a query that has not looked anything up for this many seconds are removed."""


class Versions(Protocol):
    """The versions of a state, as a coordinator knows them, or as storage shows them."""

    @property
    def completed(self) -> int:
        """Return the last completed version."""

    @property
    def chain(self) -> Mapping[int, Manifest]:
        """Return a manifest for each version."""

    @property
    def readable(self) -> Sequence[int]:
        """Return the versions that can be read."""

    def pin(self, holder: int | str, version: int) -> None:
        """Keep a version."""

    def unpin(self, holder: int | str) -> None:
        """Release the version that a holder has kept."""


class LookedUpVersions:
    """Resolves, records and keeps looked-up versions. The lock of the run guards the kept versions."""

    def __init__(self, records: LookupRecords, versions: Versions) -> None:
        self._records = records
        self._versions = versions
        self._pins: dict[str, dict[int, LookupRecord]] = {}
        self._used: dict[str, float] = {}
        """By query that looks up, the time of its last look-up, by the coordinator's clock, including repeated batches.
        """
        self._under_way = 0
        self._seen: dict[tuple[str, int], LookupRecord] = {}
        """The records of the last listing, so that each is read once."""

    def resolve(self, by: str, batch_id: int, now: float, lock: AbstractContextManager[object]) -> LookupRecord:
        """Return the record of a batch; for a batch without one, record the completed version.

        ``lock`` is that of the run. It is not held during requests to storage: the run continues with its own batches.
        Raises ``VersionNotFoundError`` if the recorded version no longer exists as it was.
        """
        with lock:
            self._used[by] = now
            record = self._pins.get(by, {}).get(batch_id)
            if record is not None and self._why_gone(by, batch_id, record):
                # The user may have followed the remedy, and removed the record.
                record = None
                self._unpin(by, batch_id)
        if record is None:
            record = self._records.find(by, batch_id)
        if record is None:
            with lock:
                self._under_way += 1
                holder = f"lookup {self._under_way} under way"
                completed = self._versions.completed
                new_record = LookupRecord(completed, self._maker(completed), int(now * 1000))
                self._versions.pin(holder, completed)  # before the record is written, retention may run
            try:
                # Another task may have been first: its record counts.
                record = self._records.make(by, batch_id, new_record)
                with lock:
                    self._pin(by, batch_id, record)
            finally:
                with lock:
                    self._versions.unpin(holder)
            if batch_id % REMOVED_EVERY == 0:
                old = [b for b in self._records.batches().get(by, ()) if b <= batch_id - KEPT_BATCHES]
                self._records.remove(by, old)
        with lock:
            if why_gone := self._why_gone(by, batch_id, record):
                raise VersionNotFoundError(
                    f"{why_gone} Remove {self._records.full_location(by, batch_id)}, and the batch looks up the "
                    "version that is completed then."
                )
            self._pin(by, batch_id, record)
        return record

    def _maker(self, version: int) -> str:
        manifest = self._versions.chain.get(version)
        return "" if manifest is None else manifest.run_id

    def _why_gone(self, by: str, batch_id: int, record: LookupRecord) -> str:
        """Return why a recorded version cannot be read as it was; "" if it can."""
        readable, version = self._versions.readable, record.version
        if version not in readable:
            return (
                f"Batch {batch_id} of query {by} has looked up version {version}, and must read it again, but the "
                f"versions {readable[0]} to {readable[-1]} are kept."
            )
        if version and self._maker(version) != record.made_by:
            return (
                f"Batch {batch_id} of query {by} has looked up version {version} as run {record.made_by} had made it. "
                f"The query that is looked up has rolled back since, and run {self._maker(version)} has replaced it."
            )
        return ""

    # -- keeping -------------------------------------------------------------------------------

    def _pin(self, by: str, batch_id: int, record: LookupRecord) -> None:
        records = {**self._pins.get(by, {}), batch_id: record}
        self._pins[by] = {b: records[b] for b in sorted(records)[-PINNED_BATCHES:]}
        self._keep(by)

    def _unpin(self, by: str, batch_id: int) -> None:
        records = self._pins.get(by, {})
        if records.pop(batch_id, None) is not None:
            if not records:
                del self._pins[by]
            self._keep(by)

    def _keep(self, by: str) -> None:
        records = self._pins.get(by)
        if records:
            self._versions.pin(f"lookups of {by}", min(record.version for record in records.values()))
        else:
            self._versions.unpin(f"lookups of {by}")

    def _undamaged(self, by: str, batch_id: int) -> LookupRecord | None:
        """Return a record, or None if it is damaged: a batch that repeats its look-up fails then, and needs no version.

        Raises ``StorageError``.
        """
        try:
            return self._records.find(by, batch_id)
        except DamagedFileError as error:
            log.warning("The version that batch %d of query %s has looked up is not kept: %s", batch_id, by, error)
            return None

    def look(self, now: float, lock: AbstractContextManager[object]) -> None:
        """Load the records in storage, which earlier coordinators and readers of storage have made too.

        Releases versions of queries that have not looked anything up for ``PIN_SECONDS``, and removes the records of
        those that have not for ``LOOKUP_RECORD_SECONDS``. ``lock`` is the lock of the run, as in ``resolve``. Only the
        run's maintenance calls this. Raises ``StorageError``.
        """
        with lock:
            pinned = [(by, batch_id) for by, records in self._pins.items() for batch_id in records]
        listed = self._records.batches()
        newest = [(by, batch_id) for by, batches in listed.items() for batch_id in batches[-PINNED_BATCHES:]]
        seen = {key: self._seen.get(key) or self._undamaged(*key) for key in newest}
        self._seen = {key: record for key, record in seen.items() if record is not None}
        with lock:
            last = {by: self._used.get(by, 0.0) for by in {*listed, *self._pins}}
            for by, records in self._pins.items():
                last[by] = max(last[by], *(record.at_ms / 1000 for record in records.values()))
            for (by, _), record in self._seen.items():
                last[by] = max(last[by], record.at_ms / 1000)
            for by, batch_id in pinned:
                if batch_id not in listed.get(by, ()):  # the user has removed the record
                    self._unpin(by, batch_id)
            for (by, batch_id), record in self._seen.items():
                if now - last[by] <= PIN_SECONDS and batch_id not in self._pins.get(by, {}):
                    self._pin(by, batch_id, record)
            for by in [by for by in self._pins if now - last[by] > PIN_SECONDS]:
                del self._pins[by]
                self._keep(by)
            self._used = {by: used for by, used in self._used.items() if now - used <= PIN_SECONDS}
        for by in [by for by in listed if last[by] and now - last[by] > LOOKUP_RECORD_SECONDS]:
            self._records.remove(by, listed[by])
