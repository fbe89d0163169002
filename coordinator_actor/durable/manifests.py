"""The manifests of a query: which files make up each version, written under the fencing of ``fencing.py``."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import msgspec
from msgspec import Struct

from backends.exceptions import FileExistsInStorageError
from backends.formats import manifest_chain as chain
from backends.formats.manifest import STATE_FORMAT_VERSION, Manifest
from backends.formats.manifest_chain import Layout
from backends.formats.sealed import seal
from backends.storage.checkpoint_storage import CheckpointStorage
from coordinator_actor.checkpoints.checkpoint_id import CheckpointIDCounter
from coordinator_actor.durable.checkpoint_place import CheckpointPlaces
from coordinator_actor.durable.fencing import Epochs
from coordinator_actor.durable.record_files import RecordFiles, numbered_path
from coordinator_actor.durable.savepoint_records import SavepointRecords

MANIFESTS = "manifests"
QUERY_FILE = "query.json"


class QueryFile(Struct, frozen=True):
    """``query.json``: the query that the state belongs to."""

    query_id: str
    key_groups: int
    format_version: int = STATE_FORMAT_VERSION


def manifest_path(manifest_id: int) -> str:
    """Return the path of a manifest. Paths sort by id."""
    return numbered_path(MANIFESTS, manifest_id)


def schema_path(schema_id: str) -> str:
    """Return the path of a schema."""
    return f"schemas/{schema_id}.json"


class ManifestLog:
    """The manifests of one query, as one coordinator sees and extends them.

    ``epochs`` are its epochs, ``savepoints`` the records of its savepoints, ``places`` those of the places of its
    checkpoint. ``manifests`` has those that were read, by id.
    """

    def __init__(self, storage: CheckpointStorage, coordinator_id: str) -> None:
        self.storage = storage
        self.manifests: dict[int, Manifest] = {}
        self._files = RecordFiles(storage)
        self.epochs = Epochs(self._files, coordinator_id)
        self.savepoints = SavepointRecords(self._files)
        self.places = CheckpointPlaces(self._files)

    @property
    def epoch(self) -> int:
        """Return the epoch that this coordinator has claimed, 0 before the first claim."""
        return self.epochs.current

    def claim(self, run_id: str, layouts: Iterable[Layout] = (), schema_ids: Mapping[str, str] | None = None) -> None:
        """Claim the next epoch, then read all manifests: in this order nothing acknowledged can be missed."""
        self.epochs.claim(run_id, layouts, schema_ids)
        self.refresh()

    def refresh(self) -> None:
        """Read the manifests that are not known yet."""
        missing = [i for i in self._files.numbers(MANIFESTS) if i not in self.manifests]
        # Maintenance may remove a manifest between listing and reading. Such a manifest is not needed; if it were,
        # walking the chain would say so.
        for manifest in self._files.read_all([manifest_path(i) for i in missing], Manifest):
            self.manifests[manifest.id] = manifest

    def last_id(self) -> int:
        """Return the highest checkpoint id that was ever given to a manifest or a savepoint."""
        return max((*self.manifests, *self.savepoints.ids()), default=0)

    def head(self) -> Manifest | None:
        """Return the newest manifest of the highest epoch. Later manifests of lower epochs are ignored."""
        return max(self.manifests.values(), key=lambda m: (m.epoch, m.id), default=None)

    def chain(self) -> dict[int, Manifest]:
        """Return the manifest of each version, along the parents of the head, as far as they are kept."""
        return chain.walk(self.head(), self.manifests.get, lambda i: self.storage.full_location(manifest_path(i)))

    def forget(self, kept: Collection[int]) -> list[str]:
        """Forget the manifests that are older than the newest of ``kept`` and not among them. Return their paths."""
        newest = max(kept, default=0)
        gone = [i for i in self.manifests if i < newest and i not in kept]
        for i in gone:
            del self.manifests[i]
        return [manifest_path(i) for i in gone]

    def append(self, manifest: Manifest, counter: CheckpointIDCounter) -> Manifest:
        """Write a manifest durably, under the next id if its own is taken. Return it as written.

        Raises ``FencedError`` if another coordinator has taken over. The manifest then counts for nothing.
        """
        while True:
            try:
                self._files.create(manifest_path(manifest.id), manifest)
            except FileExistsInStorageError:
                self.epochs.check()
                self.refresh()
                counter.ensure_above(max(self.manifests))
                manifest = msgspec.structs.replace(manifest, id=counter.get_and_increment())
                continue
            self.epochs.check()
            self.manifests[manifest.id] = manifest
            return manifest

    def query_file(self) -> QueryFile | None:
        """Return ``query.json``, or None if it does not exist."""
        return self._files.read_or_none(QUERY_FILE, QueryFile)

    def ensure_query_file(self, content: QueryFile) -> None:
        """Write ``query.json`` once."""
        self._files.ensure(QUERY_FILE, seal(content))

    def ensure_schema(self, schema_id: str, schema: str) -> None:
        """Write a schema, a JSON text, once."""
        self._files.ensure(schema_path(schema_id), schema.encode())

    def schema(self, schema_id: str) -> str:
        """Return the JSON of a stored schema."""
        return self.storage.get(schema_path(schema_id)).decode()
