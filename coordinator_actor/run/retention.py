"""The removal of files from storage: only files that the newest manifest, which is durable, no longer keeps.

The rules are in ``backends/formats/manifest_chain.py``; this file applies them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping

from backends.exceptions import DamagedFileError, MissingFileError
from backends.formats import manifest_chain, snapshot
from backends.formats.changelog import GROUPS_DIRECTORY
from backends.formats.manifest import Manifest, SnapshotDescriptor, SnapshotRef, version_in
from backends.formats.manifest_chain import full_bytes
from backends.spans import Pool
from coordinator_actor.durable.fencing import EPOCHS, MANIFESTS, READERS
from coordinator_actor.durable.manifests import CHECKPOINTS, FOLDS, REWRITTEN, manifest_path
from coordinator_actor.durable.records import AUDIT, DIRECTORY, FEATURE_VIEWS, HISTORY, LOOKUPS
from coordinator_actor.run.query_state import QueryState

log = logging.getLogger(__name__)

RECORDS = (MANIFESTS, FOLDS, EPOCHS, REWRITTEN, CHECKPOINTS, HISTORY, AUDIT, LOOKUPS, FEATURE_VIEWS, DIRECTORY)
"""The directories of all records."""


def remove_garbage(run: QueryState, now: float) -> list[str]:
    """Plan what the next manifest keeps, and remove the files that the last one does not keep.

    Return the removed paths.

    Raises ``RetiredRunError`` if the run is over, ``FencedError`` if another coordinator has taken over.
    """
    storage, versions, files = run.manifests.storage, run.versions, run.files
    with run.lock:
        if run.machine.rewriting.at(now) is not None:
            return []
    # Before each plan: readers of storage record their look-ups without a message to the coordinator. The version of a
    # record is the newest completed one. A plan that was begun before the record was written keeps that version.
    run.looked_up.look(now, run.lock)
    files.look(storage, versions.completed)
    with run.lock:
        run.lifetime.require_current()
        refs = _snapshots(run)
    descriptors = _read_descriptors(run, refs)
    run.manifests.epochs.check()
    with run.lock:
        run.lifetime.require_current()
        seconds = run.registration.min_seconds_to_retain
        versions.plan_retention(
            run.registration.min_versions_to_retain,
            lambda s: files.is_whole(s, descriptors.get(s.file.path)),
            newest_at_ms=(now - seconds) * 1000 if seconds else None,
        )
        recorded, unnamed = versions.recorded, [s for refs in versions.unnamed.values() for s in refs]
        if recorded is None or recorded.oldest == 0 or run.machine.rewriting.at(now) is not None:
            return []
        in_use = run.files_in_use.directories(versions.layouts, now)
        oldest_in_use = run.files_in_use.oldest(now)
        # The chain is never changed, only replaced. A load that begins from now on gets only files that are kept.
        chain, refs = versions.chain, _snapshots(run)
        kept = {m.id for m in chain.values()}
        manifests = [*map(manifest_path, run.manifests.unneeded(kept)), *run.manifests.folds.unneeded(kept)]
    # Without the lock: there may be a million files.
    descriptors = _read_descriptors(run, refs)
    garbage: list[str] = []
    try:
        needed = manifest_chain.needed_files(chain, recorded, lambda s: descriptors[s.file.path].paths, unnamed)
    except KeyError as error:
        # As long as that snapshot is kept, its files are unknown.
        log.warning("Nothing of run %s is removed: the snapshot %s is damaged", run.run_id, error)
    else:
        files.needed(needed)
        garbage = manifest_chain.garbage(files.paths, needed, recorded.oldest)

    def is_in_use(path: str) -> bool:
        is_group = path.startswith(f"{GROUPS_DIRECTORY}/")
        return path.startswith(in_use) or (is_group and version_in(path) >= oldest_in_use)

    unused = [path for path in garbage if not is_in_use(path)]
    storage.delete_all([*unused, *manifests])
    # After the deletion: if it fails, the next maintenance deletes these files.
    files.removed(unused)
    with run.lock:
        run.manifests.forget(kept)
        run.manifests.folds.forget(kept)
    return [*unused, *manifests]


def tidy_records(run: QueryState) -> None:
    """Fold manifests, and remove claims and savepoint records that are no longer needed: a new coordinator reads them
    all. Remove records whose writers died in the middle of them.

    To be called after ``remove_garbage`` by the same thread, which has checked that no other coordinator has taken
    over.
    """
    manifests = run.manifests
    with run.lock:
        run.lifetime.require_current()
        folds, record_id = manifests.folds.due(run.versions.completed_chain), run.machine.savepoint_hold.record_id
        oldest = min(run.versions.chain, default=0)
    manifests.folds.write(folds)
    if run.lifetime.records_are_due:
        storage = manifests.storage
        unfinished = {path for directory in RECORDS for path in storage.unfinished(directory)}
        # A writer that is still at work has finished its file long before the next of these looks.
        abandoned, run.unfinished_records = sorted(unfinished & run.unfinished_records), unfinished
        records = [*manifests.epochs.obsolete(), *manifests.savepoints.obsolete(record_id)]
        storage.delete_all([*records, *manifests.obsolete_records(oldest), *abandoned])


def loaded_bytes(run: QueryState) -> tuple[Manifest, int | None] | None:
    """Return the newest completed version, and the bytes of the files that it is loaded from, if they are known."""
    with run.lock:
        versions = run.versions
        chain, completed, descriptors = versions.completed_chain, versions.completed, versions.descriptors
    if completed not in chain:
        return None

    def size_of(ref: SnapshotRef) -> int | None:
        descriptor = descriptors.get(ref.file.path)
        return None if descriptor is None else ref.file.size + descriptor.nbytes

    # Without the lock: there may be millions of changelogs.
    return chain[completed], full_bytes(chain, completed, size_of)


def _snapshots(run: QueryState) -> list[SnapshotRef]:
    """Return all snapshots that manifests of completed versions name, of every kept layout, and the unnamed ones."""
    versions = run.versions
    below = versions.completed_chain
    snapshots = []
    for operator in versions.layouts:
        for segment in manifest_chain.segments(below, operator):
            snapshots += [s for refs in manifest_chain.snapshots(below, segment).values() for s in refs]
    return snapshots + [s for unnamed in versions.unnamed.values() for s in unnamed]


def _read_descriptors(run: QueryState, refs: list[SnapshotRef]) -> Mapping[str, SnapshotDescriptor]:
    """Return the descriptors of these snapshots by path, and keep only them in memory.

    Each is read once, by ``READERS`` threads. Those of damaged snapshots are left out. Raises ``StorageError``.
    """
    storage, cached = run.manifests.storage, dict(run.versions.descriptors)
    unread: dict[str, list[SnapshotRef]] = {}
    for ref in refs:
        if ref.file.path not in cached:
            unread.setdefault(ref.file.stored_in, []).append(ref)

    def read(parts: list[SnapshotRef]) -> Iterator[tuple[str, SnapshotDescriptor]]:
        contents = snapshot.read_together(storage, [ref.file for ref in parts])
        for ref in parts:
            path = ref.file.path
            try:
                yield path, snapshot.read_descriptor(storage, ref, contents.get(path)).without_content
            except (DamagedFileError, MissingFileError) as error:
                log.warning("A snapshot of run %s is damaged: %s", run.run_id, error)

    kept = {ref.file.path: cached[ref.file.path] for ref in refs if ref.file.path in cached}
    if unread:
        with Pool(min(READERS, len(unread))) as pool:
            for descriptors in pool.map(lambda parts: dict(read(parts)), unread.values()):
                kept |= descriptors
    with run.lock:
        # Snapshots may have been added in between.
        added = {path: d for path, d in run.versions.descriptors.items() if path not in cached}
        run.versions.descriptors = {**kept, **added}
        return run.versions.descriptors
