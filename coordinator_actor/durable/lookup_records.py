"""``lookups/``: which version of this state another query's batch has looked up, so that the batch reads it again.

A record is made once, by create-if-absent, before the batch reads anything. Spark may run a batch any number of times,
on any executors, and in any order of its tasks: all of them find the same record.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from backends.exceptions import FileExistsInStorageError
from backends.ids import check_name
from backends.storage.checkpoint_storage import CheckpointStorage
from coordinator_actor.durable.record_files import RecordFiles, numbered_path

LOOKUPS = "lookups"


class LookupRecord(Struct, frozen=True):
    """A batch has looked up ``version``, which run ``made_by`` has made ("": nobody, the empty version 0).

    ``at_ms`` is when it did so first, in ms since 1970: what has expired by then is not there, whenever it is looked up
    again.
    """

    version: int
    made_by: str
    at_ms: int


class LookupRecords:
    """The records of lookups in one state. ``by`` is the id of the query that looks up."""

    def __init__(self, storage: CheckpointStorage) -> None:
        self._files = RecordFiles(storage)

    @staticmethod
    def path(by: str, batch_id: int) -> str:
        """Return the path of a record. Raises ``InvalidStateStoreArgument`` for an id that no directory can have."""
        check_name("a query that looks up", by)
        return numbered_path(f"{LOOKUPS}/{by}", batch_id)

    def full_location(self, by: str, batch_id: int) -> str:
        """Return the address of a record, for messages."""
        return self._files.storage.full_location(self.path(by, batch_id))

    def find(self, by: str, batch_id: int) -> LookupRecord | None:
        """Return the record of a batch, or None. Raises ``DamagedFileError``, ``StorageError``."""
        return self._files.read_or_none(self.path(by, batch_id), LookupRecord)

    def make(self, by: str, batch_id: int, record: LookupRecord) -> LookupRecord:
        """Write the record of a batch, and return the one that counts: another one's, if that was first."""
        path = self.path(by, batch_id)
        try:
            self._files.create(path, record)
        except FileExistsInStorageError:
            return self._files.read(path, LookupRecord)
        return record

    def batches(self) -> dict[str, list[int]]:
        """List the batches that have records, ascending, by the query that looked up. One listing."""
        found: dict[str, list[int]] = {}
        for path, _ in self._files.storage.list(f"{LOOKUPS}/"):
            _, by, name = path.split("/", 2)
            number = name.removesuffix(".json")
            if name.endswith(".json") and number.isdecimal():
                found.setdefault(by, []).append(int(number))
        return {by: sorted(batches) for by, batches in found.items()}

    def remove(self, by: str, batches: Sequence[int]) -> None:
        """Remove the records of batches."""
        self._files.storage.delete_all([self.path(by, batch_id) for batch_id in batches])
