"""Layers of later changes and before-images over the engine, by which reads see another version than the engine's."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeAlias

from backends.formats.changelog import ChangelogMeta, Changes
from backends.formats.local_state import LocalState
from backends.host_memory import Claim
from backends.storage.file_ref import FileRef


@dataclass(frozen=True)
class BeforeImage:
    """The pairs that changes replace, and what counts their memory. The changes have the same keys."""

    changes: Changes
    claim: Claim


@dataclass(eq=False)
class Delta:
    """One attempt's durable changes, which lead to a version.

    ``before`` are the pairs that the changes replace, ``apply`` writes the changes to the engine. Both are made by
    background threads while the changelog is written. ``claim`` counts the changes and what ``apply`` holds of them.
    """

    meta: ChangelogMeta
    file: FileRef
    changes: Changes
    before: Future[BeforeImage | None]
    apply: Future[Callable[[LocalState], None]]
    claim: Claim

    @property
    def nbytes(self) -> int:
        """Memory, also that of the before-images once they are there."""
        is_there = self.before.done() and self.before.exception() is None
        before = self.before.result() if is_there else None
        return self.claim.nbytes + (0 if before is None else before.claim.nbytes)


@dataclass(eq=False)
class OlderVersion:
    """A version below the completed one, as the before-images that lead back to it from the version above it.

    ``head``, ``families`` and ``num_keys`` are those of ``version``.
    """

    version: int
    head: str | None
    changes: Changes
    families: frozenset[str]
    num_keys: int | None
    claim: Claim | None = None
    """Counts the memory; None until there is room for it."""

    @property
    def nbytes(self) -> int:
        """Memory."""
        return self.changes.nbytes


Layer: TypeAlias = Delta | OlderVersion


@dataclass(frozen=True)
class VersionView:
    """A version as reads see it: the engine with ``layers`` over it, of which the last one counts most.

    ``head`` is the changelog that made the version, ``families`` are its column families.
    """

    version: int
    layers: tuple[Layer, ...]
    head: str | None
    families: frozenset[str]
