"""The manifests of a query: which files make up each version, written under the fencing of ``fencing.py``."""

from __future__ import annotations

import logging
import os
import shlex
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import lru_cache
from itertools import groupby

import msgspec
from msgspec import Struct, structs

from backends.encoding.operator_schema import OperatorSchema
from backends.exceptions import DamagedFileError, FileExistsInStorageError, MissingFileError, StateStoreError
from backends.formats import manifest_chain as chain
from backends.formats.manifest import (
    STATE_FORMAT_VERSION,
    Manifest,
    OperatorEntry,
    PartitionEntries,
    PartitionEntry,
    SnapshotRef,
    seal,
    unseal,
)
from backends.formats.manifest_chain import Layout
from backends.storage.checkpoint_storage import CheckpointStorage
from backends.storage.locations import FileRef, parse_location
from coordinator_actor.checkpoints.pending_checkpoint import CheckpointIDCounter
from coordinator_actor.durable import fencing
from coordinator_actor.durable.records import SavepointRecords

# ``folds/<epoch>-<sequence>.json``: copies of many successive manifests in one object, for readers that begin.
#
# A query keeps a manifest for each of the last hundred versions and more. A fold has ``FOLDED`` of them in one object,
# so that a coordinator that recovers the query makes only a few requests. The manifests themselves stay, and are
# authoritative: a fold that is missing or damaged costs only requests.


log = logging.getLogger(__name__)

FOLDS = "folds"
FOLDED = 16
"""Manifests of a fold: of a hundred versions there are seven folds, and fewer than 16 other manifests."""


class FoldFile(Struct, frozen=True):
    """The content of a fold: manifests by ascending id."""

    manifests: tuple[Manifest, ...]


class ManifestFolds:
    """The folds of one query, as one process sees and extends them. ``_ids`` has the manifests of each, by its path."""

    def __init__(self, files: fencing.RecordFiles) -> None:
        self._files = files
        self._ids: dict[str, tuple[int, ...]] = {}

    def read(self) -> list[Manifest]:
        """Return the manifests of all folds that are not known yet, as far as they can be read."""
        paths = [path for path, _ in self._files.storage.list(f"{FOLDS}/") if path not in self._ids]
        try:
            folds = self._files.read_all(paths, FoldFile)
        except DamagedFileError as error:
            log.warning("Manifests are read one by one: %s", error)
            return []
        for fold in folds:
            self._note(fold)
        return [manifest for fold in folds for manifest in fold.manifests]

    def due(self, chain: Mapping[int, Manifest]) -> list[FoldFile]:
        """Return the folds to be written: of manifests of completed versions that are in no fold yet, by version."""
        folded = {manifest_id for ids in self._ids.values() for manifest_id in ids}
        left = [chain[v] for v in sorted(chain) if chain[v].id not in folded and chain[v].sequence]
        whole = len(left) - len(left) % FOLDED
        return [FoldFile(tuple(left[first : first + FOLDED])) for first in range(0, whole, FOLDED)]

    def write(self, folds: Iterable[FoldFile]) -> None:
        for fold in folds:
            try:
                self._files.create(_path(fold), fold)
            except FileExistsInStorageError:
                log.info("%s was written by another coordinator", _path(fold))
            self._note(fold)

    def unneeded(self, kept: Collection[int]) -> list[str]:
        """Return the paths of the folds that have none of these manifests."""
        return [path for path, ids in self._ids.items() if not any(i in kept for i in ids)]

    def forget(self, kept: Collection[int]) -> None:
        """Forget the folds that have none of these manifests."""
        for path in self.unneeded(kept):
            del self._ids[path]

    def _note(self, fold: FoldFile) -> None:
        self._ids[_path(fold)] = tuple(manifest.id for manifest in fold.manifests)


def _path(fold: FoldFile) -> str:
    newest = fold.manifests[-1]
    return fencing.place_path(newest.epoch, newest.sequence).replace(fencing.MANIFESTS, FOLDS, 1)


