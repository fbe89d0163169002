"""Reads a query's records at its registration, and recovers a version that Spark committed without a manifest.

Hosts may have died together with an earlier coordinator after their acknowledgements. The changelogs are durable, and
each names its run and its base.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from backends.exceptions import UnsupportedLocationError
from backends.formats.changelog import GROUPS_DIRECTORY, SUFFIX, read_changelog_meta, read_index
from backends.formats.manifest import PartitionEntry, version_in
from backends.formats.manifest_chain import Layout
from backends.spans import Pool
from backends.storage.checkpoint_storage import CheckpointStorage
from backends.storage.locations import FileRef, digest
from coordinator_actor.checkpoints.pending_checkpoint import TaskKey, named_tasks
from coordinator_actor.durable.fencing import READERS, EpochFile
from coordinator_actor.durable.manifests import CheckpointPlace, ManifestLog, QueryFile, is_inside
from coordinator_actor.durable.records import read_feature_views
from coordinator_actor.durable.spark_commits import SparkCommits
from coordinator_actor.feature_views import FeatureView
from coordinator_actor.messages import QueryRegistration
from coordinator_actor.run.versions import QueryVersions, tasks_of

_Commit: TypeAlias = "tuple[str, int, int, str, str | None]"
"""Operator, number of partitions, partition, run id, base."""


class StoredChanges(NamedTuple):
    """The changes of one version: the run that has made them, its layouts by operator, and the changes by partition."""

    run_id: str
    layouts: Mapping[str, Layout]
    entries: dict[TaskKey, PartitionEntry]

    @property
    def missing(self) -> list[TaskKey]:
        """Return the partitions without changes."""
        return [task for task in tasks_of(self.layouts) if task not in self.entries]


def stored_changes(
    log: ManifestLog, versions: QueryVersions, run_id: str, version: int, acknowledged: Mapping[TaskKey, PartitionEntry]
) -> StoredChanges:
    """Return the changes of a version: those that were ``acknowledged``, or else those in storage.

    If the run ``run_id`` has no changes of the version, an earlier run has: Spark had committed its batch before this
    run began, perhaps with another number of partitions. Changes of two runs never make one version: each run may have
    seen other rows.
    """
    entries = dict(acknowledged)
    grouped = _grouped(log, version) if any(task not in entries for task in tasks_of(versions.layouts)) else {}
    runs = {
        run_id: versions.layouts,
        **{r: {x.operator: x for x in file.layouts} for r, file in log.epochs.runs().items() if r != run_id},
    }
    alone = _alone(log, version)
    with Pool(READERS) as pool:
        for of_run, layouts in runs.items():
            if layouts.keys() != versions.layouts.keys():
                continue
            missing = [task for task in tasks_of(layouts) if task not in entries]

            def changes_of(
                task: TaskKey, of_run: str = of_run, layouts: Mapping[str, Layout] = layouts
            ) -> PartitionEntry | None:
                paths = alone.get(layouts[task[0]].directory(task[1]), [])
                return _stored_changelog(log, versions, layouts[task[0]], task[1], version, of_run, grouped, paths)

            changes = zip(missing, pool.map(changes_of, missing), strict=True)
            entries.update({task: entry for task, entry in changes if entry is not None})
            if entries:
                return StoredChanges(of_run, layouts, entries)
    return StoredChanges(run_id, versions.layouts, entries)


def _alone(log: ManifestLog, version: int) -> dict[str, list[tuple[str, int]]]:
    """Return path and size of the changelogs of a version in separate files, by directory, the last first."""
    by_directory: dict[str, list[tuple[str, int]]] = {}
    for path, size in reversed(log.storage.list("operators")):
        directory, _, name = path.rpartition("/")
        if name.startswith(f"{version}-") and name.endswith(".changelog"):
            by_directory.setdefault(directory, []).append((path, size))
    return by_directory


def _grouped(log: ManifestLog, version: int) -> dict[_Commit, PartitionEntry]:
    """Return the changes of a version in groups, of every run. Reads the indices of that version's groups.

    Raises ``DamagedFileError`` if one cannot be read.
    """
    listed = log.storage.list(GROUPS_DIRECTORY)
    groups = [(p, size) for p, size in listed if version_in(p) == version and p.endswith(SUFFIX)]
    with Pool(READERS) as pool:
        indices = list(pool.map(lambda group: read_index(log.storage, *group), groups))
    return {
        (m.operator, m.num_partitions, m.partition, m.query_run_id, m.base): PartitionEntry(m.attempt, file)
        for index in indices
        for m, file in index
        if m.version == version
    }


def _stored_changelog(
    log: ManifestLog,
    versions: QueryVersions,
    layout: Layout,
    partition: int,
    version: int,
    run_id: str,
    grouped: Mapping[_Commit, PartitionEntry],
    alone: Sequence[tuple[str, int]],
) -> PartitionEntry | None:
    base = versions.head_in(layout, partition, version - 1)
    in_group = grouped.get((layout.operator, layout.num_partitions, partition, run_id, base))
    if in_group is not None:
        return in_group
    for path, size in alone:
        data = log.storage.get(path)
        meta = read_changelog_meta(data)
        if (meta.query_run_id, meta.version, meta.base) == (run_id, version, base):
            return PartitionEntry(meta.attempt, FileRef(path, size, digest(data)))
    return None


def incomplete_message(batch_id: int, missing: list[TaskKey], total: int) -> str:
    """Return why a batch that ran only in part, or not at all, stops the query, and how to continue."""
    did = "consumed only a part of its DataFrame (head, limit, take)" if len(missing) < total else NOT_CONSUMED
    return (
        f"Spark committed batch {batch_id}, but {len(missing)} of {total} state partitions never ran in it "
        f"({named_tasks(missing)}): most likely a foreachBatch function {did}. {how_to_repeat(batch_id, batch_id)}"
    )


NOT_CONSUMED = (
    "did not consume its DataFrame at all, or a file sink skipped the batch because another query has written a batch "
    "of this number to its directory (then give this query another directory)"
)


def how_to_repeat(first: int, last: int) -> str:
    """Return how a user makes Spark repeat the batches ``first`` to ``last``, the last that it has committed."""
    if first == last:
        files = (
            f"commits/{first} and offsets/{first + 1} in the checkpoint location (and commits/.{first}.crc and "
            f"offsets/.{first + 1}.crc, if they are there)"
        )
        repeats = "the batch from the state before it"
    else:
        files = (
            f"commits/{first} to commits/{last} and offsets/{first + 1} to offsets/{last + 1} in the checkpoint "
            "location (and their .crc files, which begin with a dot, if they are there)"
        )
        repeats = f"the batches from {first} on from the state before them"
    return (
        f"Make the function consume all of it in every batch, delete {files}, and start the query again: it repeats "
        f"{repeats}."
    )


# Reads a query's records for the first time, at the registration, with parallel requests if possible.


REQUESTS_AT_ONCE = 8


@dataclass(frozen=True)
class FirstLook:
    """The newest claim, the query that the state belongs to, the place of its checkpoint, and Spark's commits.

    ``place`` is also None if the state is inside its checkpoint. ``views`` are the feature views with records here.
    """

    newest: EpochFile | None
    query: QueryFile | None
    place: CheckpointPlace | None
    completed: int
    views: tuple[FeatureView, ...] = ()


def first_look(
    registration: QueryRegistration,
    manifests: ManifestLog,
    commits: SparkCommits,
    prove: Callable[[CheckpointStorage], None],
) -> FirstLook:
    """Read what decides about a registration, and all manifests. Raises the errors of these reads.

    Changes nothing. In parallel, ``prove`` gets the storage of the query's own state. If ``prove`` raises
    ``UnsupportedLocationError``, this is ignored: the caller proves the storage again.
    """

    def prove_own() -> None:
        stored = query.result()
        if stored is not None and stored.query_id == registration.query_id:
            with suppress(UnsupportedLocationError):
                prove(manifests.storage)

    with Pool(REQUESTS_AT_ONCE, thread_name_prefix="statestore-look") as pool:
        query = pool.submit(manifests.query_file)
        newest = pool.submit(manifests.epochs.newest)
        folded = pool.submit(manifests.folds.read)
        views = pool.submit(read_feature_views, manifests.storage)
        is_apart = not is_inside(registration.state_location, registration.checkpoint_location)
        place = pool.submit(manifests.newest_place) if is_apart else None
        proof = pool.submit(prove_own)
        # Spark's commits before the manifests: an older run may still advance, and a committed batch has a manifest.
        completed = commits.next_batch()
        manifests.refresh(folded.result)
        proof.result()
        newest_place = None if place is None else place.result()
        return FirstLook(newest.result(), query.result(), newest_place, completed, views.result())
