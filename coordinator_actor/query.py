"""One registered query: its operators, versions and owners, and the acknowledgements of the running batch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from backends import chain as chains
from backends.chain import PartitionKey, Retention
from backends.changelog import read_changelog_meta
from backends.manifest import FileRef, Lineage, Manifest, OperatorEntry, PartitionEntry, SnapshotRef
from backends.schema import StateSchema
from backends.snapshot import Snapshot
from backends.storage import digest
from coordinator_actor.exceptions import IncompleteBatchError
from coordinator_actor.manifests import ManifestLog, SparkCommits
from coordinator_actor.messages import Completed, OperatorSpec, QueryRegistration


@dataclass
class QueryState:
    """What the coordinator knows of one run. ``lock`` guards everything in it.

    ``unnamed`` are the snapshots that no manifest of a completed version names yet. ``planned`` is what the
    next manifest will keep, ``recorded`` what the last one says. ``busy`` has the partitions that are
    being loaded or uploaded, and until when that is believed.
    """

    registration: QueryRegistration
    log: ManifestLog
    commits: SparkCommits
    completed: int = 0
    highest_opened: int = -1
    chain: dict[int, Manifest] = field(default_factory=dict)
    pending: dict[int, dict[PartitionKey, PartitionEntry]] = field(default_factory=dict)
    unnamed: dict[PartitionKey, tuple[SnapshotRef, ...]] = field(default_factory=dict)
    planned: Retention | None = None
    recorded: Retention | None = None
    descriptors: dict[str, Snapshot] = field(default_factory=dict)
    busy: dict[PartitionKey, float] = field(default_factory=dict)
    maintained: float = 0.0
    owners: dict[str, str] = field(default_factory=dict)
    announced: Completed | None = None
    retired_by: str | None = None
    ended: bool = False
    driver_seen: float = 0.0
    lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def run_id(self) -> str:
        """The run."""
        return self.registration.run_id

    def operator(self, name: str) -> OperatorSpec | None:
        """The declaration of an operator."""
        return next((o for o in self.registration.operators if o.name == name), None)

    def partitions(self) -> Iterator[PartitionKey]:
        """Every declared partition of every operator."""
        for operator in self.registration.operators:
            for partition in range(operator.num_partitions):
                yield operator.name, partition

    def entry(self, version: int, operator: str, partition: int) -> PartitionEntry | None:
        """What a partition contributed to a version of the chain."""
        return chains.entry(self.chain, version, (operator, partition))

    def head(self, version: int, operator: str, partition: int) -> str | None:
        """The changelog that a partition's state ends with at a version; None for the empty version 0."""
        return chains.head_of(self.chain, version, (operator, partition))

    @property
    def oldest(self) -> int:
        """The oldest version that is kept, besides the empty 0."""
        return self.chain[max(self.chain)].oldest if self.chain else 0

    def snapshots(self, key: PartitionKey, version: int) -> tuple[SnapshotRef, ...]:
        """A partition's snapshots of versions up to one, ascending, named in a manifest or not yet."""
        below = {v: m for v, m in self.chain.items() if v <= self.completed}
        known = {s.file.path: s for s in (*chains.snapshots(below, key), *self.unnamed.get(key, ()))}
        return tuple(sorted((s for s in known.values() if s.version <= version), key=lambda s: s.version))

    def heads(self, version: int) -> Completed:
        """All of them, for the hosts."""
        heads: dict[str, dict[int, str]] = {}
        for name, entry in self.chain[version].operators.items():
            heads[name] = {p: e.changelog.path for p, e in entry.partitions.items()}
        return Completed(self.run_id, version, heads)

    def lineage(self, operator: str, partition: int, version: int) -> Lineage:
        """The files that lead to a version."""
        key = (operator, partition)
        return msgspec.structs.replace(chains.lineage(self.chain, key, version), snapshots=self.snapshots(key, version))

    def carry_snapshots(self) -> None:
        """Take up the snapshots that only manifests of versions above the completed one name: those may be replaced."""
        below = {v: m for v, m in self.chain.items() if v <= self.completed}
        for key in self.partitions():
            named = {s.file.path for s in chains.snapshots(below, key)}
            found = chains.snapshots(below, key, self.chain.values())
            if lost := tuple(s for s in found if s.file.path not in named):
                self.unnamed[key] = lost

    def plan_retention(self, is_sound: Callable[[SnapshotRef], bool]) -> None:
        """Decide which versions the next manifest keeps."""
        below = {v: m for v, m in self.chain.items() if v <= self.completed}
        target = max(0, self.completed - self.registration.min_versions_to_retain - 1)
        self.planned = chains.retain(below, self.partitions(), target, self.oldest, is_sound)

    def missing(self, version: int) -> list[PartitionKey]:
        """Declared partitions that have not acknowledged a version."""
        held = self.pending.get(version, {})
        return [key for key in self.partitions() if key not in held]

    def prepare(self, version: int, now_ms: int) -> int | None:
        """Write the manifest of a version if every partition has acknowledged it; returns its id."""
        if self.missing(version):
            return None
        base = self.chain.get(version - 1)
        operators = {
            o.name: OperatorEntry(
                num_partitions=o.num_partitions,
                schema_id=StateSchema.from_json(o.schema).id,
                backend=o.backend,
                partitions={
                    p: msgspec.structs.replace(
                        self.pending[version][(o.name, p)], snapshots=self.unnamed.get((o.name, p), ())
                    )
                    for p in range(o.num_partitions)
                },
            )
            for o in self.registration.operators
        }
        keep = self.planned or chains.Retention(self.oldest, min(self.chain, default=1), {})
        manifest = self.log.append(
            Manifest(
                id=0,
                parent=base.id if base else None,
                version=version,
                epoch=self.log.epoch,
                run_id=self.run_id,
                created_ms=now_ms,
                operators=operators,
                oldest=keep.oldest,
                chain_from=keep.chain_from,
            )
        )
        self.recorded = self.planned
        self.chain = {v: m for v, m in self.chain.items() if keep.chain_from <= v < version}
        self.chain[version] = manifest
        return manifest.id

    def name_snapshots(self, now_ms: int) -> None:
        """Name the snapshots that are not named yet in a manifest of the completed version, for the next run to find.

        Not if a later version is prepared already: it would no longer be the newest.
        """
        if (
            self.ended
            or self.retired_by
            or not any(self.unnamed.values())
            or max(self.chain, default=0) != self.completed
        ):
            return
        current = self.chain[self.completed]
        operators = {
            name: msgspec.structs.replace(
                operator,
                partitions={
                    p: msgspec.structs.replace(e, snapshots=(*e.snapshots, *self.unnamed.get((name, p), ())))
                    for p, e in operator.partitions.items()
                },
            )
            for name, operator in current.operators.items()
        }
        self.chain[self.completed] = self.log.append(
            msgspec.structs.replace(
                current, epoch=self.log.epoch, run_id=self.run_id, created_ms=now_ms, operators=operators
            )
        )
        self.unnamed.clear()

    def complete(self, version: int, now_ms: int) -> Completed:
        """Take a version as completed: Spark has committed its batch."""
        if version not in self.chain or self.chain[version].run_id != self.run_id:
            self.recover(version, now_ms)
        self.completed = version
        for done in [v for v in self.pending if v < version]:
            del self.pending[done]
        for key, entry in chains.partitions(self.chain[version]):
            if key in self.unnamed:
                self.unnamed[key] = tuple(s for s in self.unnamed[key] if s not in entry.snapshots)
        self.announced = self.heads(version)
        return self.announced

    def recover(self, version: int, now_ms: int, earlier_runs: Sequence[str] = ()) -> None:
        """Prepare a version that Spark has committed although this coordinator saw no manifest of it.

        Hosts may have died together with an earlier coordinator after their acknowledgements; the
        changelogs are durable and name their run and base. Raises ``IncompleteBatchError``.
        """
        self.log.refresh()
        self.chain = self.log.chain()
        if version in self.chain and self.chain[version].run_id == self.run_id:
            return
        lacking = self.unrecoverable(version, earlier_runs)
        if lacking:
            raise IncompleteBatchError(incomplete_message(version - 1, lacking, len(list(self.partitions()))))
        self.prepare(version, now_ms)

    def unrecoverable(self, version: int, earlier_runs: Sequence[str] = ()) -> list[PartitionKey]:
        """Partitions of which neither a host nor the storage has changes for a version; the others are taken up.

        ``earlier_runs``, the last one first, may be looked into for a version that Spark has committed before this run
        began. Changes of two runs never make one version: each may have seen other rows.
        """
        for run_id in (self.run_id, *earlier_runs):
            for operator, partition in self.missing(version):
                found = self._stored_changelog(operator, partition, version, run_id)
                if found is not None:
                    self.pending.setdefault(version, {})[(operator, partition)] = found
            if self.pending.get(version):
                break
        return self.missing(version)

    def _stored_changelog(self, operator: str, partition: int, version: int, run_id: str) -> PartitionEntry | None:
        spec = self.operator(operator)
        n = spec.num_partitions if spec else 0
        base = self.head(version - 1, operator, partition)
        prefix = f"operators/{operator}/{n}/{partition}/default/"
        for path, size in reversed(self.log.storage.list(prefix)):
            name = path.rsplit("/", 1)[-1]
            if not name.startswith(f"{version}-") or not name.endswith(".changelog"):
                continue
            data = self.log.storage.get(path)
            meta = read_changelog_meta(data)
            if (meta.query_run_id, meta.version, meta.base) == (run_id, version, base):
                return PartitionEntry(meta.attempt, FileRef(path, size, digest(data)))
        return None


def incomplete_message(batch_id: int, lacking: list[PartitionKey], total: int) -> str:
    """Why a batch that ran only in part stops the query, and how to go on."""
    named = ", ".join(f"{o}/{p}" for o, p in lacking[:8]) + (", ..." if len(lacking) > 8 else "")
    return (
        f"Spark committed batch {batch_id}, but {len(lacking)} of {total} state partitions never ran in it ({named}): "
        "most likely a foreachBatch function consumed only a part of its DataFrame (head, limit, take). Make it consume all "
        f"of it in every batch, delete commits/{batch_id} and offsets/{batch_id + 1} in the checkpoint location, and start "
        "the query again: it repeats the batch from the state before it."
    )
