"""Makes a new checkpoint, with the state of a savepoint, with rewritten state or with given rows.

All checks run before the first write. ``query.json`` with the id of the new query is written first, then the snapshots
of all partitions and the manifest; Spark's ``sources``, ``offsets`` and ``commits`` before or after these; and Spark's
``metadata`` with that id last. Before ``metadata`` exists, Spark gives the query a new id, and the coordinator rejects
the query, because ``query.json`` names another id. If the state is stored outside the checkpoint, no state of Spark's
id exists at the version that ``commits`` require. So a crash half-way never leaves a checkpoint that starts with only a
part of the state. (With a manifest but without ``offsets`` and ``commits`` the query would be rejected as well: Spark
would begin with batch 0.)

A file with create-if-absent claims the place: ``query.json`` if the state is inside the checkpoint, else a separate
file in the checkpoint, because then each caller has a separate state.
"""

from __future__ import annotations

import json
import logging
import os
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory

from backends.conf import StateStoreConf
from backends.encoding.operator_schema import OperatorSchema
from backends.encoding.sorted_pairs import SortedPairs
from backends.engines.engine import backend_of
from backends.exceptions import FileExistsInStorageError
from backends.formats import snapshot
from backends.formats.changelog import ChangelogMeta, Changes, write_changelog
from backends.formats.local_state import LocalState
from backends.formats.manifest import Manifest, OperatorEntry, PartitionEntry, changelog_path, seal
from backends.formats.snapshot import StoredSnapshot
from backends.spans import Pool
from backends.storage.checkpoint_storage import CheckpointStorage, OpenStorage
from coordinator_actor.checkpoints.pending_checkpoint import CheckpointIDCounter
from coordinator_actor.durable.manifests import QUERY_FILE, ManifestLog, QueryFile, is_inside
from coordinator_actor.durable.spark_commits import METADATA
from coordinator_actor.exceptions import SavepointError

log = logging.getLogger(__name__)

# Makes a version of one partition only from its pairs: for restored savepoints and initial states.


STORE = "default"


