"""The changes of the running batch: durable, and not part of the completed version yet."""

from __future__ import annotations

from collections.abc import Iterator

from backends.formats.changelog import ChangelogMeta
from backends.host_memory import DELTAS, HostMemory
from backends.partition.layers import Delta
from backends.storage.file_ref import FileRef


class PendingChanges:
    """Staged attempts, and the accepted attempt of each version, over a completed version.

    Has no lock of its own: ``HeldVersions.changed`` guards all access.
    """

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self._staged: dict[tuple[int, str], Delta] = {}
        self._accepted: dict[int, Delta] = {}

    def __iter__(self) -> Iterator[Delta]:
        """Return all changes, the staged ones first."""
        yield from self._staged.values()
        yield from self._accepted.values()

    def stage(self, delta: Delta) -> None:
        """Keep an attempt's changes."""
        self._staged[(delta.meta.version, delta.meta.attempt)] = delta

    def accept(self, version: int, attempt: str) -> bool:
        """Have a staged attempt count for its version, in place of an earlier one; False if the attempt is unknown."""
        delta = self._staged.pop((version, attempt), None)
        if delta is None:
            held = self._accepted.get(version)
            return held is not None and held.meta.attempt == attempt
        self._accepted[version] = delta
        self._memory.move(delta.claim, DELTAS)
        return True

    def discard(self, version: int, attempt: str) -> None:
        """Drop an attempt's staged changes; if there are none, its accepted ones."""
        if self._staged.pop((version, attempt), None) is not None:
            return
        accepted = self._accepted.get(version)
        if accepted is not None and accepted.meta.attempt == attempt:
            del self._accepted[version]

    def listed(self) -> list[tuple[ChangelogMeta, FileRef, bool]]:
        """Return all changes, and whether they are accepted; in the order of versions."""
        held = [(d.meta, d.file, False) for d in self._staged.values()]
        held += [(d.meta, d.file, True) for d in self._accepted.values()]
        return sorted(held, key=lambda entry: entry[0].version)

    def is_held(self, version: int) -> bool:
        """Return whether there are changes of an attempt of this version."""
        return version in self._accepted or any(held == version for held, _ in self._staged)

    def accepted_versions(self) -> list[int]:
        """Return the versions that have an accepted attempt."""
        return list(self._accepted)

    def accepted_head(self, version: int) -> str | None:
        """Return the changelog of the accepted attempt of a version; None if there is none."""
        accepted = self._accepted.get(version)
        return None if accepted is None else accepted.file.path

    def accepted_above(self, version: int, head: str | None) -> list[Delta]:
        """Return the accepted changes that lead on from a version, one version after the other."""
        steps: list[Delta] = []
        while (delta := self._accepted.get(version + 1)) is not None and delta.meta.base == head:
            steps.append(delta)
            version, head = version + 1, delta.file.path
        return steps

    def steps(self, base: str | None, version: int, head: str) -> list[Delta] | None:
        """Return the changes that lead from ``base`` to ``version`` as ``head`` made it; None if they are not held.

        No changes if ``head`` is ``base``.
        """
        held = {delta.file.path: delta for delta in self}
        steps: list[Delta] = []
        wanted: str | None = head
        while wanted != base:
            delta = held.pop(wanted, None) if wanted is not None else None
            if delta is None or (not steps and delta.meta.version != version):
                return None
            steps.insert(0, delta)
            wanted = delta.meta.base
        return steps

    def drop_unrelated(self, version: int, head: str | None) -> None:
        """Drop the changes that do not lead on from a completed version."""
        follows = {head}
        for delta in sorted(self, key=lambda d: d.meta.version):
            if delta.meta.version > version and delta.meta.base in follows:
                follows.add(delta.file.path)
        self._staged = {k: d for k, d in self._staged.items() if d.file.path in follows and k[0] > version}
        self._accepted = {v: d for v, d in self._accepted.items() if d.file.path in follows and v > version}

    def clear(self) -> None:
        """Drop all changes."""
        self._staged.clear()
        self._accepted.clear()
