"""``StateRouter``: asks all owners of an operator's partitions at once, and combines their answers at one version."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TypeVar
from weakref import WeakSet

import numpy as np
import pyarrow as pa
from msgspec.structs import replace

from backends.encoding.columns import concatenated, placed
from backends.encoding.keys import KEY_GROUP_BYTES
from coordinator_actor.messages import OperatorLocation
from spark_bridge import exceptions
from spark_bridge.queryable import protocol
from spark_bridge.queryable.connections import KvConnections, KvExchange
from spark_bridge.queryable.routing.hedged import MARKS_SLOW, HedgedReads, WaitForAny, wait_for_any
from spark_bridge.queryable.routing.scans import PendingScan, RoutedScan, ScanPlan
from spark_bridge.queryable.routing.scatter_gather import (
    KeyPositions,
    KeyShare,
    RoutingTable,
    ScatteredCount,
    ScatteredKey,
    ScatteredKeyRows,
    ScatteredLookup,
    ScatteredRequest,
    ScatterGather,
    expected,
    is_stable,
    is_windowed,
)
from spark_bridge.state_format import layouts

# Cuts keys into chunks that fit into a request, and joins the answers to the chunks.


KEYS_PER_REQUEST = 200_000
BYTES_PER_REQUEST = 32 << 20
"""Bytes of keys in one request. More keys are asked for in several requests, one after the other."""


def key_chunks(keys: pa.BinaryArray) -> Iterator[pa.BinaryArray]:
    """Yield slices of ``keys`` that one request may have; no keys are one empty slice."""
    content = keys.buffers()[2]
    if len(keys) <= KEYS_PER_REQUEST and (content is None or content.size <= BYTES_PER_REQUEST):
        yield keys
        return
    step = KEYS_PER_REQUEST
    if keys.nbytes > BYTES_PER_REQUEST:
        step = max(1, min(step, len(keys) * BYTES_PER_REQUEST // keys.nbytes))
    for begin in range(0, max(1, len(keys)), step):
        yield keys.slice(begin, step)


def joined_values(arrays: Sequence[pa.BinaryArray], places: Sequence[KeyPositions] | None = None) -> pa.BinaryArray:
    """Return several arrays of values as one: one after the other, or each value at its place.

    Raises ``RequestLimitError`` if the values have more bytes than an Arrow array can.
    """
    try:
        return concatenated(arrays) if places is None else placed(arrays, places)
    except pa.ArrowInvalid as error:
        raise exceptions.RequestLimitError(
            f"The values of these keys do not fit into one Arrow array ({error}): ask for fewer keys."
        ) from error


def shifted_positions(batch: pa.RecordBatch, places: KeyPositions | None, begin: int) -> pa.RecordBatch:
    """Return ``batch`` with ``position``, the first column, counted among all keys instead of those of one request.

    ``places`` are the positions of the request's keys among the keys of its chunk (None: the same ones), ``begin`` is
    that of the chunk's first key.
    """
    if places is None and not begin:
        return batch
    position = np.asarray(batch.column(0))
    shifted = (position if places is None else places[position]) + begin
    columns = [pa.array(shifted, pa.int64()), *batch.columns[1:]]
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema)


# Monotonic reads: no answer of a client is older than one that the client has received before from the same run.


MAX_SEEN_RUNS = 4096


class SeenVersions:
    """Remember the highest completed version that a client has seen of each run.

    For any number of threads and routers, and for processes that fork. The lock guards all writes; reads take no lock.
    """

    def __init__(self) -> None:
        self._versions: dict[str, int] = {}
        self._lock = threading.Lock()
        _instances.add(self)

    def get(self, run_id: str) -> int:
        """Return the highest version seen of a run; 0 of an unknown run."""
        return self._versions.get(run_id, 0)

    def note(self, run_id: str, version: int) -> None:
        if version <= self._versions.get(run_id, 0):
            return
        with self._lock:
            if version <= self._versions.get(run_id, 0):
                return
            if run_id not in self._versions and len(self._versions) >= MAX_SEEN_RUNS:
                del self._versions[next(iter(self._versions))]
            # In place, unlike in a ``BoundedDict``: ``get`` takes no lock, and must never find a lower version in
            # between.
            self._versions[run_id] = version

    def floor(self, run_id: str, at: protocol.At) -> protocol.At:
        """Return ``at`` such that the answer is not older than the version seen. It only matters for ``completed``.

        With ``staleness`` it may be that much older.
        """
        if at.isolation != "completed":
            return at
        seen = self._versions.get(run_id, 0) - at.staleness
        return at if at.version >= seen else replace(at, version=seen)


_instances: WeakSet[SeenVersions] = WeakSet()


def _renew_locks() -> None:
    """Replace all locks after a fork: a thread that the new process does not have may have held one."""
    for seen in _instances:
        seen._lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_locks)


# The version of a query's answer if several hosts answer: all answers are brought to one version.
#
# Hosts learn of a completed version one after the other, so their first answers may be of different versions. Then the
# hosts that are ahead are asked again for exactly the lowest version, which they usually still hold. So two round
# trips are enough, unless one host is far behind. ``reads/answer_version.py`` decides within one host.
#
# A large request goes out in chunks, one after the other. The answer to the first chunk fixes the version of all
# chunks.


P = TypeVar("P")
T = TypeVar("T")

OLDER_SECONDS = 0.25
"""An owner whose copy has answered in its place has this many seconds to answer at an older version; copies lack it."""
MAX_RESTARTS = 3
"""The most times that all chunks of a large request are read again, before chunks are read from storage."""


@dataclass(eq=False, repr=False)
class VersionAlignment:
    """Ask several hosts until all their answers are of one version."""

    _hosts: ScatterGather
    _seen: SeenVersions
    _hedged: HedgedReads
    _clock: Callable[[], float]

    def _answers(
        self, requests: Sequence[ScatteredRequest[T]], at: protocol.At, deadline: float
    ) -> list[tuple[int, T]]:
        if at.staleness:
            return self._hedged.answers([request.alternatives() for request in requests], at, deadline)
        return self._hosts.answers(requests, at, deadline)

    def answers(
        self, run_id: str, requests: Sequence[ScatteredRequest[T]], at: protocol.At, deadline: float
    ) -> tuple[int, list[T]]:
        """Return the version, and the answer to each request. With ``latest`` the version is the lowest one.

        Raises the errors of hosts, and ``ConnectionClosedError`` for an answer of another version than the one asked
        for.
        """
        is_completed = at.isolation == "completed"
        at = self._seen.floor(run_id, at)
        try:
            answers = self._answers(requests, at, deadline)
            versions = [version for version, _ in answers]
            low, high = min(versions), max(versions)
            while is_completed and low != high:
                answers = self._aligned(requests, answers, at, deadline)
                versions = [version for version, _ in answers]
                low, high = min(versions), max(versions)
        except exceptions.StateVersionError as error:
            raise retryable(at, error) from error
        if is_completed:
            self._seen.note(run_id, low)
        elif at.isolation == "version" and not low == high == at.version:
            raise exceptions.ConnectionClosedError(
                f"Version {at.version} of run {run_id} was asked for, versions {versions} came."
            )
        return low, [answer for _, answer in answers]

    def _aligned(
        self, requests: Sequence[ScatteredRequest[T]], answers: list[tuple[int, T]], floor: protocol.At, deadline: float
    ) -> list[tuple[int, T]]:
        """Ask some hosts again, so that all answers are of one version, or at least nearer to one version."""
        versions = [version for version, _ in answers]
        low, high = min(versions), max(versions)
        if low >= floor.version:
            ahead = [i for i, version in enumerate(versions) if version > low]
            try:
                lowest = replace(floor, isolation="version", version=low, held_only=True)
                is_limited = floor.staleness and any(self._hedged.is_slow(requests[i]) for i in ahead)
                within = min(deadline, self._clock() + OLDER_SECONDS) if is_limited else deadline
                again = self._answers([requests[i] for i in ahead], lowest, within)
            except (exceptions.StateVersionError, exceptions.NotOwnerError, *MARKS_SLOW) as error:
                # The slowest host is further behind than the others hold versions. A copy holds one only.
                if not (floor.staleness or isinstance(error, exceptions.StateVersionError)):
                    raise
            else:
                return _replaced(answers, ahead, again)
        behind = [i for i, version in enumerate(versions) if version < high]
        again = self._answers([requests[i] for i in behind], replace(floor, version=high), deadline)
        return _replaced(answers, behind, again)


def _replaced(answers: list[tuple[int, T]], places: list[int], newer: list[tuple[int, T]]) -> list[tuple[int, T]]:
    changed = list(answers)
    for place, answer in zip(places, newer, strict=True):
        changed[place] = answer
    return changed


def retryable(at: protocol.At, error: exceptions.StateVersionError) -> Exception:
    """Return the error to raise instead of ``error`` for a request at ``at``: a retryable one for ``completed``.

    A caller that asks for the completed version has named none. A host that does not know the version which other hosts
    have shown, or no longer has it, is a passing failure.
    """
    if at.isolation != "completed":
        return error
    return exceptions.HostUnavailableError(
        f"A host does not have a version that others have shown to be completed: {error}"
    )


class PinnedVersion:
    """The version of chunks that are read one after the other: ``at`` is the version of the next request.

    The first answer fixes the version. If the chunks take long, hosts may no longer hold that version in memory. Then
    all chunks are read again, a few times. If that does not help, the other chunks are read from storage, which takes
    every host much longer.
    """

    def __init__(self, asked: protocol.At) -> None:
        self.at = asked
        self._asked = asked
        self._restarts = MAX_RESTARTS

    def answered(self, version: int) -> None:
        if self.at.isolation == "completed":
            self.at = replace(self._asked, isolation="version", version=version, held_only=True)

    def restarts(self, error: exceptions.StateVersionError) -> bool:
        """Return whether all chunks are read again after a chunk has failed; else that chunk is.

        Raises ``error``, or the retryable one for it, if neither can help.
        """
        if self._asked.isolation != "completed" or not self.at.held_only:
            raise retryable(self._asked, error) from error
        if not self._restarts:
            self.at = replace(self.at, held_only=False)
            return False
        self._restarts -= 1
        self.at = self._asked
        return True


def read_in_chunks(
    chunks: Sequence[P], at: protocol.At, read: Callable[[P, protocol.At], tuple[int, T]]
) -> tuple[int, list[T]]:
    """Return the version, and the answer of ``read`` to each of the chunks; there is at least one."""
    pinned = PinnedVersion(at)
    version = 0
    answers: list[T] = []
    while len(answers) < len(chunks):
        try:
            version, answer = read(chunks[len(answers)], pinned.at)
        except exceptions.StateVersionError as error:
            if pinned.restarts(error):
                answers.clear()
            continue
        answers.append(answer)
        pinned.answered(version)
    return version, answers


SMALL_LOOKUP_KEYS = 10_000
SMALL_LOOKUP_SECONDS = 10.0
"""The answer for few keys is waited for so long at a time: a host that hangs may have lost its partitions then."""
PROXY_STREAMS = 2
"""A proxy is asked for at most this many scans at once, where each owner would be asked for one."""
ROUTED_OPERATORS = 64


def owner_of_features(location: protocol.ViewLocation, key: bytes) -> str:
    """Return the address of the host that has a stored key in the first operator of a view."""
    group = int.from_bytes(key[:KEY_GROUP_BYTES], "big")
    return location.addresses[group * len(location.addresses) // location.key_groups]


class StateRouter:
    """Route requests to the owners of partitions. Thread-safe.

    Every ``deadline`` is a time of ``clock``, which must be the clock of the connections (``time.monotonic``).

    - ``via``: None asks the owners. Else a proxy is asked for everything: its address, or a function that returns the
      address.
    - ``local``: this process's own query address, and its reads, which are used without a network.

    Raises the errors of ``StateReads`` and of ``KvConnections``. The caller looks up the location again and repeats the
    request (``retries``).
    """

    def __init__(
        self,
        connections: KvConnections,
        *,
        via: str | Callable[[], str] | None = None,
        local: tuple[str, protocol.StateReads] | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        wait: WaitForAny = wait_for_any,
    ) -> None:
        self._connections = connections
        self._via = via
        self._forward = via is not None
        self._local_address: str = "" if local is None else local[0]
        self._local: protocol.StateReads | None = None if local is None else local[1]
        self.seen = SeenVersions()
        hedged = HedgedReads(connections, self._local_address, self._local, clock=clock, wait=wait)
        hosts = ScatterGather(connections, self._local_address, self._local)
        self._hosts = VersionAlignment(hosts, self.seen, hedged, clock)
        self._clock = clock
        self._sleep = sleep
        self._tables: dict[int, RoutingTable] = {}

    @property
    def asks_owners(self) -> bool:
        """Whether requests go to the owners of partitions, and not to a proxy."""
        return self._via is None

    # -- keys ----------------------------------------------------------------------------------

    def lookup_one(
        self, location: OperatorLocation, family: str, key: bytes, at: protocol.At, deadline: float
    ) -> tuple[int, bytes | None]:
        """Return the version, and the stored value of one stored key; None if the key has none."""
        table = self._table(location)
        run_id = location.run_id
        deadline = min(deadline, self._clock() + SMALL_LOOKUP_SECONDS)
        address = table.address_of(key) if self._via is None else self._proxy()
        value: bytes | None
        if at.staleness:
            copies = table.copies_of(address) if self._via is None else ()
            of_key = ScatteredKey(address, key, location, family, self._forward, copies)
            version, (value,) = self._hosts.answers(run_id, [of_key], at, deadline)
            return version, value
        at = self.seen.floor(run_id, at)
        request = protocol.LookupRequest(run_id, location.operator.name, at, family, self._forward)
        try:
            if self._local is not None and address == self._local_address:
                version, value = self._local.lookup_one(request, key)
            else:
                reply, body = self._connections.request(address, request, protocol.pack_one(key), deadline)
                version = expected(reply, protocol.LookupReply, address).version
                value = protocol.unpack_one(body)
        except exceptions.StateVersionError as error:
            raise retryable(at, error) from error
        if at.isolation == "completed":
            self.seen.note(run_id, version)
        return version, value

    def lookup(
        self, location: OperatorLocation, family: str, keys: pa.BinaryArray, at: protocol.At, deadline: float
    ) -> tuple[int, pa.BinaryArray]:
        """Return the version, and the stored values of stored keys in the order of ``keys``; null for keys without a
        value.

        Without keys no host is asked, and the version is the highest one seen.
        """
        if not len(keys):
            return at.version if at.isolation == "version" else self.seen.get(location.run_id), joined_values([])
        lookups = [(location, family)]
        version, answers = read_in_chunks(
            list(key_chunks(keys)), at, lambda chunk, at: self.lookup_together(lookups, chunk, at, deadline)
        )
        return version, joined_values([values for (values,) in answers])

    def lookup_together(
        self, lookups: Sequence[tuple[OperatorLocation, str]], keys: pa.BinaryArray, at: protocol.At, deadline: float
    ) -> tuple[int, list[pa.BinaryArray]]:
        """Return one version, and the stored values of the same keys in several operators of one run, as ``lookup``.

        ``lookups`` are operators and column families. All owners of all operators are asked at once.
        """
        run_id = lookups[0][0].run_id
        shares = [self._shares(location, keys) for location, _ in lookups]
        requests = [
            ScatteredLookup(share, location, family, self._forward, copies=self._copies(location, at))
            for (location, family), of_operator in zip(lookups, shares, strict=True)
            for share in of_operator
        ]
        version, answers = self._hosts.answers(run_id, requests, at, self._earlier(deadline, keys))
        values = []
        for of_operator in shares:
            parts, answers = answers[: len(of_operator)], answers[len(of_operator) :]
            places = [share.positions for share in of_operator if share.positions is not None]
            values.append(parts[0] if len(parts) == 1 else joined_values(parts, places))
        return version, values

    def lookup_few_together(
        self, lookups: Sequence[tuple[OperatorLocation, str]], keys: Sequence[bytes], at: protocol.At, deadline: float
    ) -> tuple[int, list[list[bytes | None]]]:
        """Return the result of ``lookup_together`` as lists; fast if this process has the keys in all operators."""
        run_id, local = lookups[0][0].run_id, self._local
        # Rolling aggregates of several keys are merged by columns.
        is_short = len(keys) == 1 or all(family != layouts.ROLLED_FAMILY for _, family in lookups)
        if (
            is_short
            and local is not None
            and all(
                self._table(location).address_of(key) == self._local_address for location, _ in lookups for key in keys
            )
        ):
            asked = self.seen.floor(run_id, at)
            requests = [
                protocol.LookupRequest(run_id, location.operator.name, asked, family) for location, family in lookups
            ]
            try:
                answers = [[local.lookup_one(request, key) for key in keys] for request in requests]
            except exceptions.StateVersionError:
                answers = []  # ask again below, where this error is handled
            versions = {version for of_operator in answers for version, _ in of_operator}
            if len(versions) == 1:
                (version,) = versions
                if at.isolation == "completed":
                    self.seen.note(run_id, version)
                return version, [[value for _, value in of_operator] for of_operator in answers]
        version, values = self.lookup_together(lookups, pa.array(keys, pa.binary()), at, deadline)
        return version, [of_operator.to_pylist() for of_operator in values]

    def features(
        self,
        location: protocol.ViewLocation,
        request: protocol.FeaturesRequest,
        keys: protocol.StoredKeys,
        deadline: float,
    ) -> tuple[protocol.FeaturesReply, memoryview]:
        """Return the answer of one host, which asks the others: of the owner of the first key in the first operator.

        ``keys`` are stored keys, a few as a list, or one.
        """
        address, packed, deadline = self._host_of_features(location, keys, deadline)
        reply, body = self._connections.request(address, request, packed, deadline)
        return expected(reply, protocol.FeaturesReply, address), body

    def begin_features(
        self,
        location: protocol.ViewLocation,
        request: protocol.FeaturesRequest,
        keys: protocol.StoredKeys,
        deadline: float,
    ) -> KvExchange | None:
        """Send the request of ``features`` if a connection is free, else return None. Waits only to find a proxy."""
        address, packed, deadline = self._host_of_features(location, keys, deadline)
        return self._connections.begin_if_idle(address, request, packed, deadline)

    def _host_of_features(
        self, location: protocol.ViewLocation, keys: protocol.StoredKeys, deadline: float
    ) -> tuple[str, bytes, float]:
        """Return the address of the host that is asked, the packed keys, and when the host must have answered."""
        if isinstance(keys, bytes):
            first, packed = keys, protocol.pack_one(keys)
            deadline = min(deadline, self._clock() + SMALL_LOOKUP_SECONDS)
        elif isinstance(keys, list):
            first, packed = keys[0], protocol.pack_few(keys)
            deadline = min(deadline, self._clock() + SMALL_LOOKUP_SECONDS)
        else:
            first = keys[0].as_py() if len(keys) else bytes(KEY_GROUP_BYTES)
            packed, deadline = protocol.pack_bytes(keys), self._earlier(deadline, keys)
        return self._proxy() if self._via is not None else owner_of_features(location, first), packed, deadline

    def key_rows(
        self, location: OperatorLocation, request: protocol.KeyRowsRequest, keys: pa.BinaryArray, deadline: float
    ) -> protocol.StateAnswer:
        """Return the rows of stored grouping keys.

        The column ``position`` is the position of the row's key in ``keys``, and ascends within a batch. The rows of
        one key come together and in order, except for the rows of an aggregate by windows, which come from all hosts.
        """
        asked = replace(request, run_id=location.run_id, forward=self._forward)
        is_everywhere = is_windowed(location.operator.schema, request.state)

        def read(chunk: pa.BinaryArray, at: protocol.At) -> tuple[int, tuple[pa.Schema, list[pa.RecordBatch]]]:
            shares = self._shares(location, chunk, is_everywhere)
            copies = self._copies(location, at)
            requests = [ScatteredKeyRows(s, replace(asked, partitions=s.partitions), copies=copies) for s in shares]
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
        return protocol.StateAnswer(version, answers[0][0], iter(batches))

    def _copies(self, location: OperatorLocation, at: protocol.At) -> Callable[[str], tuple[str, ...]] | None:
        """Return what names the hosts with copies of an owner's partitions, if they may answer; a proxy asks them."""
        return self._table(location).copies_of if at.staleness and self._via is None else None

    def _shares(self, location: OperatorLocation, keys: pa.BinaryArray, is_everywhere: bool = False) -> list[KeyShare]:
        if keys.null_count:
            raise exceptions.RequestError(f"{keys.null_count} of {len(keys)} stored keys are null.")
        if self._via is not None:
            return [KeyShare(self._proxy(), keys, None)]
        table = self._table(location)
        if len(keys) == 1 and not is_everywhere:
            return [KeyShare(table.address_of(keys[0].as_py()), keys, None)]
        return table.shares_everywhere(keys) if is_everywhere else table.shares_of(keys)

    # -- ranges --------------------------------------------------------------------------------

    def count(self, location: OperatorLocation, request: protocol.ScanRequest, deadline: float) -> tuple[int, int]:
        asked = replace(request, run_id=location.run_id, forward=self._forward)
        if self._via is not None:
            requests = [ScatteredCount(self._proxy(), asked)]
        else:
            shares = self._table(location).partitions_by_owner(request.partitions)
            if not shares:
                raise exceptions.RequestError(
                    "A count of no partitions was asked for; partitions= must name one at least."
                )
            requests = [ScatteredCount(address, replace(asked, partitions=owned)) for address, owned in shares]
        version, counts = self._hosts.answers(location.run_id, requests, request.at, deadline)
        count = sum(counts)
        return version, count if request.limit is None else min(count, request.limit)

    def scan(
        self,
        location: OperatorLocation,
        request: protocol.ScanRequest,
        deadline: float,
        relocate: Callable[[Exception], OperatorLocation] | None = None,
        *,
        in_order: bool = False,
    ) -> protocol.StateAnswer:
        """Return the rows of all partitions (or of ``request.partitions``), all owners in parallel, at one version.

        ``deadline`` is for the beginning; while rows come there is none. A stream that breaks later is resumed at the
        same version, at the owners that ``relocate(error)`` returns, within the connections' ``timeout``. The next run
        of the query resumes it too, if that run has the same layout and has not been rolled back. Without ``relocate``,
        with ``latest``, or if rows have a TTL, the error is raised. The batches come in any order, but the rows of one
        partition in their order; with ``in_order`` the partitions come one after the other, as they are asked for.
        """
        shares = self._scan_shares(location, request.partitions, in_order)
        if not shares:
            raise exceptions.RequestError("A scan of no partitions was asked for; partitions= must name one at least.")
        asked = request.at
        is_completed = asked.isolation == "completed"
        at = self.seen.floor(location.run_id, asked)
        request = replace(request, run_id=location.run_id, forward=self._forward, at=at)
        if is_completed and len(shares) > 1:
            version = self._completed_now(location, request, shares, deadline)
            request = replace(request, at=replace(asked, isolation="version", version=version))
        plan = ScanPlan(
            request=request,
            location=location,
            open_stream=self._open_scan,
            address_of=lambda located, partition: self._scan_shares(located, [partition], in_order)[0][0],
            relocate=None if request.at.isolation == "latest" else relocate,
            timeout=self._connections.timeout,
            is_stable=is_stable(location.operator.schema, request.state),
            clock=self._clock,
            sleep=self._sleep,
        )
        try:
            batches = RoutedScan(plan, shares, deadline, in_order=in_order)
        except exceptions.StateVersionError as error:
            raise retryable(asked, error) from error
        if is_completed:
            self.seen.note(location.run_id, batches.version)
        return protocol.StateAnswer(batches.version, batches.schema, batches)

    def _scan_shares(
        self, location: OperatorLocation, partitions: list[int] | None, in_order: bool
    ) -> list[tuple[str, list[int]]]:
        """Return addresses with partitions; a proxy gets those of several owners in one scan, owner by owner."""
        shares = self._table(location).partitions_by_owner(partitions, in_order=in_order)
        if self._via is None:
            return shares
        proxy = self._proxy()
        streams = 1 if in_order else PROXY_STREAMS
        groups = [[p for _, owned in shares[i::streams] for p in owned] for i in range(streams)]
        return [(proxy, group) for group in groups if group]

    def _completed_now(
        self,
        location: OperatorLocation,
        request: protocol.ScanRequest,
        shares: list[tuple[str, list[int]]],
        deadline: float,
    ) -> int:
        """Return the version of a scan, which all hosts are then asked for: the later one of an owner's and the
        location's.

        An owner is asked because other hosts may not have received the run's versions for long.
        """
        address, partitions = shares[0]
        if self._via is not None:
            # A scan of no rows of one partition: the partition's owner answers.
            beginning = replace(request, partitions=partitions[:1], limit=0)
            reply, _ = list(self._connections.stream(address, beginning, b"", deadline))[-1]
            completed = expected(reply, protocol.EndOfRows, address).version
        elif self._local is not None and any(owner == self._local_address for owner, _ in shares):
            completed = self._local.await_completed(request.run_id, 0, 0.0)
        else:
            reply, _ = self._connections.request(address, protocol.AwaitRequest(request.run_id, 0, 0.0), b"", deadline)
            completed = expected(reply, protocol.CountReply, address).count
        if completed < 0:
            raise exceptions.HostUnavailableError(
                f"{address} knows no completed version of run {request.run_id}: it could not ask the coordinator."
            )
        completed = max(completed, location.completed_version)
        # The version that the caller asks for is not recorded: it may never be completed.
        self.seen.note(request.run_id, completed)
        return max(request.at.version, completed)

    def _open_scan(self, address: str, request: protocol.ScanRequest, deadline: float) -> PendingScan:
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
