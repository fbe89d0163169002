"""The overview of one query from its checkpoint alone: manifests, history and savepoint records. Needs no cluster."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace

from msgspec import structs

from backends.encoding.operator_schema import OperatorSchema
from backends.exceptions import DamagedFileError, MissingFileError
from backends.formats import manifest_chain as chains
from backends.formats.manifest_chain import delta_bytes
from backends.storage.checkpoint_storage import CheckpointStorage, OpenStorage
from coordinator_actor.durable.fencing import RecordFiles
from coordinator_actor.durable.manifests import schema_history
from coordinator_actor.durable.records import CheckpointRecord, CheckpointRecords
from coordinator_actor.durable.spark_commits import SparkCommits, query_id_of
from coordinator_actor.messages import BatchTimes
from coordinator_actor.reading.stored_versions import StatePlace, StateVersions, find_state, spans
from spark_bridge.overview import model
from spark_bridge.overview.faults import faults_of


def overview_of_checkpoint(
    checkpoint_location: str,
    state_location: str | None = None,
    options: Mapping[str, str] | None = None,
    *,
    open_storage: OpenStorage = CheckpointStorage.open,
    now_ms: int | None = None,
) -> model.Overview:
    """Describe the query of a checkpoint, running or not, from storage alone. Nothing is written or locked.

    Older damaged manifests are skipped, and named. Raises ``MissingFileError`` if the checkpoint has no state,
    ``DamagedFileError`` naming a file that is indispensable, ``StorageError``.
    """
    place = find_state(checkpoint_location, state_location, options, open_storage=open_storage)
    versions = StateVersions.look(place, passes_over_damage=True, open_storage=open_storage)
    query = stored_query(place, versions, open_storage)
    taken_ms = int(time.time() * 1000) if now_ms is None else now_ms
    overview = model.Overview(model.STORAGE, taken_ms, queries=(query,))
    return replace(overview, faults=faults_of(overview))


def stored_query(place: StatePlace, versions: StateVersions, open_storage: OpenStorage) -> model.Query:
    """Return the description of a query from its storage."""
    storage = open_storage(place.state_location, place.options)
    files = RecordFiles(storage)
    records = CheckpointRecords(files).load()
    newest = versions.log.epochs.newest()
    readable = versions.readable
    prepared = max(versions.chain, default=0)
    times = _times(SparkCommits(open_storage(place.checkpoint_location, place.options)))
    return model.Query(
        query_id=query_id_of(open_storage(place.checkpoint_location, place.options)),
        run_id="" if newest is None else newest.run_id,
        name=None,
        status=model.STORED,
        checkpoint_location=place.checkpoint_location,
        state_location=place.state_location,
        epoch=0 if newest is None else newest.epoch,
        completed_version=versions.completed,
        prepared_version=prepared,
        oldest_version=readable[0] if readable else None,
        operators=tuple(_operators(versions)),
        checkpoints=checkpoints_of(records, versions),
        savepoints=tuple(
            model.Savepoint(r.checkpoint_id, r.version, r.location, r.created_ms, r.run_id, r.stop)
            for r in versions.log.savepoints.all()
        ),
        watermark_ms=times.watermark_ms or None,
        batch_time_ms=times.timestamp_ms or None,
        damages=tuple(versions.damages.values()),
        readable=tuple(spans(readable)) if versions.damages else (),
    )


def _times(commits: SparkCommits) -> BatchTimes:
    """Return the times of the last batch that Spark has planned; zeros if there is none."""
    last = commits.last_begun()
    if last is None:
        return BatchTimes()
    try:
        return commits.times(last)
    except (DamagedFileError, MissingFileError):
        return BatchTimes()  # Spark may be removing old files; a damaged one says nothing about the state


def checkpoints_of(
    records: Iterable[CheckpointRecord], versions: StateVersions | None = None
) -> tuple[model.Checkpoint, ...]:
    """Return the history by ascending id, with the versions that only manifests describe."""
    names = [name for name in model.Checkpoint.__struct_fields__ if hasattr(CheckpointRecord, name)]
    by_id = {r.id: model.Checkpoint(**{name: getattr(r, name) for name in names}) for r in records}
    for version, manifest in ({} if versions is None else versions.chain).items():
        assert versions is not None
        recorded = by_id.get(manifest.id)
        is_completed = version <= versions.completed
        if recorded is None:
            # A manifest may be written again, under another id, to name snapshots: the record has the first id.
            recorded = next((c for c in by_id.values() if (c.version, c.run_id) == (version, manifest.run_id)), None)
        if recorded is None:
            recorded = model.Checkpoint(
                manifest.id,
                version,
                manifest.epoch,
                manifest.run_id,
                "completed" if is_completed else "prepared",
                prepared_ms=manifest.created_ms,
                partitions=sum(len(o.partitions) for o in manifest.operators.values()),
                delta_bytes=delta_bytes(manifest),
            )
        by_id[recorded.id] = structs.replace(recorded, is_kept=version in versions.readable)
    return tuple(by_id[i] for i in sorted(by_id))


def _operators(versions: StateVersions) -> Iterable[model.Operator]:
    chain = {v: m for v, m in versions.chain.items() if v <= versions.completed}
    if not chain:
        return
    newest = max(chain)
    for name, entry in sorted(chain[newest].operators.items()):
        (segment, *_) = chains.segments(chain, name)
        refs = {p: snapshots[-1] for p, snapshots in chains.snapshots(chain, segment).items()}
        behind = dict.fromkeys(range(entry.num_partitions), 0)
        for version in (v for v in chain if segment.first <= v <= segment.last):
            stored = chain[version].operators[name].partitions
            for p, size in zip(stored, stored.stored.size, strict=True):
                if p not in refs or refs[p].version < version:
                    behind[p] += size
        partitions = tuple(
            model.Partition(
                name,
                p,
                version=newest,
                snapshot_version=refs[p].version if p in refs else 0,
                snapshot_lag=newest - (refs[p].version if p in refs else segment.first - 1),
                changelog_bytes=behind[p],
            )
            for p in range(entry.num_partitions)
        )
        used = [
            model.SchemaUse(i, first, last, model.variables_in_use(OperatorSchema.from_json(versions.log.schema(i))))
            for i, first, last in schema_history(chain, name)
        ]
        yield model.Operator(
            name,
            entry.num_partitions,
            entry.backend,
            entry.schema_id,
            partitions=partitions,
            variables=used[-1].variables,
            schemas=tuple(used),
        )
