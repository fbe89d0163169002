"""Scatter-gather: send one request to each of several hosts, then collect all answers."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as with_changes
from functools import cached_property, lru_cache
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from msgspec.structs import replace

from backends.conf import DEFAULT_FAMILY
from backends.encoding.columns import Records, binary_content, even_array, even_rows
from backends.encoding.keys import KEY_GROUP_BYTES
from backends.encoding.operator_schema import TIMERS, OperatorSchema, StateVariable
from coordinator_actor import exceptions as coordinator_errors
from coordinator_actor.messages import OperatorLocation
from spark_bridge import exceptions
from spark_bridge.queryable import protocol
from spark_bridge.queryable.connections import KvConnections, KvExchange
from spark_bridge.state_format.layouts import window_place

# The owner of each partition and key of an operator: an ``OperatorLocation`` in the form that routing needs.


KeyPositions: TypeAlias = npt.NDArray[np.int64]
"""Positions of keys among all keys of a request."""


@dataclass(frozen=True)
class KeyShare:
    """The keys that one host is asked for.

    ``positions`` are those of its keys among all keys; None if the host is asked for all keys, in order. ``partitions``
    are the partitions to look in; None means the partitions of the keys.
    """

    address: str
    keys: pa.BinaryArray
    positions: KeyPositions | None
    partitions: list[int] | None = None


class RoutingTable:
    """The owners of one operator's partitions in one run.

    Every method raises ``UnknownKvStateKeyGroupLocationError`` if a partition has no owner.
    """

    def __init__(self, location: OperatorLocation) -> None:
        self.location = location
        self.num_partitions = len(location.owners)
        self.key_groups = location.key_groups
        self.addresses: list[str] = list(dict.fromkeys(owner.query_address for owner in location.owners))
        places = {address: i for i, address in enumerate(self.addresses)}
        self._hosts = np.array([places[owner.query_address] for owner in location.owners], np.uint16)

    def copies_of(self, address: str) -> tuple[str, ...]:
        """Return the query addresses of the hosts that keep copies of the partitions of the owner at ``address``."""
        return self._copies.get(address, ())

    @cached_property
    def _copies(self) -> dict[str, tuple[str, ...]]:
        standbys = self.location.standbys
        return {
            owner.query_address: tuple(c.query_address for c in standbys.get(owner.host_id, ()) if c.query_address)
            for owner in self.location.owners
        }

    @cached_property
    def _hosts_of_groups(self) -> npt.NDArray[np.uint16]:
        groups = np.arange(self.key_groups, dtype=np.int64)
        return self._hosts[groups * self.num_partitions // self.key_groups]

    @cached_property
    def _ranks_of_groups(self) -> npt.NDArray[np.unsignedinteger[Any]]:
        """Return the rank of each key group's partition in an order that keeps the partitions of one owner together.

        The ranks take few bytes each, because few bytes are sorted faster.
        """
        ranks = np.empty(self.num_partitions, np.uint8 if self.num_partitions <= 1 << 8 else np.uint16)
        ranks[np.argsort(self._hosts, kind="stable")] = np.arange(self.num_partitions)
        groups = np.arange(self.key_groups, dtype=np.int64)
        return ranks[groups * self.num_partitions // self.key_groups]

    @cached_property
    def _addresses_of_groups(self) -> list[str]:
        return [self.addresses[host] for host in self._hosts_of_groups.tolist()]

    def address_of(self, key: bytes) -> str:
        try:
            address = self._addresses_of_groups[(key[0] << 8) | key[1]]
        except IndexError:
            raise self._no_key(key) from None
        return address or self._no_owner()

    def shares_of(self, keys: pa.BinaryArray) -> list[KeyShare]:
        """Return stored keys by owner. Those of a partition come together, so that owners need not order them again."""
        if len(self.addresses) == 1 or not len(keys):
            return [KeyShare(self.addresses[0] or self._no_owner(), keys, None)]
        even = even_rows(keys)
        groups = self._groups_of(keys, even)
        counts = np.bincount(self._hosts_of_groups.take(groups), minlength=len(self.addresses)).tolist()
        order, ordered = None, keys
        if max(counts) < len(keys):
            order = np.argsort(self._ranks_of_groups.take(groups), kind="stable")
            ordered = keys.take(pa.array(order)) if even is None else even_array(even.take(order))
        shares, begin = [], 0
        for host, count in enumerate(counts):
            if count:
                address = self.addresses[host] or self._no_owner()
                if order is None:
                    return [KeyShare(address, keys, None)]
                shares.append(KeyShare(address, ordered.slice(begin, count), order[begin : begin + count]))
                begin += count
        return shares

    def _groups_of(self, keys: pa.BinaryArray, even: Records | None) -> npt.NDArray[np.intp]:
        groups: npt.NDArray[np.intp]
        if even is not None and even.dtype.itemsize >= KEY_GROUP_BYTES:
            groups = np.ndarray((len(even),), ">u2", even, 0, even.strides).astype(np.intp)
        else:
            content, offsets = binary_content(keys)
            if int(np.diff(offsets).min()) < KEY_GROUP_BYTES:
                raise self._no_key(keys[int(np.diff(offsets).argmin())].as_py())
            begins = offsets[:-1]
            groups = (content[begins].astype(np.intp) << 8) | content[begins + 1]
        if int(groups.max()) >= self.key_groups:
            raise self._no_key(keys[int(groups.argmax())].as_py())
        return groups

    def shares_everywhere(self, keys: pa.BinaryArray) -> list[KeyShare]:
        """Return all keys for every owner, with the owner's partitions: so each partition is read once."""
        return [KeyShare(address, keys, None, owned) for address, owned in self.partitions_by_owner(None)]

    def partitions_by_owner(
        self, partitions: Iterable[int] | None, *, in_order: bool = False
    ) -> list[tuple[str, list[int]]]:
        """Return the partitions (None: all) by owner, in the order given.

        With ``in_order`` that order is kept strictly, so an owner may come more than once.
        """
        shares: list[tuple[str, list[int]]] = []
        for partition in range(self.num_partitions) if partitions is None else partitions:
            if not 0 <= partition < self.num_partitions:
                raise exceptions.UnknownKvStateKeyGroupLocationError(
                    f"Operator {self.location.operator.name!r} (run {self.location.run_id}) has no partition "
                    f"{partition}; it has {self.num_partitions}."
                )
            address = self.addresses[self._hosts[partition]] or self._no_owner()
            shares_of_address = shares[-1:] if in_order else [share for share in shares if share[0] == address]
            if shares_of_address and shares_of_address[0][0] == address:
                shares_of_address[0][1].append(partition)
            else:
                shares.append((address, [partition]))
        return shares

    def _no_key(self, key: bytes) -> exceptions.UnknownKeyOrNamespaceError:
        return exceptions.UnknownKeyOrNamespaceError(
            f"{key!r} is not a stored key of operator {self.location.operator.name!r}: it begins with none of the "
            f"{self.key_groups} key groups."
        )

    def _no_owner(self) -> Any:
        location = self.location
        silent = sorted({owner.host_id for owner in location.owners if not owner.query_address})
        raise exceptions.UnknownKvStateKeyGroupLocationError(
            f"Some partitions of operator {location.operator.name!r} (run {location.run_id}) have no owner that "
            f"answers queries; hosts without a query address: {', '.join(silent)}."
        )


