"""The rows of several hosts as one stream, which goes on when one of the hosts dies.

There is no thread and no queue: the thread that takes the rows reads from a connection that has some. Rows that a host
sends ahead wait in the socket, so that a slow reader holds the hosts back, and memory stays flat.
"""

from __future__ import annotations

import select
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
from msgspec.structs import replace

from spark_bridge.exceptions import ConnectionClosedError
from spark_bridge.queryable.protocol.exchange import KvStream
from spark_bridge.queryable.protocol.request_context import raise_if_cancelled
from spark_bridge.queryable.routing.retries import MOVED
from spark_bridge.queryable.routing.scan_resumption import ScanPlan, ScanResumption
from spark_bridge.queryable.routing.scan_sources import LocalRows, PendingScan, ScanSource, scan_source


@dataclass
class _Stream:
    """Partitions that are read one after the other, and how many of their rows have been given.

    ``is_resumed``: the source is a ``ScanResumption``, which makes its own attempts, so its errors are final.
    """

    partitions: list[int]
    source: ScanSource
    given: int = 0
    is_resumed: bool = False


class RoutedScan(Iterator[pa.RecordBatch]):
    """The rows of ``shares``: addresses, and the partitions that each address is asked for.

    With ``in_order`` the rows of the first share come first, and so on; else rows come as they arrive. A caller that
    stops early must ``close`` the scan. ``version`` is the lowest of the hosts' versions, all of which are the same if
    an exact one is asked for.
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
            # The scans of this process first: other hosts work meanwhile.
            for is_remote in (False, True):
                for (_, partitions), one in zip(shares, pending, strict=True):
                    if isinstance(one, KvStream) == is_remote:
                        self._streams.append(_Stream(partitions, scan_source(one)))
            if in_order:
                self._streams.sort(key=lambda stream: [p for _, p in shares].index(stream.partitions))
            self.version = min(stream.source.version for stream in self._streams)
            self.schema: pa.Schema = self._streams[0].source.schema
            self._check_same()
        except BaseException:
            self.close()
            for one in pending:
                if isinstance(one, KvStream):
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
                may_resume = not stream.is_resumed and (self._plan.is_stable or not stream.given)
                if relocate is None or not may_resume or not isinstance(error, MOVED):
                    self.close()
                    raise
                stream.source.close()
                rest = ScanResumption(self._plan, self.version, relocate).rows(stream.partitions, stream.given, error)
                stream.source = LocalRows(self.version, self.schema, rest)
                stream.is_resumed = True
                continue
            if batch is None:
                self._streams.remove(stream)
                continue
            if not batch.num_rows:
                self._check_cancelled()
                continue
            stream.given += batch.num_rows
            if self._left is not None:
                batch = batch.slice(0, self._left)
                self._left -= batch.num_rows
            return batch
        self.close()
        raise StopIteration

    def _check_cancelled(self) -> None:
        """Raise if this is a proxy's scan, and the proxy's client no longer wants the rows."""
        try:
            raise_if_cancelled()
        except BaseException:
            self.close()
            raise

    def _next_stream(self) -> _Stream:
        """Return a stream that has something to read; the streams take turns."""
        streams = self._streams
        if len(streams) == 1 or self._in_order:
            return streams[0]
        waiting: dict[int, _Stream] = {}
        ready: list[_Stream] = []
        for stream in streams:
            source = stream.source
            if isinstance(source, LocalRows) or source.has_buffered:
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
        # If no stream is ready after all that time, one is read nevertheless: the read raises that nothing comes.
        return (ready or streams)[self._turn % len(ready or streams)]

    def close(self) -> None:
        """End the scan on all hosts."""
        for stream in self._streams:
            stream.source.close()
        self._streams = []

    def __del__(self) -> None:
        if getattr(self, "_streams", None):
            self.close()
