"""Records of the savepoints that were begun, also to hold a run that is being stopped with one."""

from __future__ import annotations

from msgspec import Struct

from coordinator_actor.durable.record_files import RecordFiles, numbered_path, numbers_of

DIRECTORY = "savepoint-ids"
RELEASED = ".released"
KEPT_RECORDS = 20
"""At most this many records are kept. The newest one says which ids are taken; a hold is the last, or nearly."""


class SavepointRecord(Struct, frozen=True):
    """``savepoint-ids/<id>.json``: a savepoint was begun. Its own metadata file says whether it was finished.

    With ``stop``, no batch of the run ``run_id`` after the version may run before the driver of the run says so.
    """

    checkpoint_id: int
    version: int
    location: str
    created_ms: int
    run_id: str
    stop: bool


def savepoint_record_path(checkpoint_id: int) -> str:
    """Return the path of the record of a savepoint."""
    return numbered_path(DIRECTORY, checkpoint_id)


def _released_path(checkpoint_id: int) -> str:
    return savepoint_record_path(checkpoint_id).removesuffix(".json") + RELEASED


class SavepointRecords:
    """The savepoint records of one query."""

    def __init__(self, files: RecordFiles) -> None:
        self._files = files

    def create(self, record: SavepointRecord) -> None:
        """Write durably that a savepoint takes a checkpoint id. Raises ``FileExistsInStorageError``."""
        self._files.create(savepoint_record_path(record.checkpoint_id), record)

    def ids(self) -> list[int]:
        """Return the checkpoint ids that savepoints have taken, ascending."""
        return self._files.numbers(DIRECTORY)

    def all(self) -> list[SavepointRecord]:
        """Return the records of the last savepoints that were begun, by ascending id."""
        return self._read(self.ids())

    def _read(self, ids: list[int]) -> list[SavepointRecord]:
        return self._files.read_all([savepoint_record_path(i) for i in ids], SavepointRecord)

    def hold_of(self, run_id: str) -> SavepointRecord | None:
        """Return the savepoint that a run was being stopped with. None if there is none, or if it was released.

        The run may do no batch after the version of that savepoint.
        """
        there = [path for path, _ in self._files.storage.list(f"{DIRECTORY}/")]
        held = [r for r in self._read(numbers_of(there)) if r.stop and r.run_id == run_id]
        return next((r for r in reversed(held) if _released_path(r.checkpoint_id) not in there), None)

    def obsolete(self, held: int | None) -> list[str]:
        """Return the paths of the records that are not kept; ``held`` is kept in any case."""
        old = [i for i in self.ids()[:-KEPT_RECORDS] if i != held]
        return [path for i in old for path in (savepoint_record_path(i), _released_path(i))]

    def release(self, checkpoint_id: int) -> None:
        """Write durably that the savepoint has failed that a run was to be stopped with. The run goes on."""
        self._files.ensure(_released_path(checkpoint_id), b"")
