"""``audit/<n>.json``: what was done to a query's state by hand, when and by whom. Records are never removed."""

from __future__ import annotations

import getpass
import socket

from msgspec import Struct, field

from backends.exceptions import FileExistsInStorageError
from backends.storage.checkpoint_storage import CheckpointStorage
from coordinator_actor.durable.record_files import RecordFiles, numbered_path

AUDIT = "audit"


class AuditRecord(Struct, frozen=True):
    """One entry. ``what`` is the name of the function, ``status`` "begun" or "done", ``at_ms`` is in ms since 1970.

    ``by`` is the user and the machine. ``version`` is the newest version that it is about. ``counts`` are numbers of
    keys, rows and files. ``reference`` is what the caller gave, as the number of a request. No record has a key.
    """

    what: str
    status: str
    at_ms: int
    by: str
    operators: tuple[str, ...]
    version: int
    counts: dict[str, int] = field(default_factory=dict)
    reference: str | None = None
    details: dict[str, str] = field(default_factory=dict)


class AuditLog:
    """The audit records of one state."""

    def __init__(self, storage: CheckpointStorage) -> None:
        self._files = RecordFiles(storage)

    def append(self, record: AuditRecord) -> None:
        """Write a record durably after the last one. Raises ``StorageError``."""
        number = max(self._files.numbers(AUDIT), default=0)
        while True:
            number += 1
            try:
                self._files.create(numbered_path(AUDIT, number), record)
            except FileExistsInStorageError:
                continue
            return

    def read(self) -> list[AuditRecord]:
        """Return all records, the oldest first. Raises ``DamagedFileError``."""
        return self._files.read_all([numbered_path(AUDIT, n) for n in self._files.numbers(AUDIT)], AuditRecord)


def caller() -> str:
    """Return the user and the machine of this process, as records name them."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "unknown"
    return f"{user}@{socket.gethostname()}"
