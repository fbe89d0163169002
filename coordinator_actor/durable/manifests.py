"""The manifests of a query: which files make up each version, written under the fencing of ``fencing.py``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import lru_cache

import msgspec
from msgspec import Struct

from backends.encoding.operator_schema import OperatorSchema
from backends.exceptions import DamagedFileError, FileExistsInStorageError, MissingFileError, StateStoreError
from backends.formats import manifest_chain as chain
from backends.formats.manifest import STATE_FORMAT_VERSION, Manifest
from backends.formats.manifest_chain import Layout
from backends.formats.sealed import seal, unseal
from backends.storage.checkpoint_storage import CheckpointStorage
from coordinator_actor.checkpoints.checkpoint_id import CheckpointIDCounter
from coordinator_actor.durable.checkpoint_place import CheckpointPlaces
from coordinator_actor.durable.fencing import FENCE, MANIFESTS, Epochs, place_in, place_path
from coordinator_actor.durable.manifest_folds import ManifestFolds
from coordinator_actor.durable.record_files import RecordFiles, numbered_path, numbers_of
from coordinator_actor.durable.rewritten_files import REWRITTEN, RewrittenFiles, still_named, version_of
from coordinator_actor.durable.savepoint_records import SavepointRecords

QUERY_FILE = "query.json"
FEW = 4
"""At most this many manifests are read one by one."""
LISTINGS = 5
"""How often manifests are listed again because the newest one was removed before it was read."""


class QueryFile(Struct, frozen=True):
    """``query.json``: the query that the state belongs to."""

    query_id: str
    key_groups: int
    format_version: int = STATE_FORMAT_VERSION


def manifest_path(manifest: Manifest) -> str:
    """Return the path of a manifest: by epoch and sequence, or by its id if an earlier release has written it."""
    if manifest.sequence:
        return place_path(manifest.epoch, manifest.sequence)
    return numbered_path(MANIFESTS, manifest.id)


def schema_path(schema_id: str) -> str:
    """Return the path of a schema."""
    return f"schemas/{schema_id}.json"


class ManifestLog:
    """The manifests of one query, as one coordinator sees and extends them.

    ``epochs`` are its epochs, ``savepoints`` the records of its savepoints, ``places`` those of the places of its
    checkpoint, ``folds`` copies of manifests. ``manifests`` has those that were read, by id, as they were written.
    ``rewritten`` names the records of files that were written anew, as the newest manifest does; ``chain`` goes by
    these. ``damages`` has, by path, what is wrong with older manifests that ``refresh`` was to pass over, and with the
    chain where it ``has_gaps`` because of them. ``_sequence`` is that of the last manifest of the claimed epoch that is
    known to exist.
    """

    def __init__(self, storage: CheckpointStorage, coordinator_id: str) -> None:
        self.storage = storage
        self.manifests: dict[int, Manifest] = {}
        self._files = RecordFiles(storage)
        self.epochs = Epochs(self._files, coordinator_id)
        self.savepoints = SavepointRecords(self._files)
        self.places = CheckpointPlaces(self._files)
        self.folds = ManifestFolds(self._files)
        self.rewritten: tuple[str, ...] = ()
        self.damages: dict[str, str] = {}
        self.has_gaps = False
        self._records: dict[str, RewrittenFiles] = {}
        self._sequence = 0

    @property
    def epoch(self) -> int:
        """Return the epoch that this coordinator has claimed, 0 before the first claim."""
        return self.epochs.current

    def claim(
        self,
        run_id: str,
        layouts: Iterable[Layout] = (),
        schema_ids: Mapping[str, str] | None = None,
        *,
        ends_run: bool = False,
    ) -> None:
        """Claim the next epoch, then read all manifests: in this order nothing acknowledged can be missed."""
        there = self.epochs.claim(run_id, layouts, schema_ids, ends_run=ends_run)
        self._sequence = 0
        # If the newest is gone by now, another coordinator has claimed the state since: this one writes nothing more.
        self._read(there)

    def refresh(
        self, folded: Callable[[], Iterable[Manifest]] | None = None, *, passes_over_damage: bool = False
    ) -> None:
        """Read the manifests that are not known yet. ``folded`` returns what ``folds.read`` has, if it is under way.

        Raises ``DamagedFileError``. ``passes_over_damage`` is for readers: a damaged manifest that is older than the
        newest one is noted in ``damages`` instead. Without the newest nobody can tell which of the others count.
        Raises ``MissingFileError`` if the newest manifest of each of ``LISTINGS`` listings is gone before it is read.
        """
        found: dict[str, DamagedFileError] = {}
        damaged = found.__setitem__ if passes_over_damage else None
        gone: str | None = None
        for _ in range(LISTINGS):
            listed = self.storage.list(f"{MANIFESTS}/")
            # A reader may stand still between the listing and its reads. If the newest manifest is gone by then, the
            # older ones that are still there make a version that was current once, and no longer.
            gone = self._read((path for path, size in listed if size != len(FENCE)), folded, damaged)
            if gone is None:
                break
            folded = None
        if gone is not None:
            raise MissingFileError(
                f"{self.storage.full_location(gone)} was the newest manifest in a listing, and was gone before it was "
                f"read, as those of {LISTINGS - 1} listings before: the storage answers slower than the query makes "
                "versions. Try again."
            )
        head = self.head()
        for path, error in found.items():
            if head is None or not _is_older(path, head):
                raise error
        self.damages = {path: str(error) for path, error in sorted(found.items())}

    def _read(
        self,
        paths: Iterable[str],
        folded: Callable[[], Iterable[Manifest]] | None = None,
        damaged: Callable[[str, DamagedFileError], None] | None = None,
    ) -> str | None:
        """Read the manifests at some paths. Return the newest path if its manifest is gone, None if all is well."""
        there = {path for path in paths if path.endswith(".json")}
        if folded is None and len(there) > len(self.manifests) + FEW:
            folded = self.folds.read
        if folded is not None:
            copies = {manifest_path(copy): copy for copy in folded()}
            self.manifests.update({copies[path].id: copies[path] for path in copies.keys() & there})
        missing = sorted(there - {manifest_path(manifest) for manifest in self.manifests.values()})
        broken: set[str] = set()

        def note(path: str, error: DamagedFileError) -> None:
            assert damaged is not None
            broken.add(path)
            damaged(path, error)

        # Maintenance may remove a manifest between listing and reading. Such a manifest is not needed; if it were,
        # walking the chain would say so, unless it is the newest one.
        read = self._files.read_all(missing, Manifest, None if damaged is None else note)
        self.manifests.update({manifest.id: manifest for manifest in read})
        newest = max(there, key=_age, default=None)
        known = {manifest_path(manifest) for manifest in read}
        return newest if newest in missing and newest not in known | broken else None

    def last_id(self) -> int:
        """Return the highest checkpoint id that was ever given to a manifest or a savepoint."""
        return max((*self.manifests, *self.savepoints.ids()), default=0)

    def head(self) -> Manifest | None:
        """Return the newest manifest of the highest epoch. Later manifests of lower epochs are ignored."""
        return max(self.manifests.values(), key=lambda m: (m.epoch, m.id), default=None)

    def chain(self, *, leaves_out: bool = False) -> dict[int, Manifest]:
        """Return the manifest of each version, along the parents of the head, as far as they are kept.

        They name the files that count: in the place of those that a record of ``rewritten`` gives up, the others.
        Raises ``MissingFileError`` and ``DamagedFileError`` where a parent is not there or not the right one. With
        ``leaves_out`` the chain has not its version, and ``damages`` says why.
        """
        head = self.head()
        self.has_gaps = False
        self.rewritten = () if head is None else head.rewritten
        self._records = {path: self._records.get(path) or self.record(path) for path in self.rewritten}

        def manifest(manifest_id: int) -> Manifest | None:
            found = self.manifests.get(manifest_id)
            if found is not None:
                for record in self._records.values():
                    found = record.of(found)
            return found

        def gap(child: Manifest, error: MissingFileError | DamagedFileError) -> Manifest | None:
            self.has_gaps = True
            if not self.damages:  # else these say why
                self.damages = {f"{MANIFESTS}/": str(error)}
            # What was written last before the missing one has the same versions below: a completed version does not
            # change, and whoever goes back writes the version gone back to again before others.
            older = [m for m in self.manifests.values() if m.id < (child.parent or 0)]
            last = max(older, key=lambda m: (m.epoch, m.id), default=None)
            return None if last is None else manifest(last.id)

        return chain.walk(
            None if head is None else manifest(head.id), manifest, self._name, gap if leaves_out else None
        )

    def record(self, path: str) -> RewrittenFiles:
        """Read a record of files that were written anew. Raises ``MissingFileError`` or ``DamagedFileError``."""
        return self._files.read(path, RewrittenFiles)

    def has_news(self) -> bool:
        """Return whether storage has a manifest that is newer than all that are known. One listing."""
        newest = max(map(manifest_path, self.manifests.values()), default="")
        return any(size != len(FENCE) for _, size in self.storage.list(f"{MANIFESTS}/", after=newest))

    def obsolete_records(self, chain_from: int) -> list[str]:
        """Return the paths of the records that no manifest of a version from ``chain_from`` on needs."""
        paths = [path for path, _ in self.storage.list(f"{REWRITTEN}/") if path not in self.rewritten]
        return [path for path in paths if version_of(path) < chain_from]

    def put_record(self, path: str, record: RewrittenFiles) -> None:
        """Write a record of files that were written anew; it counts from the manifest on that names it."""
        self._files.create(path, record)

    def forget(self, kept: Collection[int]) -> list[str]:
        """Forget the manifests that are older than the newest of ``kept`` and not among them. Return their paths."""
        newest = max(kept, default=0)
        return [manifest_path(self.manifests.pop(i)) for i in list(self.manifests) if i < newest and i not in kept]

    def append(self, manifest: Manifest, counter: CheckpointIDCounter) -> Manifest:
        """Write a manifest durably at the next place of the epoch, with a new id if its own is taken. Return it so.

        Raises ``FencedError`` if another coordinator has taken over: then the manifest is not written. What an earlier
        call has written, whose answer was lost, is found at its place and taken up. The manifest names the records of
        rewritten files that the last one named, too.
        """
        records = still_named((*self.rewritten, *manifest.rewritten), manifest.chain_from)
        manifest = msgspec.structs.replace(manifest, rewritten=records)
        while True:
            placed = msgspec.structs.replace(manifest, epoch=self.epoch, sequence=self._sequence + 1)
            path = manifest_path(placed)
            try:
                self._files.create(path, placed)
            except FileExistsInStorageError:
                there = self.storage.get(path)
                if there == FENCE:
                    raise self.epochs.fenced(path) from None
                earlier = unseal(there, Manifest, self.storage.full_location(path))
                self._take(earlier)
                if manifest.id <= earlier.id:
                    counter.ensure_above(max(self.manifests))
                    manifest = msgspec.structs.replace(manifest, id=counter.get_and_increment())
                continue
            self._take(placed)
            return placed

    def _take(self, written: Manifest) -> None:
        self.manifests[written.id] = written
        self.rewritten = written.rewritten
        self._sequence = written.sequence

    def _name(self, manifest_id: int) -> str:
        """Name a manifest for messages. Where one is missing that an earlier one names, only its id is known."""
        known = self.manifests.get(manifest_id)
        if known is not None:
            return self.storage.full_location(manifest_path(known))
        after = min(manifest_path(m) for m in self.manifests.values() if m.id > manifest_id)
        return f"Manifest {manifest_id}, a file before {self.storage.full_location(after)} by its name,"

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
        """Return the JSON of a stored schema. Raises ``MissingFileError``, ``DamagedFileError``."""
        path = self.storage.full_location(schema_path(schema_id))
        try:
            content = self.storage.get(schema_path(schema_id))
        except MissingFileError as error:
            raise MissingFileError(
                f"{path} does not exist, but the state needs it: it was removed, or is kept elsewhere. Restore it from "
                "a copy."
            ) from error
        if not _is_schema(content, schema_id):
            raise DamagedFileError(
                f"{path} is damaged: its content is not the schema with the id {schema_id}. Restore it from a copy."
            )
        return content.decode()


@lru_cache(maxsize=256)
def _is_schema(content: bytes, schema_id: str) -> bool:
    """Return whether a file holds the schema with this id, the digest of the schema's canonical JSON."""
    try:
        return OperatorSchema.from_json(content.decode()).id == schema_id
    except (UnicodeDecodeError, StateStoreError):
        return False


def _age(path: str) -> tuple[int, tuple[int, int]]:
    """Return what orders the paths of manifests: those of earlier releases have no epoch in their names."""
    place = place_in(path)
    return (0, (numbers_of([path])[0], 0)) if place is None else (1, place)


def _is_older(path: str, head: Manifest) -> bool:
    """Return whether a manifest was written before another one, by its path: nobody can read it."""
    place = place_in(path)
    if place is not None:
        return place < (head.epoch, head.sequence)
    return bool(head.sequence) or numbers_of([path]) < [head.id]
