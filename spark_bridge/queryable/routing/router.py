"""``StateRouter``: asks the owners of an operator's partitions, all at once, and puts one answer of one version together.

An answer is never older than what the same client has had before of the same run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import pyarrow as pa
from msgspec.structs import replace

from backends.encoding.columns import concatenated, placed
from coordinator_actor.messages import OperatorLocation
from spark_bridge.exceptions import HostUnavailableError, RequestError, RequestLimitError, StateVersionError
from spark_bridge.queryable.protocol.connections import KvConnections
from spark_bridge.queryable.protocol.messages import (
    At,
    Await,
    Counted,
    End,
    KeyRows,
    Lookup,
    Scan,
    Values,
    pack_one,
    unpack_one,
)
from spark_bridge.queryable.protocol.state_reads import StateReads
from spark_bridge.queryable.routing.one_version import CompletedVersions, Interrogation, in_parts, lagging
from spark_bridge.queryable.routing.routed_scan import Opened, RoutedScan, ScanPlan, StateRows
from spark_bridge.queryable.routing.routing_table import KeyShare, RoutingTable, Rows
from spark_bridge.queryable.routing.scattered_requests import CountQuestion, KeyRowsQuestion, LookupQuestion, unexpected

KEYS_PER_REQUEST = 200_000
BYTES_PER_REQUEST = 32 << 20
"""Of keys: what is more is asked in several requests, one after the other."""
ANSWER_SECONDS = 10.0
"""So long the answer for few keys is waited for at a time: a host that hangs may have lost its partitions to others by then."""
FEW_KEYS = 10_000
VIA_STREAMS = 2
"""So many scans a proxy is asked for at once, where the owners themselves would be asked for one each."""
REMEMBERED_LOCATIONS = 64


@dataclass(frozen=True)
class RoutedAnswer:
    """Rows at ``version``, as they come; closing it early ends it everywhere."""

    version: int
    schema: pa.Schema
    batches: Iterator[pa.RecordBatch]

    def close(self) -> None:
        """End it: the hosts stop. Nothing happens if it has ended."""
        close = getattr(self.batches, "close", None)
        if close is not None:
            close()


class StateRouter:
    """Thread-safe. Every ``deadline`` is a time of ``clock``, which must be that of the connections (``time.monotonic``).

    Without ``via`` the owners are asked; else everything is asked of the proxy at the address that ``via`` is, or that it returns.
    What belongs to ``local``, an address and what is to be read there, is read without a network.
    ``versions`` may be shared by routers, so that no answer of one is older than one of another.

    Errors come as they are, those of ``StateReads`` and of ``KvConnections``: it is for the caller to look up the location again and
    repeat (``retries``).
    """

    def __init__(
        self,
        connections: KvConnections,
        *,
        via: str | Callable[[], str] | None = None,
        local: tuple[str, StateReads] | None = None,
        versions: CompletedVersions | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._connections = connections
        self._via = via
        self._forward = via is not None
        self._local_address: str = "" if local is None else local[0]
        self._local: StateReads | None = None if local is None else local[1]
        self.versions = versions or CompletedVersions()
        self._hosts = Interrogation(connections, self.versions, self._local_address, self._local)
        self._clock = clock
        self._sleep = sleep
        self._tables: dict[int, RoutingTable] = {}

    def completed_version(self, run_id: str) -> int:
        """The highest completed version of a run that this client has seen; no later answer is older."""
        return self.versions.get(run_id)

    # -- keys ----------------------------------------------------------------------------------

    def lookup_one(
        self, location: OperatorLocation, family: str, key: bytes, at: At, deadline: float
    ) -> tuple[int, bytes | None]:
        """The version, and the stored value of one stored key."""
        table = self._table(location)
        run_id = location.run_id
        deadline = min(deadline, self._clock() + ANSWER_SECONDS)
        is_completed = at.isolation == "completed"
        if is_completed:
            at = self._hosts.not_before(run_id, at)
        request = Lookup(run_id, location.operator.name, at, family, self._forward)
        address = table.address_of(key) if self._via is None else self._proxy()
        value: bytes | None
        try:
            if self._local is not None and address == self._local_address:
                version, value = self._local.lookup_one(request, key)
            else:
                reply, body = self._connections.request(address, request, pack_one(key), deadline)
                if type(reply) is not Values:
                    unexpected(address, reply)
                version, value = reply.version, unpack_one(body)
        except StateVersionError as error:
            raise lagging(at, error) from error
        if is_completed:
            self.versions.note(run_id, version)
        return version, value

    def lookup(
        self, location: OperatorLocation, family: str, keys: pa.BinaryArray, at: At, deadline: float
    ) -> tuple[int, pa.BinaryArray]:
        """The version, and the stored values of stored keys in the order of ``keys``; null where a key has none.

        No keys need no host: the version is then the highest one seen.
        """
        if not len(keys):
            return at.version if at.isolation == "version" else self.versions.get(location.run_id), put_together([])
        version, answers = in_parts(
            list(parts(keys)), at, lambda part, at: self._lookup_part(location, family, part, at, deadline)
        )
        return version, put_together(answers)

    def _lookup_part(
        self, location: OperatorLocation, family: str, keys: pa.BinaryArray, at: At, deadline: float
    ) -> tuple[int, pa.BinaryArray]:
        shares = self._shares(location, keys)
        questions = [LookupQuestion(share, location, family, self._forward) for share in shares]
        version, values = self._hosts.answers(location.run_id, questions, at, self._soon(deadline, keys))
        if len(values) == 1:
            return version, values[0]
        return version, put_together(values, [share.rows for share in shares if share.rows is not None])

    def key_rows(
        self, location: OperatorLocation, request: KeyRows, keys: pa.BinaryArray, deadline: float
    ) -> RoutedAnswer:
        """The rows of stored grouping keys; the column ``position`` counts in ``keys``, and ascends within a batch.

        The rows of one key come together and in order, except for those of an aggregate by windows: these come from all hosts.
        """
        asked = replace(request, run_id=location.run_id, forward=self._forward)
        is_windowed = self._table(location).is_windowed(request.state)

        def ask(part: pa.BinaryArray, at: At) -> tuple[int, tuple[pa.Schema, list[pa.RecordBatch]]]:
            shares = self._shares(location, part, is_windowed)
            questions = [KeyRowsQuestion(share, replace(asked, partitions=share.partitions)) for share in shares]
            version, answers = self._hosts.answers(location.run_id, questions, at, self._soon(deadline, part))
            found = zip(shares, answers, strict=True)
            return version, (answers[0][0], [moved(b, share.rows, 0) for share, (_, rows) in found for b in rows])

        split = list(parts(keys))
        version, answers = in_parts(split, request.at, ask)
        begins = accumulate(map(len, split), initial=0)
        batches = [
            moved(batch, None, begin) for begin, (_, rows) in zip(begins, answers, strict=False) for batch in rows
        ]
        return RoutedAnswer(version, answers[0][0], iter(batches))

    def _shares(self, location: OperatorLocation, keys: pa.BinaryArray, is_everywhere: bool = False) -> list[KeyShare]:
        if keys.null_count:
            raise RequestError(f"{keys.null_count} of {len(keys)} stored keys are null.")
        if self._via is not None:
            return [KeyShare(self._proxy(), keys, None)]
        table = self._table(location)
        return table.shares_everywhere(keys) if is_everywhere else table.shares_of(keys)

    # -- ranges --------------------------------------------------------------------------------

    def count(self, location: OperatorLocation, request: Scan, deadline: float) -> tuple[int, int]:
        """The version, and how many rows ``scan`` would give."""
        asked = replace(request, run_id=location.run_id, forward=self._forward)
        if self._via is not None:
            questions = [CountQuestion(self._proxy(), asked)]
        else:
            shares = self._table(location).partitions_by_owner(request.partitions)
            if not shares:
                raise RequestError("A count of no partitions was asked for; partitions= must name one at least.")
            questions = [CountQuestion(address, replace(asked, partitions=mine)) for address, mine in shares]
        version, counts = self._hosts.answers(location.run_id, questions, request.at, deadline)
        count = sum(counts)
        return version, count if request.limit is None else min(count, request.limit)

    def scan(
        self,
        location: OperatorLocation,
        request: Scan,
        deadline: float,
        relocate: Callable[[Exception], OperatorLocation] | None = None,
        *,
        in_order: bool = False,
    ) -> RoutedAnswer:
        """The rows of all partitions (or of ``request.partitions``), all owners in parallel, at one version.

        ``deadline`` is for the beginning; while rows come there is none. A stream that breaks later is resumed at the same version where
        ``relocate(error)`` says, within the connections' ``timeout``, by the query's next run too if it has the same layout and has not been
        rolled back. Without ``relocate``, with ``latest`` or if rows have a TTL, the error is raised. The batches come in any order, those of
        one partition in theirs; with ``in_order`` partition after partition, as they are asked for.
        """
        shares = self._scan_shares(location, request.partitions, in_order)
        if not shares:
            raise RequestError("A scan of no partitions was asked for; partitions= must name one at least.")
        request = replace(request, run_id=location.run_id, forward=self._forward)
        asked = request.at
        is_completed = asked.isolation == "completed"
        if is_completed:
            request = replace(request, at=self._hosts.not_before(location.run_id, asked))
            if len(shares) > 1:
                version = self._completed_now(location, request, shares, deadline)
                request = replace(request, at=At("version", version))
        plan = ScanPlan(
            request=request,
            location=location,
            open_stream=self._open_scan,
            address_of=lambda found, partition: self._scan_shares(found, [partition], in_order)[0][0],
            relocate=None if request.at.isolation == "latest" else relocate,
            timeout=self._connections.timeout,
            is_stable=self._table(location).is_stable(request.state),
            clock=self._clock,
            sleep=self._sleep,
        )
        try:
            batches = RoutedScan(plan, shares, deadline, in_order=in_order)
        except StateVersionError as error:
            raise lagging(asked, error) from error
        if is_completed:
            self.versions.note(location.run_id, batches.version)
        return RoutedAnswer(batches.version, batches.schema, batches)

    def _scan_shares(
        self, location: OperatorLocation, partitions: list[int] | None, in_order: bool
    ) -> list[tuple[str, list[int]]]:
        """Whom to ask for which partitions. Of a proxy several owners' partitions are asked in one scan, owner by owner."""
        shares = self._table(location).partitions_by_owner(partitions, in_order=in_order)
        if self._via is None:
            return shares
        proxy = self._proxy()
        streams = 1 if in_order else VIA_STREAMS
        groups = [[p for _, mine in shares[i::streams] for p in mine] for i in range(streams)]
        return [(proxy, group) for group in groups if group]

    def _completed_now(
        self, location: OperatorLocation, request: Scan, shares: list[tuple[str, list[int]]], deadline: float
    ) -> int:
        """The version of a scan, which all hosts are asked for then: what one of the owners says, or what came with the location.

        Others may not have heard of the run for long.
        """
        address, partitions = shares[0]
        if self._via is not None:
            # No rows of one partition: its owner answers.
            beginning = replace(request, partitions=partitions[:1], limit=0)
            reply, _ = list(self._connections.stream(address, beginning, b"", deadline))[-1]
            if type(reply) is not End:
                unexpected(address, reply)
            completed = reply.version
        elif self._local is not None and any(owner == self._local_address for owner, _ in shares):
            completed = self._local.await_completed(request.run_id, 0, 0.0)
        else:
            reply, _ = self._connections.request(address, Await(request.run_id, 0, 0.0), b"", deadline)
            if type(reply) is not Counted:
                unexpected(address, reply)
            completed = reply.count
        if completed < 0:
            raise HostUnavailableError(
                f"{address} knows no completed version of run {request.run_id}: it could not ask the coordinator."
            )
        completed = max(completed, location.completed_version)
        # What the caller asks for is not noted: it may be a version that will never be.
        self.versions.note(request.run_id, completed)
        return max(request.at.version, completed)

    def _open_scan(self, address: str, request: Scan, deadline: float) -> Opened:
        """A stream that has been asked for; of this very process, what begins it."""
        if self._local is not None and address == self._local_address:
            reads = self._local

            def begin() -> StateRows:
                answer = reads.scan(request)
                return answer.version, answer.schema, answer.batches

            return begin
        return self._connections.stream(address, request, b"", deadline)

    # -- details -------------------------------------------------------------------------------

    def _soon(self, deadline: float, keys: pa.BinaryArray) -> float:
        return min(deadline, self._clock() + ANSWER_SECONDS) if len(keys) <= FEW_KEYS else deadline

    def _proxy(self) -> str:
        assert self._via is not None
        return self._via if isinstance(self._via, str) else self._via()

    def _table(self, location: OperatorLocation) -> RoutingTable:
        table = self._tables.get(id(location))
        if table is None or table.location is not location:
            table = self._tables[id(location)] = RoutingTable(location)
            # The table holds the location, so that no other one gets its id.
            for old in list(self._tables)[:-REMEMBERED_LOCATIONS]:
                self._tables.pop(old, None)
        return table


