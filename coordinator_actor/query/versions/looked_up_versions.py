"""The versions that other queries' batches look up: each is recorded, and kept while its batch may run again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from backends.exceptions import VersionNotFoundError
from backends.formats.manifest import Manifest
from coordinator_actor.durable.lookup_records import LookupRecord, LookupRecords

PINNED_BATCHES = 2
"""Of each query that looks up, the versions of its last batches are kept: Spark begins a batch before it knows that the
one before is committed.
"""
KEPT_BATCHES = 100
"""At most this many records of each query are kept, as many as the batches to which a user can go back (Spark's
default).
"""
REMOVED_EVERY = 16
PIN_SECONDS = 24 * 3600.0
"""A query that has not looked anything up for this many seconds keeps no version any more."""
LOOKUP_RECORD_SECONDS = 30 * PIN_SECONDS
"""The records of a query that has not looked anything up for this many seconds are removed."""


class Versions(Protocol):
    """The versions of a state, as a coordinator knows them, or as storage shows them."""

    @property
    def completed(self) -> int:
        """Return the last completed version."""

    @property
    def chain(self) -> Mapping[int, Manifest]:
        """Return a manifest for each version."""

    @property
    def readable(self) -> Sequence[int]:
        """Return the versions that can be read."""

    def pin(self, holder: int | str, version: int) -> None:
        """Keep a version."""

    def unpin(self, holder: int | str) -> None:
        """Let go of the version that a holder has kept."""


class LookedUpVersions:
    """Resolves, records and keeps looked-up versions. The lock of the run guards what is kept."""

    def __init__(self, records: LookupRecords, versions: Versions) -> None:
        self._records = records
        self._versions = versions
        self._pins: dict[str, dict[int, LookupRecord]] = {}
        self._used: dict[str, float] = {}
        """By query that looks up, when it did last, by the coordinator's clock: also a batch that is run again."""
        self._under_way = 0
        self._seen: dict[tuple[str, int], LookupRecord] = {}
        """The records that the last look has found, so that each is read once."""

    def resolve(self, by: str, batch_id: int, now: float, lock: AbstractContextManager[object]) -> LookupRecord:
        """Return the record of a batch; the completed version is recorded for a batch that has none.

        ``lock`` is that of the run. It is not held while storage is asked: the run goes on with its own batches. Raises
        ``VersionNotFoundError`` if the recorded version is not there any more as it was.
        """
        with lock:
            self._used[by] = now
            record = self._pins.get(by, {}).get(batch_id)
            if record is not None and self._why_gone(by, batch_id, record):
                # The user may have followed the remedy, and removed the record.
                record = None
                self._unpin(by, batch_id)
        if record is None:
            record = self._records.find(by, batch_id)
        if record is None:
            with lock:
                self._under_way += 1
                holder = f"lookup {self._under_way} under way"
                completed = self._versions.completed
                made = LookupRecord(completed, self._maker(completed), int(now * 1000))
                self._versions.pin(holder, completed)  # before the record is there, retention may come
            try:
                record = self._records.make(by, batch_id, made)  # another task may have been first: its record counts
                with lock:
                    self._pin(by, batch_id, record)
            finally:
                with lock:
                    self._versions.unpin(holder)
            if batch_id % REMOVED_EVERY == 0:
                old = [b for b in self._records.batches().get(by, ()) if b <= batch_id - KEPT_BATCHES]
                self._records.remove(by, old)
        with lock:
            if why_gone := self._why_gone(by, batch_id, record):
                raise VersionNotFoundError(
                    f"{why_gone} Remove {self._records.full_location(by, batch_id)}, and the batch looks up the "
                    "version that is completed then."
                )
            self._pin(by, batch_id, record)
        return record

    def _maker(self, version: int) -> str:
        manifest = self._versions.chain.get(version)
        return "" if manifest is None else manifest.run_id

    def _why_gone(self, by: str, batch_id: int, record: LookupRecord) -> str:
        """Return why a recorded version cannot be read as it was; "" if it can."""
        readable, version = self._versions.readable, record.version
        if version not in readable:
            return (
                f"Batch {batch_id} of query {by} has looked up version {version}, and must read it again, but the "
                f"versions {readable[0]} to {readable[-1]} are kept."
            )
        if version and self._maker(version) != record.made_by:
            return (
                f"Batch {batch_id} of query {by} has looked up version {version} as run {record.made_by} had made it. "
                f"The query that is looked up went back since, and run {self._maker(version)} has made it anew."
            )
        return ""

    # -- keeping -------------------------------------------------------------------------------

    def _pin(self, by: str, batch_id: int, record: LookupRecord) -> None:
        held = {**self._pins.get(by, {}), batch_id: record}
        self._pins[by] = {b: held[b] for b in sorted(held)[-PINNED_BATCHES:]}
        self._keep(by)

    def _unpin(self, by: str, batch_id: int) -> None:
        held = self._pins.get(by, {})
        if batch_id in held:
            left = {b: record for b, record in held.items() if b != batch_id}
            if left:
                self._pins[by] = left
            else:
                del self._pins[by]
            self._keep(by)

    def _keep(self, by: str) -> None:
        held = self._pins.get(by)
        if held:
            self._versions.pin(f"lookups of {by}", min(record.version for record in held.values()))
        else:
            self._versions.unpin(f"lookups of {by}")

    def look(self, now: float, lock: AbstractContextManager[object]) -> None:
        """Take up the records in storage, which earlier coordinators and readers of storage have made too.

        Lets go of queries that have not looked anything up for ``PIN_SECONDS``, and removes the records of those that
        have not for ``LOOKUP_RECORD_SECONDS``. ``lock`` is the lock of the run, as in ``resolve``. The run's
        maintenance alone calls this. Raises ``StorageError``.
        """
        with lock:
            pinned = [(by, batch_id) for by, held in self._pins.items() for batch_id in held]
        listed = self._records.batches()
        newest = [(by, batch_id) for by, batches in listed.items() for batch_id in batches[-PINNED_BATCHES:]]
        seen = {key: self._seen.get(key) or self._records.find(*key) for key in newest}
        self._seen = {key: record for key, record in seen.items() if record is not None}
        with lock:
            last = {by: self._used.get(by, 0.0) for by in {*listed, *self._pins}}
            for by, held in self._pins.items():
                last[by] = max(last[by], *(record.at_ms / 1000 for record in held.values()))
            for (by, _), record in self._seen.items():
                last[by] = max(last[by], record.at_ms / 1000)
            for by, batch_id in pinned:
                if batch_id not in listed.get(by, ()):  # the user has removed the record
                    self._unpin(by, batch_id)
            for (by, batch_id), record in self._seen.items():
                if now - last[by] <= PIN_SECONDS and batch_id not in self._pins.get(by, {}):
                    self._pin(by, batch_id, record)
            for by in [by for by in self._pins if now - last[by] > PIN_SECONDS]:
                del self._pins[by]
                self._keep(by)
            self._used = {by: used for by, used in self._used.items() if now - used <= PIN_SECONDS}
        for by in [by for by in listed if last[by] and now - last[by] > LOOKUP_RECORD_SECONDS]:
            self._records.remove(by, listed[by])
