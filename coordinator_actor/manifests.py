"""A query's durable record: epochs, query.json, schemas, manifests, and Spark's own commits.

After SlateDB: a coordinator claims an epoch before it reads, and checks for a higher one after it
has written and before it answers, so that of two coordinators only one can complete a version.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec
from msgspec import Struct, field

from backends.decoders import json_decoder
from backends.exceptions import DamagedFileError, FileExistsInStorageError, MissingFileError
from backends.formats import chain
from backends.formats.chain import Layout
from backends.formats.manifest import FORMAT_VERSION, Manifest
from backends.formats.sealed import seal, unseal
from backends.storage.checkpoint_storage import CheckpointStorage
from coordinator_actor.checkpoints.checkpoint_id import CheckpointIDCounter
from coordinator_actor.exceptions import FencedError
from coordinator_actor.messages import BatchTimes

T = TypeVar("T", bound=Struct)
READERS = 16


class QueryFile(Struct, frozen=True):
    """``query.json``: whose state this is."""

    query_id: str
    key_groups: int
    format_version: int = FORMAT_VERSION


class EpochFile(Struct, frozen=True):
    """``epochs/<k>.json``: who coordinates, which run, and in which layouts and by which schemas it keeps its operators."""

    epoch: int
    coordinator_id: str
    run_id: str
    layouts: tuple[Layout, ...] = ()
    schema_ids: dict[str, str] = field(default_factory=dict)


class SavepointRecord(Struct, frozen=True):
    """``savepoint-ids/<id>.json``: a savepoint was begun. Its own metadata file says whether it was finished.

    With ``stop`` no batch of the run ``run_id`` behind the version may be done before the run's driver says so.
    """

    checkpoint_id: int
    version: int
    location: str
    created_ms: int
    run_id: str
    stop: bool


def savepoint_record_path(checkpoint_id: int) -> str:
    """Where the record of a savepoint is kept."""
    return f"savepoint-ids/{checkpoint_id:020d}.json"


RELEASED = ".released"


def _released_path(checkpoint_id: int) -> str:
    return savepoint_record_path(checkpoint_id).removesuffix(".json") + RELEASED


def manifest_path(manifest_id: int) -> str:
    """Where a manifest is kept; names sort by id."""
    return f"manifests/{manifest_id:020d}.json"


def epoch_path(epoch: int) -> str:
    """Where the claim of an epoch is kept."""
    return f"epochs/{epoch:020d}.json"


def schema_path(schema_id: str) -> str:
    """Where a schema is kept."""
    return f"schemas/{schema_id}.json"


class ManifestLog:
    """The manifests of one query, as one coordinator sees and extends them under one epoch."""

    def __init__(self, storage: CheckpointStorage, coordinator_id: str) -> None:
        self.storage = storage
        self.epoch = 0
        self.manifests: dict[int, Manifest] = {}
        self._coordinator_id = coordinator_id

    def newest_epoch(self) -> EpochFile | None:
        """The highest claim there is."""
        ids = self._ids("epochs")
        return self._read(epoch_path(ids[-1]), EpochFile) if ids else None

    def superseded(self, run_id: str) -> bool:
        """Whether a run has claimed an epoch and another run a later one."""
        newest = self.newest_epoch()
        if newest is None or newest.run_id == run_id:
            return False
        files = self._read_all([epoch_path(k) for k in self._ids("epochs")], EpochFile)
        return any(f.run_id == run_id for f in files)

    def runs(self) -> dict[str, EpochFile]:
        """The runs that have claimed an epoch, the last one first, with their last claims."""
        files = self._read_all([epoch_path(k) for k in self._ids("epochs")], EpochFile)
        found: dict[str, EpochFile] = {}
        for file in reversed(files):
            found.setdefault(file.run_id, file)
        return found

    def claim(self, run_id: str, layouts: Iterable[Layout] = (), schema_ids: Mapping[str, str] | None = None) -> None:
        """Claim the next epoch, then read all manifests: in this order nothing acknowledged can be missed."""
        while True:
            ids = self._ids("epochs")
            epoch = (ids[-1] if ids else 0) + 1
            claim = EpochFile(epoch, self._coordinator_id, run_id, tuple(layouts), dict(schema_ids or {}))
            try:
                self._create(epoch_path(epoch), claim)
            except FileExistsInStorageError:
                continue
            self.epoch = epoch
            self.refresh()
            return

    def refresh(self) -> None:
        """Read the manifests that are not known yet."""
        missing = [i for i in self._ids("manifests") if i not in self.manifests]
        # One that maintenance has removed since it was listed is not needed; if it were, walking the chain would say so.
        for manifest in self._read_all([manifest_path(i) for i in missing], Manifest):
            self.manifests[manifest.id] = manifest

    def _read_all(self, paths: list[str], kind: type[T]) -> list[T]:
        if len(paths) < 2:
            found = [self._read_or_none(path, kind) for path in paths]
        else:
            with ThreadPoolExecutor(READERS) as pool:
                found = list(pool.map(lambda path: self._read_or_none(path, kind), paths))
        return [record for record in found if record is not None]

    def _read_or_none(self, path: str, kind: type[T]) -> T | None:
        try:
            return self._read(path, kind)
        except MissingFileError:
            return None

    def last_id(self) -> int:
        """The highest checkpoint id that was ever given out: to a manifest or to a savepoint."""
        return max((*self.manifests, *self._ids("savepoint-ids")), default=0)

    def record_savepoint(self, record: SavepointRecord) -> None:
        """Write down, durably, that a savepoint takes a checkpoint id. Raises ``FileExistsInStorageError``."""
        self._create(savepoint_record_path(record.checkpoint_id), record)

    def hold_of(self, run_id: str) -> SavepointRecord | None:
        """The savepoint that a run was being stopped with, and behind which it may do no batch; None if it was let go."""
        released = {path for path, _ in self.storage.list("savepoint-ids/") if path.endswith(RELEASED)}
        held = [r for r in self.savepoints() if r.stop and r.run_id == run_id]
        return next((r for r in reversed(held) if _released_path(r.checkpoint_id) not in released), None)

    def release(self, checkpoint_id: int) -> None:
        """Write down, durably, that a savepoint has failed that a run was to be stopped with: it goes on."""
        self.ensure(_released_path(checkpoint_id), b"")

    def savepoints(self) -> list[SavepointRecord]:
        """The savepoints of this query that were ever begun, by ascending id."""
        return self._read_all([savepoint_record_path(i) for i in self._ids("savepoint-ids")], SavepointRecord)

    def head(self) -> Manifest | None:
        """The newest manifest of the highest epoch; later ones of lower epochs are ignored."""
        return max(self.manifests.values(), key=lambda m: (m.epoch, m.id), default=None)

    def chain(self) -> dict[int, Manifest]:
        """Manifest per version, along the parents of the head, as far as they are kept."""
        return chain.walk(self.head(), self.manifests.get, lambda i: self.storage.full_location(manifest_path(i)))

    def forget(self, kept: Collection[int]) -> list[str]:
        """Let go of manifests that are not ``kept`` and not newer than all of those; returns their paths."""
        newest = max(kept, default=0)
        gone = [i for i in self.manifests if i < newest and i not in kept]
        for i in gone:
            del self.manifests[i]
        return [manifest_path(i) for i in gone]

    def append(self, manifest: Manifest, counter: CheckpointIDCounter) -> Manifest:
        """Write a manifest durably, unless another coordinator has taken over; under the next id if its own is taken.

        Raises ``FencedError``, after which the manifest counts for nothing that this coordinator answers.
        """
        while True:
            try:
                self._create(manifest_path(manifest.id), manifest)
            except FileExistsInStorageError:
                self.check_epoch()
                self.refresh()
                counter.ensure_above(max(self.manifests))
                manifest = msgspec.structs.replace(manifest, id=counter.get_and_increment())
                continue
            self.check_epoch()
            self.manifests[manifest.id] = manifest
            return manifest

    def check_epoch(self) -> None:
        """Raise ``FencedError`` if a higher epoch is claimed. Epochs are claimed one by one, so one look is enough."""
        if self.storage.exists(epoch_path(self.epoch + 1)):
            raise FencedError(
                f"The state at {self.storage.location} has been taken over by another coordinator (epoch {self.epoch + 1}; "
                f"this one has {self.epoch}). Only one Ray cluster may run a query at a time."
            )

    def query_file(self) -> QueryFile | None:
        """``query.json``, if there is one."""
        try:
            return self._read("query.json", QueryFile)
        except MissingFileError:
            return None

    def ensure(self, path: str, content: bytes) -> None:
        """Write a file once; that it exists is as good (its name says its content)."""
        try:
            self.storage.put_new(path, content)
        except FileExistsInStorageError:
            return

    def ensure_query_file(self, content: QueryFile) -> None:
        """Write ``query.json`` once."""
        self.ensure("query.json", seal(content))

    def schema(self, schema_id: str) -> str:
        """The JSON of a stored schema."""
        return self.storage.get(schema_path(schema_id)).decode()

    def _ids(self, directory: str) -> list[int]:
        names = [path.rsplit("/", 1)[-1] for path, _ in self.storage.list(f"{directory}/")]
        return sorted(int(n.removesuffix(".json")) for n in names if n.endswith(".json") and n[:-5].isdigit())

    def _create(self, path: str, content: Struct) -> None:
        self.storage.put_new(path, seal(content))

    def _read(self, path: str, kind: type[T]) -> T:
        return unseal(self.storage.get(path), kind, self.storage.full_location(path))


class SparkCommits:
    """Spark's own ``commits/`` and ``offsets/`` of a checkpoint: the batches that are done, and begun."""

    def __init__(self, storage: CheckpointStorage) -> None:
        self._storage = storage

    def next_batch(self) -> int:
        """The batch that Spark begins with when it starts: the last planned one, or the one behind it if it is committed.

        As Spark does it (``MicroBatchExecution.populateStartOffsets``), whatever has been removed from either directory.
        """
        begun, done = self.last_begun(), self._last("commits")
        if begun is None:
            return 0 if done is None else done + 1
        return begun + 1 if done is not None and done >= begun else begun

    def last_begun(self) -> int | None:
        """The last batch that Spark has planned, None if there is none."""
        return self._last("offsets")

    def _last(self, directory: str) -> int | None:
        names = [path.rsplit("/", 1)[-1] for path, _ in self._storage.list(f"{directory}/")]
        return max((int(n) for n in names if n.isdigit()), default=None)

    def has_begun(self, batch_id: int) -> bool:
        """Whether a batch is planned: if it is run again, it has the same rows."""
        return self._storage.exists(f"offsets/{batch_id}")

    def has(self, batch_id: int) -> bool:
        """Whether a batch is committed."""
        return self._storage.exists(f"commits/{batch_id}")

    def times(self, batch_id: int) -> BatchTimes:
        """The times of a batch that Spark has planned; rows that are late by the watermark of the one before are late.

        Raises ``MissingFileError``, and ``DamagedFileError`` if a file is not as Spark writes it.
        """
        own = self._offsets(batch_id)
        late = self._offsets(batch_id - 1).batchWatermarkMs if batch_id > 0 else 0
        return BatchTimes(own.batchTimestampMs, own.batchWatermarkMs, late)

    def _offsets(self, batch_id: int) -> _OffsetSeqMetadata:
        path = f"offsets/{batch_id}"
        lines = self._storage.get(path).split(b"\n")
        try:
            return json_decoder(_OffsetSeqMetadata).decode(lines[1])
        except (IndexError, msgspec.MsgspecError) as error:
            where = self._storage.full_location(path)
            raise DamagedFileError(
                f"{where} does not say the times of its batch as Spark writes them: {error}"
            ) from error


class _OffsetSeqMetadata(Struct):
    """The second line of a file in ``offsets/``, as Spark names it."""

    batchWatermarkMs: int
    batchTimestampMs: int