@lru_cache(256)
def is_windowed(schema: str, state: str | None) -> bool:
    """Return whether the state variable ``state`` of an operator with that schema (JSON) is an aggregate by windows.

    Then the rows of one key may be in all partitions, because the window is a part of the stored key.
    """
    return any(window_place(v) is not None for v in variables_of(schema, state))


@lru_cache(256)
def is_stable(schema: str, state: str | None) -> bool:
    """Return whether the state variable ``state`` of an operator with that schema (JSON) is known to have no TTL.

    Then a version has the same rows at any time.
    """
    chosen = variables_of(schema, state)
    return bool(chosen) and all(v.ttl_ms is None for v in chosen)


def variables_of(schema: str, state: str | None) -> list[StateVariable]:
    """Return the variables among which a host chooses (``OperatorPlan.variable``); none if the schema is not known."""
    return chosen_variables(OperatorSchema.from_json(schema).in_use, state) if schema else []


def chosen_variables(variables: Sequence[StateVariable], state: str | None) -> list[StateVariable]:
    """Return the variables of a name. None means the operator's own rows, else all apart from timers, else all."""
    if state is None:
        own = [v for v in variables if v.name == DEFAULT_FAMILY]
        return own or [v for v in variables if v.kind != TIMERS] or list(variables)
    return [v for v in variables if v.name == state]


# The requests that a router sends to several hosts at once, each at a version that is chosen when it is sent.


T_co = TypeVar("T_co", covariant=True)


