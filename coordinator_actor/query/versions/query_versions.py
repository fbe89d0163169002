"""The versions of one run's state: which files make up each version, and which versions can be read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import msgspec

from backends.formats import manifest_chain as chains
from backends.formats import retention_rules
from backends.formats.manifest import Lineage, Manifest, PartitionEntry, SnapshotRef
from backends.formats.manifest_chain import Layout
from backends.formats.retention_rules import Retention
from backends.formats.snapshot_descriptor import SnapshotDescriptor
from coordinator_actor.checkpoints.tasks import TaskKey

Snapshots = dict[TaskKey, tuple[SnapshotRef, ...]]


class QueryVersions:
    """The versions of one run along the chain of manifests. The lock of the run guards everything here.

    ``chain`` has a manifest per version. ``completed`` is the version after the last batch that Spark has committed;
    the chain may have one more, prepared version. ``layouts`` are those of the run, by operator. ``unnamed`` are
    snapshots that no manifest of a completed version names yet. ``planned`` is the retention for the next manifest,
    ``recorded`` the retention that the last manifest says. ``descriptors`` has the contents of snapshots by path.
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
        return chains.head_of(self.chain, version, layout, partition, self._key_groups)

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
        """Return the oldest version that is kept, besides the empty version 0."""
        return self.chain[max(self.chain)].oldest if self.chain else 0

    @property
    def readable(self) -> range:
        """Return the completed versions that are kept. The empty version 0 is one as long as nothing was removed."""
        chain, completed = self.chain, self.completed
        if not chain:
            return range(completed, completed + 1)
        lowest = min(chain)
        oldest = chain[max(chain)].oldest or (0 if lowest <= 1 else lowest)
        return range(min(oldest, completed), completed + 1)

    @property
    def completed_chain(self) -> dict[int, Manifest]:
        """Return the completed part of the chain."""
        return {v: m for v, m in self.chain.items() if v <= self.completed}

    def is_in_layout(self, version: int, operator: str) -> bool:
        """Return whether a version of the chain is in the layout that the run declares."""
        manifest = self.chain.get(version)
        held = manifest.operators.get(operator) if manifest else None
        return held is not None and chains.layout_of(operator, held) == self.layouts[operator]

    @property
    def is_rescaled(self) -> bool:
        """Return whether the last completed version is in another layout than the run declares."""
        return self.completed in self.chain and not all(self.is_in_layout(self.completed, o) for o in self.layouts)

    def snapshots(self, operator: str, partition: int, version: int) -> tuple[SnapshotRef, ...]:
        """Return a partition's snapshots of versions up to ``version``, ascending, in the layout of the run.

        Also those that no manifest names yet.
        """
        held = chains.segments(self.chain, operator, self.completed)
        named: list[SnapshotRef] = []
        if held and held[0].layout == self.layouts[operator]:
            named = chains.snapshots(self.completed_chain, held[0], of=partition).get(partition, [])
        known = {s.file.path: s for s in (*named, *self.unnamed.get((operator, partition), ()))}
        return tuple(sorted((s for s in known.values() if s.version <= version), key=lambda s: s.version))

    def lineage(self, operator: str, partition: int, version: int) -> Lineage:
        """Return the files that lead to a version of a partition."""
        found = chains.lineage(self.chain, version, self.layouts[operator], partition, self._key_groups)
        return msgspec.structs.replace(found, snapshots=self.snapshots(operator, partition, version))

    # -- snapshots that no manifest names yet --------------------------------------------------

    def add_snapshot(
        self,
        task: TaskKey,
        new: SnapshotRef,
        reused: SnapshotRef | None,
        descriptor: SnapshotDescriptor | None = None,
    ) -> bool:
        """Take up an uploaded snapshot. Return False if it is of no use: of another lineage, or not of a kept version.

        ``reused`` is the earlier snapshot with which it shares files, ``descriptor`` what is in it, if that is known.
        """
        known = {s.file.path for s in self.snapshots(*task, self.completed)}
        counts = (
            self.is_in_layout(new.version, task[0])
            and self.oldest < new.version <= self.completed
            and self.head(new.version, *task) == new.head
            and new.file.path not in known
            and (reused is None or reused.file.path in known)
        )
        if counts:
            self.unnamed[task] = (*self.unnamed.get(task, ()), new)
            if descriptor is not None and descriptor.path == new.file.path:
                self.descriptors[new.file.path] = descriptor
        return counts

    def unnamed_in(self, layout: Layout, partition: int) -> tuple[SnapshotRef, ...]:
        """Return the unnamed snapshots of a partition of a layout; those of another layout than the run's are none."""
        if layout != self.layouts[layout.operator]:
            return ()
        return self.unnamed.get((layout.operator, partition), ())

    def carry_snapshots(self) -> None:
        """Take up the snapshots that only manifests above the completed version name.

        These manifests may be replaced.
        """
        for task, found in self.named_only_above().items():
            if self.is_in_layout(self.completed, task[0]):
                self.unnamed[task] = found

    def named_only_above(self) -> Snapshots:
        """Return the snapshots of completed versions that only manifests above the completed version name."""
        below = self.completed_chain
        lost: Snapshots = {}
        for operator in self.layouts:
            for held in chains.segments(below, operator)[:1]:
                named = chains.snapshots(below, held)
                for partition, found in chains.snapshots(below, held, self.chain.values()).items():
                    if gone := tuple(s for s in found if s not in named.get(partition, ())):
                        lost[(operator, partition)] = gone
        return lost

    # -- retention -----------------------------------------------------------------------------

    def pin(self, holder: int | str, version: int) -> None:
        """Keep a version for a savepoint (``holder`` is its checkpoint id) or for lookups, whatever retention says."""
        self._pinned[holder] = version

    def unpin(self, holder: int | str) -> None:
        """Let go of the version that was kept for a savepoint or for lookups."""
        self._pinned.pop(holder, None)

    @property
    def pinned(self) -> Mapping[int | str, int]:
        """Return the versions that are kept for savepoints and lookups, by their holders."""
        return self._pinned

    def plan_retention(self, min_versions_to_retain: int, is_sound: Callable[[SnapshotRef], bool]) -> None:
        """Decide which versions the next manifest keeps. ``is_sound`` says whether a snapshot can be loaded."""
        target = max(0, self.completed - min_versions_to_retain - 1)
        target = min((target, *self._pinned.values()))
        self.planned = retention_rules.retain(self.completed_chain, self.layouts, target, self.oldest, is_sound)

    def keep_descriptors(self, descriptors: dict[str, SnapshotDescriptor]) -> None:
        """Keep the contents of these snapshots, by path, and of no others."""
        self.descriptors = descriptors

    # -- going on ------------------------------------------------------------------------------

    def load(self, chain: dict[int, Manifest], completed: int | None = None) -> None:
        """Take up the chain as it is in storage, and the version that Spark has committed, if it is given."""
        self.chain = chain
        if completed is not None:
            self.completed = completed

    def plan_anew(self) -> None:
        """Forget the planned retention: the snapshots that it relies on have been exchanged."""
        self.planned = None

    def record_retention(self) -> None:
        """Take note that the planned retention is in a durable manifest."""
        self.recorded = self.planned

    def appended(self, manifest: Manifest) -> None:
        """Take up a manifest that was written, as the newest one."""
        kept = {v: m for v, m in self.chain.items() if manifest.chain_from <= v < manifest.version}
        self.chain = {**kept, manifest.version: manifest}

    def complete(self, version: int) -> None:
        """Take a version of the chain as completed. Its manifest now names snapshots for good."""
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
