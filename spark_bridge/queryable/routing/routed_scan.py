"""The rows of several hosts as one stream, which goes on when one of them dies.

There is no thread and no queue: whoever takes the rows reads from the connection that has some. What a host sends ahead waits in the
socket, so a slow reader holds the hosts back, and memory stays flat.

A host gives its partitions one after the other, in the order in which they were asked for, and of each the rows at an exact version always in the
same order. So a stream that broke is resumed by counting: the rows that were given already are asked for again and dropped. That is
done partition by partition, for they may have other owners by then. A query that was restarted goes on from the version that it had, so
its next run is asked for the rest, and refuses if that version was made anew (a rollback). Where rows expire by the clock there is nothing
to count by, and a stream that has given some is not resumed.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pyarrow as pa
from msgspec.structs import replace

from coordinator_actor.exceptions import RetiredRunError
from coordinator_actor.messages import OperatorLocation
from spark_bridge.exceptions import ConnectionClosedError
from spark_bridge.queryable.protocol.connections import KvStream
from spark_bridge.queryable.protocol.messages import At, Batch, End, Scan
from spark_bridge.queryable.protocol.request_watch import check_request
from spark_bridge.queryable.protocol.row_batches import BatchDecoder
from spark_bridge.queryable.routing.retries import MOVED, Attempts, should_locate

StateRows = tuple[int, pa.Schema, Iterator[pa.RecordBatch]]
Opened = KvStream | Callable[[], StateRows]
"""What has been asked of a server; or what begins a scan in this process."""


@dataclass(frozen=True)
class ScanPlan:
    """What is scanned, and how its streams are opened.

    ``open_stream(address, request, deadline)`` asks without waiting. ``address_of(location, partition)`` says whom. ``relocate(error)``
    finds out who owns what now, also if the query has been restarted, and raises ``RetiredRunError`` if only the run of ``location`` will do;
    without it a broken stream is an error. ``timeout`` in seconds is how long that may take. ``is_stable``: a second look finds the same rows.
    """

    request: Scan
    location: OperatorLocation
    open_stream: Callable[[str, Scan, float], Opened]
    address_of: Callable[[OperatorLocation, int], str]
    relocate: Callable[[Exception], OperatorLocation] | None
    timeout: float
    is_stable: bool = True
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


class _RowsOfServer:
    """The rows that come over a connection. Waits for the first of them, so that version and schema are known."""

    def __init__(self, stream: KvStream) -> None:
        self.stream = stream
        self._decoder = BatchDecoder()
        self._first: pa.RecordBatch | None = None
        self.version = 0
        self._is_over = False
        self._first = self._next()
        if self._decoder.schema is None:
            stream.close()
            raise ConnectionClosedError(f"{stream.address} answered rows without a schema.")
        self.schema: pa.Schema = self._decoder.schema

    def read(self) -> pa.RecordBatch | None:
        """The next rows; None at the end."""
        if self._first is not None:
            first, self._first = self._first, None
            return first
        return None if self._is_over else self._next()

    def _next(self) -> pa.RecordBatch | None:
        while True:
            reply, body = next(self.stream)
            if type(reply) is End:
                self._is_over = True
                self.version = reply.version
                return None
            if type(reply) is not Batch:
                self.stream.close()
                raise ConnectionClosedError(f"{self.stream.address} answered by an unexpected {type(reply).__name__}.")
            self.version = reply.version
            try:
                batch = self._decoder.decode(body)
            except ConnectionClosedError:
                self.stream.close()
                raise
            if batch is not None:
                return batch

    @property
    def has_buffered(self) -> bool:
        """Whether ``read`` has something that ``select`` would not see."""
        return self._first is not None or self._is_over or self.stream.has_buffered()

    def close(self) -> None:
        self.stream.close()


class _RowsHere:
    """The rows that an iterator of this process gives."""

    def __init__(self, version: int, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> None:
        self.version = version
        self.schema = schema
        self._batches = batches

    def read(self) -> pa.RecordBatch | None:
        return next(self._batches, None)

    def close(self) -> None:
        close = getattr(self._batches, "close", None)
        if close is not None:
            close()


@dataclass
class _Share:
    """The partitions that are read one after the other, their rows, and how many of these have been given.

    What ``is_resumed`` makes its own attempts: its errors are final.
    """

    partitions: list[int]
    rows: _RowsOfServer | _RowsHere
    given: int = 0
    is_resumed: bool = False


class RoutedScan(Iterator[pa.RecordBatch]):
    """The rows of ``shares``: addresses, and the partitions that each is asked for.

    ``in_order``: the rows of the first share come first, and so on; else as they come. Whoever stops early must ``close`` it.
    ``version`` is the lowest of the hosts' versions, all of which are the same if an exact one is asked for.
    """

    def __init__(
        self, plan: ScanPlan, shares: list[tuple[str, list[int]]], deadline: float, *, in_order: bool = False
    ) -> None:
        self._plan = plan
        self._in_order = in_order
        self._left = plan.request.limit
        self._turn = 0
        self._shares: list[_Share] = []
        # All are asked before any answer is waited for, so that all hosts hold the version from now on.
        opened: list[Opened] = []
        try:
            for address, partitions in shares:
                opened.append(plan.open_stream(address, replace(plan.request, partitions=partitions), deadline))
            for (_, partitions), stream in zip(shares, opened, strict=True):
                if not isinstance(stream, KvStream):
                    self._shares.append(_Share(partitions, _RowsHere(*stream())))
            for (_, partitions), stream in zip(shares, opened, strict=True):
                if isinstance(stream, KvStream):
                    self._shares.append(_Share(partitions, _RowsOfServer(stream)))
            if in_order:
                self._shares.sort(key=lambda share: [p for _, p in shares].index(share.partitions))
            self.version = min(share.rows.version for share in self._shares)
            self.schema: pa.Schema = self._shares[0].rows.schema
            self._check_same()
        except BaseException:
            self.close()
            for stream in opened:
                if isinstance(stream, KvStream):
                    stream.close()
            raise

    def _check_same(self) -> None:
        at = self._plan.request.at
        for share in self._shares:
            if at.isolation == "version" and share.rows.version != at.version:
                raise ConnectionClosedError(
                    f"Version {at.version} of run {self._plan.request.run_id} was asked for, version {share.rows.version} came."
                )
            if not share.rows.schema.equals(self.schema):
                raise ConnectionClosedError(
                    f"Partitions {share.partitions} have other columns than the rest: {share.rows.schema}, not {self.schema}."
                )

    def __next__(self) -> pa.RecordBatch:
        while self._shares and self._left != 0:
            share = self._next_share()
            try:
                batch = share.rows.read()
            except BaseException as error:
                relocate = self._plan.relocate
                may_resume = not share.is_resumed and (self._plan.is_stable or not share.given)
                if relocate is None or not may_resume or not isinstance(error, MOVED):
                    self.close()
                    raise
                share.rows.close()
                share.rows = _RowsHere(self.version, self.schema, self._resumed(share, relocate, error))
                share.is_resumed = True
                continue
            if batch is None:
                self._shares.remove(share)
                continue
            if not batch.num_rows:
                self._check()
                continue
            share.given += batch.num_rows
            if self._left is not None:
                batch = batch.slice(0, self._left)
                self._left -= batch.num_rows
            return batch
        self.close()
        raise StopIteration

    def _check(self) -> None:
        """Where a proxy answers with these rows: whether its client still wants them."""
        try:
            check_request()
        except BaseException:
            self.close()
            raise

    def _next_share(self) -> _Share:
        """One that has something to read; each gets its turn."""
        shares = self._shares
        if len(shares) == 1 or self._in_order:
            return shares[0]
        waiting: dict[int, _Share] = {}
        ready: list[_Share] = []
        for share in shares:
            rows = share.rows
            if isinstance(rows, _RowsHere) or rows.has_buffered:
                ready.append(share)
            else:
                waiting[rows.stream.fileno()] = share
        if waiting:
            # Not select, which knows no file descriptor above 1023.
            poll = select.poll()
            for fileno in waiting:
                poll.register(fileno, select.POLLIN)
            ready += [waiting[fileno] for fileno, _ in poll.poll(0 if ready else self._plan.timeout * 1000)]
        self._turn += 1
        # Whoever is not ready after all that time is read from nevertheless: then it says that nothing comes.
        return (ready or shares)[self._turn % len(ready or shares)]

    # -- going on ------------------------------------------------------------------------------

    def _resumed(
        self, share: _Share, relocate: Callable[[Exception], OperatorLocation], failure: Exception
    ) -> Iterator[pa.RecordBatch]:
        """What has not been given of a share yet, partition by partition, from whoever owns them now."""
        plan = self._plan
        error: Exception | None = failure
        location = plan.location
        attempts = self._attempts()
        drop = share.given
        left = list(share.partitions)
        while left:
            if error is not None:
                plan.sleep(attempts.delay(error))
                if should_locate(error):
                    try:
                        location = relocate(error)
                    except RetiredRunError:
                        raise
                    except Exception as again:  # noqa: BLE001 - delay raises what no attempt can help
                        error = again
                        continue
                    self._check_same_rows(location)
            rows: _RowsOfServer | _RowsHere | None = None
            seen = 0
            try:
                error = None
                rows = self._opened(location, left[0])
                while (batch := rows.read()) is not None:
                    attempts = self._attempts()
                    seen += batch.num_rows
                    behind = seen - drop
                    if behind <= 0:
                        check_request()
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
                if rows is not None:
                    rows.close()

    def _opened(self, location: OperatorLocation, partition: int) -> _RowsOfServer | _RowsHere:
        plan = self._plan
        deadline = plan.clock() + plan.timeout
        address = plan.address_of(location, partition)
        request = replace(plan.request, at=At("version", self.version), partitions=[partition])
        if location.run_id != plan.location.run_id:
            request = replace(request, run_id=location.run_id, behind_run=plan.location.run_id)
        stream = plan.open_stream(address, request, deadline)
        rows = _RowsOfServer(stream) if isinstance(stream, KvStream) else _RowsHere(*stream())
        if rows.version != self.version:
            rows.close()
            raise ConnectionClosedError(f"{address} answered version {rows.version}, not {self.version}.")
        return rows

    def _check_same_rows(self, location: OperatorLocation) -> None:
        """Whether each partition has the rows, in the order, that it had when the scan began."""
        before = self._plan.location
        if location.query_id == before.query_id and _layout(location) == _layout(before):
            return
        raise RetiredRunError(
            f"Operator {before.operator.name!r} of query {before.query_id} (run {before.run_id}) was scanned, which then ended; run "
            f"{location.run_id} of query {location.query_id} has the operator now, with other state, partitions or columns: scan it again."
        )

    def _attempts(self) -> Attempts:
        plan = self._plan
        what = f"The rest of a scan of operator {plan.location.operator.name!r} at version {self.version}"
        return Attempts(what, plan.clock() + plan.timeout, had_answer=True, clock=plan.clock)

    def close(self) -> None:
        """End it everywhere."""
        for share in self._shares:
            share.rows.close()
        self._shares = []

    def __del__(self) -> None:
        if getattr(self, "_shares", None):
            self.close()


def _layout(location: OperatorLocation) -> tuple[object, ...]:
    """What says which rows a partition has, and how they are read."""
    return (location.operator.name, location.operator.schema, len(location.owners), location.key_groups)
