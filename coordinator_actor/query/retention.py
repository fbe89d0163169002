"""What is removed from storage, and when: only files that the newest manifest, which is durable, no longer keeps.

The rules are in ``backends/formats/retention.py``; this file removes by them.
"""

from __future__ import annotations

import logging

from backends.exceptions import DamagedFileError, MissingFileError
from backends.formats import manifest_chain as chains
from backends.formats import retention, snapshot
from backends.formats.changelog_group import GROUPS
from backends.formats.checkpoint_size import full_bytes
from backends.formats.file_names import version_in
from backends.formats.manifest import Manifest, SnapshotRef
from backends.formats.snapshot_descriptor import SnapshotDescriptor
from coordinator_actor.query.query_state import QueryState

log = logging.getLogger(__name__)


def remove_garbage(run: QueryState, now: float) -> list[str]:
    """Plan what the next manifest keeps, and remove what the last one does not keep. Return the removed paths.

    Raises ``RetiredRunError`` if the run is over, ``FencedError`` if another coordinator has taken over.
    """
    storage, versions = run.manifests.storage, run.versions
    sizes = {path: size for directory in ("operators", GROUPS) for path, size in storage.list(directory)}
    with run.lock:
        run.require_current()
        refs = _snapshots(run)
    _read_descriptors(run, refs)
    with run.lock:
        run.require_current()
        run.manifests.epochs.check()
        versions.plan_retention(
            run.registration.min_versions_to_retain,
            lambda s: (
                s.file.is_in(sizes)
                and s.file.path in versions.descriptors
                and versions.descriptors[s.file.path].is_complete(sizes)
            ),
        )
        recorded, unnamed = versions.recorded, [s for found in versions.unnamed.values() for s in found]
        if recorded is None or recorded.oldest == 0:
            return []
        in_use = run.files_in_use.directories(versions.layouts, now)
        oldest_in_use = run.files_in_use.oldest(now)
        _read_descriptors(run, [*refs, *unnamed])
        # The chain is never changed, only replaced, and descriptors are only added. A load that begins from now on is
        # told of no file that is not kept.
        chain, descriptors = versions.chain, versions.descriptors
        kept = {m.id for m in chain.values()}
        manifests = [*run.manifests.forget(kept), *run.manifests.folds.forget(kept)]
    # Without the lock, since there may be a million files.
    try:
        files = [*sizes, *(path for directory in ("operators", GROUPS) for path in storage.unfinished(directory))]
        found = retention.garbage(files, chain, recorded, lambda s: descriptors[s.file.path].paths, unnamed)
    except KeyError as error:
        # As long as that snapshot is kept, nobody can tell which files belong to it.
        log.warning("Nothing of run %s is removed: the snapshot %s is damaged", run.run_id, error)
        found = []

    def is_in_use(path: str) -> bool:
        is_group = path.startswith(f"{GROUPS}/")
        return path.startswith(in_use) or (is_group and version_in(path) >= oldest_in_use)

    removed = [path for path in found if not is_in_use(path)] + manifests
    storage.delete_all(removed)
    return removed


def tidy_records(run: QueryState) -> None:
    """Fold manifests, and remove claims and savepoint records that nobody needs: who begins has to read them all.

    To be called behind ``remove_garbage`` by the same thread, which has seen that nobody has taken over.
    """
    manifests = run.manifests
    with run.lock:
        run.require_current()
        folds, held = manifests.folds.due(run.versions.completed_chain), run.held_by_record
    manifests.folds.write(folds)
    if run.records_are_due:
        manifests.storage.delete_all([*manifests.epochs.obsolete(), *manifests.savepoints.obsolete(held)])


def measured(run: QueryState) -> tuple[Manifest, int | None] | None:
    """Return the newest completed version, and the bytes of the files from which it is loaded, if they are known."""
    with run.lock:
        versions = run.versions
        chain, completed, descriptors = versions.completed_chain, versions.completed, versions.descriptors
    if completed not in chain:
        return None

    def size_of(ref: SnapshotRef) -> int | None:
        held = descriptors.get(ref.file.path)
        return None if held is None else ref.file.size + held.nbytes

    # Without the lock: there may be millions of changelogs.
    return chain[completed], full_bytes(chain, completed, size_of)


def _snapshots(run: QueryState) -> list[SnapshotRef]:
    """Return all snapshots that manifests of completed versions name, of every kept layout, and the unnamed ones."""
    versions = run.versions
    below = versions.completed_chain
    found = []
    for operator in versions.layouts:
        for segment in chains.segments(below, operator):
            found += [s for refs in chains.snapshots(below, segment).values() for s in refs]
    return found + [s for unnamed in versions.unnamed.values() for s in unnamed]


def _read_descriptors(run: QueryState, refs: list[SnapshotRef]) -> None:
    """Keep the descriptors of these snapshots, and of no others. Those of damaged snapshots are left out."""
    held, storage = run.versions.descriptors, run.manifests.storage
    found: dict[str, SnapshotDescriptor] = {}
    read = snapshot.read_together(storage, [ref.file for ref in refs if ref.file.path not in held])
    for ref in refs:
        path = ref.file.path
        known = held.get(path)
        try:
            found[path] = known or snapshot.read_descriptor(storage, ref, read.get(path)).without_content
        except (DamagedFileError, MissingFileError) as error:
            log.warning("A snapshot of run %s is damaged: %s", run.run_id, error)
    run.versions.keep_descriptors(found)
