"""A state task's way to its partition: find the owner, read, commit, and continue when a host dies.

A PySpark worker does not join Ray. It knows host addresses from Spark's local properties, and looks into the node's Ray
session directory for newer ones. ``spark_bridge.host.commits`` describes what a host does with a commit.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Literal, Protocol, TypeVar

import pyarrow as pa
from msgspec.structs import replace

from backends import spans
from backends.conf import DEFAULT_FAMILY
from backends.encoding.key_groups import partition_range
from backends.encoding.keys import KeyRange
from backends.encoding.operator_schema import OperatorSchema
from backends.exceptions import HostMemoryBusyError
from backends.load_watch import LoadProgress
from coordinator_actor.exceptions import (
    BatchHeldError,
    QueryBusyError,
    StaleOwnerError,
    UnknownHostError,
    UnknownRunError,
)
from coordinator_actor.messages import BatchTimes, OperatorFigures
from spark_bridge.exceptions import HostUnavailableError, NotOwnerError, other_key_groups
from spark_bridge.task.executor import Endpoints, temporary_file
from spark_bridge.transport import protocol
from spark_bridge.transport.flight_client import HostClient, client_for, forget_client

# Batches that a task keeps until its commit, in memory and beyond a limit on the local disk: changes and output rows.


SPOOL_MEMORY_BYTES = 64 << 20
_LABEL = b"label"


class Spool:
    """Keeps batches of one schema, in the order of their addition. Use it in a ``with`` statement, or ``close`` it.

    The batches can be read several times, one read after the other. ``memory`` is the limit in bytes; beyond it,
    batches go to a file, compressed by ``compression``. The file has no name: it is gone at the end, and if the process
    dies.
    """

    def __init__(
        self, schema: pa.Schema, memory: int = SPOOL_MEMORY_BYTES, compression: Literal["lz4"] | None = "lz4"
    ) -> None:
        self.schema = schema
        self.num_rows = 0
        self.nbytes = 0
        """The bytes of all batches as they are in memory."""
        self._memory = memory
        self._compression = compression
        self._held: list[tuple[str, pa.RecordBatch]] = []
        self._held_bytes = 0
        self._file: IO[bytes] | None = None
        self._writer: pa.RecordBatchStreamWriter | None = None
        self._read: object = None
        """The last read, if nothing was added since."""

    @property
    def is_on_disk(self) -> bool:
        return self._file is not None

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, batch: pa.RecordBatch, label: str = "") -> None:
        """Add a batch with a label; a batch without rows is left out."""
        if not batch.num_rows:
            return
        self._read = None
        self._held.append((label, batch))
        self.num_rows += batch.num_rows
        self.nbytes += batch.nbytes
        self._held_bytes += batch.nbytes
        if self._held_bytes > self._memory:
            self._write()

    def _write(self) -> None:
        if self._writer is None:
            self._file = temporary_file()
            options = pa.ipc.IpcWriteOptions(compression=self._compression)
            self._writer = pa.ipc.new_stream(self._file, self.schema, options=options)
        assert self._file is not None
        self._file.seek(0, os.SEEK_END)  # a read has moved it
        for label, batch in self._held:
            self._writer.write_batch(batch, custom_metadata={_LABEL: label.encode()})
        self._held, self._held_bytes = [], 0

    def batches(self) -> Iterator[pa.RecordBatch]:
        return (batch for _, batch in self.labelled())

    def labelled(self) -> Iterator[tuple[str, pa.RecordBatch]]:
        """Yield all batches with their labels.

        Raises ``RuntimeError`` if another read begins, or a batch is added, before this read has ended.
        """
        read = self._read = object()
        for labelled in self._stored():
            yield labelled
            if self._read is not read:
                raise RuntimeError("Batches that a task keeps were added, or read again, while they were being read.")

    def _stored(self) -> Iterator[tuple[str, pa.RecordBatch]]:
        if self._file is not None:
            # The stream's end is not written yet, so the file is read up to its length.
            end = self._file.seek(0, os.SEEK_END)
            self._file.seek(0)
            with pa.ipc.open_stream(self._file) as reader:
                while self._file.tell() < end:
                    stored = reader.read_next_batch_with_custom_metadata()
                    yield stored.custom_metadata[_LABEL].decode(), stored.batch
        yield from self._held

    def close(self) -> None:
        self._held = []
        if self._file is not None:
            self._file.close()
            self._file = None


RETRIABLE = (HostUnavailableError, NotOwnerError, QueryBusyError, StaleOwnerError, UnknownHostError, UnknownRunError)
"""After these errors the task looks for the owner again."""
RETRY_DELAY = 0.1
"""Seconds before the next search for the owner, at most."""
SOON_DELAY = 0.02
"""Seconds before the first search after a successful call. Each further search waits twice as long. The first one is
soon, because the coordinator confirms a dead process within milliseconds.
"""
HELD_DELAY = 0.5
"""Seconds before a retry of a batch that is held for a savepoint, or of a commit that waits for others."""

T = TypeVar("T")


class _StillLoadingError(Exception):
    """The owner is loading the partition; carries the progress."""

    def __init__(self, host: str, progress: LoadProgress) -> None:
        super().__init__(host, progress)
        self.host = host
        self.progress = progress


_owners: dict[tuple[str, str, int], tuple[str, str]] = {}
"""Owner (address, token) by run id, operator and partition: this worker's cache of locations."""


