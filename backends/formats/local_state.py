"""``LocalState``: the version that an engine holds, or the mark of an unfinished write. Backends use it."""

from __future__ import annotations

import msgspec

_UNFINISHED = ", unfinished"


class LocalState(msgspec.Struct, frozen=True):
    """The state in an engine: a version, the path of the changelog that made the version, and the number of keys.

    ``head`` None is the empty version 0. ``num_keys`` None: the keys are not counted.
    """

    version: int = 0
    head: str | None = None
    num_keys: int | None = 0

    @classmethod
    def unfinished(cls, head: str | None) -> LocalState:
        """Return the mark of a write to ``head`` that has not ended. No lineage has such a version."""
        return cls(0, f"{head}{_UNFINISHED}", None)

    @property
    def is_unfinished(self) -> bool:
        """Whether this is the mark of a write that has not ended."""
        return self.head is not None and self.head.endswith(_UNFINISHED)