# ``rewritten/<version>-<unique>.json``: files of versions that were rewritten to remove some of their content.
#
# A manifest is never changed. So if the files that it names must be removed, as when keys are forgotten, a record names
# their replacements. A record counts from the manifest on that names it: that manifest is written under the fencing of
# all manifests, so that no coordinator that has been replaced can exchange files. Each later manifest names the record
# again, until no manifest of a version that the record covers is kept.


REWRITTEN = "rewritten"


class RewrittenFiles(Struct, frozen=True):
    """The changelogs and the descriptors of snapshots that replace others, by the paths of the replaced files.

    They belong to versions up to ``version``. The record grows with the changed partitions and the versions kept.
    """

    version: int
    changelogs: dict[str, FileRef]
    snapshots: dict[str, SnapshotRef]

    def of(self, manifest: Manifest) -> Manifest:
        """Return a manifest with the current files. A manifest that already names them is returned unchanged."""
        if manifest.version > self.version:
            return manifest
        operators = {name: self._operator(entry) for name, entry in manifest.operators.items()}
        if all(entry is manifest.operators[name] for name, entry in operators.items()):
            return manifest
        return structs.replace(manifest, operators=operators)

    def _operator(self, entry: OperatorEntry) -> OperatorEntry:
        partitions = entry.partitions
        is_changed = any(partitions.head(p) in self.changelogs for p in partitions) or any(
            ref.file.path in self.snapshots for refs in partitions.snapshots.values() for ref in refs
        )
        if not is_changed:
            return entry
        return structs.replace(
            entry, partitions=PartitionEntries.of({p: self._partition(partitions[p]) for p in partitions})
        )

    def _partition(self, entry: PartitionEntry) -> PartitionEntry:
        return PartitionEntry(
            entry.attempt,
            self.changelogs.get(entry.changelog.path, entry.changelog),
            tuple(self.snapshots.get(ref.file.path, ref) for ref in entry.snapshots),
        )


def new_path(version: int) -> str:
    """Return a new path for a record about versions up to ``version``."""
    return f"{REWRITTEN}/{version}-{uuid.uuid4().hex}.json"


def version_of(path: str) -> int:
    """Return the highest version that a record is about."""
    return int(path.rpartition("/")[2].partition("-")[0])


# The record of the checkpoint that a state belongs to, for state that is stored outside the checkpoint.
#
# Such a state is found by the query id, which a copy of a checkpoint shares with the original. So the state records
# where its checkpoint is: the newest record counts.


CHECKPOINTS = "checkpoints"


class CheckpointPlace(Struct, frozen=True):
    """``checkpoints/<number>.json``: the state belongs to the checkpoint at that location, from this record on."""

    number: int
    checkpoint_location: str

    def is_at(self, checkpoint_location: str) -> bool:
        """Return whether a location is this place. A link to a local directory is the same place."""
        return _canonical(self.checkpoint_location) == _canonical(checkpoint_location)


def checkpoint_command(verb: str, checkpoint_location: str, state_base: str, options: Mapping[str, str]) -> str:
    """Return ``statestore checkpoint <verb>`` for a checkpoint, as a user runs it.

    Values of storage options, which may be secrets, are replaced by "...".
    """
    words = ["statestore", "checkpoint", verb, checkpoint_location, "--state-location", state_base]
    for name in sorted(options):
        words += ["--storage-option", f"{name}=..."]
    return shlex.join(words)


def values_in_words(options: Mapping[str, str]) -> str:
    """Return instructions for the values that ``checkpoint_command`` leaves out; empty if there are none."""
    if not options:
        return ""
    return (
        "\nReplace '...' with the values of your program. Leave secrets to the environment, such as "
        "AWS_SECRET_ACCESS_KEY."
    )


def is_inside(state_location: str, checkpoint_location: str) -> bool:
    """Return whether the state is inside the checkpoint, so that both are copied and moved together."""
    if state_location.startswith(f"{checkpoint_location.rstrip('/')}/"):
        return True  # the default
    return _canonical(state_location).startswith(f"{_canonical(checkpoint_location)}/")


