"""Times at which each version of a query's state was completed, and so the version that was seen at a time."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cached_property

from backends.exceptions import InvalidStateStoreArgument, VersionNotFoundError
from backends.formats.manifest import Manifest
from backends.storage.checkpoint_storage import CheckpointStorage
from coordinator_actor.durable.checkpoint_records import CheckpointRecords
from coordinator_actor.durable.record_files import RecordFiles
from coordinator_actor.durable.spark_commits import SparkCommits
from coordinator_actor.reading.stored_versions import StateVersions


@dataclass(frozen=True)
class VersionTimes:
    """The versions that can be read, ascending, and when each was completed, in ms since 1970.

    The next version's manifest says when a version was completed. Of the last version, and of one after which the
    coordinator was replaced, the history of checkpoints does, 10 s later at most. Where neither does, the time counts
    at which Spark committed the batch, a moment before. The empty version 0 was always there.
    """

    location: str
    versions: tuple[int, ...]
    completed_ms: tuple[int, ...]

    @classmethod
    def of(cls, versions: StateVersions) -> VersionTimes:
        """Return the times of the versions that storage shows. Raises ``StorageError``."""
        found, times = [], list[int]()
        others = _OtherTimes(versions)
        for version in versions.readable:
            following, manifest = versions.chain.get(version + 1), versions.chain.get(version)
            known = None if following is None else following.parent_completed_ms
            at = known if known is not None else 0 if manifest is None else others.completed_ms(manifest)
            found.append(version)
            times.append(max(at, times[-1] if times else at))
        return cls(versions.place.checkpoint_location, tuple(found), tuple(times))

    def version_at(self, ms: int) -> int:
        """Return the version that was the last completed one at a time.

        Raises ``VersionNotFoundError`` for a time before the first version that is kept.
        """
        index = bisect_right(self.completed_ms, ms) - 1
        if index < 0:
            raise self.too_early(ms)
        return self.versions[index]

    def too_early(self, ms: int) -> VersionNotFoundError:
        """Return the error for a time before the first version that is kept."""
        first = (
            "none is kept" if not self.versions else f"version {self.versions[0]}, of {_in_words(self.completed_ms[0])}"
        )
        return VersionNotFoundError(
            f"Nobody knows what the state at {self.location} was at {_in_words(ms)}: the first version that is kept is "
            f"{first}. More are kept with a higher min_versions_to_retain (StateStoreConf)."
        )


class _OtherTimes:
    """Times of versions whose successor does not record them. Reads one file, and one name for each version."""

    def __init__(self, versions: StateVersions) -> None:
        self._place = versions.place

    @cached_property
    def _in_history(self) -> dict[int, int]:
        """By the id of the manifest."""
        storage = CheckpointStorage.open(self._place.state_location, self._place.options)
        records = CheckpointRecords(RecordFiles(storage)).load()
        return {record.id: record.completed_ms for record in records if record.completed_ms is not None}

    @cached_property
    def _commits(self) -> SparkCommits:
        return SparkCommits(CheckpointStorage.open(self._place.checkpoint_location, self._place.options))

    def completed_ms(self, manifest: Manifest) -> int:
        known = self._in_history.get(manifest.id)
        if known is None:
            known = self._commits.committed_ms(manifest.version - 1)
        return manifest.created_ms if known is None else max(known, manifest.created_ms)


def ms_of(time: str | datetime) -> int:
    """Return a time in ms since 1970. A text is of ISO 8601; without a zone the time is UTC.

    Raises ``InvalidStateStoreArgument``.
    """
    try:
        given = datetime.fromisoformat(time) if isinstance(time, str) else time
        aware = given if given.tzinfo is not None else given.replace(tzinfo=timezone.utc)
        return int(aware.timestamp() * 1000)
    except (AttributeError, TypeError, ValueError) as error:
        raise InvalidStateStoreArgument(
            f'as_of={time!r} is no time: give a datetime, or a text such as "2026-01-01T00:00:00" (UTC).'
        ) from error


def _in_words(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, timezone.utc).isoformat(sep=" ", timespec="milliseconds")