class TaskStore:
    """The store of one state task: opened at version = batch id, committed once (``StateAccess``).

    When a host dies, a call waits for the new owner and continues there, so that the query does not fail. After
    ``endpoints.timeout`` seconds the call raises ``HostUnavailableError`` naming the last failure. While the owner
    loads the partition, the seconds count from the last progress of the load.

    ``watermark_lag_ms`` is how far behind the watermark of the query the rows of the task may be.
    """

    def __init__(
        self,
        task: protocol.TaskIdentity,
        num_partitions: int,
        num_key_groups: int,
        endpoints: Endpoints,
        watermark_lag_ms: int = 0,
    ) -> None:
        self.num_key_groups = num_key_groups
        self._watermark_lag_ms = watermark_lag_ms
        self._task = task
        self._num_partitions = num_partitions
        self._endpoints = endpoints
        self._key = (task.run_id, task.operator, task.partition)
        self._owner: HostClient | None = None
        self._owner_token = endpoints.token
        self._opened: protocol.OpenReply | None = None
        self._schema: OperatorSchema | None = None
        self._staged = Spool(protocol.COMMIT_SCHEMA, compression=None)
        """The changes, labelled with their column families."""
        self._loaded = LoadProgress()
        self._unreachable = ""
        """The address of the host that did not answer last; the next host that is asked reports it."""

    @property
    def knows_owner(self) -> bool:
        """Return whether an earlier task of this worker found the owner: then the first ``get_many`` may open it."""
        return self._key in _owners

    def open(self) -> None:
        with spans.step("task.open"):
            self._with_owner(lambda owner: None)

    @property
    def batch_id(self) -> int:
        return self._task.batch_id

    def _open_reply(self) -> protocol.OpenReply:
        """Return the owner's answer to ``open``; open the store first if that has not happened yet."""
        if self._opened is None:
            # The owner is known from an earlier task of this worker, and has not opened the store of this task yet.
            self._owner = None
            self.open()
        assert self._opened is not None
        return self._opened

    @property
    def times(self) -> BatchTimes:
        times = self._open_reply().times
        if times is None:
            raise HostUnavailableError(f"The times of batch {self.batch_id} are not known for {self._task.operator!r}.")
        return times.behind(self._watermark_lag_ms) if self._watermark_lag_ms else times

    @property
    def schema(self) -> OperatorSchema:
        if self._schema is None:
            self._schema = OperatorSchema.from_json(self._open_reply().schema)
        return self._schema

    @property
    def key_groups(self) -> tuple[int, int]:
        return partition_range(self._task.partition, self._num_partitions, self.num_key_groups)

    def get_many(self, keys: pa.BinaryArray, column_family: str = DEFAULT_FAMILY) -> pa.BinaryArray:
        """Return values of keys at the version opened; see ``StateAccess``.

        If the owner is known, the same call opens a store that is not open yet.
        """
        task = self._task
        command = protocol.GetCommand(task.run_id, task.operator, task.partition, task.batch_id, column_family)
        with spans.step("task.read", num_keys=len(keys)):
            return self._with_owner(
                lambda owner: owner.get_many(command, keys), lambda owner: owner.open_and_get(task, keys, column_family)
            )

    def scan(
        self, ranges: Sequence[KeyRange], column_family: str = DEFAULT_FAMILY, limit: int | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yield pairs of the ranges, one range after the other; the next owner continues where the last one stopped."""
        task, left, rest = self._task, limit, list(ranges)
        deadline = time.monotonic() + self._endpoints.timeout
        while rest and left != 0:
            command = protocol.ScanCommand(
                task.run_id, task.operator, task.partition, task.batch_id, column_family, left
            )
            try:
                asked = time.monotonic()
                owner = self._with_owner(lambda owner: owner)
                deadline += time.monotonic() - asked  # a search for the owner has its own deadline
                for pairs in owner.scan(command, rest):
                    rest = _ranges_after(rest, pairs.column(0)[-1].as_py())
                    if left is not None:
                        left -= pairs.num_rows
                    yield pairs
                    deadline = time.monotonic() + self._endpoints.timeout
                return
            except RETRIABLE as error:
                self._forget_owner(error)
                if time.monotonic() > deadline:
                    raise self._unavailable(error) from error
                time.sleep(RETRY_DELAY)

    def stage(self, keys: pa.BinaryArray, values: pa.BinaryArray, column_family: str = DEFAULT_FAMILY) -> None:
        self._staged.add(pa.RecordBatch.from_arrays([keys, values], schema=protocol.COMMIT_SCHEMA), column_family)

    def commit(self, figures: OperatorFigures, timings: dict[str, float] | None = None) -> None:
        command = protocol.CommitCommand(self._task, timings or {}, figures, self._staged.nbytes)
        with spans.step("task.commit", nbytes=self._staged.nbytes):
            self._with_owner(lambda owner: owner.commit(command, self._staged.labelled()))
        self._staged.close()

    def close(self) -> None:
        self._staged.close()

    def _with_owner(
        self,
        call: Callable[[HostClient], T],
        opening: Callable[[HostClient], tuple[protocol.OpenReply, T]] | None = None,
    ) -> T:
        """Call the owner; ``opening`` makes the same call to a store that is not open, and opens it."""
        deadline = time.monotonic() + self._endpoints.timeout
        delay = SOON_DELAY
        while True:
            try:
                if self._owner is None and opening is not None and self._key in _owners:
                    opened, answer = self._open_with(opening)
                    if opened.redirect is None:
                        return answer
                return call(self._owner or self._find_owner())
            except _StillLoadingError as loading:
                opening = None  # it would send its keys again and again
                if self._loaded.is_behind(loading.progress):
                    deadline = time.monotonic() + self._endpoints.timeout
                elif time.monotonic() > deadline:
                    raise self._stalled(loading) from None
                self._loaded = loading.progress
                time.sleep(RETRY_DELAY)
            except (BatchHeldError, HostMemoryBusyError):
                # The batch is held for a savepoint that stops the query: Spark ends this task, or the savepoint fails
                # and the batch continues. Or the host has no memory until other commits end.
                opening = None  # it would send its keys again and again
                time.sleep(HELD_DELAY)
                deadline = time.monotonic() + self._endpoints.timeout
            except RETRIABLE as error:
                self._forget_owner(error)
                if time.monotonic() > deadline:
                    raise self._unavailable(error) from error
                time.sleep(delay)
                delay = min(2 * delay, RETRY_DELAY)

    def _unavailable(self, error: Exception) -> HostUnavailableError:
        return HostUnavailableError(
            f"Partition {self._task.partition} of operator {self._task.operator!r} found no owner within "
            f"{self._endpoints.timeout:.0f} s (spark.statestore.recoveryTimeout); last failure: "
            f"{type(error).__name__}: {error}"
        )

    def _stalled(self, loading: _StillLoadingError) -> HostUnavailableError:
        return HostUnavailableError(
            f"Partition {self._task.partition} of operator {self._task.operator!r} is being loaded at {loading.host}, "
            f"and has made no progress for {self._endpoints.timeout:.0f} s (spark.statestore.recoveryTimeout). "
            f"Progress: {loading.progress}. Loaded files are kept for the next attempt. Check whether the storage "
            "of the checkpoint answers."
        )

    def _forget_owner(self, error: Exception) -> None:
        if self._owner is not None and isinstance(error, HostUnavailableError):
            self._give_up(self._owner.address, self._owner_token)
        self._owner = None
        _owners.pop(self._key, None)

    def _open_with(self, opening: Callable[[HostClient], tuple[protocol.OpenReply, T]]) -> tuple[protocol.OpenReply, T]:
        """Open the store at its last known owner; a host that is not the owner any more names the new owner."""
        address, token = _owners[self._key]
        try:
            host = client_for(address, token, self._endpoints.tls)
            opened, answer = opening(host)
        except HostUnavailableError:
            self._give_up(address, token)
            raise
        if opened.loading is not None:
            raise _StillLoadingError(address, opened.loading)
        if opened.redirect is None:
            self._opened_at(host, token, opened)
        else:
            _owners[self._key] = (opened.redirect, token)
        return opened, answer

    def _opened_at(self, host: HostClient, token: str, opened: protocol.OpenReply) -> None:
        if opened.key_groups != self.num_key_groups:
            raise other_key_groups(self._task.operator, self.num_key_groups, opened.key_groups)
        _owners[self._key] = (host.address, token)
        self._owner, self._owner_token, self._opened = host, token, opened
        self._unreachable = ""

    def _find_owner(self) -> HostClient:
        cached = _owners.get(self._key)
        candidates = self._endpoints.candidates() if cached is None else [cached]
        failure: Exception = HostUnavailableError(
            f"no state store host is known; looked into {self._endpoints.host_files}"
        )
        for address, token in candidates:
            try:
                host = client_for(address, token, self._endpoints.tls)
                # It reports the host that has not answered before, if there is one.
                task = replace(self._task, unreachable=self._unreachable) if self._unreachable else self._task
                opened = host.open(task)
                if opened.redirect is not None:
                    address = opened.redirect  # noqa: PLW2901 - the owner replaces the host asked
                    host = client_for(address, token, self._endpoints.tls)
                    opened = host.open(self._task)
                    if opened.redirect is not None:
                        raise NotOwnerError(f"{address} sent the task on to {opened.redirect}; ownership is changing.")
            except HostUnavailableError as error:
                self._give_up(address, token)
                failure = error
                continue
            if opened.loading is not None:
                _owners[self._key] = (address, token)
                raise _StillLoadingError(address, opened.loading)
            self._opened_at(host, token, opened)
            return host
        raise failure

    def _give_up(self, address: str, token: str) -> None:
        """Forget a host that does not answer, with all its partitions.

        Otherwise the task of each partition would call it.
        """
        self._unreachable = address
        forget_client(address, token)
        for key in [key for key, (owner, _) in list(_owners.items()) if owner == address]:
            _owners.pop(key, None)


def _ranges_after(ranges: Sequence[KeyRange], key: bytes) -> list[KeyRange]:
    """Return the ranges that are left when the ranges are read one after the other, and ``key`` was read last."""
    at = next(i for i, (start, end) in enumerate(ranges) if start <= key and (end is None or key < end))
    return [(key + b"\x00", ranges[at][1]), *ranges[at + 1 :]]


# ``StateAccess``: how an operator's logic reads and changes the state of its partition in one micro-batch.


class StateAccess(Protocol):
    """One partition's state, opened at version = batch id, and the changes to it that one commit makes."""

    @property
    def batch_id(self) -> int:
        """Return the micro-batch, which is the version that is read."""

    @property
    def times(self) -> BatchTimes:
        """Return processing time and watermarks of the batch."""

    @property
    def schema(self) -> OperatorSchema:
        """Return the operator's schema with its history, as the coordinator has it."""

    @property
    def key_groups(self) -> tuple[int, int]:
        """Return the partition's key groups: from the first (included) to the last (not included)."""

    @property
    def num_key_groups(self) -> int:
        """Return the number of key groups of all partitions together."""

    def get_many(self, keys: pa.BinaryArray, column_family: str = DEFAULT_FAMILY) -> pa.BinaryArray:
        """Return values at the version opened, in the order of ``keys``, null for keys without a value.

        Sorted keys are fastest. Staged changes are not visible. A family that was never written to is empty.
        """

    def scan(
        self, ranges: Sequence[KeyRange], column_family: str = DEFAULT_FAMILY, limit: int | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yield pairs (``key``, ``value``) of the ranges at the version opened, range after range, ``limit`` in all."""

    def stage(self, keys: pa.BinaryArray, values: pa.BinaryArray, column_family: str = DEFAULT_FAMILY) -> None:
        """Add changes to the commit. A null value removes its key. The last change of a key counts."""

    def commit(self, figures: OperatorFigures, timings: dict[str, float] | None = None) -> None:
        """Commit the staged changes durably as the next version. Call it once, before yielding any output."""