class ScatteredRequest(Protocol[T_co]):
    """A request to one host. The host answers with the version that it has read, and with the result."""

    @property
    def address(self) -> str:
        """The query address of the host."""

    @property
    def num_keys(self) -> int:
        """How many keys are asked for."""

    def message(self, at: protocol.At) -> tuple[protocol.Request, bytes]:
        """Return the request for the host's server, and its body."""

    def receive(self, exchange: KvExchange) -> tuple[int, T_co]:
        """Wait for the server's answer, and return its version and content."""

    def read(self, reads: protocol.StateReads, at: protocol.At) -> tuple[int, T_co]:
        """Answer the request in this process, from ``reads``."""

    def alternatives(self) -> Sequence[ScatteredRequest[T_co]]:
        """Return this request, and the same one to each host that may answer instead."""


S = TypeVar("S", bound="_OfShare")


@dataclass(frozen=True)
class _OfShare:
    """A request for the keys of a share. ``copies`` returns the hosts that may answer instead of the share's owner."""

    share: KeyShare
    copies: Callable[[str], tuple[str, ...]] | None = field(default=None, kw_only=True)

    @property
    def address(self) -> str:
        return self.share.address

    @property
    def num_keys(self) -> int:
        return len(self.share.keys)

    def alternatives(self: S) -> list[S]:
        """Return this request to the owner, and then to each host with a copy."""
        others = () if self.copies is None else self.copies(self.address)
        return [self, *(with_changes(self, share=with_changes(self.share, address=a)) for a in others)]


@dataclass(frozen=True)
class ScatteredLookup(_OfShare):
    """Ask one host for the stored values of some stored keys."""

    location: OperatorLocation
    family: str
    forward: bool

    def _request(self, at: protocol.At) -> protocol.LookupRequest:
        return protocol.LookupRequest(self.location.run_id, self.location.operator.name, at, self.family, self.forward)

    def message(self, at: protocol.At) -> tuple[protocol.Request, bytes]:
        return self._request(at), protocol.pack_bytes(self.share.keys)

    def receive(self, exchange: KvExchange) -> tuple[int, pa.BinaryArray]:
        reply, body = exchange.finish()
        version = expected(reply, protocol.LookupReply, exchange.address).version
        return version, self._checked(protocol.unpack_bytes(body))

    def read(self, reads: protocol.StateReads, at: protocol.At) -> tuple[int, pa.BinaryArray]:
        if len(self.share.keys) == 1:
            version, value = reads.lookup_one(self._request(at), self.share.keys[0].as_py())
            return version, pa.array([value], pa.binary())
        version, values = reads.lookup(self._request(at), self.share.keys)
        return version, self._checked(values)

    def _checked(self, values: pa.BinaryArray) -> pa.BinaryArray:
        if len(values) != len(self.share.keys):
            raise exceptions.ConnectionClosedError(
                f"{self.address} answered {len(values)} values for {len(self.share.keys)} keys."
            )
        return values


@dataclass(frozen=True)
class ScatteredKey:
    """Ask one host for the stored value of one stored key; the fast path of ``ScatteredLookup``."""

    address: str
    key: bytes
    location: OperatorLocation
    family: str
    forward: bool
    copies: tuple[str, ...] = ()
    num_keys: int = 1

    def alternatives(self) -> list[ScatteredKey]:
        """Return this request to the owner, and then to each host with a copy."""
        # Not by ``with_changes``, which takes 7 us for each.
        rest = self.key, self.location, self.family, self.forward
        return [self, *[ScatteredKey(address, *rest) for address in self.copies]]

    def _request(self, at: protocol.At) -> protocol.LookupRequest:
        return protocol.LookupRequest(self.location.run_id, self.location.operator.name, at, self.family, self.forward)

    def message(self, at: protocol.At) -> tuple[protocol.Request, bytes]:
        return self._request(at), protocol.pack_one(self.key)

    def receive(self, exchange: KvExchange) -> tuple[int, bytes | None]:
        reply, body = exchange.finish()
        return expected(reply, protocol.LookupReply, exchange.address).version, protocol.unpack_one(body)

    def read(self, reads: protocol.StateReads, at: protocol.At) -> tuple[int, bytes | None]:
        return reads.lookup_one(self._request(at), self.key)


