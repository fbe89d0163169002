"""The reference to a file of the state: path, size and digest."""

from __future__ import annotations

from msgspec import Struct


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
