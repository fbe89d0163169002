"""The rows of several hosts as one stream, which survives the death of one of the hosts.

There are neither threads nor queues: the thread that takes the rows reads from a connection that has some. Rows that a
host sends ahead wait in the socket, so that a slow reader holds the hosts back, and memory stays flat.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import pyarrow as pa
from msgspec.structs import replace

from coordinator_actor.exceptions import RetiredRunError
from coordinator_actor.messages import OperatorLocation
from spark_bridge.exceptions import ConnectionClosedError
from spark_bridge.queryable import protocol
from spark_bridge.queryable.connections import KvExchange
from spark_bridge.queryable.routing.scatter_gather import MOVED, Attempts, RemoteRows, should_locate

# Sources of the rows of a routed scan: a stream of another host, or an iterator of this process.


PendingScan: TypeAlias = KvExchange | Callable[[], protocol.StateAnswer]
"""A scan that a server has been asked for; or a function that begins the scan in this process."""


ScanSource: TypeAlias = RemoteRows | protocol.StateAnswer


def scan_source(pending: PendingScan) -> ScanSource:
    """Wait until a scan that has been asked for begins, and return its rows."""
    return RemoteRows(pending) if isinstance(pending, KvExchange) else pending()


# The rest of a scan whose stream has broken, partition by partition, from the hosts that own the partitions now.
#
# A host sends its partitions one after the other, in the order of the request. The rows of a partition at an exact
# version always come in the same order. So a stream is resumed by counting: the rows that were already returned are
# requested again and dropped. Each partition is requested separately, because the partitions may have new owners. A
# query that was restarted continues from its version, so its next run is asked for the rest; that run rejects the
# request if it has remade the version (a rollback). Rows that expire by the clock cannot be counted: a stream that has
# returned some of those is not resumed.


@dataclass(frozen=True)
class ScanPlan:
    """The request of a scan, and the way to open its streams.

    - ``open_stream(address, request, deadline)`` sends the request without waiting for an answer.
    - ``address_of(location, partition)`` returns the address to ask for a partition.
    - ``relocate(error)`` finds out who owns what now, also if the query has been restarted. It raises
      ``RetiredRunError`` if no other run than that of ``location`` will do. With None, a broken stream is an error.
    - ``timeout``: the seconds that the resumption may take.
    - ``is_stable``: a second scan of a version finds the same rows.
    """

    request: protocol.ScanRequest
    location: OperatorLocation
    open_stream: Callable[[str, protocol.ScanRequest, float], PendingScan]
    address_of: Callable[[OperatorLocation, int], str]
    relocate: Callable[[Exception], OperatorLocation] | None
    timeout: float
    is_stable: bool = True
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


@dataclass(frozen=True)
class ScanResumption:
    """Continues at ``version`` after a broken stream of ``plan``; ``relocate`` is that of the plan."""

    plan: ScanPlan
    version: int
    relocate: Callable[[Exception], OperatorLocation]

    def rows(self, partitions: Sequence[int], num_rows: int, failure: Exception) -> Iterator[pa.RecordBatch]:
        """Yield the rows of ``partitions`` without the first ``num_rows`` ones, which the broken stream has returned.

        ``failure`` is the error of that stream. Raises what ``Attempts.delay`` raises if attempts no longer help.
        """
        plan = self.plan
        error: Exception | None = failure
        location = plan.location
        attempts = self._attempts()
        drop = num_rows
        left = list(partitions)
        while left:
            if error is not None:
                plan.sleep(attempts.delay(error))
                if should_locate(error):
                    try:
                        location = self.relocate(error)
                    except RetiredRunError:
                        raise
                    except Exception as again:  # noqa: BLE001 - delay raises errors that no attempt can help
                        error = again
                        continue
                    self._check_same_rows(location)
            source: ScanSource | None = None
            seen = 0
            try:
                error = None
                source = self._opened(location, left[0])
                while (batch := source.read()) is not None:
                    attempts = self._attempts()
                    seen += batch.num_rows
                    behind = seen - drop
                    if behind <= 0:
                        protocol.raise_if_cancelled()
                    else:
                        yield batch.slice(max(0, batch.num_rows - behind))
                drop = max(0, drop - seen)
                del left[0]
            except Exception as again:
                if seen and not plan.is_stable:
                    raise
                drop = max(drop, seen)
                error = again
            finally:
                if source is not None:
                    source.close()

    def _opened(self, location: OperatorLocation, partition: int) -> ScanSource:
        plan = self.plan
        deadline = plan.clock() + plan.timeout
        address = plan.address_of(location, partition)
        at = replace(plan.request.at, isolation="version", version=self.version)
        request = replace(plan.request, at=at, partitions=[partition])
        if location.run_id != plan.location.run_id:
            request = replace(request, run_id=location.run_id, previous_run=plan.location.run_id)
        source = scan_source(plan.open_stream(address, request, deadline))
        if source.version != self.version:
            source.close()
            raise ConnectionClosedError(f"{address} answered version {source.version}, not {self.version}.")
        return source

    def _check_same_rows(self, location: OperatorLocation) -> None:
        """Raise ``RetiredRunError`` unless each partition has the same rows in the same order as at the beginning."""
        before = self.plan.location
        if location.query_id == before.query_id and _layout(location) == _layout(before):
            return
        raise RetiredRunError(
            f"Operator {before.operator.name!r} of query {before.query_id} (run {before.run_id}) was scanned, which "
            f"then ended; run {location.run_id} of query {location.query_id} has the operator now, with other state, "
            "partitions or columns: scan it again."
        )

    def _attempts(self) -> Attempts:
        plan = self.plan
        what = f"The rest of a scan of operator {plan.location.operator.name!r} at version {self.version}"
        return Attempts(what, plan.clock() + plan.timeout, had_answer=True, clock=plan.clock)


def _layout(location: OperatorLocation) -> tuple[object, ...]:
    """Return the properties that decide which rows a partition has, and how they are read."""
    return (location.operator.name, location.operator.schema, len(location.owners), location.key_groups)


@dataclass
class _Stream:
    """Partitions that are read one after the other, and how many of their rows have been returned.

    ``is_resumed``: the source is a ``ScanResumption``, which makes its own attempts, so its errors are final.
    """

    partitions: list[int]
    source: ScanSource
    num_rows: int = 0
    is_resumed: bool = False


class RoutedScan(Iterator[pa.RecordBatch]):
    """The rows of ``shares``: addresses, and the partitions that each address is asked for.

    With ``in_order`` the rows of the first share come first, and so on; otherwise rows come as they arrive. A caller
    that stops early must ``close`` the scan. ``version`` is the lowest of the hosts' versions; if an exact version is
    requested, they are all the same.
    """

    def __init__(
        self, plan: ScanPlan, shares: list[tuple[str, list[int]]], deadline: float, *, in_order: bool = False
    ) -> None:
        self._plan = plan
        self._in_order = in_order
        self._left = plan.request.limit
        self._turn = 0
        self._streams: list[_Stream] = []
        # All hosts are asked before any answer is waited for, so that all of them hold the version from now on.
        pending: list[PendingScan] = []
        try:
            for address, partitions in shares:
                pending.append(plan.open_stream(address, replace(plan.request, partitions=partitions), deadline))
            # The scans of this process first: the other hosts work in parallel.
            for is_remote in (False, True):
                for (_, partitions), one in zip(shares, pending, strict=True):
                    if isinstance(one, KvExchange) == is_remote:
                        self._streams.append(_Stream(partitions, scan_source(one)))
            if in_order:
                self._streams.sort(key=lambda stream: [p for _, p in shares].index(stream.partitions))
            self.version = min(stream.source.version for stream in self._streams)
            self.schema: pa.Schema = self._streams[0].source.schema
            self._check_same()
        except BaseException:
            self.close()
            for one in pending:
                if isinstance(one, KvExchange):
                    one.close()
            raise

    def _check_same(self) -> None:
        """Raise ``ConnectionClosedError`` unless all hosts answer with the version asked for and the same columns."""
        at = self._plan.request.at
        for stream in self._streams:
            source = stream.source
            if at.isolation == "version" and source.version != at.version:
                raise ConnectionClosedError(
                    f"Version {at.version} of run {self._plan.request.run_id} was asked for, version "
                    f"{source.version} came."
                )
            if not source.schema.equals(self.schema):
                raise ConnectionClosedError(
                    f"Partitions {stream.partitions} have other columns than the rest: {source.schema}, not "
                    f"{self.schema}."
                )

    def __next__(self) -> pa.RecordBatch:
        while self._streams and self._left != 0:
            stream = self._next_stream()
            try:
                batch = stream.source.read()
            except BaseException as error:
                relocate = self._plan.relocate
                may_resume = not stream.is_resumed and (self._plan.is_stable or not stream.num_rows)
                if relocate is None or not may_resume or not isinstance(error, MOVED):
                    self.close()
                    raise
                stream.source.close()
                resumption = ScanResumption(self._plan, self.version, relocate)
                rest = resumption.rows(stream.partitions, stream.num_rows, error)
                stream.source = protocol.StateAnswer(self.version, self.schema, rest)
                stream.is_resumed = True
                continue
            if batch is None:
                self._streams.remove(stream)
                continue
            if not batch.num_rows:
                try:
                    protocol.raise_if_cancelled()  # by the client of the proxy that reads
                except BaseException:
                    self.close()
                    raise
                continue
            stream.num_rows += batch.num_rows
            if self._left is not None:
                batch = batch.slice(0, self._left)
                self._left -= batch.num_rows
            return batch
        self.close()
        raise StopIteration

    def _next_stream(self) -> _Stream:
        """Return a stream that has something to read; the streams take turns."""
        streams = self._streams
        if len(streams) == 1 or self._in_order:
            return streams[0]
        waiting: dict[int, _Stream] = {}
        ready: list[_Stream] = []
        for stream in streams:
            source = stream.source
            if isinstance(source, protocol.StateAnswer) or source.has_buffered:
                ready.append(stream)
            else:
                waiting[source.stream.fileno()] = stream
        if waiting:
            # Not ``select``, which knows no file descriptor above 1023.
            poll = select.poll()
            for fileno in waiting:
                poll.register(fileno, select.POLLIN)
            ready += [waiting[fileno] for fileno, _ in poll.poll(0 if ready else self._plan.timeout * 1000)]
        self._turn += 1
        # If no stream is ready after all that time, one is read nevertheless: the read then times out.
        return (ready or streams)[self._turn % len(ready or streams)]

    def close(self) -> None:
        for stream in self._streams:
            stream.source.close()
        self._streams = []

    def __del__(self) -> None:
        if getattr(self, "_streams", None):
            self.close()