class RemoteRows:
    """Rows that come over a connection. The constructor waits for the first frame, with version and schema."""

    def __init__(self, stream: KvExchange) -> None:
        self.stream = stream
        self._decoder = protocol.RowBatchDecoder()
        self._first: pa.RecordBatch | None = None
        self.version = 0
        self._is_over = False
        self._first = self._next()
        if self._decoder.schema is None:
            stream.close()
            raise exceptions.ConnectionClosedError(f"{stream.address} answered rows without a schema.")
        self.schema: pa.Schema = self._decoder.schema

    def read(self) -> pa.RecordBatch | None:
        """Wait for the next rows; None at the end."""
        if self._first is not None:
            first, self._first = self._first, None
            return first
        return None if self._is_over else self._next()

    def _next(self) -> pa.RecordBatch | None:
        while True:
            reply, body = next(self.stream)
            if type(reply) is protocol.EndOfRows:
                self._is_over = True
                self.version = reply.version
                return None
            try:
                self.version = expected(reply, protocol.RowsReply, self.stream.address).version
                batch = self._decoder.decode(body)
            except exceptions.ConnectionClosedError:
                self.stream.close()
                raise
            if batch is not None:
                return batch

    @property
    def has_buffered(self) -> bool:
        """Whether ``read`` has something that ``poll`` would not see."""
        return self._first is not None or self._is_over or self.stream.has_buffered()

    def close(self) -> None:
        self.stream.close()


@dataclass(frozen=True)
class ScatteredKeyRows(_OfShare):
    """Ask one host for the rows of some grouping keys: for their schema and batches."""

    request: protocol.KeyRowsRequest

    def message(self, at: protocol.At) -> tuple[protocol.Request, bytes]:
        return replace(self.request, at=at), protocol.pack_bytes(self.share.keys)

    def receive(self, exchange: KvExchange) -> tuple[int, tuple[pa.Schema, list[pa.RecordBatch]]]:
        rows = RemoteRows(exchange)
        batches = []
        while (batch := rows.read()) is not None:
            if batch.num_rows:
                batches.append(batch)
        return rows.version, (rows.schema, batches)

    def read(self, reads: protocol.StateReads, at: protocol.At) -> tuple[int, tuple[pa.Schema, list[pa.RecordBatch]]]:
        answer = reads.key_rows(replace(self.request, at=at), self.share.keys)
        return answer.version, (answer.schema, [batch for batch in answer.batches if batch.num_rows])


@dataclass(frozen=True)
class ScatteredCount:
    """Ask one host for the number of rows of a scan."""

    address: str
    request: protocol.ScanRequest
    num_keys: int = 0

    def alternatives(self) -> list[ScatteredCount]:
        return [self]

    def message(self, at: protocol.At) -> tuple[protocol.Request, bytes]:
        return protocol.CountRequest(replace(self.request, at=at)), b""

    def receive(self, exchange: KvExchange) -> tuple[int, int]:
        reply = expected(exchange.finish()[0], protocol.CountReply, exchange.address)
        return reply.version, reply.count

    def read(self, reads: protocol.StateReads, at: protocol.At) -> tuple[int, int]:
        return reads.count(replace(self.request, at=at))


R = TypeVar("R", bound=protocol.Reply)


def expected(reply: protocol.Reply, kind: type[R], address: str) -> R:
    """Return a reply of the kind that the request has. Raises ``ConnectionClosedError`` for one of another kind."""
    if not isinstance(reply, kind):
        raise exceptions.ConnectionClosedError(f"{address} answered by an unexpected {type(reply).__name__}.")
    return reply


T = TypeVar("T")


class ScatterGather:
    """Sends requests to hosts and collects the answers; ``local`` answers for ``local_address`` in this process."""

    def __init__(self, connections: KvConnections, local_address: str, local: protocol.StateReads | None) -> None:
        self._connections = connections
        self._local_address = local_address
        self._local = local

    def answers(self, requests: Sequence[ScatteredRequest[T]], at: protocol.At, deadline: float) -> list[tuple[int, T]]:
        """Return version and answer of each request; ``deadline`` is a time of ``time.monotonic``.

        All requests are sent before any answer is read. If some fail, the other answers are read all the same, so that
        their connections stay usable; then the first failure is raised.
        """
        begun: list[KvExchange | None] = []
        answers: list[tuple[int, T]] = []
        failure: Exception | None = None
        try:
            for request in requests:
                exchange = None
                if self._local is None or request.address != self._local_address:
                    try:
                        exchange = self._connections.begin(request.address, *request.message(at), deadline)
                    except Exception as error:  # noqa: BLE001 - raised below
                        failure = error
                        break
                begun.append(exchange)
            for request, exchange in zip(requests, begun, strict=False):
                try:
                    if exchange is not None:
                        answers.append(request.receive(exchange))
                    elif self._local is not None and failure is None:
                        answers.append(request.read(self._local, at))
                except Exception as error:  # noqa: BLE001 - raised below
                    failure = failure or error
        finally:
            for exchange in begun:
                if exchange is not None:
                    exchange.close()  # no effect on exchanges whose answer has been read
        if failure is not None:
            raise failure
        return answers


