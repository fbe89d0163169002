"""The reference to a file of the state: path, size and digest; and digests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import xxhash
from msgspec import Struct

_CHUNK_BYTES = 4 << 20


class FileRef(Struct, frozen=True, omit_defaults=True):
    """A file below the state location: its relative path, size in bytes, and xxh3-128 hex digest.

    ``within`` None: the file lies at ``path``. Otherwise its bytes are a part of the object ``within``, from ``offset``
    on, and ``path`` is only the name by which the content is known.
    """

    path: str
    size: int
    digest: str
    within: str | None = None
    offset: int = 0

    @property
    def stored_in(self) -> str:
        """The path of the object in which the bytes are."""
        return self.path if self.within is None else self.within

    def is_in(self, sizes: Mapping[str, int]) -> bool:
        """Return whether all bytes are there, by the sizes of all stored objects; an object that was cut has not."""
        size = sizes.get(self.stored_in, -1)
        return size == self.size if self.within is None else size >= self.offset + self.size


def digest(data: bytes) -> str:
    """Return the digest that ``FileRef`` carries: xxh3-128, hex."""
    return xxhash.xxh3_128_hexdigest(data)


def file_digest(path: Path) -> str:
    """Return the digest of a local file's content."""
    hashed = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK_BYTES):
            hashed.update(chunk)
    return hashed.hexdigest()
