"""``StateRouter``: asks all owners of an operator's partitions at once, and combines their answers at one
version.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import accumulate

import pyarrow as pa
from msgspec.structs import replace

from coordinator_actor.messages import OperatorLocation
from spark_bridge.exceptions import HostUnavailableError, RequestError, StateVersionError
from spark_bridge.queryable.protocol.byte_arrays import pack_one, unpack_one
from spark_bridge.queryable.protocol.connections import KvConnections
from spark_bridge.queryable.protocol.messages import (
    At,
    AwaitRequest,
    CountReply,
    EndOfRows,
    KeyRowsRequest,
    LookupReply,
    LookupRequest,
    ScanRequest,
)
from spark_bridge.queryable.protocol.state_reads import StateAnswer, StateReads
from spark_bridge.queryable.routing.key_chunks import joined_values, key_chunks, shifted_positions
from spark_bridge.queryable.routing.monotonic_reads import SeenVersions
from spark_bridge.queryable.routing.routed_scan import RoutedScan
from spark_bridge.queryable.routing.routing_table import KeyShare, RoutingTable
from spark_bridge.queryable.routing.scan_resumption import ScanPlan
from spark_bridge.queryable.routing.scan_sources import PendingScan
from spark_bridge.queryable.routing.scatter_gather import ScatterGather
from spark_bridge.queryable.routing.scattered_requests import (
    ScatteredCount,
    ScatteredKeyRows,
    ScatteredLookup,
    unexpected,
)
from spark_bridge.queryable.routing.version_alignment import VersionAlignment, read_in_chunks, retryable

SMALL_LOOKUP_KEYS = 10_000
SMALL_LOOKUP_SECONDS = 10.0
"""The answer for few keys is waited for this many seconds at a time. A host that hangs may have lost its partitions by
then.
"""
PROXY_STREAMS = 2
"""A proxy is asked for at most this many scans at once, where each owner would be asked for one."""
ROUTED_OPERATORS = 64


class StateRouter:
    """Route requests to the owners of partitions. Thread-safe.

    Every ``deadline`` is a time of ``clock``, which must be the clock of the connections (``time.monotonic``).

    - ``via``: None asks the owners. Else a proxy is asked for everything: its address, or a function that returns the
      address.
    - ``local``: this process's own query address, and its reads, which are used without a network.
    - ``seen``: the versions seen (``SeenVersions``); no answer is older than they are. Routers may share them.

    Raises the errors of ``StateReads`` and of ``KvConnections``. The caller looks up the location again and repeats the
    request (``retries``).
    """

    def __init__(
        self,
        connections: KvConnections,
        *,
        via: str | Callable[[], str] | None = None,
        local: tuple[str, StateReads] | None = None,
        seen: SeenVersions | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._connections = connections
        self._via = via
        self._forward = via is not None
        self._local_address: str = "" if local is None else local[0]
        self._local: StateReads | None = None if local is None else local[1]
        self.seen = seen or SeenVersions()
        self._hosts = VersionAlignment(ScatterGather(connections, self._local_address, self._local), self.seen)
        self._clock = clock
        self._sleep = sleep
        self._tables: dict[int, RoutingTable] = {}

    def completed_version(self, run_id: str) -> int:
        """Return the highest completed version of a run that this client has seen; no later answer is older."""
        return self.seen.get(run_id)

    # -- keys ----------------------------------------------------------------------------------

    def lookup_one(
        self, location: OperatorLocation, family: str, key: bytes, at: At, deadline: float
    ) -> tuple[int, bytes | None]:
        """Return the version, and the stored value of one stored key; None if the key has none."""
        table = self._table(location)
        run_id = location.run_id
        deadline = min(deadline, self._clock() + SMALL_LOOKUP_SECONDS)
        is_completed = at.isolation == "completed"
        if is_completed:
            at = self.seen.floor(run_id, at)
        request = LookupRequest(run_id, location.operator.name, at, family, self._forward)
        address = table.address_of(key) if self._via is None else self._proxy()
        value: bytes | None
        try:
            if self._local is not None and address == self._local_address:
                version, value = self._local.lookup_one(request, key)
            else:
                reply, body = self._connections.request(address, request, pack_one(key), deadline)
                if type(reply) is not LookupReply:
                    unexpected(address, reply)
                version, value = reply.version, unpack_one(body)
        except StateVersionError as error:
            raise retryable(at, error) from error
        if is_completed:
            self.seen.note(run_id, version)
        return version, value

    def lookup(
        self, location: OperatorLocation, family: str, keys: pa.BinaryArray, at: At, deadline: float
    ) -> tuple[int, pa.BinaryArray]:
        """Return the version, and the stored values of stored keys in the order of ``keys``; null where a key has none.

        Without keys no host is asked, and the version is the highest one seen.
        """
        if not len(keys):
            return at.version if at.isolation == "version" else self.seen.get(location.run_id), joined_values([])
        version, answers = read_in_chunks(
            list(key_chunks(keys)), at, lambda chunk, at: self._lookup_chunk(location, family, chunk, at, deadline)
        )
        return version, joined_values(answers)

    def _lookup_chunk(
        self, location: OperatorLocation, family: str, keys: pa.BinaryArray, at: At, deadline: float
    ) -> tuple[int, pa.BinaryArray]:
        shares = self._shares(location, keys)
        requests = [ScatteredLookup(share, location, family, self._forward) for share in shares]
        version, values = self._hosts.answers(location.run_id, requests, at, self._earlier(deadline, keys))
        if len(values) == 1:
            return version, values[0]
        return version, joined_values(values, [share.positions for share in shares if share.positions is not None])

    def key_rows(
        self, location: OperatorLocation, request: KeyRowsRequest, keys: pa.BinaryArray, deadline: float
    ) -> StateAnswer:
        """Return the rows of stored grouping keys.

        The column ``position`` is the position of the row's key in ``keys``, and ascends within a batch. The rows of
        one key come together and in order, except for the rows of an aggregate by windows, which come from all hosts.
        """
        asked = replace(request, run_id=location.run_id, forward=self._forward)
        is_windowed = self._table(location).is_windowed(request.state)

        def read(chunk: pa.BinaryArray, at: At) -> tuple[int, tuple[pa.Schema, list[pa.RecordBatch]]]:
            shares = self._shares(location, chunk, is_windowed)
            requests = [ScatteredKeyRows(share, replace(asked, partitions=share.partitions)) for share in shares]
            version, answers = self._hosts.answers(location.run_id, requests, at, self._earlier(deadline, chunk))
            batches = [
                shifted_positions(batch, share.positions, 0)
                for share, (_, rows) in zip(shares, answers, strict=True)
                for batch in rows
            ]
            return version, (answers[0][0], batches)

        chunks = list(key_chunks(keys))
        version, answers = read_in_chunks(chunks, request.at, read)
        begins = accumulate(map(len, chunks), initial=0)
        batches = [
            shifted_positions(batch, None, begin)
            for begin, (_, rows) in zip(begins, answers, strict=False)
            for batch in rows
        ]
        return StateAnswer(version, answers[0][0], iter(batches))

    def _shares(self, location: OperatorLocation, keys: pa.BinaryArray, is_everywhere: bool = False) -> list[KeyShare]:
        if keys.null_count:
            raise RequestError(f"{keys.null_count} of {len(keys)} stored keys are null.")
        if self._via is not None:
            return [KeyShare(self._proxy(), keys, None)]
        table = self._table(location)
        return table.shares_everywhere(keys) if is_everywhere else table.shares_of(keys)

    # -- ranges --------------------------------------------------------------------------------

    def count(self, location: OperatorLocation, request: ScanRequest, deadline: float) -> tuple[int, int]:
        """Return the version, and how many rows ``scan`` would give."""
        asked = replace(request, run_id=location.run_id, forward=self._forward)
        if self._via is not None:
            requests = [ScatteredCount(self._proxy(), asked)]
        else:
            shares = self._table(location).partitions_by_owner(request.partitions)
            if not shares:
                raise RequestError("A count of no partitions was asked for; partitions= must name one at least.")
            requests = [ScatteredCount(address, replace(asked, partitions=owned)) for address, owned in shares]
        version, counts = self._hosts.answers(location.run_id, requests, request.at, deadline)
        count = sum(counts)
        return version, count if request.limit is None else min(count, request.limit)

    def scan(
        self,
        location: OperatorLocation,
        request: ScanRequest,
        deadline: float,
        relocate: Callable[[Exception], OperatorLocation] | None = None,
        *,
        in_order: bool = False,
    ) -> StateAnswer:
        """Return the rows of all partitions (or of ``request.partitions``), all owners in parallel, at one version.

        ``deadline`` is for the beginning; while rows come there is none. A stream that breaks later is resumed at the
        same version, at the owners that ``relocate(error)`` returns, within the connections' ``timeout``. The next run
        of the query resumes it too, if that run has the same layout and has not been rolled back. Without ``relocate``,
        with ``latest``, or if rows have a TTL, the error is raised. The batches come in any order, but the rows of one
        partition in their order; with ``in_order`` the partitions come one after the other, as they are asked for.
        """
        shares = self._scan_shares(location, request.partitions, in_order)
        if not shares:
            raise RequestError("A scan of no partitions was asked for; partitions= must name one at least.")
        request = replace(request, run_id=location.run_id, forward=self._forward)
        asked = request.at
        is_completed = asked.isolation == "completed"
        if is_completed:
            request = replace(request, at=self.seen.floor(location.run_id, asked))
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
            raise retryable(asked, error) from error
        if is_completed:
            self.seen.note(location.run_id, batches.version)
        return StateAnswer(batches.version, batches.schema, batches)

    def _scan_shares(
        self, location: OperatorLocation, partitions: list[int] | None, in_order: bool
    ) -> list[tuple[str, list[int]]]:
        """Return the addresses to ask, and for which partitions.

        A proxy is asked for the partitions of several owners in one scan, owner by owner.
        """
        shares = self._table(location).partitions_by_owner(partitions, in_order=in_order)
        if self._via is None:
            return shares
        proxy = self._proxy()
        streams = 1 if in_order else PROXY_STREAMS
        groups = [[p for _, owned in shares[i::streams] for p in owned] for i in range(streams)]
        return [(proxy, group) for group in groups if group]

    def _completed_now(
        self, location: OperatorLocation, request: ScanRequest, shares: list[tuple[str, list[int]]], deadline: float
    ) -> int:
        """Return the version of a scan, which all hosts are then asked for: the later one of an owner's and the
        location's.

        An owner is asked because other hosts may not have heard of the run for long.
        """
        address, partitions = shares[0]
        if self._via is not None:
            # A scan of no rows of one partition: the partition's owner answers.
            beginning = replace(request, partitions=partitions[:1], limit=0)
            reply, _ = list(self._connections.stream(address, beginning, b"", deadline))[-1]
            if type(reply) is not EndOfRows:
                unexpected(address, reply)
            completed = reply.version
        elif self._local is not None and any(owner == self._local_address for owner, _ in shares):
            completed = self._local.await_completed(request.run_id, 0, 0.0)
        else:
            reply, _ = self._connections.request(address, AwaitRequest(request.run_id, 0, 0.0), b"", deadline)
            if type(reply) is not CountReply:
                unexpected(address, reply)
            completed = reply.count
        if completed < 0:
            raise HostUnavailableError(
                f"{address} knows no completed version of run {request.run_id}: it could not ask the coordinator."
            )
        completed = max(completed, location.completed_version)
        # The version that the caller asks for is not noted: it may never be completed.
        self.seen.note(request.run_id, completed)
        return max(request.at.version, completed)

    def _open_scan(self, address: str, request: ScanRequest, deadline: float) -> PendingScan:
        if self._local is not None and address == self._local_address:
            return partial(self._local.scan, request)
        return self._connections.stream(address, request, b"", deadline)

    # -- details -------------------------------------------------------------------------------

    def _earlier(self, deadline: float, keys: pa.BinaryArray) -> float:
        return min(deadline, self._clock() + SMALL_LOOKUP_SECONDS) if len(keys) <= SMALL_LOOKUP_KEYS else deadline

    def _proxy(self) -> str:
        assert self._via is not None
        return self._via if isinstance(self._via, str) else self._via()

    def _table(self, location: OperatorLocation) -> RoutingTable:
        table = self._tables.get(id(location))
        if table is None or table.location is not location:
            # The table keeps the location alive, so that no other location gets its id.
            table = self._tables[id(location)] = RoutingTable(location)
            # Without a lock, and so not a ``BoundedDict``: a process may fork while a thread is here.
            for old in list(self._tables)[:-ROUTED_OPERATORS]:
                self._tables.pop(old, None)
        return table
