"""``folds/<epoch>-<sequence>.json``: copies of many successive manifests in one object, for readers that begin.

A query keeps a manifest for each of the last hundred versions and more. A fold has ``FOLDED`` of them in one object, so
that a coordinator that takes the query up makes a few requests only. The manifests themselves stay, and are the truth:
a fold that is missing or damaged costs requests only.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping

from msgspec import Struct

from backends.exceptions import DamagedFileError, FileExistsInStorageError
from backends.formats.manifest import Manifest
from coordinator_actor.durable.fencing import MANIFESTS, place_path
from coordinator_actor.durable.record_files import RecordFiles

log = logging.getLogger(__name__)

FOLDS = "folds"
FOLDED = 16
"""A fold has this many manifests: of a hundred versions there are seven folds, and fewer than 16 manifests more."""


class FoldFile(Struct, frozen=True):
    """The content of a fold: manifests by ascending id."""

    manifests: tuple[Manifest, ...]


class ManifestFolds:
    """The folds of one query, as one process sees and extends them. ``_ids`` has the manifests of each, by its path."""

    def __init__(self, files: RecordFiles) -> None:
        self._files = files
        self._ids: dict[str, tuple[int, ...]] = {}

    def read(self) -> list[Manifest]:
        """Return the manifests of all folds that are not known yet, as far as they can be read."""
        paths = [path for path, _ in self._files.storage.list(f"{FOLDS}/") if path not in self._ids]
        try:
            found = self._files.read_all(paths, FoldFile)
        except DamagedFileError as error:
            log.warning("Manifests are read one by one: %s", error)
            return []
        for fold in found:
            self._note(fold)
        return [manifest for fold in found for manifest in fold.manifests]

    def due(self, chain: Mapping[int, Manifest]) -> list[FoldFile]:
        """Return the folds to be written: of manifests of completed versions that are in no fold yet, by version."""
        folded = {manifest_id for ids in self._ids.values() for manifest_id in ids}
        left = [chain[v] for v in sorted(chain) if chain[v].id not in folded and chain[v].sequence]
        whole = len(left) - len(left) % FOLDED
        return [FoldFile(tuple(left[first : first + FOLDED])) for first in range(0, whole, FOLDED)]

    def write(self, folds: Iterable[FoldFile]) -> None:
        """Write folds durably."""
        for fold in folds:
            try:
                self._files.create(_path(fold), fold)
            except FileExistsInStorageError:
                log.info("%s was written by another coordinator", _path(fold))
            self._note(fold)

    def forget(self, kept: Collection[int]) -> list[str]:
        """Forget the folds that have none of these manifests. Return their paths."""
        gone = [path for path, ids in self._ids.items() if not any(i in kept for i in ids)]
        for path in gone:
            del self._ids[path]
        return gone

    def _note(self, fold: FoldFile) -> None:
        self._ids[_path(fold)] = tuple(manifest.id for manifest in fold.manifests)


def _path(fold: FoldFile) -> str:
    newest = fold.manifests[-1]
    return place_path(newest.epoch, newest.sequence).replace(MANIFESTS, FOLDS, 1)
