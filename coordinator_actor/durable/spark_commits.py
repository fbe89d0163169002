"""Spark's own files of a query: ``commits/`` and ``offsets/``, its batches and their times; ``metadata``, its id."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

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

        Follows Spark (``MicroBatchExecution.populateStartOffsets``), also if files of either directory were removed.
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
        return max(self._numbers("offsets"), default=None)

    def last_committed(self) -> int | None:
        """Return the last batch that Spark has committed; None if there is none."""
        return max(self._numbers("commits"), default=None)

    def committed(self) -> list[int]:
        """Return the committed batches whose record Spark still keeps."""
        return self._numbers("commits")

    def _numbers(self, directory: str) -> list[int]:
        names = [path.rsplit("/", 1)[-1] for path, _ in self._storage.list(f"{directory}/")]
        return [int(name) for name in names if name.isdigit()]

    def has_begun(self, batch_id: int) -> bool:
        """Return whether a batch is planned. A planned batch has the same rows whenever it is run again."""
        return self._storage.exists(f"offsets/{batch_id}")

    def has(self, batch_id: int) -> bool:
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

    def watermark_ms(self, batch_id: int) -> int | None:
        """Return the watermark of a batch, in ms since 1970; None if there was none, or Spark has no plan of the batch.

        Raises ``DamagedFileError`` if its file is not as Spark writes it.
        """
        try:
            return self._offsets(batch_id).batchWatermarkMs or None
        except MissingFileError:
            return None

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


@dataclass(frozen=True)
class SparkBatch:
    """A committed batch of Spark. ``digest`` tells it from a batch of the same number after a rollback."""

    number: int
    digest: str

    @classmethod
    def newest(cls, storage: CheckpointStorage) -> SparkBatch | None:
        """Return the last committed batch of a checkpoint; None if there is none, or just being rolled back."""
        number = SparkCommits(storage).last_committed()
        return None if number is None else cls.at(storage, number)

    @classmethod
    def at(cls, storage: CheckpointStorage, number: int) -> SparkBatch | None:
        """Return a committed batch; None if Spark has not committed it, or has removed its records."""
        committed_ms = SparkCommits(storage).committed_ms(number)
        try:
            plan = storage.get(f"offsets/{number}")  # includes the time of planning
        except MissingFileError:
            return None
        if committed_ms is None:
            return None
        return cls(number, hashlib.sha256(plan + str(committed_ms).encode()).hexdigest()[:16])


T = TypeVar("T")


class _SingleFlight(Generic[T]):
    """One request for all threads that ask for the same batch, and its answer until another batch is requested."""

    def __init__(self, ask: Callable[[int], T]) -> None:
        self._ask = ask
        self._lock = threading.Lock()
        self._batch: int | None = None
        self._answer: Future[T] = Future()

    def at(self, batch_id: int) -> T:
        """Return the answer for a batch. A false answer and an error are not kept: the next caller asks again."""
        while True:
            with self._lock:
                is_ours = self._batch != batch_id
                if is_ours:
                    self._batch, self._answer = batch_id, Future()
                answer = self._answer
            if is_ours:
                return self._asked(batch_id, answer)
            # The thread that asked raises its error, and a False may be older than this call: then ask again.
            if answer.exception() is None and (result := answer.result()):
                return result

    def _asked(self, batch_id: int, answer: Future[T]) -> T:
        result: T | None = None
        try:
            result = self._ask(batch_id)
        except BaseException as error:
            self._forget(answer)
            answer.set_exception(
                error if isinstance(error, Exception) else RuntimeError("the thread that asked has ended")
            )
            raise
        if not result:
            self._forget(answer)
        answer.set_result(result)
        return result

    def _forget(self, answer: Future[T]) -> None:
        with self._lock:
            if self._answer is answer:
                self._batch = None


class SparkLogs:
    """Spark's ``commits/`` and ``offsets/`` as one run reads them: each question once, outside the lock of the run.

    A batch waits for two writes, its changes and its manifest. Before them its first task needs two facts: the batch
    before is committed, and the times of the batch. The driver reports a committed batch while Spark plans the next
    one, so that the first fact is known when the tasks come. Callers that need the same answer at the same time share
    one request. Many threads may share an object; the lock of the run guards ``times_for_tasks`` alone.

    ``uses_time``: an operator of the query uses times; otherwise they are not read. ``last_times`` are those that were
    read last, for people; ``rose_at`` is when the current watermark was first read, by the clock of the coordinator.
    """

    def __init__(self, commits: SparkCommits, clock: Callable[[], float], *, uses_time: bool) -> None:
        self._committed = _SingleFlight(commits.has)
        self._times = _SingleFlight(commits.times)
        self._clock = clock
        self._uses_time = uses_time
        self._last: tuple[int, BatchTimes] | None = None
        self._watermark: tuple[int, int] = (-1, 0)
        self._commits = commits
        self.rose_at: float | None = None

    def has(self, batch_id: int) -> bool:
        """Return whether Spark has committed a batch. During a run, a committed batch stays committed."""
        return self._committed.at(batch_id)

    def times(self, batch_id: int) -> BatchTimes:
        """Return the times of a batch that Spark has planned. Raises the errors of ``SparkCommits.times``."""
        return self._times.at(batch_id)

    def watermark_of(self, version: int) -> int | None:
        """Return the watermark of the batch that made a version, in ms since 1970; None without one.

        It waits for storage if neither that batch nor the next one has been opened yet. Raises the errors of
        ``SparkCommits.watermark_ms``.
        """
        last, (known, watermark) = self._last, self._watermark
        if last is not None and last[0] in (version - 1, version):
            return (last[1].watermark_ms if last[0] < version else last[1].late_watermark_ms) or None
        if known != version and version:
            watermark = self._commits.watermark_ms(version - 1) or 0
            self._watermark = (version if watermark else -1), watermark
        return watermark or None

    def look_ahead(self, batch_id: int, *, is_before_open: bool) -> None:
        """Read what opening a batch needs, both at the same time: whether the batch before is committed, and the
        batch's times.

        Raises the errors of ``has`` and ``times``.
        """
        last = self._last
        needs_times = self._uses_time and (last is None or last[0] != batch_id)
        if not is_before_open:
            if needs_times:
                self.times(batch_id)
        elif not needs_times:
            self.has(batch_id - 1)
        else:
            with Pool(1) as pool:
                times = pool.submit(self.times, batch_id)
                self.has(batch_id - 1)
                times.result()

    def times_for_tasks(self, batch_id: int) -> BatchTimes | None:
        """Return the times of a batch; None if no operator uses them. Raises what ``times`` raises."""
        if not self._uses_time:
            return None
        if self._last is None or self._last[0] != batch_id:
            times = self.times(batch_id)
            if self.rose_at is None or times.watermark_ms != self.watermark_ms:
                self.rose_at = self._clock()
            self._last = (batch_id, times)
        return self._last[1]

    @property
    def last_times(self) -> BatchTimes | None:
        last = self._last
        return None if last is None else last[1]

    @property
    def watermark_ms(self) -> int:
        """Return the watermark of the batch whose times were read last, in ms since 1970; 0 without one."""
        times = self.last_times
        return 0 if times is None else times.watermark_ms


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
