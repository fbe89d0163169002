"""Removing what a run no longer keeps: only what the newest manifest, which is durable, says is not kept."""

from __future__ import annotations

import logging
from collections.abc import Callable

from backends.exceptions import DamagedFileError, MissingFileError
from backends.formats import chain as chains
from backends.formats import snapshot
from backends.formats.manifest import SnapshotRef
from coordinator_actor.query import QueryState

log = logging.getLogger(__name__)


def remove_garbage(run: QueryState, now: float, require_current: Callable[[QueryState], None]) -> list[str]:
    """Plan what the next manifest keeps, and remove what the last one does not; returns the paths.

    ``require_current`` raises if the run is over. Raises ``FencedError`` if another coordinator has taken over.
    """
    storage = run.log.storage
    sizes = dict(storage.list("operators"))
    with run.lock:
        require_current(run)
        refs = _snapshots(run)
        refs += [s for unnamed in run.unnamed.values() for s in unnamed]
    _read_descriptors(run, refs)
    with run.lock:
        require_current(run)
        run.log.check_epoch()
        run.plan_retention(
            lambda s: (
                sizes.get(s.file.path) == s.file.size
                and s.file.path in run.descriptors
                and run.descriptors[s.file.path].is_complete(sizes)
            )
        )
        recorded, unnamed = run.recorded, [s for refs in run.unnamed.values() for s in refs]
        if recorded is None or recorded.oldest == 0:
            return []
        busy = tuple(f"{run.layouts[o].directory(p)}/" for (o, p), until in run.busy.items() if until > now)
        if run.is_rescaling(now):
            # New partitions are being made of the files of the old ones, whichever those are.
            busy = ("operators/",)
        _read_descriptors(run, [*refs, *unnamed])
        # Neither is ever changed, only replaced. A load that begins from now on is told of nothing that is not kept.
        chain, descriptors = run.chain, run.descriptors
        manifests = run.log.forget({m.id for m in chain.values()})
    # Without the lock, for there may be a million files.
    try:
        files = [*sizes, *storage.unfinished("operators")]
        found = chains.garbage(files, chain, recorded, lambda s: descriptors[s.file.path].paths, unnamed)
    except KeyError as error:
        # Until that snapshot is no longer kept, nobody can tell which files are its own.
        log.warning("Nothing of run %s is removed: the snapshot %s is damaged", run.run_id, error)
        found = []
    removed = [path for path in found if not path.startswith(busy)] + manifests
    for path in removed:
        storage.delete(path)
    return removed


def _snapshots(run: QueryState) -> list[SnapshotRef]:
    """All that manifests of completed versions name, of every layout that is kept."""
    below = run.below
    found = []
    for operator in run.layouts:
        for segment in chains.segments(below, operator):
            found += [s for refs in chains.snapshots(below, segment).values() for s in refs]
    return found


def _read_descriptors(run: QueryState, refs: list[SnapshotRef]) -> None:
    """Remember the descriptors of these snapshots, but for damaged ones, and of no others."""
    wanted = {s.file.path for s in refs}
    held = run.descriptors
    for ref in refs:
        if ref.file.path not in held:
            try:
                held = {**held, ref.file.path: snapshot.read_descriptor(run.log.storage, ref)}
            except (DamagedFileError, MissingFileError) as error:
                log.warning("A snapshot of run %s is damaged: %s", run.run_id, error)
    run.descriptors = {path: held[path] for path in held if path in wanted}
