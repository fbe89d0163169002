"""The reference to a file of the state: path, size and digest."""

from __future__ import annotations

from msgspec import Struct


class FileRef(Struct, frozen=True):
    """A file below the state location: its relative path, size in bytes, and xxh3-128 hex digest."""

    path: str
    size: int
    digest: str
