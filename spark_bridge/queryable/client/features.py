"""The answers of ``features`` and ``feature_views``."""

from __future__ import annotations

import dataclasses
import datetime as dt
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from msgspec import to_builtins
from msgspec.structs import replace

from backends.encoding.user_values import python_values
from spark_bridge import exceptions
from spark_bridge.queryable import protocol
from spark_bridge.queryable.client.arguments import AT_WATERMARK, COMPLETED, KeyCodec, requested_version
from spark_bridge.queryable.client.discovery import ClusterAccess, KnownView
from spark_bridge.queryable.client.results import formed
from spark_bridge.queryable.client.scans import utc_time
from spark_bridge.queryable.connections import KvConnections, KvExchange
from spark_bridge.queryable.protocol import At
from spark_bridge.queryable.routing.feature_reads import FEW_KEYS, stale_error, stale_queries
from spark_bridge.queryable.routing.router import StateRouter, owner_of_features
from spark_bridge.queryable.routing.scatter_gather import expected


class FeatureRows:
    """Features of entities: a row per key asked, in that order."""

    def __init__(
        self, target: KnownView, keys: pa.RecordBatch | list[Any], answer: protocol.FeatureAnswer, moment: int | None
    ) -> None:
        self._target = target
        # Nothing that the caller can change.
        self._asked = keys
        self._answer = answer
        self._moment = moment

    @cached_property
    def keys(self) -> pa.RecordBatch:
        """The columns of the entity."""
        asked = self._asked
        return asked if isinstance(asked, pa.RecordBatch) else self._target.codec.columns(asked)

    @cached_property
    def columns(self) -> pa.RecordBatch:
        """The features, in the order of the view."""
        columns, schema = self._answer.columns, self._target.columns
        if not isinstance(columns, list):
            return columns
        of_columns = zip(*(self._answer.rows or [columns]), strict=True)
        arrays = [pa.array(values, field.type) for values, field in zip(of_columns, schema, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=schema)

    @cached_property
    def versions(self) -> dict[str, int]:
        """The version that was read of each query, by its name.

        A query that has no name, or shares it with another query of the view, is named by its id.
        """
        return dict(zip(self._target.location.titles, self._answer.versions, strict=True))

    @cached_property
    def ages(self) -> dict[str, float | None]:
        """The age of the version of each feature in seconds.

        None if it is not known: for a version that was asked for, and before the first batch.
        """
        location = self._target.location
        seconds = [None if age is None else age / 1000 for age in self._answer.ages_ms]
        return {f.name: seconds[i] for f, i in zip(location.view.features, location.of_feature, strict=True)}

    @property
    def age(self) -> float | None:
        """The age of the oldest version that was read, in seconds; None if one is not known."""
        known = [age for age in self._answer.ages_ms if age is not None]
        return max(known) / 1000 if known and len(known) == len(self._answer.ages_ms) else None

    @property
    def at(self) -> dt.datetime | None:
        """The time that the rolling aggregates are of; None without any."""
        return None if self._moment is None else utc_time(self._moment)

    def __len__(self) -> int:
        return len(self._asked)

    def divided(self, requests: Sequence[list[Any]]) -> Iterator[FeatureRows]:
        """Yield the rows of each of several requests, whose keys were asked together in that order."""
        of_keys = self._answer.rows
        if of_keys is None and self._target.is_plain:
            of_keys = list(map(list, zip(*map(python_values, self.columns.columns), strict=True)))
        at = 0
        for keys in requests:
            if of_keys is None:
                part, rows = self.columns.slice(at, len(keys)), None
            else:  # many short arrays would take longer
                part, rows = (of_keys[at], None) if len(keys) == 1 else ([], of_keys[at : at + len(keys)])
            answer = dataclasses.replace(self._answer, columns=part, rows=rows)
            asked = self._asked
            of_request = asked[at : at + len(keys)] if isinstance(asked, list) else asked.slice(at, len(keys))
            yield FeatureRows(self._target, of_request, answer, self._moment)
            at += len(keys)

    def to_arrow(self) -> pa.Table:
        """Return the columns of the entity and the features as a table."""
        schema = pa.schema([*self.keys.schema, *self.columns.schema])
        return pa.Table.from_arrays([*self.keys.columns, *self.columns.columns], schema=schema)

    def to_dict(self) -> dict[str, list[Any]]:
        """Return the columns of the entity and the features as lists of Python values, None for null."""
        asked, plain = self._asked, self._target.plain_key
        if isinstance(asked, list) and all(type(key) is plain for key in asked):
            keys = {self._target.codec.schema.names[0]: asked[:]}  # columns of one key would take longer than its read
        else:
            keys = {name: python_values(column) for name, column in zip(self.keys.schema.names, self.keys, strict=True)}
        return {**keys, **self.values()}

    def values(self, names: Sequence[str] | None = None) -> dict[str, list[Any]]:
        """Return features, by default all, as lists of Python values, None for null.

        Raises ``RequestError`` for a name that is not a feature of the view.
        """
        columns, features = self._answer.columns, self._target.names
        rows = self._answer.rows
        if names is None and rows is None and isinstance(columns, list):
            return {name: [value] for name, value in zip(features, columns, strict=True)}
        of_columns = columns if rows is None else map(list, zip(*rows, strict=True))
        by_name = dict(zip(features, of_columns, strict=True))
        wanted = features if names is None else names
        unknown = [name for name in wanted if name not in by_name]
        if unknown:
            raise exceptions.RequestError(
                f"View {self._target.location.view.name!r} has no feature {', '.join(map(repr, unknown))}; it has "
                f"{', '.join(map(repr, features))}."
            )
        if rows is not None:
            return {name: by_name[name] for name in wanted}
        if isinstance(columns, list):
            return {name: [by_name[name]] for name in wanted}
        return {name: python_values(by_name[name]) for name in wanted}

    def to_pandas(self) -> Any:
        """Return the columns of the entity and the features as a pandas frame."""
        return formed(self.to_arrow(), "pandas")

    def to_numpy(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return the features as arrays, as ``torch.as_tensor`` takes them.

        Numbers without nulls are not copied; such arrays are read-only. A null is NaN in floats, NaT in times, and None
        in columns of other types than numbers and booleans. Integers and booleans have no value for null: then raises
        ``RequestError``.
        """
        columns, schema = self._answer.columns, self._target.columns
        if isinstance(columns, list) and self._answer.rows is None:
            named = list(zip(schema.names, self._target.dtypes, columns, strict=True))
            if all(value is not None or dtype.kind not in "biu" for _, dtype, value in named):
                return {name: np.array([value], dtype) for name, dtype, value in named}
        return {name: _array(name, column) for name, column in zip(schema.names, self.columns, strict=True)}


def _array(name: str, column: pa.Array) -> np.ndarray[Any, Any]:
    kind = column.type
    if column.null_count and (pa.types.is_integer(kind) or pa.types.is_boolean(kind)):
        raise exceptions.RequestError(
            f"Feature {name!r} is null in {column.null_count} of {len(column)} rows, and a numpy array of {kind} has "
            "no value for that. Declare a default= for it, or take to_arrow(), to_dict() or to_pandas()."
        )
    array: np.ndarray[Any, Any] = column.to_numpy(zero_copy_only=False)
    return array


class ViewClient(Protocol):
    """What reads of views need of ``QueryableStateClient``."""

    _connections: KvConnections
    _router: StateRouter
    _access: ClusterAccess
    _answered_at: int | None

    def _ask_features(
        self, target: KnownView, at: list[At], defaults: bool, keys: protocol.StoredKeys, deadline: float
    ) -> protocol.FeatureAnswer: ...

    def features(
        self, view: str, keys: Any, *, defaults: bool = True, isolation: str = "completed", timeout: float | None = None
    ) -> FeatureRows:
        """See ``QueryableStateClient.features``."""


def read_views(
    client: ViewClient, requests: Sequence[tuple[str, Any]], *, defaults: bool, timeout: float | None
) -> list[FeatureRows]:
    """Return the answer of ``QueryableStateClient.features_of_views``."""
    moment = client._connections.now_us()

    def as_of(location: protocol.ViewLocation) -> At:
        return replace(COMPLETED, moment=moment) if location.is_rolling else COMPLETED

    read = partial(read_view, client, as_of=as_of, defaults=defaults, timeout=timeout)
    asked = [(view, keys if hasattr(keys, "__len__") else list(keys)) for view, keys in requests]
    answers = [read(view, keys, versions=None) for view, keys in asked]
    return at_one_version(answers, lambda i, versions: read(*asked[i], versions=versions))


def plain_stored(codec: KeyCodec, keys: Any) -> list[bytes] | None:
    """Return the stored keys of a list of few keys of the columns' own Python types; None for other keys."""
    if not isinstance(keys, list) or not 0 < len(keys) <= FEW_KEYS:
        return None
    stored = []
    for key in keys:
        encoded = codec.encode_plain(key)
        if encoded is None:
            return None
        stored.append(encoded)
    return stored


@dataclass(frozen=True)
class _Call:
    """A request for the features of some keys: the keys as the caller has them and as stored, and the version of each
    query. With ``is_newest``, later answers are not older than this one.
    """

    target: KnownView
    keys: pa.RecordBatch | list[Any]
    encoded: protocol.StoredKeys
    at: list[At]
    moment: int | None
    is_newest: bool

    @classmethod
    def of(
        cls,
        client: ViewClient,
        target: KnownView,
        keys: Any,
        as_of: Callable[[protocol.ViewLocation], At],
        versions: Mapping[str, int] | None,
    ) -> _Call:
        codec, queries, asked = target.codec, target.location.queries, as_of(target.location)
        stored = plain_stored(codec, keys)
        of_answer: pa.RecordBatch | list[Any]
        encoded: protocol.StoredKeys
        if stored is not None:  # columns of a few keys would take longer than their look-up
            of_answer, encoded = keys[:], stored[0] if len(stored) == 1 else stored
        else:
            of_answer = codec.columns(keys)
            encoded = codec.encode(of_answer)
        client._answered_at = client._answered_at if asked.moment is None else asked.moment
        is_completed = asked.isolation == "completed" and versions is None
        if versions is not None:
            at = versions_of(target.location, versions, asked)
        elif is_completed:
            at = [client._router.seen.floor(query.run_id, asked) for query in queries]
        else:
            at = [asked] * len(queries)
        return cls(target, of_answer, encoded, at, asked.moment, is_completed)

    def rows(self, client: ViewClient, answer: protocol.FeatureAnswer) -> FeatureRows:
        """Return the answer, and remember its versions."""
        if self.is_newest:
            for query, version in zip(self.target.location.queries, answer.versions, strict=True):
                client._router.seen.note(query.run_id, version)
        return FeatureRows(self.target, self.keys, answer, self.moment)


def read_view(
    client: ViewClient,
    view: str,
    keys: Any,
    as_of: Callable[[protocol.ViewLocation], At],
    versions: Mapping[str, int] | None,
    *,
    defaults: bool,
    timeout: float | None,
) -> FeatureRows:
    """Return the answer of ``QueryableStateClient.features``. ``as_of`` gives the version and moment of a view."""
    all_keys = keys if hasattr(keys, "__len__") else list(keys)

    def ask(target: KnownView, deadline: float) -> FeatureRows:
        call = _Call.of(client, target, all_keys, as_of, versions)
        return call.rows(client, client._ask_features(target, call.at, defaults, call.encoded, deadline))

    # A dict has a column of keys for each name.
    count = len(next(iter(all_keys.values()), ())) if isinstance(all_keys, dict) else len(all_keys)
    return client._access.answer_of_view(f"features({view!r}) of {count} keys", view, timeout, ask)


def features_each(
    client: ViewClient, view: str, requests: Sequence[list[Any]], *, defaults: bool, isolation: str, timeout: float
) -> list[FeatureRows | Exception]:
    """Return the answer of each of several requests of one view, or its error, all of one version of each query.

    For the requests of different callers. Raises the error of all.
    """
    read = partial(client.features, view, defaults=defaults, isolation=isolation, timeout=timeout)
    if len(requests) == 1:
        return [read(requests[0])]
    try:
        return list(read([key for keys in requests for key in keys]).divided(requests))
    except (exceptions.UnknownKeyOrNamespaceError, exceptions.RequestLimitError):
        answers: list[FeatureRows | Exception] = []
        for keys in requests:
            try:
                answers.append(read(keys))
            except exceptions.QueryableStateError as error:
                answers.append(error)
        return answers


def owner_of(client: ViewClient, view: str, keys: Sequence[Any]) -> str:
    """Return the address of the host that has the only key of a request; "" if it is not known, or a proxy is asked."""
    target = client._access.known_view(view) if len(keys) == 1 and client._router.asks_owners else None
    key = None if target is None else target.codec.encode_plain(keys[0])
    return "" if target is None or key is None else owner_of_features(target.location, key)


@dataclass(frozen=True)
class BegunFeatures:
    """Several requests under way, in one exchange with a host, for an event loop that waits for the host's bytes."""

    exchange: KvExchange
    _client: ViewClient
    _call: _Call
    _requests: Sequence[list[Any]]

    def answers(self) -> list[FeatureRows]:
        """Return the answer of each request once the exchange has it. Raises the error of all."""
        reply, body = self.exchange.finish()
        reply = expected(reply, protocol.FeaturesReply, self.exchange.address)
        rows = self._call.rows(self._client, protocol.features_of(reply, body, self._call.target.columns))
        return [rows] if len(self._requests) == 1 else list(rows.divided(self._requests))


def begin_each(
    client: ViewClient, view: str, requests: Sequence[list[Any]], *, defaults: bool, isolation: str, timeout: float
) -> BegunFeatures | None:
    """Send the requests of ``features_each`` if that needs no wait; else return None.

    It needs one if the view or the host is not known, or no connection is free. Keys that only Arrow converts need one,
    too: its first array imports pandas. Raises the error of all; ``features_each`` tells which request has it, and
    tries again where that may help.
    """
    target = client._access.known_view(view)
    if target is None or not (client._router.asks_owners or client._access.knows_proxy()):
        return None
    asked = requested_version(isolation, None, None)
    as_of = partial(moment_of, asked=asked, now_us=client._connections.now_us)
    keys = requests[0] if len(requests) == 1 else [key for keys in requests for key in keys]
    if plain_stored(target.codec, keys) is None:
        return None
    call, location = _Call.of(client, target, keys, as_of, None), target.location
    request = protocol.FeaturesRequest(location.view.name, location.revision, call.at, defaults, takes_rows=True)
    deadline = time.monotonic() + timeout
    exchange = client._router.begin_features(location, request, call.encoded, deadline)
    return None if exchange is None else BegunFeatures(exchange, client, call, requests)


def moment_of(location: protocol.ViewLocation, asked: At, now_us: Callable[[], int]) -> At:
    """Return the version asked for, with the moment of the view's rolling aggregates, by default now.

    Raises ``RequestError`` for a moment if the view has no rolling aggregates.
    """
    if asked.moment == AT_WATERMARK:
        raise exceptions.RequestError(
            f"Feature view {location.view.name!r} may be of several queries, each with its own watermark: "
            "at='watermark' is of one operator. Read one with at='watermark', and give at=client.answered_at."
        )
    if asked.moment is not None and not location.is_rolling:
        raise exceptions.RequestError(
            f"View {location.view.name!r} has no rolling aggregates, and at= is the time that those are of: leave it "
            "out. versions= reads older versions."
        )
    return replace(asked, moment=now_us()) if location.is_rolling and asked.moment is None else asked


def versions_of(location: protocol.ViewLocation, versions: Mapping[str, int], asked: At) -> list[At]:
    """Return the version of each query of a view, as of the moment that is asked for.

    The only query may have any name if its own is not known, as in a checkpoint. Raises ``RequestError`` for other
    queries than the view has, and for an isolation level as well.
    """
    if asked.isolation != "completed":
        raise exceptions.RequestError(
            f"versions={dict(versions)!r} already select the versions; leave isolation={asked.isolation!r} out."
        )
    titles = location.titles
    if len(versions) == len(titles) == 1 and location.queries[0].query_name is None:
        versions = dict(zip(titles, versions.values(), strict=True))
    wrong = [v for v in versions.values() if isinstance(v, bool) or not isinstance(v, int) or v < 0]
    if sorted(versions) != sorted(titles) or wrong:
        raise exceptions.RequestError(
            f"versions={dict(versions)!r} must have a version, from 0 on, for each query of view "
            f"{location.view.name!r}: {', '.join(map(repr, titles))}."
        )
    return [replace(asked, isolation="version", version=versions[title]) for title in titles]


def at_one_version(
    answers: Sequence[FeatureRows], read_again: Callable[[int, dict[str, int]], FeatureRows]
) -> list[FeatureRows]:
    """Return the answers at one version per query: answers of an older version or run are read again.

    ``read_again`` returns the answer of this index at some versions. It has the ages of the answers that had them, and
    ``max_age`` bounds these: another query of the view may have been too old all the time.
    """
    newest: dict[str, tuple[str, int, int | None]] = {}
    for rows in answers:
        queries = rows._target.location.queries
        for query, version, age_ms in zip(queries, rows._answer.versions, rows._answer.ages_ms, strict=True):
            run_id, newest_version, _ = newest.get(query.query_id, ("", -1, None))
            # A query that was started again may have begun at an earlier version.
            if query.run_id != run_id or version > newest_version:
                newest[query.query_id] = query.run_id, version, age_ms
    same = list(answers)
    for i, rows in enumerate(answers):
        queries = rows._target.location.queries
        wanted = [newest[query.query_id] for query in queries]
        read = [(query.run_id, version) for query, version in zip(queries, rows._answer.versions, strict=True)]
        if [(run_id, version) for run_id, version, _ in wanted] != read:
            titles = rows._target.location.titles
            same[i] = read_again(i, {title: version for title, (_, version, _) in zip(titles, wanted, strict=True)})
            answer = dataclasses.replace(same[i]._answer, ages_ms=[age_ms for _, _, age_ms in wanted])
            same[i]._answer = _within_max_age(same[i]._target.location, answer)
    return same


def _within_max_age(location: protocol.ViewLocation, answer: protocol.FeatureAnswer) -> protocol.FeatureAnswer:
    """Return an answer with nulls for older features than ``max_age``, or raise ``StaleFeatureError``.

    Hosts do so themselves, but not for a version that was asked for.
    """
    view, ages_ms = location.view, answer.ages_ms
    stale = stale_queries(view.max_age_seconds, ages_ms)
    if not stale:
        return answer
    if view.on_stale == "error":
        feature = view.features[location.of_feature.index(stale[0])].name
        raise stale_error(view, feature, location.titles[stale[0]], ages_ms[stale[0]])
    is_stale = [query in stale for query in location.of_feature]
    if answer.rows is not None:
        return dataclasses.replace(answer, rows=[_with_nulls(row, is_stale) for row in answer.rows])
    if isinstance(answer.columns, list):
        return dataclasses.replace(answer, columns=_with_nulls(answer.columns, is_stale))
    arrays = [
        pa.nulls(len(column), column.type) if hidden else column
        for column, hidden in zip(answer.columns, is_stale, strict=True)
    ]
    return dataclasses.replace(answer, columns=pa.RecordBatch.from_arrays(arrays, schema=answer.columns.schema))


def _with_nulls(row: list[Any], is_null: list[bool]) -> list[Any]:
    return [None if null else value for value, null in zip(row, is_null, strict=True)]


def described_view(location: protocol.ViewLocation) -> dict[str, Any]:
    """Return a view ready for JSON: its declaration, the types of its columns, and its queries."""
    view = location.view
    types: list[Any] = [None] * len(view.features)
    if location.columns:
        types = pa.ipc.read_schema(pa.py_buffer(location.columns)).types
    return {
        "view": view.name,
        "entity": list(view.keys),
        "owner": view.owner,
        "description": view.description,
        "max_age": view.max_age,
        "on_stale": view.on_stale,
        "features": [
            {
                "feature": feature.name,
                "operator": feature.operator,
                "column": feature.column or feature.name,
                "type": None if kind is None else str(kind),
                "default": feature.default,
            }
            for feature, kind in zip(view.features, types, strict=True)
        ],
        "queries": [
            {name: value for name, value in to_builtins(query).items() if name != "age_ms"}
            | {"age": None if query.age_ms is None else query.age_ms / 1000}
            for query in location.queries
        ],
        "problem": location.problem,
    }


def age_of(view: dict[str, Any]) -> str:
    """Return the age of a described view for people: that of its oldest query; "" if one is not known."""
    ages = [query["age"] for query in view["queries"]]
    return "" if not ages or None in ages else f"{max(ages):.1f} s"
