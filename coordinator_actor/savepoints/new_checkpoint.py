"""Makes a new checkpoint, with the state of a savepoint, with rewritten state or with given rows.

Everything is checked before anything is written. ``query.json`` with the id of the new query is written first, then the
snapshots of all partitions and the manifest; Spark's ``sources``, ``offsets`` and ``commits`` before or after these;
and Spark's ``metadata`` with that id last. Before ``metadata`` exists, Spark gives the query an id of its own, and the
coordinator refuses the query, since ``query.json`` names another id. Where the state lies elsewhere, there is no state
of Spark's id at the version that ``commits`` ask for. So whoever dies half-way never leaves a checkpoint that starts
with only a part of the state. (With a manifest but without ``offsets`` and ``commits`` the query would be refused as
well: Spark would begin with batch 0.)

The place is taken by a file that only one can create: ``query.json`` where the state lies in the checkpoint, else a
file of its own in the checkpoint, for then each caller has a state of its own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from backends.encoding.operator_schema import OperatorSchema
from backends.exceptions import FileExistsInStorageError
from backends.formats.changelog import ChangelogMeta
from backends.formats.manifest import Manifest, OperatorEntry
from backends.formats.sealed import seal
from backends.storage.checkpoint_storage import CheckpointStorage, OpenStorage
from coordinator_actor.checkpoints.checkpoint_id import CheckpointIDCounter
from coordinator_actor.durable.checkpoint_place import is_inside
from coordinator_actor.durable.manifests import QUERY_FILE, ManifestLog, QueryFile
from coordinator_actor.durable.spark_commits import METADATA
from coordinator_actor.exceptions import SavepointError
from coordinator_actor.savepoints.partition_builder import STORE

CLAIM = "statestore-claim"
"""Whoever creates this file makes the checkpoint, whose state lies elsewhere."""
_SPARKS_OWN = ("offsets", "commits", "sources", "state", "statestore")


@dataclass(frozen=True)
class NewCheckpoint:
    """A checkpoint location, and the state of its query at ``version``, with which the query begins.

    ``how`` says in names and messages how the state came there, as "restored".
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
        """Return the run that the state counts as made by."""
        return f"{self.how}-{self.query_id}"

    @cached_property
    def _log(self) -> ManifestLog:
        return ManifestLog(self.state, self.how)

    def check_place(self, source: CheckpointStorage | None = None, what: str = "") -> None:
        """Raise ``SavepointError`` unless the place is new, and outside of ``source``, which is ``what``."""
        target = _canonical(self.checkpoint)
        if source is not None and (target == _canonical(source) or target.startswith(f"{_canonical(source)}/")):
            raise SavepointError(
                f"{self.checkpoint.location} lies in the {what} {source.location}: choose a directory outside of it."
            )
        held = [name for name in _SPARKS_OWN if self.checkpoint.list(name)]
        held += [name for name in (METADATA, f".{METADATA}.crc", CLAIM) if self.checkpoint.exists(name)]
        if held or self.state.list():
            raise SavepointError(
                f"The state needs a new checkpoint location, and in {self.checkpoint.location} there is "
                f"{', '.join(held) or self.state.location} already. Choose another, or remove it if it was left by a "
                "call that failed."
            )

    def claim(self) -> None:
        """Take the place. Raises ``SavepointError`` if somebody else has just taken it, and leaves nothing there."""
        storage, path = (self.state, QUERY_FILE) if self._has_state_inside else (self.checkpoint, CLAIM)
        query = seal(QueryFile(self.query_id, self.key_groups))
        try:
            storage.put_new(path, query)
        except FileExistsInStorageError as error:
            raise SavepointError(f"Somebody else is making a checkpoint at {storage.location} now.") from error
        if not self._has_state_inside:
            if self.checkpoint.exists(METADATA):  # whoever has finished meanwhile has given the claim back
                self.checkpoint.delete(CLAIM)
                raise SavepointError(f"Somebody else has just made a checkpoint at {self.checkpoint.location}.")
            self.state.put_new(QUERY_FILE, query)

    @property
    def _has_state_inside(self) -> bool:
        return is_inside(self.state.location, self.checkpoint.location)

    def write_schemas(self, schemas: Iterable[OperatorSchema]) -> None:
        """Write the schemas that the manifest will name."""
        for schema in schemas:
            self._log.ensure_schema(schema.id, schema.to_json())

    def changelog_meta(self, operator: str, partition: int, num_partitions: int, origin: str) -> ChangelogMeta:
        """Return the metadata of the head of a partition; ``origin`` names the source of the state.

        Its base is no version here: nobody may take the changelog for the first changes to the empty version 0.
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
        """Remove everything that was written here. Only for whoever has claimed the place: it was empty before."""
        self.checkpoint.delete(METADATA)  # first of all: a write that failed may have been done
        self.state.delete_all([path for path, _ in self.state.list() if path != QUERY_FILE])
        for directory in ("offsets", "commits", "sources"):
            self.checkpoint.delete_all([path for path, _ in self.checkpoint.list(directory)])
        self.state.delete(QUERY_FILE)  # last of all: until then the place is taken
        if not self._has_state_inside:
            self.checkpoint.delete(CLAIM)


def _canonical(storage: CheckpointStorage) -> str:
    return os.path.realpath(storage.location) if storage.is_local else storage.location
