"""The files of one location on object storage or in memory, through obstore, with the methods of ``LocalFiles``.

Errors are obstore's own. A call is one request, unless it says otherwise; ``sending`` repeats what fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import obstore
from obstore.exceptions import BaseError

from backends.storage.object_stores import ObjectStores
from backends.storage.sending.failures import is_out_of_range

if TYPE_CHECKING:
    from obstore import GetOptions

MOST_FILES_AT_ONCE = 1000
"""S3 removes at most this many files with one request, and lists at most this many on one page."""
PART_BYTES, _PARTS_AT_ONCE, _MOST_PARTS = 8 << 20, 4, 10_000
"""The bytes of a part, in which large files go up, a few at once; and the most parts that S3 takes."""
_PIECE_BYTES = 4 << 20


class ObjectFiles:
    """Reads, writes and removes the files below ``prefix``. Many threads and processes may do so at once.

    ``note_more`` is told of requests beyond the first one of a call: their verb and their number.
    """

    def __init__(self, stores: ObjectStores, prefix: str, note_more: Callable[[str, int], None]) -> None:
        self._stores = stores
        root = prefix.strip("/")
        self._prefix = f"{root}/" if root else ""
        self._note_more = note_more

    def put_new(self, path: str, data: bytes) -> None:
        """Write a file that must not exist; raises ``AlreadyExistsError`` if it does, or if it is being written."""
        obstore.put(self._stores.plain, self._prefix + path, data, mode="create")

    def replace(self, path: str, data: bytes) -> None:
        """Write a file in place of the one that may be there."""
        obstore.put(self._stores.plain, self._prefix + path, data)

    def put_file(self, path: str, source: Path | bytes, size: int) -> None:
        """Write a large file in parts, some at once. obstore repeats a part that fails, at a pace of its own."""
        part = max(PART_BYTES, -(-size // _MOST_PARTS))
        if size > part:
            # Each part, and to begin and to end them: one more than the parts.
            self._note_more("write", -(-size // part) + 1)
        store = self._stores.in_parts
        obstore.put(store, self._prefix + path, source, chunk_size=part, max_concurrency=_PARTS_AT_ONCE)

    def read(self, path: str) -> bytes:
        """Return a file's content; raises ``FileNotFoundError``."""
        return bytes(obstore.get(self._stores.plain, self._prefix + path).bytes())

    def read_ranges(self, path: str, starts: Sequence[int], lengths: Sequence[int]) -> list[bytes]:
        """Return parts of a file; one part is shorter where the file ends before. Raises ``FileNotFoundError``.

        Parts that lie near to each other are one request. If one of several begins after the end, all are empty.
        """
        store, key = self._stores.plain, self._prefix + path
        try:
            if len(starts) == 1:
                return [bytes(obstore.get_range(store, key, start=starts[0], length=lengths[0]))]
            return [bytes(part) for part in obstore.get_ranges(store, key, starts=starts, lengths=lengths)]
        except BaseError as error:
            if is_out_of_range(error):
                return [b""] * len(starts)
            raise

    def pieces(self, path: str, start: int) -> Iterator[bytes]:
        """Read a file from ``start`` on, in pieces. Raises ``FileNotFoundError``."""
        try:
            rest: GetOptions = {"range": {"offset": start}} if start else {}
            found = obstore.get(self._stores.plain, self._prefix + path, options=rest)
        except BaseError as error:
            if start and is_out_of_range(error):
                return  # all was read when the connection broke
            raise
        yield from found.stream(min_chunk_size=_PIECE_BYTES)

    def modified_ms(self, path: str) -> int:
        """Return when a file was written, in ms since 1970, by the second. Raises ``FileNotFoundError``."""
        return int(obstore.head(self._stores.plain, self._prefix + path)["last_modified"].timestamp() * 1000)

    def remove(self, path: str) -> None:
        """Remove a file. Some storages raise ``FileNotFoundError`` if there is none."""
        obstore.delete(self._stores.plain, self._prefix + path)

    def remove_all(self, paths: Sequence[str]) -> None:
        """Remove at most ``MOST_FILES_AT_ONCE`` files; some storages stop at one that is missing, as by ``remove``."""
        obstore.delete(self._stores.plain, [self._prefix + path for path in paths])

    def listed(self, directory: str, after: str | None) -> list[tuple[str, int]]:
        """Return path and size of every file in a directory and below, sorted by path; see ``LocalFiles``."""
        key = (self._prefix + directory).rstrip("/") if directory.strip("/") else self._prefix.rstrip("/")
        offset = None if after is None else self._prefix + after
        found = obstore.list(self._stores.plain, prefix=key or None, offset=offset).collect()
        self._note_more("list", len(found) // MOST_FILES_AT_ONCE)  # further pages
        return sorted((str(meta["path"]).removeprefix(self._prefix), int(meta["size"])) for meta in found)