# Retries: which failed requests are repeated, after how long, and when they are given up.


MOVED = (
    exceptions.ConnectionClosedError,
    exceptions.HostUnavailableError,
    exceptions.NotOwnerError,
    OSError,
    coordinator_errors.RetiredRunError,
    coordinator_errors.StaleOwnerError,
    coordinator_errors.UnknownHostError,
    exceptions.UnknownKvStateKeyGroupLocationError,
    coordinator_errors.UnknownRunError,
)
"""Errors after which a new look-up may help: a host has moved or died, query or coordinator were restarted."""
BUSY = (coordinator_errors.QueryBusyError, exceptions.TooManyRequestsError)
"""Errors that pass with time: no partition has moved, and the host accepts no more requests for the moment."""
PERMANENT = (exceptions.AccessDeniedError, exceptions.QueryTimeoutError, exceptions.WrongOperatorError)
"""Errors that no attempt helps, though their base classes may pass."""
FINAL_ERRORS = (exceptions.QueryEndedError, exceptions.UnknownOperatorError)
"""Errors that are final for a client that asks for the first time.

A client that has had answers of the operator waits until its deadline for the query to be started again.
"""
FIRST_RETRY_DELAY = 0.02
"""In seconds. The delay doubles with each failure up to ``LONGEST_RETRY_DELAY``, and up to half of it is random."""
LONGEST_RETRY_DELAY = 0.5


def should_locate(error: Exception) -> bool:
    """Return whether an error shows that the cached owners are wrong or stale."""
    return isinstance(error, (*MOVED, *FINAL_ERRORS)) and not isinstance(error, PERMANENT)


class Attempts:
    """The attempts at one answer until ``deadline``, a time of ``clock``. ``begun`` is when they began, by default now.

    ``what`` begins the message of a ``QueryTimeoutError``. ``had_answer``: this client has had answers of that operator
    before. The class does not wait itself, so that threads and coroutines can both use it; ``retrying`` waits.
    """

    def __init__(
        self,
        what: str,
        deadline: float,
        *,
        had_answer: bool = False,
        begun: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        rng: Callable[[], float] = random.random,
    ) -> None:
        self.deadline = deadline
        self._what = what
        self._had_answer = had_answer
        self._clock = clock
        self._rng = rng
        self._begun = clock() if begun is None else begun
        self._failures = 0

    def delay(self, error: Exception) -> float:
        """Return the seconds to wait until the next attempt.

        Raises ``error`` itself if another attempt does not help. If there is no time for one, raises
        ``QueryTimeoutError``, or ``error`` if it is one of ``FINAL_ERRORS``, because it is an answer that the query has
        not come back.
        """
        if not self._may_help(error):
            raise error
        self._failures += 1
        longest = min(LONGEST_RETRY_DELAY, FIRST_RETRY_DELAY * 2 ** min(self._failures - 1, 10))
        delay: float = longest * (0.5 + 0.5 * self._rng())
        now = self._clock()
        if now + delay >= self.deadline:
            if isinstance(error, FINAL_ERRORS):
                raise error
            raise exceptions.QueryTimeoutError(
                f"{self._what} was not answered within {max(0.0, self.deadline - self._begun):.1f} s, in "
                f"{self._failures} attempts; last failure: {type(error).__name__}: {error}"
            ) from error
        return delay

    def _may_help(self, error: Exception) -> bool:
        if isinstance(error, PERMANENT):
            return False
        if isinstance(error, FINAL_ERRORS):
            return self._had_answer
        return isinstance(error, (*MOVED, *BUSY))


def retrying(
    call: Callable[[], T],
    attempts: Attempts,
    *,
    relocate: Callable[[Exception], None] = lambda error: None,
    sleep: Callable[[float], None] = time.sleep,
    failure: Exception | None = None,
) -> T:
    """Repeat ``call`` until it returns.

    Before each further attempt ``relocate`` forgets the location, if that may help. ``failure`` is that of a first
    attempt that the caller has made itself. Raises what ``Attempts.delay`` does. ``call`` must look up a forgotten
    location itself, because the look-up may fail in the same ways.
    """
    while True:
        try:
            if failure is not None:
                raise failure
            return call()
        except Exception as error:  # noqa: BLE001 - delay raises errors that no attempt can help
            failure = None
            delay = attempts.delay(error)
            if should_locate(error):
                relocate(error)
        sleep(delay)
