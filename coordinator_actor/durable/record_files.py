"""Sealed JSON records below the state location of a query. Many of them are numbered by their file names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from msgspec import Struct

from backends.exceptions import DamagedFileError, FileExistsInStorageError, MissingFileError
from backends.formats.sealed import seal, unseal
from backends.storage.checkpoint_storage import CheckpointStorage
from backends.tracing.spans import Pool

T = TypeVar("T", bound=Struct)
READERS = 16
"""The number of threads that read several records at once."""


def numbered_path(directory: str, number: int) -> str:
    """Return the path of a numbered record. Paths sort by number."""
    return f"{directory}/{number:020d}.json"


def numbers_of(paths: Iterable[str]) -> list[int]:
    """Return the numbers of those of some paths that are numbered records, ascending."""
    names = [path.rsplit("/", 1)[-1] for path in paths]
    return sorted(int(n.removesuffix(".json")) for n in names if n.endswith(".json") and n[:-5].isdigit())


class RecordFiles:
    """Writes and reads the records of one query."""

    def __init__(self, storage: CheckpointStorage) -> None:
        self.storage = storage

    def numbers(self, directory: str) -> list[int]:
        """Return the numbers of the records in a directory, ascending."""
        return numbers_of(path for path, _ in self.storage.list(f"{directory}/"))

    def create(self, path: str, record: Struct) -> None:
        """Write a record durably. Raises ``FileExistsInStorageError`` if the path is taken."""
        self.storage.put_new(path, seal(record))

    def ensure(self, path: str, content: bytes) -> None:
        """Write a file unless the path is taken. The path must say the content."""
        try:
            self.storage.put_new(path, content)
        except FileExistsInStorageError:
            return

    def read(self, path: str, kind: type[T]) -> T:
        """Read a record. Raises ``MissingFileError`` or ``DamagedFileError``."""
        return unseal(self.storage.get(path), kind, self.storage.full_location(path))

    def read_or_none(self, path: str, kind: type[T]) -> T | None:
        """Read a record, or return None if it does not exist. Raises ``DamagedFileError``."""
        try:
            return self.read(path, kind)
        except MissingFileError:
            return None

    def read_all(
        self, paths: list[str], kind: type[T], damaged: Callable[[str, DamagedFileError], None] | None = None
    ) -> list[T]:
        """Read several records, without those that do not exist.

        Raises ``DamagedFileError``, unless ``damaged`` is to hear of the path and the error instead.
        """

        def read(path: str) -> T | None:
            try:
                return self.read_or_none(path, kind)
            except DamagedFileError as error:
                if damaged is None:
                    raise
                damaged(path, error)
                return None

        if len(paths) < 2:
            found = [read(path) for path in paths]
        else:
            with Pool(READERS) as pool:
                found = list(pool.map(read, paths))
        return [record for record in found if record is not None]