def build_partition(
    storage: CheckpointStorage,
    meta: ChangelogMeta,
    families: Collection[str],
    pairs: Iterable[tuple[str, SortedPairs]],
    conf: StateStoreConf,
    *,
    is_distinct: bool = False,
    scratch: Path | None = None,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> tuple[PartitionEntry, int]:
    """Write the version ``meta.version`` of a partition: a changelog without changes as its head, and a snapshot.

    ``pairs`` come by column family, each batch sorted. If a key comes several times, the last pair counts, and a null
    value removes the key; ``is_distinct`` says that no key comes twice. ``meta.base`` must not name a changelog, so
    that this changelog cannot be confused with changes to the empty version 0. ``scratch`` is a local directory for
    temporary files. Also returns the number of pairs. Raises ``StorageError``.
    """
    path = changelog_path(meta.operator, meta.num_partitions, meta.partition, STORE, meta.version, uuid.uuid4().hex)
    empty = Changes({family: SortedPairs.empty() for family in families})
    changelog = storage.put_new(path, write_changelog(empty, meta, conf.compression))
    built, rows = build_snapshot(
        storage,
        path,
        meta.version,
        families,
        pairs,
        conf,
        is_distinct=is_distinct,
        scratch=scratch,
        is_cancelled=is_cancelled,
    )
    return PartitionEntry(meta.attempt, changelog, (built.ref,)), rows


def build_snapshot(
    storage: CheckpointStorage,
    head: str,
    version: int,
    families: Collection[str],
    pairs: Iterable[tuple[str, SortedPairs]],
    conf: StateStoreConf,
    *,
    is_distinct: bool = False,
    scratch: Path | None = None,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> tuple[StoredSnapshot, int]:
    """Write a snapshot of a partition at ``version``, which the changelog at the path ``head`` has made.

    The files are in the directory of that changelog, and contain only ``pairs``. See ``build_partition`` for the rest.
    """
    backend = backend_of(conf)
    empty = Changes({family: SortedPairs.empty() for family in families})
    with TemporaryDirectory(prefix="statestore-build-", dir=scratch) as directory:
        captured = Path(directory) / "snapshot"
        captured.mkdir()
        engine = backend.engine(Path(directory) / "engine", conf)
        try:
            rows = 0

            def counted() -> Iterator[tuple[str, SortedPairs]]:
                nonlocal rows
                for family, batch in pairs:
                    rows += len(batch)
                    yield family, batch

            if is_distinct:
                engine.load_sorted(counted(), LocalState.unfinished(head))
            else:
                for family, batch in pairs:
                    engine.prepare(Changes({family: batch}))(LocalState())
                engine.prepare(empty)(LocalState())
                rows = sum(batch.num_rows for family in families for batch in engine.scan(None, None, family))
            state = LocalState(version, head, rows)
            engine.prepare(empty)(state)
            engine.capture(captured)()
        finally:
            engine.close()
        with Pool(conf.upload_threads, thread_name_prefix="statestore-upload") as pool:
            prepared = snapshot.prepare(
                storage,
                head.rpartition("/")[0],
                backend.name,
                captured,
                state,
                earlier=None,
                digests=snapshot.Digests(),
                pool=pool,
                is_cancelled=is_cancelled,
            )
    return snapshot.store_alone(storage, prepared), rows


CLAIM = "statestore-claim"
"""The caller that creates this file makes the checkpoint, whose state is stored outside it."""
_SPARKS_OWN = ("offsets", "commits", "sources", "state", "statestore")


@dataclass(frozen=True)
class NewCheckpoint:
    """A checkpoint location, and the state at ``version`` that its query begins with.

    ``how`` names the origin of the state in names and messages, for example "restored".
    """

    checkpoint: CheckpointStorage
    state: CheckpointStorage
    query_id: str
    key_groups: int
    version: int
    how: str

    @classmethod
    def at(
        cls,
        checkpoint_location: str,
        state_location: str | None,
        options: Mapping[str, str],
        *,
        query_id: str,
        key_groups: int,
        version: int,
        how: str,
        open_storage: OpenStorage = CheckpointStorage.open,
    ) -> NewCheckpoint:
        """Return the checkpoint at a location; nothing is written.

        ``state_location`` is the base directory of ``spark.statestore.location``, if the session has that.
        """
        checkpoint = open_storage(checkpoint_location, options)
        base = state_location or None
        own = f"{checkpoint.location.rstrip('/')}/statestore"
        place = own if base is None else f"{base.rstrip('/')}/{query_id}"
        return cls(checkpoint, open_storage(place, options), query_id, key_groups, version, how)

    @property
    def run_id(self) -> str:
        """Return the run that is recorded as the maker of the state."""
        return f"{self.how}-{self.query_id}"

    @cached_property
    def _log(self) -> ManifestLog:
        return ManifestLog(self.state, self.how)

    def check_place(self, source: CheckpointStorage | None = None, what: str = "") -> None:
        """Raise ``SavepointError`` unless the place is new, and outside of ``source``, which is ``what``."""
        target = _canonical(self.checkpoint)
        if source is not None and (target == _canonical(source) or target.startswith(f"{_canonical(source)}/")):
            raise SavepointError(
                f"{self.checkpoint.location} is inside the {what} {source.location}: choose a directory outside of it."
            )
        files = [name for name in _SPARKS_OWN if self.checkpoint.list(name)]
        files += [name for name in (METADATA, f".{METADATA}.crc", CLAIM) if self.checkpoint.exists(name)]
        if files or self.state.list():
            raise SavepointError(
                f"The state needs a new checkpoint location, and in {self.checkpoint.location} there is "
                f"{', '.join(files) or self.state.location} already. Choose another, or remove it if it was left by a "
                "call that failed."
            )

    @contextmanager
    def made(self, say: Callable[[str], None]) -> Iterator[None]:
        """Claim the place for a block that writes the checkpoint, and finish it.

        If anything fails, remove all files again; if that fails too, log which places to remove.
        Raises ``SavepointError`` if another process has claimed the place.
        """
        self.claim()
        try:
            if not self._has_state_inside:
                self.state.put_new(QUERY_FILE, self._query)
            yield
            self.finish()
        except BaseException:
            with suppress(Exception):  # the files must go, and the first error must come out
                say(f"removing the files written to {self.checkpoint.location}")
            try:
                self.remove()
            except Exception:
                places = dict.fromkeys((self.checkpoint.location, self.state.location))
                log.warning("%s could not be removed; remove it manually", " and ".join(places), exc_info=True)
            raise

    def claim(self) -> None:
        """Claim the place. If another process has just claimed it, raise ``SavepointError`` and write nothing."""
        storage, path = (self.state, QUERY_FILE) if self._has_state_inside else (self.checkpoint, CLAIM)
        try:
            storage.put_new(path, self._query)
        except FileExistsInStorageError as error:
            raise SavepointError(f"Another process is making a checkpoint at {storage.location} now.") from error
        if not self._has_state_inside and self.checkpoint.exists(METADATA):
            self.checkpoint.delete(CLAIM)  # another process has finished in between and released its claim
            raise SavepointError(f"Another process has just made a checkpoint at {self.checkpoint.location}.")

    @property
    def _query(self) -> bytes:
        return seal(QueryFile(self.query_id, self.key_groups))

    @property
    def _has_state_inside(self) -> bool:
        return is_inside(self.state.location, self.checkpoint.location)

    def write_schemas(self, schemas: Iterable[OperatorSchema]) -> None:
        """Write the schemas that the manifest will name."""
        for schema in schemas:
            self._log.ensure_schema(schema.id, schema.to_json())

    def changelog_meta(self, operator: str, partition: int, num_partitions: int, origin: str) -> ChangelogMeta:
        """Return the metadata of the head of a partition; ``origin`` names the source of the state.

        Its base is not a version here, so that the changelog cannot be confused with the first changes to the empty
        version 0.
        """
        attempt = f"{self.how}-{origin.rpartition('/')[2]}"
        return ChangelogMeta(
            self.run_id, operator, partition, num_partitions, self.version, attempt, f"{self.how}/{origin}", STORE
        )

    def append(self, operators: Mapping[str, OperatorEntry], now_ms: int) -> None:
        """Write the manifest; ``now_ms`` is in ms since 1970."""
        self._log.claim(self.run_id)
        manifest = Manifest(
            id=0,
            parent=None,
            version=self.version,
            epoch=self._log.epoch,
            run_id=self.run_id,
            created_ms=now_ms,
            operators=dict(operators),
            oldest=self.version,
            chain_from=self.version,
        )
        self._log.append(manifest, CheckpointIDCounter())

    def finish(self) -> None:
        """Write Spark's ``metadata``, as the last file: only with that file the directory is a checkpoint."""
        self.checkpoint.put_new(METADATA, json.dumps({"id": self.query_id}, separators=(",", ":")).encode())
        if not self._has_state_inside:
            self.checkpoint.delete(CLAIM)

    def remove(self) -> None:
        """Remove all files of this place.

        Only for the process that has claimed it: the place was empty before, so all are its own.
        """
        self.checkpoint.delete(METADATA)  # first of all: a failed write may have succeeded
        self.state.delete_all([path for path, _ in self.state.list() if path != QUERY_FILE])
        for directory in ("offsets", "commits", "sources"):
            self.checkpoint.delete_all([path for path, _ in self.checkpoint.list(directory)])
        self.state.delete(QUERY_FILE)  # last of all: until then the place is claimed
        if not self._has_state_inside:
            self.checkpoint.delete(CLAIM)


def _canonical(storage: CheckpointStorage) -> str:
    return os.path.realpath(storage.location) if storage.is_local else storage.location
