"""Writes the manifests of one run, each of which prepares a version or names more snapshots of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import msgspec

from backends.formats.manifest import Manifest, OperatorEntry, PartitionEntry, SnapshotRef
from backends.formats.manifest_chain import Layout
from backends.formats.retention_rules import Retention
from backends.tracing import spans
from coordinator_actor.checkpoints.checkpoint_id import CheckpointIDCounter
from coordinator_actor.checkpoints.tasks import TaskKey
from coordinator_actor.durable.manifests import ManifestLog
from coordinator_actor.durable.rewritten_files import RewrittenFiles
from coordinator_actor.query.versions.query_versions import QueryVersions

NO_SNAPSHOTS: Mapping[TaskKey, tuple[SnapshotRef, ...]] = MappingProxyType({})
NO_STAGES: Mapping[TaskKey, int] = MappingProxyType({})


class ManifestWriter:
    """Extends the chain of a run's versions, in storage and in memory. The lock of the run guards everything here.

    ``is_uncertain``: the last manifest could not be written, as far as is known; it may exist all the same.
    """

    def __init__(
        self,
        run_id: str,
        log: ManifestLog,
        versions: QueryVersions,
        counter: CheckpointIDCounter,
        clock: Callable[[], float],
    ) -> None:
        self.is_uncertain = False
        self._completed: tuple[int, int] | None = None
        self._run_id = run_id
        self._log = log
        self._versions = versions
        self._counter = counter
        self._clock = clock

    def note_completed(self, version: int) -> None:
        """Take note that a version is completed now, for the manifest of the next one."""
        self._completed = version, self._now_ms()

    def _completed_ms(self, version: int) -> int | None:
        return None if self._completed is None or self._completed[0] != version else self._completed[1]

    def begin_with(self, initial: Mapping[str, Mapping[int, PartitionEntry]], schema_ids: Mapping[str, str]) -> None:
        """Write the manifest of version 0 of a state that does not begin empty."""
        operators = {
            name: OperatorEntry.of(layout.num_partitions, schema_ids[name], layout.backend, dict(initial.get(name, {})))
            for name, layout in self._versions.layouts.items()
        }
        self._append(
            Manifest(
                id=self._counter.get_and_increment(),
                parent=None,
                version=0,
                epoch=self._log.epoch,
                run_id=self._run_id,
                created_ms=self._now_ms(),
                operators=operators,
                oldest=0,
                chain_from=0,
            )
        )

    def write(
        self,
        version: int,
        layouts: Mapping[str, Layout],
        changes: Mapping[TaskKey, PartitionEntry],
        schema_ids: Mapping[str, str],
        manifest_id: int | None = None,
        stages: Mapping[TaskKey, int] = NO_STAGES,
    ) -> None:
        """Write the manifest of a version, from the changes of every partition of these layouts.

        ``manifest_id`` was taken from the counter before; the next one is taken by default. ``stages`` are the stages
        in which these changes were made, where they are known.
        """
        versions = self._versions
        below = versions.chain.get(version - 1)
        keep = versions.planned or Retention(versions.oldest, min(versions.chain, default=1))
        operators = {
            name: OperatorEntry.of(
                layout.num_partitions,
                schema_ids[name],
                layout.backend,
                {
                    p: PartitionEntry(e.attempt, e.changelog, versions.unnamed_in(layout, p))
                    for p in range(layout.num_partitions)
                    if (e := changes[(name, p)])
                },
                {p: stages[(name, p)] for p in range(layout.num_partitions) if (name, p) in stages},
            )
            for name, layout in layouts.items()
        }
        self._append(
            Manifest(
                id=self._counter.get_and_increment() if manifest_id is None else manifest_id,
                parent=below.id if below else None,
                version=version,
                epoch=self._log.epoch,
                run_id=self._run_id,
                created_ms=self._now_ms(),
                operators=operators,
                oldest=keep.oldest,
                chain_from=keep.chain_from,
                parent_completed_ms=self._completed_ms(version - 1),
            )
        )

    def write_again(self, version: int, found: Mapping[TaskKey, tuple[SnapshotRef, ...]] = NO_SNAPSHOTS) -> None:
        """Write the manifest of a version once more, as the newest one and under this epoch, naming more snapshots.

        The time at which the version was prepared stays.
        """
        chain = self._versions.chain
        current = chain[version]
        operators = {
            name: msgspec.structs.replace(
                operator,
                partitions=operator.partitions.with_snapshots(
                    {p: found[(name, p)] for p in operator.partitions if (name, p) in found}
                ),
            )
            for name, operator in current.operators.items()
        }
        self._append(
            msgspec.structs.replace(
                current,
                id=self._counter.get_and_increment(),
                epoch=self._log.epoch,
                operators=operators,
                # What a newer manifest has let go of does not come back.
                oldest=max(current.oldest, self._versions.oldest),
                chain_from=max(current.chain_from, min(chain)),
            )
        )

    def adopt(self, path: str, record: RewrittenFiles) -> None:
        """Write the manifest of the newest version once more, with the record at ``path``, which counts from then on.

        The manifests of the versions below stay as they are; the record says which files they mean.
        """
        versions = self._versions
        chain = {version: record.of(manifest) for version, manifest in versions.chain.items()}
        newest = chain[max(chain)]
        self._append(
            msgspec.structs.replace(
                newest,
                id=self._counter.get_and_increment(),
                epoch=self._log.epoch,
                oldest=max(newest.oldest, versions.oldest),
                chain_from=max(newest.chain_from, min(chain)),
                rewritten=(path,),
            ),
            chain,
        )

    def _append(self, manifest: Manifest, chain: dict[int, Manifest] | None = None) -> None:
        self.is_uncertain = True
        name, number = "coordinator.manifest", manifest.id
        with spans.alone(name, run_id=self._run_id, version=manifest.version, manifest_id=number):
            appended = self._log.append(manifest, self._counter)
        self.is_uncertain = False
        if chain is not None:
            self._versions.load(chain)
        self._versions.appended(appended)

    def _now_ms(self) -> int:
        return int(self._clock() * 1000)
