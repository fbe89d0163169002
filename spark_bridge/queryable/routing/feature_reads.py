"""Feature views on their way to clients: what a declaration means for the operators' schemas, and the reads of it.

Any host answers for all operators of a view, from its own partitions and those of other hosts. So a client needs no
right on the operators, and knows no more of their columns than the view has.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import pyarrow as pa

from backends.conf import DEFAULT_FAMILY
from backends.encoding.key_groups import key_groups
from backends.encoding.keys import decode_keys, encode_keys
from backends.encoding.operator_schema import OperatorSchema, StateVariable
from backends.encoding.schema import StateSchema
from backends.encoding.user_values import CAST_ERRORS, array_without_loss
from coordinator_actor.exceptions import CoordinatorError, RetiredRunError
from coordinator_actor.feature_views import Feature, FeatureView
from coordinator_actor.messages import LocatedView, OperatorLocation
from spark_bridge import exceptions
from spark_bridge.queryable import protocol
from spark_bridge.queryable.routing.router import StateRouter
from spark_bridge.queryable.routing.scatter_gather import variables_of
from spark_bridge.state_format import layouts
from spark_bridge.state_format.stored_rows import VariableRows
from spark_bridge.state_format.stored_values import StoredValues

# A view with the schemas of its operators.


@dataclass(frozen=True)
class _Source:
    """One operator of a view: where it is, its stored values, and which of their columns are features.

    ``places`` has pairs: the place among the features, and that among the columns of ``values``. ``defaults`` has the
    defaults by the place among the features.
    """

    location: OperatorLocation
    family: str
    values: StoredValues
    query: int
    places: tuple[tuple[int, int], ...]
    defaults: tuple[tuple[int, pa.Scalar], ...]

    @cached_property
    def plain_defaults(self) -> tuple[tuple[int, Any], ...]:
        return tuple((place, default.as_py()) for place, default in self.defaults)

    @cached_property
    def names(self) -> tuple[tuple[int, str], ...]:
        """The places among the features, and the names of the columns."""
        return tuple((place, self.values.fields[i].name) for place, i in self.places)


@dataclass(frozen=True)
class ResolvedView:
    """A located view that fits the schemas of its operators. Make one with ``of``.

    ``key`` are the key columns as they are stored, ``columns`` those of the features. ``sources`` are in the order of
    their queries.
    """

    located: LocatedView
    revision: str
    key: pa.Schema
    columns: pa.Schema
    sources: tuple[_Source, ...]

    @classmethod
    def of(cls, located: LocatedView) -> ResolvedView:
        """Return the view. Raises ``RequestError`` naming what does not fit, and the remedy."""
        view = located.view
        runs = list(dict.fromkeys(location.run_id for location in located.operators))
        by_source = dict(zip(view.sources, located.operators, strict=True))
        # Two features may name the query of one operator differently.
        by_place: dict[tuple[str, str, str | None], list[int]] = {}
        for i, feature in enumerate(view.features):
            location = by_source[feature.source]
            by_place.setdefault((location.run_id, location.operator.name, feature.state), []).append(i)
        fields: list[pa.Field | None] = [None] * len(view.features)
        sources: list[_Source] = []
        key: pa.Schema | None = None
        for (run_id, _, state), features in by_place.items():
            location = by_source[view.features[features[0]].source]
            variable = _variable(view.name, location, state)
            family, schema, is_rows = _values_of(location, variable)
            _check_key(located, location.operator.name, schema.key, key)
            key = key or schema.key
            values = StoredValues(schema, is_rows)
            names = [field.name for field in values.fields]
            places, defaults = [], []
            for i in features:
                feature = view.features[i]
                column = feature.column or feature.name
                if column not in names:
                    raise exceptions.RequestError(
                        f"Feature {feature.name!r} of view {view.name!r}: operator {feature.operator!r} has no column "
                        f"{column!r}; it has {', '.join(map(repr, names)) or 'none'}. Name one with column=."
                    )
                field = values.fields[names.index(column)]
                fields[i] = pa.field(feature.name, field.type)
                places.append((i, names.index(column)))
                if feature.default is not None:
                    defaults.append((i, _default_of(view.name, feature, field.type)))
            sources.append(_Source(location, family, values, runs.index(run_id), tuple(places), tuple(defaults)))
        assert key is not None
        columns = pa.schema([f for f in fields if f is not None])
        return cls(located, located.revision, key, columns, tuple(sorted(sources, key=lambda source: source.query)))

    @cached_property
    def run_ids(self) -> list[str]:
        """The runs that the view reads, each once; other lists are in their order."""
        return list(dict.fromkeys(location.run_id for location in self.located.operators))

    @cached_property
    def by_query(self) -> list[list[_Source]]:
        return [[s for s in self.sources if s.query == i] for i in range(len(self.run_ids))]

    @cached_property
    def of_feature(self) -> tuple[int, ...]:
        places = {place: source.query for source in self.sources for place, _ in source.places}
        return tuple(places[i] for i in range(len(places)))

    @cached_property
    def max_age_seconds(self) -> float | None:
        return self.located.view.max_age_seconds

    def keys_of(self, source: _Source, keys: Any) -> Any:
        """Return stored keys of the first operator, an array or a list, as those of another, by its key groups."""
        groups = source.location.key_groups
        if groups == self.sources[0].location.key_groups:
            return keys
        columns = decode_keys(pa.array(keys, pa.binary()) if isinstance(keys, list) else keys, self.key)
        encoded = encode_keys(columns, key_groups(columns, groups))
        return encoded.to_pylist() if isinstance(keys, list) else encoded

    def stale(self, ages_ms: Sequence[int | None], at: Sequence[protocol.At]) -> list[int]:
        """Return the queries that are older than ``max_age``; a version that was asked for may have any age."""
        stale = stale_queries(self.max_age_seconds, ages_ms)
        return [i for i in stale if at[i].isolation != "version"]

    def stale_error(self, query: int, age_ms: int | None) -> exceptions.StaleFeatureError:
        view, location = self.located.view, self.by_query[query][0].location
        feature = view.features[self.of_feature.index(query)].name
        return stale_error(view, feature, location.query_name or location.query_id, age_ms)

    @cached_property
    def is_plain(self) -> bool:
        return protocol.have_plain_values(self.columns)

    def row(self, values: Sequence[bytes | None], nulls_for: Sequence[int], defaults: bool) -> list[Any]:
        """Return the features of one key: those of ``rows``, several times faster for one row."""
        row: list[Any] = [None] * len(self.columns)
        for source, stored in zip(self.sources, values, strict=True):
            if source.query in nulls_for:
                continue
            state = None if stored is None else source.values.decode_one(stored)
            if state is not None:
                for place, name in source.names:
                    row[place] = state[name]
            if defaults:
                for place, default in source.plain_defaults:
                    if row[place] is None:
                        row[place] = default
        return row

    def rows(
        self, values: Sequence[pa.BinaryArray], at_ms: int, nulls_for: Sequence[int], defaults: bool
    ) -> pa.RecordBatch:
        """Return the features of stored values, which are by source; null for the queries ``nulls_for``."""
        columns: list[pa.Array] = [None] * len(self.columns)
        for source, stored in zip(self.sources, values, strict=True):
            if source.query in nulls_for:
                for place, _ in source.places:
                    columns[place] = pa.nulls(len(stored), self.columns.field(place).type)
                continue
            of_source = source.values.columns(stored, at_ms)
            for place, i in source.places:
                columns[place] = of_source[i]
            for place, default in source.defaults if defaults else ():
                if columns[place].null_count:
                    columns[place] = columns[place].fill_null(default)
        return pa.RecordBatch.from_arrays(columns, schema=self.columns)


def _variable(view: str, location: OperatorLocation, state: str | None) -> StateVariable:
    name = location.operator.name
    variables = variables_of(location.operator.schema, state)
    if len(variables) != 1:
        exist = ", ".join(repr(v.name) for v in variables_of(location.operator.schema, None)) or "none"
        raise exceptions.RequestError(
            f"View {view!r} needs one state variable of operator {name!r}, and state={state!r} names "
            f"{'none' if not variables else 'several'}; there are {exist}. Name one with state=."
        )
    (variable,) = variables
    has_one_row = variable.kind == layouts.VALUE or (
        variable.kind == layouts.ROWS
        and layouts.rows_kind(variable) != layouts.SESSIONS
        and layouts.window_place(variable) is None
    )
    if not has_one_row:
        raise exceptions.RequestError(
            f"View {view!r}: operator {name!r} keeps several rows per key (windows, sessions, a list, a map or timers)."
            " A feature needs one value per key: take an aggregate without a window in its by, or a value state."
        )
    return variable


def _values_of(location: OperatorLocation, variable: StateVariable) -> tuple[str, StateSchema, bool]:
    """Return the family of a variable's values, their schema, and whether they are rows of state.

    Hosts compute the values of rolling aggregates, whose columns are the results.
    """
    if variable.kind != layouts.ROWS:
        return *layouts.family_of(variable), False
    if layouts.rows_kind(variable) == layouts.ROLLING:
        rows = VariableRows(OperatorSchema.from_json(location.operator.schema), variable)
        return layouts.ROLLED_FAMILY, StateSchema(rows.key, rows.value), False
    return DEFAULT_FAMILY, variable.families[DEFAULT_FAMILY], True


def _check_key(located: LocatedView, operator: str, stored: pa.Schema, first: pa.Schema | None) -> None:
    view = located.view
    if sorted(view.keys) != sorted(stored.names):
        raise exceptions.RequestError(
            f"View {view.name!r} has entity={view.entity!r}, and the key of operator {operator!r} is "
            f"{_in_words(stored)}: give its columns as entity=, or take operators with that key."
        )
    if first is not None and [(f.name, f.type) for f in stored] != [(f.name, f.type) for f in first]:
        raise exceptions.RequestError(
            f"View {view.name!r}: operator {operator!r} has the key {_in_words(stored)}, and operator "
            f"{located.operators[0].operator.name!r} has {_in_words(first)}. The key columns need the same names, "
            "types and order in all operators of a view: cast them, or reorder by=."
        )


def _in_words(schema: pa.Schema) -> str:
    return "(" + ", ".join(f"{f.name}: {f.type}" for f in schema) + ")"


def _default_of(view: str, feature: Feature, kind: pa.DataType) -> pa.Scalar:
    """Return a feature's default in the column's type. Raises ``RequestError`` if that is another type."""
    try:
        return array_without_loss([feature.default], kind)[0]
    except CAST_ERRORS as error:
        raise exceptions.RequestError(
            f"Feature {feature.name!r} of view {view!r} has default={feature.default!r}, and its column is {kind}: "
            f"{error} Give a default of that type, or none."
        ) from error


# The bound on the age of features.


def stale_queries(max_age_seconds: float | None, ages_ms: Sequence[int | None]) -> list[int]:
    """Return the queries whose answers are older than the bound; one of unknown age is, too."""
    if max_age_seconds is None:
        return []
    return [i for i, age_ms in enumerate(ages_ms) if age_ms is None or age_ms > 1000 * max_age_seconds]


def stale_error(view: FeatureView, feature: str, title: str, age_ms: int | None) -> exceptions.StaleFeatureError:
    """Return the error for a feature that is older than the bound of its view; ``title`` names its query."""
    if age_ms is None:
        return exceptions.StaleFeatureError(
            f"Feature {feature!r} of view {view.name!r} is of unknown age: no batch of query {title!r} is known to "
            f"be completed, and max_age={view.max_age!r}. Wait for its first batch (statestore status). A view "
            "with on_stale='null' gives nulls until then."
        )
    return exceptions.StaleFeatureError(
        f"Feature {feature!r} of view {view.name!r} is {age_ms / 1000:.1f} s old, and max_age={view.max_age!r}. See "
        f"whether query {title!r} runs and gets input (statestore status). A view with on_stale='null' gives nulls "
        "instead; one with a greater max_age, or None, is less strict."
    )


# The reads of a process that answers for views.


FEW_KEYS = 16
"""The rows of so many keys are sent as values: by columns they take longer, most of it for each column."""
VIEW_SECONDS = 2.0
"""A declaration in use is looked up again at this age."""
LOOK_AGAIN_SECONDS = 0.1
"""The least seconds between two look-ups of a declaration, however many clients know another revision."""


@dataclass
class _KnownView:
    """A view, when it was looked up last, and as it was located then: hosts may have moved since it was resolved."""

    view: ResolvedView
    looked_at: float
    located: LocatedView

    @property
    def addresses(self) -> tuple[str, ...]:
        """The address of the host of each partition of the first operator."""
        first = self.view.sources[0].location
        places = {(at.run_id, at.operator.name): at for at in self.located.operators}
        return tuple(owner.query_address for owner in places[first.run_id, first.operator.name].owners)


@dataclass(eq=False, repr=False)
class FeatureReads:
    """Answers for feature views, from ``reads`` and ``router``. Thread-safe.

    ``location`` returns the newest location of an operator of a run. The lock is held by the thread that looks a view
    up again; requests with a known revision do not wait for it.
    """

    _reads: protocol.OwnReads
    _router: StateRouter
    _location: Callable[[str, str], OperatorLocation]
    _known: dict[str, _KnownView] = field(default_factory=dict)
    _looking: threading.Lock = field(default_factory=threading.Lock)

    def views(self, request: protocol.ViewsRequest) -> list[protocol.ViewLocation]:
        """Return one view, or all; of all, those that cannot be read now have a ``problem``."""
        if request.view is not None:
            return [self._described(self._looked_up(request.view))]
        views = []
        for located in self._reads.feature_views():
            try:
                views.append(self._described(self._looked_up(located.view.name)))
            except exceptions.STATESTORE_ERRORS as error:
                views.append(protocol.ViewLocation(located.view, problem=str(error)))
        return views

    def _described(self, known: _KnownView) -> protocol.ViewLocation:
        resolved = known.view
        queries = []
        for sources in resolved.by_query:
            location = sources[0].location
            version = self._reads.await_completed(location.run_id, 0, 0.0)
            age_ms = self._reads.age_ms(location.run_id, version)
            queries.append(
                protocol.ViewQuery(location.query_id, location.query_name, location.run_id, max(0, version), age_ms)
            )
        first = resolved.sources[0].location
        return protocol.ViewLocation(
            resolved.located.view,
            resolved.revision,
            tuple(queries),
            resolved.of_feature,
            resolved.key.serialize().to_pybytes(),
            first.key_groups,
            resolved.columns.serialize().to_pybytes(),
            known.addresses,
            any(source.family == layouts.ROLLED_FAMILY for source in resolved.sources),
        )

    def features(
        self, request: protocol.FeaturesRequest, keys: pa.BinaryArray | bytes, deadline: float
    ) -> protocol.FeatureAnswer:
        """See ``ServedReads``. ``deadline`` is a time of the clock of the connections."""
        resolved = self._of_revision(request.view, request.revision)
        if len(request.at) != len(resolved.run_ids):
            raise exceptions.RequestError(
                f"View {request.view!r} reads {len(resolved.run_ids)} queries, and the request has versions of "
                f"{len(request.at)}."
            )
        is_one = isinstance(keys, bytes)
        few: list[bytes] | None = None
        if resolved.is_plain and (is_one or (request.takes_rows and 0 < len(keys) <= FEW_KEYS)):
            few = [keys] if isinstance(keys, bytes) else keys.to_pylist()
        all_keys = few or (pa.array([keys], pa.binary()) if is_one else keys)
        read = self._router.lookup_together if few is None else self._router.lookup_few_together
        versions: list[int] = []
        ages_ms: list[int | None] = []
        values: list[Any] = []
        for run_id, sources, at in zip(resolved.run_ids, resolved.by_query, request.at, strict=True):
            lookups = [(self._location(run_id, s.location.operator.name), s.family) for s in sources]
            version, of_query = read(lookups, resolved.keys_of(sources[0], all_keys), at, deadline)
            versions.append(version)
            ages_ms.append(self._age_ms(run_id, version, at))
            values += of_query
        stale = resolved.stale(ages_ms, request.at)
        if stale and resolved.located.view.on_stale == "error":
            raise resolved.stale_error(stale[0], ages_ms[stale[0]])
        lag_ms = max(map(self._reads.lag_ms, resolved.run_ids))
        if few is not None:
            rows = [resolved.row(of_key, stale, request.defaults) for of_key in zip(*values, strict=True)]
            return protocol.FeatureAnswer(versions, ages_ms, lag_ms, *([rows[0]] if is_one else [[], rows]))
        columns = resolved.rows(values, int(time.time() * 1000), stale, request.defaults)
        return protocol.FeatureAnswer(versions, ages_ms, lag_ms, columns)

    def _age_ms(self, run_id: str, version: int, at: protocol.At) -> int | None:
        """Return the age of an answer; of one that is not completed yet, that of the last completed version."""
        if at.isolation == "latest":
            version = min(version, self._reads.await_completed(run_id, 0, 0.0))
        return None if at.isolation == "version" else self._reads.age_ms(run_id, version)

    def run_ids(self, view: str) -> list[str]:
        known = self._known.get(view)
        return [] if known is None else known.view.run_ids

    def _of_revision(self, name: str, revision: str) -> ResolvedView:
        """Return the view of a revision. Raises ``RetiredRunError`` if the view has another one now."""
        known = self._known.get(name)
        if known is None or known.view.revision != revision:
            view = self._looked_up(name).view
        elif time.monotonic() - known.looked_at < VIEW_SECONDS:
            return known.view
        else:
            view = self._refreshed(name, known)
        if view.revision != revision:
            raise RetiredRunError(
                f"Feature view {name!r} was declared again, or one of its queries was started again; look it up again."
            )
        return view

    def _refreshed(self, name: str, known: _KnownView) -> ResolvedView:
        """Return the view as it is now, or the known one: if another thread looks, or no coordinator answers."""
        if not self._looking.acquire(blocking=False):
            return known.view
        try:
            return self._look_up(name).view
        except exceptions.UnknownFeatureViewError:
            raise
        except (CoordinatorError, exceptions.HostUnavailableError):
            known.looked_at = time.monotonic()
            return known.view
        finally:
            self._looking.release()

    def _looked_up(self, name: str) -> _KnownView:
        with self._looking:
            known = self._known.get(name)
            if known is not None and time.monotonic() - known.looked_at < LOOK_AGAIN_SECONDS:
                return known
            return self._look_up(name)

    def _look_up(self, name: str) -> _KnownView:
        """Look a view up. The lock is held."""
        try:
            located = self._reads.located_view(name)
        except exceptions.UnknownFeatureViewError:
            self._known.pop(name, None)
            raise
        known = self._known.get(name)
        is_same = known is not None and known.view.revision == located.revision
        view = known.view if known is not None and is_same else ResolvedView.of(located)
        self._known[name] = _KnownView(view, time.monotonic(), located)
        return self._known[name]