def _canonical(location: str) -> str:
    parsed = parse_location(location)
    return os.path.realpath(parsed.prefix) if parsed.kind == "local" else parsed.text


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
        return fencing.place_path(manifest.epoch, manifest.sequence)
    return fencing.numbered_path(fencing.MANIFESTS, manifest.id)


def schema_path(schema_id: str) -> str:
    """Return the path of a schema."""
    return f"schemas/{schema_id}.json"


class ManifestLog:
    """The manifests of one query, as one coordinator sees and extends them.

    ``epochs`` are its epochs, ``savepoints`` the records of its savepoints, ``folds`` copies of manifests.
    ``manifests`` has the manifests that were read, by id, as they were written. ``rewritten`` are the paths of the
    records of rewritten files that the newest manifest names; ``chain`` applies these records. ``damages`` has an error
    message by path: for each damaged manifest that ``refresh`` has skipped, or, if no manifest was skipped, for the
    first gap of ``chain`` (``has_gaps``). ``_sequence`` is that of the last manifest of the claimed epoch that is known
    to exist.
    """

    def __init__(self, storage: CheckpointStorage, coordinator_id: str) -> None:
        self.storage = storage
        self.manifests: dict[int, Manifest] = {}
        self._files = fencing.RecordFiles(storage)
        self.epochs = fencing.Epochs(self._files, coordinator_id)
        self.savepoints = SavepointRecords(self._files)
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
        """Claim the next epoch, then read all manifests: in this order no acknowledged manifest can be missed."""
        paths = self.epochs.claim(run_id, layouts, schema_ids, ends_run=ends_run)
        self._sequence = 0
        # If the newest is gone by now, another coordinator has claimed the state since: this one writes nothing more.
        self._read(paths)

    def refresh(
        self, folded: Callable[[], Iterable[Manifest]] | None = None, *, passes_over_damage: bool = False
    ) -> None:
        """Read the manifests that are not known yet.

        ``folded`` returns the result of ``folds.read``, if it is under way.

        Raises ``DamagedFileError``. ``passes_over_damage`` is for readers: a damaged manifest that is older than the
        newest one is recorded in ``damages`` instead. The newest one must be readable, because only its parents are
        valid. Raises ``MissingFileError`` if the newest manifest of each of ``LISTINGS`` listings is gone before it is
        read.
        """
        errors: dict[str, DamagedFileError] = {}
        missing: str | None = None
        for _ in range(LISTINGS):
            listed = self.storage.list(f"{fencing.MANIFESTS}/")
            # A reader may be suspended between the listing and its reads. If the newest manifest is gone by then, a
            # newer one exists, and the older ones that still exist lead to a version that is no longer current.
            paths = [path for path, size in listed if size != len(fencing.FENCE)]
            missing = self._read(paths, folded, errors if passes_over_damage else None)
            if missing is None:
                break
            folded = None
        if missing is not None:
            raise MissingFileError(
                f"{self.storage.full_location(missing)} was the newest manifest in a listing, and was gone before it "
                f"was read, as those of {LISTINGS - 1} listings before: the storage answers slower than the query "
                "makes versions. Try again."
            )
        head = self.head()
        for path, error in errors.items():
            if head is None or not _is_older(path, head):
                raise error
        self.damages = {path: str(error) for path, error in sorted(errors.items())}

    def _read(
        self,
        paths: Iterable[str],
        folded: Callable[[], Iterable[Manifest]] | None = None,
        damages: dict[str, DamagedFileError] | None = None,
    ) -> str | None:
        """Read the manifests at some paths. Return the newest path if its manifest is gone, else None.

        ``folded`` reads copies of many manifests at once. ``damages`` gets the errors of damaged manifests by path;
        without it the first one raises ``DamagedFileError``.
        """
        listed = {path for path in paths if path.endswith(".json")}
        if folded is None and len(listed) > len(self.manifests) + FEW:
            folded = self.folds.read
        if folded is not None:
            copies = {manifest_path(copy): copy for copy in folded()}
            self.manifests.update({copies[path].id: copies[path] for path in copies.keys() & listed})
        missing = sorted(listed - {manifest_path(manifest) for manifest in self.manifests.values()})
        # Maintenance may remove a manifest between listing and reading. Such a manifest is not needed; if it were,
        # walking the chain would say so, unless it is the newest one.
        read = self._files.read_all(missing, Manifest, damages)
        self.manifests.update({manifest.id: manifest for manifest in read})
        newest = max(listed, key=_age, default=None)
        seen = {*map(manifest_path, read), *(damages or ())}
        return newest if newest in missing and newest not in seen else None

    def last_id(self) -> int:
        """Return the highest checkpoint id that was ever given to a manifest or a savepoint."""
        return max((*self.manifests, *self.savepoints.ids()), default=0)

    def head(self) -> Manifest | None:
        """Return the newest manifest of the highest epoch. Later manifests of lower epochs are ignored."""
        return max(self.manifests.values(), key=lambda m: (m.epoch, m.id), default=None)

    def chain(self, *, leaves_out: bool = False) -> dict[int, Manifest]:
        """Return the manifest of each version, along the parents of the head, as far as they are kept.

        They name the current files: files that a record of ``rewritten`` gives up are replaced. Raises
        ``MissingFileError`` and ``DamagedFileError`` if a parent is missing or wrong. With ``leaves_out`` the chain
        skips that version, and ``damages`` says why.
        """
        head = self.head()
        self.has_gaps = False
        self.rewritten = () if head is None else head.rewritten
        self._records = {path: self._records.get(path) or self.record(path) for path in self.rewritten}

        def manifest(manifest_id: int) -> Manifest | None:
            current = self.manifests.get(manifest_id)
            if current is not None:
                for record in self._records.values():
                    current = record.of(current)
            return current

        def gap(child: Manifest, error: MissingFileError | DamagedFileError) -> Manifest | None:
            self.has_gaps = True
            if not self.damages:  # the manifests that ``refresh`` has skipped explain the gap better
                self.damages = {f"{fencing.MANIFESTS}/": str(error)}
            # The manifest written last before the missing one has the same versions below: a completed version does not
            # change, and a rollback first writes the version that it returns to again.
            older = [m for m in self.manifests.values() if m.id < (child.parent or 0)]
            last = max(older, key=lambda m: (m.epoch, m.id), default=None)
            return None if last is None else manifest(last.id)

        return chain.walk(
            None if head is None else manifest(head.id), manifest, self._name, gap if leaves_out else None
        )

    def record(self, path: str) -> RewrittenFiles:
        """Read a record of rewritten files. Raises ``MissingFileError`` or ``DamagedFileError``."""
        return self._files.read(path, RewrittenFiles)

    def has_news(self) -> bool:
        """Return whether storage has a manifest that is newer than all that are known. One listing."""
        newest = max(map(manifest_path, self.manifests.values()), default="")
        return any(size != len(fencing.FENCE) for _, size in self.storage.list(f"{fencing.MANIFESTS}/", after=newest))

    def obsolete_records(self, chain_from: int) -> list[str]:
        """Return the paths of the records that no manifest of a version from ``chain_from`` on needs."""
        paths = [path for path, _ in self.storage.list(f"{REWRITTEN}/") if path not in self.rewritten]
        return [path for path in paths if version_of(path) < chain_from]

    def put_record(self, path: str, record: RewrittenFiles) -> None:
        """Write a record of rewritten files; it counts from the manifest on that names it."""
        self._files.create(path, record)

    def unneeded(self, kept: Collection[int]) -> list[Manifest]:
        """Return the manifests that are older than the newest of ``kept`` and not among them."""
        newest = max(kept, default=0)
        return [manifest for i, manifest in list(self.manifests.items()) if i < newest and i not in kept]

    def forget(self, kept: Collection[int]) -> None:
        """Forget the manifests that are ``unneeded``."""
        for manifest in self.unneeded(kept):
            del self.manifests[manifest.id]

    def append(self, manifest: Manifest, counter: CheckpointIDCounter) -> Manifest:
        """Write a manifest durably at the next place of the epoch, with a new id if its own is taken.

        Return the written one.

        Raises ``FencedError`` if another coordinator has taken over: then the manifest is not written. If an earlier
        call has written it and its answer was lost, it is found at its place and adopted. The manifest names the
        records of rewritten files that the last one named, too, except those about versions that are no longer kept.
        """
        records = dict.fromkeys((*self.rewritten, *manifest.rewritten))
        kept_records = tuple(path for path in records if version_of(path) >= manifest.chain_from)
        manifest = msgspec.structs.replace(manifest, rewritten=kept_records)
        while True:
            placed = msgspec.structs.replace(manifest, epoch=self.epoch, sequence=self._sequence + 1)
            path = manifest_path(placed)
            try:
                self._files.create(path, placed)
            except FileExistsInStorageError:
                content = self.storage.get(path)
                if content == fencing.FENCE:
                    raise self.epochs.fenced(path) from None
                earlier = unseal(content, Manifest, self.storage.full_location(path))
                self._note_written(earlier)
                if manifest.id <= earlier.id:
                    counter.ensure_above(max(self.manifests))
                    manifest = msgspec.structs.replace(manifest, id=counter.get_and_increment())
                continue
            self._note_written(placed)
            return placed

    def _note_written(self, written: Manifest) -> None:
        self.manifests[written.id] = written
        self.rewritten = written.rewritten
        self._sequence = written.sequence

    def _name(self, manifest_id: int) -> str:
        """Name a manifest for messages. Its file's name has its epoch, which is unknown if the manifest is missing."""
        manifest = self.manifests.get(manifest_id)
        if manifest is not None:
            return self.storage.full_location(manifest_path(manifest))
        after = min(manifest_path(m) for m in self.manifests.values() if m.id > manifest_id)
        return f"Manifest {manifest_id}, a file before {self.storage.full_location(after)} by its name,"

    def newest_place(self) -> CheckpointPlace | None:
        """Return the newest record of the checkpoint's place; None for a state that does not record it."""
        numbers = self._files.numbers(CHECKPOINTS)
        return self._files.read(fencing.numbered_path(CHECKPOINTS, numbers[-1]), CheckpointPlace) if numbers else None

    def record_place(self, checkpoint_location: str, previous: CheckpointPlace | None) -> CheckpointPlace:
        """Write the record that follows ``previous``; return it, or the one that another process has written first."""
        place = CheckpointPlace(1 if previous is None else previous.number + 1, checkpoint_location)
        path = fencing.numbered_path(CHECKPOINTS, place.number)
        try:
            self._files.create(path, place)
        except FileExistsInStorageError:
            return self._files.read(path, CheckpointPlace)
        return place

    def query_file(self) -> QueryFile | None:
        """Return ``query.json``, or None if it does not exist."""
        return self._files.read_or_none(QUERY_FILE, QueryFile)

    def ensure_query_file(self, content: QueryFile) -> None:
        """Write ``query.json`` once."""
        self._files.ensure(QUERY_FILE, seal(content))

    def ensure_schema(self, schema_id: str, schema: str) -> None:
        """Write a schema, a JSON string, once."""
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
    """Return the sort key of a manifest's path: those of earlier releases have no epoch in their names."""
    place = fencing.place_in(path)
    return (0, (fencing.numbers_of([path])[0], 0)) if place is None else (1, place)


def _is_older(path: str, head: Manifest) -> bool:
    """Return whether an unreadable manifest is older than ``head``. Only its path is known."""
    place = fencing.place_in(path)
    if place is not None:
        return place < (head.epoch, head.sequence)
    return bool(head.sequence) or fencing.numbers_of([path]) < [head.id]


# The schema history of an operator's versions.


def schema_history(chain: Mapping[int, Manifest], operator: str) -> list[tuple[str, int, int]]:
    """Return the schema id, the first and the last version of each stretch of one schema, the oldest first.

    ``chain`` has a manifest per version, as many as are retained.
    """
    written = [(v, chain[v].operators[operator].schema_id) for v in sorted(chain) if operator in chain[v].operators]
    stretches = []
    for schema_id, of_schema in groupby(written, key=lambda one: one[1]):
        versions = [version for version, _ in of_schema]
        stretches.append((schema_id, versions[0], versions[-1]))
    return stretches
