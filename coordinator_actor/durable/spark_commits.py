"""Spark's own files of a query: ``commits/`` and ``offsets/``, its batches and their times; ``metadata``, its id."""

from __future__ import annotations

import json
from typing import NamedTuple

import msgspec
from msgspec import Struct

from backends.decoders import json_decoder
from backends.exceptions import DamagedFileError, MissingFileError
from backends.spans import Pool
from backends.storage.checkpoint_storage import CheckpointStorage
from coordinator_actor.messages import BatchTimes

METADATA = "metadata"
"""Spark's file with the query id."""


class SparkCommits:
    """Spark's own ``commits/`` and ``offsets/`` of a checkpoint: the batches that are committed, and planned.

    Created for each run: during a run, Spark's plans do not change. Several threads may call, because the offsets that
    ``times`` remembers are replaced as a whole. ``SparkLogs`` shares the answers among threads.
    """

    def __init__(self, storage: CheckpointStorage) -> None:
        self._storage = storage
        self._last_times: tuple[int, _OffsetSeqMetadata] | None = None
        self._begun: int | None = None

    @property
    def used(self) -> dict[str, int]:
        """Return the counts of requests to Spark's directory: ``CheckpointStorage.used``."""
        return self._storage.used

    def next_batch(self) -> int:
        """Return the batch that Spark begins with: the last planned one, or the one after it if that is committed.

        As Spark does it (``MicroBatchExecution.populateStartOffsets``), whatever was removed from either directory.
        """
        with Pool(1) as pool:  # neither request needs the other's answer
            last_begun = pool.submit(self.last_begun)
            done = self.last_committed()
            begun = self._begun = last_begun.result()
        if begun is None:
            return 0 if done is None else done + 1
        return begun + 1 if done is not None and done >= begun else begun

    def had_begun(self, batch_id: int) -> bool:
        """Return whether a batch was planned at the last call of ``next_batch``."""
        return self._begun is not None and batch_id <= self._begun

    def last_begun(self) -> int | None:
        """Return the last batch that Spark has planned; None if there is none."""
        return self._last("offsets")

    def last_committed(self) -> int | None:
        """Return the last batch that Spark has committed; None if there is none."""
        return self._last("commits")

    def _last(self, directory: str) -> int | None:
        names = [path.rsplit("/", 1)[-1] for path, _ in self._storage.list(f"{directory}/")]
        return max((int(n) for n in names if n.isdigit()), default=None)

    def has_begun(self, batch_id: int) -> bool:
        """Return whether a batch is planned. A planned batch has the same rows whenever it is run again."""
        return self._storage.exists(f"offsets/{batch_id}")

    def has(self, batch_id: int) -> bool:
        """Return whether a batch is committed."""
        return self._storage.exists(f"commits/{batch_id}")

    def committed_ms(self, batch_id: int) -> int | None:
        """Return when a batch was committed, in ms since 1970 by the clock of the storage; None if it is not."""
        return self._storage.modified_ms(f"commits/{batch_id}")

    def times(self, batch_id: int) -> BatchTimes:
        """Return the times of a batch that Spark has planned.

        Rows are late by the watermark of the batch before, which was read for that batch: tasks wait for one request.
        Raises ``MissingFileError``, and ``DamagedFileError`` if a file is not as Spark writes it.
        """
        last, before = self._last_times, batch_id - 1
        own = self._offsets(batch_id)
        late = 0
        if batch_id > 0:
            late = (last[1] if last is not None and last[0] == before else self._offsets(before)).batchWatermarkMs
        self._last_times = (batch_id, own)
        return BatchTimes(own.batchTimestampMs, own.batchWatermarkMs, late)

    def sources(self) -> PlannedSources | None:
        """Return what the offsets of the last planned batch say about the query's sources; None if there is no batch.

        Also None if sources have names (``v2`` with Spark's source evolution): names, not places, identify them.
        """
        last = self.last_begun()
        if last is None:
            return None
        version, _, *lines = self._storage.get(f"offsets/{last}").rstrip(b"\n").split(b"\n")
        if version == b"v1":
            offsets = {str(place).encode(): line for place, line in enumerate(lines)}
        else:
            offsets = {place: offset for place, _, offset in (line.partition(b":") for line in lines)}
            if not all(place.isdigit() for place in offsets):
                return None
        numbered = frozenset(int(place) for place, offset in offsets.items() if offset.isdigit())
        rates = frozenset(place for place in numbered if self._is_rate(place))
        return PlannedSources(len(lines) if version == b"v1" else None, numbered, rates)

    def _is_rate(self, place: int) -> bool:
        """Return whether a source records its start time, as a ``rate`` source does."""
        try:
            version, begun_ms = self._storage.get(f"sources/{place}/0").split(b"\n")
        except (MissingFileError, ValueError):
            return False
        return version == b"v1" and begun_ms.isdigit()

    def _offsets(self, batch_id: int) -> _OffsetSeqMetadata:
        path = f"offsets/{batch_id}"
        lines = self._storage.get(path).split(b"\n")
        try:
            return json_decoder(_OffsetSeqMetadata).decode(lines[1])
        except (IndexError, msgspec.MsgspecError) as error:
            where = self._storage.full_location(path)
            raise DamagedFileError(
                f"{where} does not say the times of its batch as Spark writes them: {error}"
            ) from error


class PlannedSources(NamedTuple):
    """The sources of the last planned batch.

    ``num_sources`` is None in offsets of format 2, which leave out a source without data. ``numbered`` are the places
    of sources whose offsets are plain numbers. Among them are ``rates``, the places of ``rate`` sources, such as those
    that make batches on a quiet stream.
    """

    num_sources: int | None
    numbered: frozenset[int]
    rates: frozenset[int]


def query_id_of(checkpoint: CheckpointStorage) -> str:
    """Return the query id of a checkpoint location; raises ``MissingFileError`` or ``DamagedFileError``."""
    name = checkpoint.full_location(METADATA)
    try:
        content = json.loads(checkpoint.get(METADATA))
    except MissingFileError as error:
        raise MissingFileError(
            f"{name} does not exist: {checkpoint.location} is not a checkpoint location of a query that has started."
        ) from error
    except ValueError as error:
        raise DamagedFileError(f"{name} is damaged: {error}") from error
    match content:
        case {"id": str(query_id)}:
            return query_id
    raise DamagedFileError(f"{name} is damaged: it has no query id.")


def write_query_id(checkpoint: CheckpointStorage, query_id: str) -> None:
    """Give a checkpoint another query id, which the next start of its query uses. The write is atomic."""
    # Hadoop's checksum of the old content, on a local disk. Without it, nothing is checked.
    checkpoint.delete(f".{METADATA}.crc")
    checkpoint.replace(METADATA, json.dumps({"id": query_id}, separators=(",", ":")).encode())


class _OffsetSeqMetadata(Struct):
    """The second line of a file in ``offsets/``, as Spark names it."""

    batchWatermarkMs: int
    batchTimestampMs: int
