"""``QueryableStateClient``: lookups, scans, SQL and watches of running queries (Flink's client of the same name)."""

from __future__ import annotations

import datetime as dt
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from coordinator_actor.access_tokens import ALL, Scope
from coordinator_actor.coordinator_conf import COORDINATOR_NAME, NAMESPACE
from spark_bridge.queryable import protocol
from spark_bridge.queryable.client import arguments
from spark_bridge.queryable.client.discovery import (
    REFRESH_SECONDS,
    ClusterAccess,
    Discovery,
    KnownOperator,
    KnownView,
    NoRunningQueryError,
    ScopedDiscovery,
    Watermarks,
    connected,
)
from spark_bridge.queryable.client.features import FeatureRows, described_view, moment_of, read_view, read_views
from spark_bridge.queryable.client.lookups import KeyLookups, operator_description
from spark_bridge.queryable.client.results import check_form, formed
from spark_bridge.queryable.client.scans import StateScan, VersionDiff, scan_request, utc_time
from spark_bridge.queryable.client.state_views import StateView
from spark_bridge.queryable.client.watch import StateWatch
from spark_bridge.queryable.connections import KvConnections
from spark_bridge.queryable.routing.router import StateRouter
from spark_bridge.queryable.routing.scopes import is_in_scope, view_errors, views_within
from spark_bridge.state_format.layouts import ROWS, VALUE
from spark_bridge.transport.tls import TlsConf

if TYPE_CHECKING:
    from spark_bridge.queryable.sql.sql import SqlLimits, StateRelation


@dataclass(frozen=True)
class _FastLookup:
    """All that a lookup of one key in one state variable needs, for the fast path of ``get``."""

    target: KnownOperator
    family: str
    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], dict[str, Any] | None]