def parts(keys: pa.BinaryArray) -> Iterator[pa.BinaryArray]:
    """Keys in numbers that one request may have; none are one part."""
    content = keys.buffers()[2]
    if len(keys) <= KEYS_PER_REQUEST and (content is None or content.size <= BYTES_PER_REQUEST):
        yield keys
        return
    step = KEYS_PER_REQUEST
    if keys.nbytes > BYTES_PER_REQUEST:
        step = max(1, min(step, len(keys) * BYTES_PER_REQUEST // keys.nbytes))
    for begin in range(0, max(1, len(keys)), step):
        yield keys.slice(begin, step)


def put_together(arrays: Sequence[pa.BinaryArray], rows: Sequence[Rows] | None = None) -> pa.BinaryArray:
    """Arrays of values as one: one behind the other, or each value in its row.

    Raises ``RequestLimitError`` if they have more than an Arrow array can.
    """
    try:
        return concatenated(arrays) if rows is None else placed(arrays, rows)
    except pa.ArrowInvalid as error:
        raise RequestLimitError(
            f"The values of these keys do not fit into one Arrow array ({error}): ask for fewer keys."
        ) from error


def moved(batch: pa.RecordBatch, rows: Rows | None, begin: int) -> pa.RecordBatch:
    """``position``, the first column, from places among the keys that one host was asked to places among all keys."""
    if rows is None and not begin:
        return batch
    position = np.asarray(batch.column(0))
    places = position if rows is None else rows[position]
    columns = [pa.array(places + begin, pa.int64()), *batch.columns[1:]]
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema)