class QueryableStateClient:
    """Reads the state of running queries, from any process. Make one with ``connect``; it is for any number of threads.

        client = QueryableStateClient.connect()                                  # in the Ray cluster
        client = QueryableStateClient.connect(address="10.0.0.5:7070", token=t)  # from anywhere, without Ray and Spark

        client.get("user_totals", 42)                     # {'n': 17, 'spent': 311.2}, or None
        client.get_many("user_totals", [42, 43, 44])      # pyarrow.Table, one row per key asked, in that order
        client.scan("user_totals", where=[("n", ">", 100)]).to_pandas()
        for change in client.watch("user_totals"):        # the changes of each completed checkpoint
            print(change.version, change.batch)

    **Operators** are named by ``operator=`` as in ``aggregate`` and the others. If two running queries have an
    operator of the same name, ``query=`` (name, query id or run id) selects one. ``state=`` names the state variable of
    a processor that has several.

    **Keys** are in the order of ``by``: a plain value for one column, a tuple for several, or a dict by column name.

    **Versions.** Every answer is of one version of all partitions. By default (``isolation="completed"``) that is the
    last completed checkpoint, and never an older one than this client has seen before. With ``staleness="1 version"``,
    ``get`` and ``get_many`` also take the answer of a standby replica that is at most so many versions behind what its
    host has heard from the coordinator, about a second ago: that host is asked if the owner does not answer within
    10 ms. ``isolation="latest"`` is the
    version that each host committed last, partition by partition, before Spark commits. ``version=`` is a version that
    is still retained.

    **Rolling aggregates** are as of ``at=``, a datetime (in UTC if it has no zone), by default now by the clock of the
    host that the client is connected to. Rows after that time do not count. ``answered_at`` has the time of the last
    answer. ``at="watermark"`` reads the last completed version as of the watermark of its batch, floored to a multiple
    of the shortest hop: for a replay of history, whose events are long past. ``StateTimeError`` says that the version
    no longer has the rows or tiles for a time.

    **Waiting.** A call waits for hosts that are restarted or moved, and for a query that is restarted, until its
    ``timeout`` (seconds; by default the client's) has elapsed. Then it raises ``QueryTimeoutError`` with the last
    failure, or ``QueryEndedError`` for a query that has not come back. A client that has never read an ended query
    raises ``QueryEndedError`` at once.

    **Errors** are ``QueryableStateError``s that name the request and the existing names: ``UnknownOperatorError``,
    ``QueryEndedError``, ``UnknownKvStateIdError`` (no such state variable), ``UnknownKeyOrNamespaceError`` (a value
    that cannot be a key), ``StateVersionError``, ``AccessDeniedError``, ``RequestLimitError``, ``QueryTimeoutError``.
    An absent key is not an error.
    """

    def __init__(self, discovery: Discovery, connections: KvConnections, router: StateRouter, timeout: float) -> None:
        self._connections = connections
        self._router = router
        self._discovery = discovery
        self._scope = discovery.scope if isinstance(discovery, ScopedDiscovery) else ALL
        self._fast: dict[tuple[str, str | None, str | None], _FastLookup] = {}
        self._answered_at: int | None = None
        self._watermarks = Watermarks(discovery, router)
        self._access = ClusterAccess(discovery, connections, timeout, on_moved=self._fast.clear)

    @property
    def timeout(self) -> float:
        """The seconds of a call that names none. May be set at any time."""
        return self._access.timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self._access.timeout = seconds

    @property
    def lag_seconds(self) -> float:
        """How old the last answer may be, in seconds, if a ``mirror`` gave it, or late hosts of
        ``serve_state(follow=True)``; else 0.0.

        Such hosts look for new versions about once a second. If the looks fail, hosts answer from the last
        version that they know, and each answer has the seconds since the last successful look began. Other
        answers of a running query's own hosts have no lag.
        """
        return self._connections.lag_ms / 1000

    def now(self) -> dt.datetime:
        """Return the clock of the host that the client was connected to last: the default of ``at=``."""
        return utc_time(self._connections.now_us())

    @property
    def answered_at(self) -> dt.datetime | None:
        """The time that the rolling aggregates of the last answer are of; None before the first one.

        All hosts that gave parts of the answer were asked as of this time. With its version, ``at=`` of this time gives
        the same answer again.
        """
        return None if self._answered_at is None else utc_time(self._answered_at)

    @property
    def answered_version(self) -> int:
        """The version of the last answer that came from a host; 0 before the first one."""
        return self._connections.version

    @classmethod
    def connect(
        cls,
        namespace: str = NAMESPACE,
        coordinator_name: str = COORDINATOR_NAME,
        address: str | Sequence[str] | None = None,
        token: str | None = None,
        tls: TlsConf | ssl.SSLContext | None = None,
        timeout: float = 30.0,
        direct: bool | None = None,
    ) -> QueryableStateClient:
        """Connect to the state store.

        Without ``address``, the process must be able to reach the Ray cluster: it finds coordinator, hosts and token by
        itself, and joins Ray if it has not joined yet. With the ``address`` of a host, ``ip:port`` or
        ``statestore://ip:port``, or of several hosts, the process needs neither Ray nor Spark; the client uses a host
        that answers. Then a ``token`` is needed, as ``statestore token`` issues it. ``STATESTORE_ADDRESS`` and
        ``STATESTORE_TOKEN`` in the environment are the defaults of both.

        ``direct``: whether the client asks the owners of partitions itself, or sends everything to the host at
        ``address``, which asks the others. By default the latter only if there is an ``address``. ``tls``, a
        ``TlsConf`` or an ``ssl.SSLContext`` of a client, must be given where hosts use TLS. ``timeout`` is in seconds,
        for every call without its own.

        With an address, ``connect`` does no I/O: a wrong address or token shows with the first call.
        """
        return cls(*connected(namespace, coordinator_name, address, token, tls, timeout, direct), timeout)

    # -- keys ----------------------------------------------------------------------------------

    def get(
        self,
        operator: str,
        key: Any,
        query: str | None = None,
        state: str | None = None,
        *,
        window: Any = None,
        isolation: str = "completed",
        version: int | None = None,
        at: Any = None,
        staleness: str | int | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Return the state of one key, or None if it has none.

        - For an aggregate or a value state: a dict of its columns.
        - For a list state: a list of its elements. For a map state: a dict of user key to value. Elements and values of
          one column are plain, others dicts; user keys of several columns are tuples.
        - For an aggregate by windows or sessions: a list of dicts with the window's column, ascending; with ``window=``
          the one dict. ``window`` is its start, a datetime, or ``(start, end)``. Times without a zone are UTC.
        - For timers: a list of the times when they fire, in ms since 1970.

            client.get("user_totals", 42)                                   # {'n': 17, 'spent': 311.2}
            client.get("by_country", ("de", "fr"))                          # a key of two columns
            client.get("per_minute", 42, window=datetime(2024, 3, 9, 23))   # {'n': 3}
        """
        begun, failure = time.monotonic(), None
        is_plain = window is None and version is None and at is None and staleness is None
        if is_plain and isolation == "completed":
            fast = self._fast.get((operator, query, state))
            if fast is not None and begun - fast.target.located_at < REFRESH_SECONDS:
                encoded = fast.encode(key)
                deadline = begun + (self._access.timeout if timeout is None else timeout)
                try:
                    _, value = self._router.lookup_one(
                        fast.target.location, fast.family, encoded, arguments.COMPLETED, deadline
                    )
                except Exception as error:  # noqa: BLE001 - the first attempt below, which raises final errors
                    failure = error
                else:
                    return None if value is None else fast.decode(value)
        asked = arguments.requested_version(isolation, version, at, staleness)

        def ask(target: KnownOperator, deadline: float) -> Any:
            view = target.view(state)
            if view.kind in (VALUE, ROWS):
                fast = _FastLookup(target, view.family, view.codec.encode_one, view.stored_values.decode_one)
                self._fast[operator, query, state] = fast
            return self._lookups(target, state, asked, deadline).one(key, window)

        return self._access.answer(f"get({operator!r}, {key!r})", (operator, query), timeout, ask, begun, failure)

    def get_each(
        self,
        operator: str,
        keys: Sequence[Any],
        query: str | None = None,
        state: str | None = None,
        *,
        isolation: str = "completed",
        at: Any = None,
        staleness: str | int | None = None,
        timeout: float | None = None,
    ) -> list[Any]:
        """Return the state of each of several keys as ``get`` does, all of one version.

        A value that cannot be a key gets the error itself. For the keys of different callers
        (``AsyncQueryableStateClient``); ``get_many`` is for a caller that wants a table.
        """
        asked = arguments.requested_version(isolation, None, at, staleness)

        def ask(target: KnownOperator, deadline: float) -> list[Any]:
            return self._lookups(target, state, asked, deadline).each(keys)

        return self._access.answer(f"get of {len(keys)} keys of {operator!r}", (operator, query), timeout, ask)

    def get_many(
        self,
        operator: str,
        keys: Any,
        query: str | None = None,
        state: str | None = None,
        *,
        window: Any = None,
        isolation: str = "completed",
        version: int | None = None,
        at: Any = None,
        staleness: str | int | None = None,
        timeout: float | None = None,
        as_: str = "arrow",
    ) -> Any:
        """Return one row per key asked, in that order: the columns of the key, then of its value.

        The columns of the value are null for an absent key.

        ``keys`` are a list of keys, an array of Arrow or numpy, a series or index of pandas or Polars. Keys of several
        columns may be a table or frame, whose columns count by name, else by order, or a dict of columns. There may be
        any number of keys, and a key may come twice.

        Lists, maps, windows, sessions and timers are one list or map per key, in the column ``list_value``,
        ``map_value``, ``windows``, ``sessions`` or ``timers``. With ``window=`` (one for all keys, or a list of them),
        or if the keys have the window's column, there is a row of values as for other aggregates.

        ``as_``: "arrow" (a ``pyarrow.Table``), "pandas", "polars" or "pylist" (a list of dicts).
        """
        check_form(as_)
        asked = arguments.requested_version(isolation, version, at, staleness)
        all_keys = keys if hasattr(keys, "__len__") else list(keys)

        def ask(target: KnownOperator, deadline: float) -> pa.Table:
            return self._lookups(target, state, asked, deadline).table(all_keys, window)

        what = f"get_many of {len(all_keys)} keys of {operator!r}"
        return formed(self._access.answer(what, (operator, query), timeout, ask), as_)

    def key_rows(
        self,
        operator: str,
        keys: Any,
        state: str | None = None,
        columns: Sequence[str] | None = None,
        *,
        query: str | None = None,
        isolation: str = "completed",
        version: int | None = None,
        at: Any = None,
        timeout: float | None = None,
    ) -> StateScan:
        """Return the rows that some keys have, in the columns of ``scan`` and like a scan. An absent key has no row.

        ``keys`` as for ``get_many``, without the window of an aggregate by windows. A key that comes twice counts once.
        """
        asked = arguments.requested_version(isolation, version, at)
        all_keys = keys if hasattr(keys, "__len__") else list(keys)

        def ask(target: KnownOperator, deadline: float) -> StateScan:
            return self._lookups(target, state, asked, deadline).rows(all_keys, state, columns)

        return self._access.answer(f"key_rows of {len(all_keys)} keys of {operator!r}", (operator, query), timeout, ask)

    # -- features ------------------------------------------------------------------------------

    def features(
        self,
        view: str,
        keys: Any,
        *,
        defaults: bool = True,
        isolation: str = "completed",
        versions: Mapping[str, int] | None = None,
        at: Any = None,
        timeout: float | None = None,
    ) -> FeatureRows:
        """Return the features of a feature view for many keys, in one request: a row per key asked, in that order.

            rows = client.features("card_fraud", ["4711", "4712"])
            rows.to_numpy()["spent"]     # also to_arrow(), to_dict() and to_pandas()
            rows.versions, rows.ages     # {'cards': 812}, {'n': 0.4, 'spent': 0.4}: seconds

        ``keys`` are those of ``get_many``. All features of one query are of one version, also those of several
        operators. With ``defaults=False`` an absent key has nulls where it would have the defaults of its features.
        ``versions``, as an earlier answer has it, reads these versions again, whatever their age. Rolling aggregates of
        all operators are as of ``at``, by default now.

        Raises ``StaleFeatureError`` if the last completed version is older than the view's ``max_age``, unless the view
        gives nulls then, and ``UnknownFeatureViewError``. Declare a view by ``declare_feature_view``.
        """
        asked = arguments.requested_version(isolation, None, at)
        as_of = partial(moment_of, asked=asked, now_us=self._connections.now_us)
        return read_view(self, view, keys, as_of, versions, defaults=defaults, timeout=timeout)

    def features_of_views(
        self, requests: Sequence[tuple[str, Any]], *, defaults: bool = True, timeout: float | None = None
    ) -> list[FeatureRows]:
        """Return the features of several pairs of a view and its keys, in that order, as of one time.

            cards, shops = client.features_of_views([("card_fraud", ["4711"]), ("shop_risk", [17])])

        Each pair is a request like ``features``. All answers are of one version of each query: if a version has been
        completed between the requests, the earlier ones are repeated with it. Rolling aggregates of all views are as of
        now. ``timeout`` is for each request.
        """
        return read_views(self, requests, defaults=defaults, timeout=timeout)

    def _ask_features(
        self, target: KnownView, at: list[protocol.At], defaults: bool, keys: protocol.StoredKeys, deadline: float
    ) -> protocol.FeatureAnswer:
        location = target.location
        request = protocol.FeaturesRequest(location.view.name, location.revision, at, defaults, takes_rows=True)
        reply, body = self._router.features(location, request, keys, deadline)
        return protocol.features_of(reply, body, target.columns)

    def feature_views(self, *, timeout: float | None = None) -> list[dict[str, Any]]:
        """Return all feature views: owner, description, bound, features with their types, and the age of each query.

        A view that cannot be read now has the reason as ``problem``.
        """
        try:
            views = self._access.views(timeout)
        except NoRunningQueryError:
            return []
        return [described_view(view) for view in views]

    def entity_schema(self, view: str, *, timeout: float | None = None) -> pa.Schema:
        """Return the columns of a feature view's entity, in the order of its keys."""
        what = f"entity_schema({view!r})"
        return self._access.answer_of_view(what, view, timeout, lambda target, _: target.codec.schema)

    # -- all rows ------------------------------------------------------------------------------

    def scan(
        self,
        operator: str,
        state: str | None = None,
        prefix: Any = None,
        start: Any = None,
        end: Any = None,
        limit: int | None = None,
        columns: Sequence[str] | None = None,
        *,
        where: Sequence[arguments.WhereCondition] | None = None,
        query: str | None = None,
        isolation: str = "completed",
        version: int | None = None,
        at: Any = None,
        timeout: float | None = None,
    ) -> StateScan:
        """Return the rows of a state variable as a stream.

        There is a row per key, list element, map entry, window, session or timer.

        ``prefix`` selects keys by their beginning: a tuple (or a value other than a string) is the first columns, as
        ``("de",)``; a string is the beginning of the key. ``start`` (included) and ``end`` (not included) bound the key
        in the order of ``by``; they are one column, or a tuple of the first columns. ``where``: conditions that must
        all hold, as ``[("n", ">", 10), ("country", "in", ["de", "fr"])]``; operators are =, !=, <, <=, >, >=, in,
        is null, is not null. ``columns``: the wanted columns; by default all but ``key_group``, ``partition_id`` and,
        with a TTL, ``ttl_expiration_ms``. ``limit``: the most rows, of any keys.

        Rows come in no order. ``timeout`` is for the first of them, and then for each wait.
        """
        asked = arguments.requested_version(isolation, version, at)
        arguments.check_limit(limit)

        def ask(target: KnownOperator, deadline: float) -> StateScan:
            view = target.view(state)
            version_and_time = self._as_of(target, view, asked, deadline)
            request = scan_request(
                target, view, state, version_and_time, prefix, start, end, limit=limit, columns=columns, where=where
            )

            def relocate(error: Exception) -> Any:
                self._access.moved((operator, query), error)
                return self._access.known((operator, query), time.monotonic() + self._access.timeout).location

            answer = self._router.scan(target.location, request, deadline, relocate)
            return StateScan(answer, limit, moment=request.at.moment)

        return self._access.answer(f"scan({operator!r})", (operator, query), timeout, ask)

    def find(
        self,
        operator: str,
        /,
        *,
        limit: int | None = None,
        columns: Sequence[str] | None = None,
        query: str | None = None,
        isolation: str = "completed",
        version: int | None = None,
        timeout: float | None = None,
        **conditions: Any,
    ) -> StateScan:
        """Return the rows of an aggregate with certain values in their columns, by an index, as ``scan`` does.

        A condition is a value, a list of accepted values, or None for null; all must hold. At least one is of a column
        with an index (``index=`` of ``aggregate``). Every host is asked, and reads the matching rows only. ``scan``
        with ``where=`` uses an index in the same way, and needs none.

            client.find("payments", merchant="m17").to_pylist()
            client.find("payments", merchant=["m17", "m18"], country="de", columns=["card"])
        """
        where = arguments.equalities(conditions)

        def check(target: KnownOperator, deadline: float) -> None:
            arguments.require_index(operator, target.view(None).variable.indexes, conditions)

        self._access.answer(f"find({operator!r})", (operator, query), timeout, check)
        options: dict[str, Any] = {"query": query, "isolation": isolation, "version": version, "timeout": timeout}
        return self.scan(operator, limit=limit, columns=columns, where=where, **options)

    def _lookups(self, target: KnownOperator, state: str | None, asked: protocol.At, deadline: float) -> KeyLookups:
        view = target.view(state)
        return KeyLookups(self._router, target, view, self._as_of(target, view, asked, deadline), deadline)

    def _as_of(self, target: KnownOperator, view: StateView, asked: protocol.At, deadline: float) -> protocol.At:
        """Return the version that is asked for, and the time of the rolling aggregates if the operator has any."""
        at = view.as_of(asked, self._connections.now_us)
        if at.moment == arguments.AT_WATERMARK:
            at = self._watermarks.version_at(target, view, at, deadline)
        if at.moment is not None:
            self._answered_at = at.moment
        return at

    def count(
        self,
        operator: str,
        state: str | None = None,
        *,
        prefix: Any = None,
        start: Any = None,
        end: Any = None,
        where: Sequence[arguments.WhereCondition] | None = None,
        query: str | None = None,
        isolation: str = "completed",
        version: int | None = None,
        at: Any = None,
        timeout: float | None = None,
    ) -> int:
        """Return the number of rows of ``scan``."""
        asked = arguments.requested_version(isolation, version, at)

        def ask(target: KnownOperator, deadline: float) -> int:
            view = target.view(state)
            version_and_time = self._as_of(target, view, asked, deadline)
            request = scan_request(target, view, state, version_and_time, prefix, start, end, where=where)
            return self._router.count(target.location, request, deadline)[1]

        return self._access.answer(f"count({operator!r})", (operator, query), timeout, ask)

    # -- changes -------------------------------------------------------------------------------

    def watch(
        self,
        operator: str,
        keys: Any = None,
        *,
        state: str | None = None,
        query: str | None = None,
        from_version: int | None = None,
        timeout: float | None = None,
        from_run: str | None = None,
        every_version: bool = False,
    ) -> StateWatch:
        """Return the changes of each completed checkpoint, version by version, for as long as it is iterated over.

        See ``StateWatch``. ``KafkaSink`` writes them to a topic of Kafka.
        """
        all_keys = keys if keys is None or hasattr(keys, "__len__") else list(keys)
        return StateWatch(
            self._access, operator, all_keys, state, query, from_version, timeout, from_run, every_version
        )

    def diff(
        self,
        operator: str,
        from_version: int,
        to_version: int | None = None,
        *,
        state: str | None = None,
        query: str | None = None,
        timeout: float | None = None,
    ) -> VersionDiff:
        """Return the keys whose values differ between two retained versions, by default up to the last completed one.

        See ``VersionDiff``.
        """
        first = arguments.requested_version("completed", from_version)
        last = arguments.requested_version("completed", to_version)

        def ask(target: KnownOperator, deadline: float) -> VersionDiff:
            return VersionDiff.begin(self._router, target, target.view(state), first, last, deadline)

        return self._access.answer(f"diff({operator!r})", (operator, query), timeout, ask)

    def sql(
        self,
        query: str,
        *,
        query_params: Any = None,
        connection: Any = None,
        version: int | None = None,
        at: Any = None,
        timeout: float | None = None,
        limits: SqlLimits | None = None,
    ) -> StateRelation:
        """Return the rows that a SQL statement makes of the state of running queries, at ``version`` or the newest.

        All rolling aggregates in it are as of ``at``.

        It needs DuckDB: install ``ray-statestore[sql]``.

            client.sql("select country, sum(n) from user_totals group by country").df()

        ``limits`` bound its memory, threads and temporary files. See ``spark_bridge.queryable.sql.sql``.
        """
        from spark_bridge.queryable.sql.sql import sql

        return sql(
            self,
            query,
            query_params=query_params,
            connection=connection,
            version=version,
            at=at,
            timeout=timeout,
            limits=limits,
        )

    # -- operators -----------------------------------------------------------------------------

    def operators(self, *, timeout: float | None = None) -> list[dict[str, Any]]:
        """Return the operators of all running queries, each with its query, key columns and state variables."""
        try:
            operators = self._access.answer_of_any_host("operators()", protocol.OperatorsRequest(), timeout)
        except NoRunningQueryError:
            return []
        return [operator for operator in operators if is_in_scope(self._scope, operator)]

    def describe(self, operator: str, query: str | None = None, *, timeout: float | None = None) -> dict[str, Any]:
        """Return the description of one operator: key, state variables, owners, versions, statistics of its hosts."""

        def ask(target: KnownOperator, deadline: float) -> dict[str, Any]:
            request = protocol.DescribeRequest(operator, target.location.run_id, forward=True)
            return operator_description(target, self._access.ask_host(request, deadline)["hosts"])

        return self._access.answer(f"describe({operator!r})", (operator, query), timeout, ask)

    def key_schema(
        self, operator: str, query: str | None = None, state: str | None = None, *, timeout: float | None = None
    ) -> pa.Schema:
        """Return the columns of a state variable's key in the order of ``by``, without a window."""

        def ask(target: KnownOperator, deadline: float) -> pa.Schema:
            return target.view(state).without_window.schema

        return self._access.answer(f"key_schema({operator!r})", (operator, query), timeout, ask)

    def close(self) -> None:
        """Close all connections; the client cannot be used afterwards."""
        self._fast.clear()
        self._connections.close()

    def __enter__(self) -> QueryableStateClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# Clients of an application whose callers have separate tokens: each sees what the scope of its token names.


def scoped_client(client: QueryableStateClient, scope: Scope) -> QueryableStateClient:
    """Return a client that sees the part in ``scope``, over the connections of ``client``: it is not closed."""
    if scope.is_all:
        return client
    discovery = ScopedDiscovery(scope, client._discovery, lambda seconds: client.operators(timeout=seconds))
    scoped = _ScopedClient(discovery, client._connections, client._router, client.timeout)
    find = client._access.find_views
    scoped._access.find_views = lambda request, deadline: views_within(scope, lambda one: find(one, deadline), request)
    return scoped


class _ScopedClient(QueryableStateClient):
    """A client for callers who must not learn of other views and operators from errors."""

    def _ask_features(
        self, target: KnownView, at: list[protocol.At], defaults: bool, keys: protocol.StoredKeys, deadline: float
    ) -> protocol.FeatureAnswer:
        with view_errors(target.location.view.name):
            return super()._ask_features(target, at, defaults, keys, deadline)
