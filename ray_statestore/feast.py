"""An online store of Feast that answers from the state of running streams: ``feature_store.yaml`` names its class.

A view of Feast is the feature view of the same name, or of the one that its tag ``statestore.view`` names; its fields
and join keys are features and columns of the entity by their names.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from backends.lazy_names import missing_package
from coordinator_actor.coordinator_conf import NAMESPACE
from spark_bridge.exceptions import QueryableStateError, RequestError
from spark_bridge.queryable.client.client import QueryableStateClient
from spark_bridge.queryable.client.features import FeatureRows
from spark_bridge.transport.tls import TlsConf

try:
    from feast import utils
    from feast.feature_view import FeatureView
    from feast.infra.online_stores.online_store import OnlineStore
    from feast.infra.supported_async_methods import SupportedAsyncMethods
    from feast.protos.feast.types.EntityKey_pb2 import EntityKey
    from feast.protos.feast.types.Value_pb2 import RepeatedValue, Value
    from feast.repo_config import FeastConfigBaseModel
    from feast.type_map import VALUE_TYPE_TO_PROTO_VALUE_MAP
    from feast.types import PrimitiveFeastType
    from feast.value_type import ValueType
    from pydantic import SecretStr
except ModuleNotFoundError as error:
    if (missing := missing_package(error, "ray_statestore.feast")) is None:
        raise
    raise missing from error


def _seconds(time: dt.datetime) -> int:
    return int((time if time.tzinfo else time.replace(tzinfo=dt.timezone.utc)).timestamp())


VIEW_TAG = "statestore.view"
"""The tag of a view of Feast that names the feature view, if it has another name."""
KEY_TYPES = {
    **dict.fromkeys(("INT32", "INT64"), ("int8", "int16", "int32", "int64")),
    "STRING": ("string",),
    "BYTES": ("binary",),
}
"""The types of Feast that an entity may have, and those of key columns. The others cannot name each key exactly."""
FEATURE_TYPES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("int8", "int16", "int32"), ("INT32", "INT64")),
    "int64": ("INT64",),
    "float": ("FLOAT", "DOUBLE"),
    "double": ("DOUBLE",),
    "bool": ("BOOL",),
    "string": ("STRING",),
    "binary": ("BYTES",),
    "timestamp": ("UNIX_TIMESTAMP",),
    "decimal128": ("DECIMAL",),
}
"""The types of Feast that can hold the values of a column, by the name of its Arrow type."""
CONVERTED: dict[str, Callable[[Any], Any]] = {"UNIX_TIMESTAMP": _seconds, "DECIMAL": str}
"""Converts a Python value for a field of ``Value``, for types that need it."""
NULL = Value()
_PRIMITIVE = {id(dtype): dtype.to_value_type().name for dtype in PrimitiveFeastType}
"""Feast's own conversion of a type takes longer than that of a value."""
_COLUMNS: dict[str, Callable[[list[Any]], list[Value]]] = {
    "BOOL": lambda values: [NULL if v is None else Value(bool_val=v) for v in values],
    "DOUBLE": lambda values: [NULL if v is None else Value(double_val=v) for v in values],
    "INT64": lambda values: [NULL if v is None else Value(int64_val=v) for v in values],
    "STRING": lambda values: [NULL if v is None else Value(string_val=v) for v in values],
}
"""The usual types of features. Python is faster with a field that is not a variable."""
_WIRE = {"DOUBLE": (pa.float64(), 0x29, 8), "INT64": (pa.int64(), 0x20, 10)}
"""Of numbers that numpy encodes: the type of the column, the tag of a field of ``Value``, and the width in bytes."""
_SHIFTS = np.arange(0, 70, 7, dtype=np.uint64)
_CONTINUED = np.array([0x80] * 9 + [0], np.uint64)
FeastRow = tuple[dt.datetime | None, dict[str, Value] | None]


class RayStatestoreOnlineStoreConfig(FeastConfigBaseModel):  # type: ignore[misc]
    """The section ``online_store`` of ``feature_store.yaml``.

    ``address``, ``token``, ``tls``, ``namespace`` and ``timeout`` are arguments of ``QueryableStateClient.connect``:
    without them, the environment has ``STATESTORE_ADDRESS`` and ``STATESTORE_TOKEN``. The file should not have the
    token. With ``defaults: false``, features of an absent key are null, and the key is not found, whatever defaults its
    view has.
    """

    type: Literal["ray_statestore.feast.RayStatestoreOnlineStore"] = "ray_statestore.feast.RayStatestoreOnlineStore"
    address: str | list[str] | None = None
    token: SecretStr | None = None
    tls: TlsConf | None = None
    namespace: str = NAMESPACE
    timeout: float = 30.0
    defaults: bool = True


class RayStatestoreOnlineStore(OnlineStore):  # type: ignore[misc]
    """Reads feature views for ``get_online_features``. It never writes: the streams do."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connected: QueryableStateClient | None = None

    @property
    def async_supported(self) -> SupportedAsyncMethods:
        """The methods that have a counterpart for event loops: those that read."""
        return SupportedAsyncMethods(read=True)

    # -- reads ---------------------------------------------------------------------------------

    def online_read(
        self,
        config: Any,
        table: FeatureView,
        entity_keys: Sequence[EntityKey],
        requested_features: Sequence[str] | None = None,
    ) -> list[FeastRow]:
        """Return the time and the features of each key, in that order.

        The time is that of the oldest version of the view. Both are None for a key without any feature.
        """
        return self._read(config, [(table, entity_keys, requested_features)])[0]

    async def online_read_async(self, *args: Any, **kwargs: Any) -> list[FeastRow]:
        """See ``online_read``."""
        return await asyncio.to_thread(self.online_read, *args, **kwargs)

    def _read_features_per_fv(
        self,
        config: Any,
        grouped_refs: Sequence[tuple[FeatureView, list[str]]],
        join_key_values: Mapping[str, Any],
        entity_name_to_join_key_map: Mapping[str, str],
        response: Any,
        full_feature_names: bool,
        include_feature_view_version_metadata: bool,
    ) -> None:
        """Read all views of a request at one version of each query; Feast's method reads one view after the other."""
        requests, places = [], []
        for table, names in grouped_refs:
            entities, indexes, length = utils._get_unique_entities(table, join_key_values, entity_name_to_join_key_map)
            requests.append((table, utils._get_entity_key_protos(entities), names))
            places.append((indexes, length))
        all_rows = self._read(config, requests)
        for (table, _, names), (indexes, length), rows in zip(requests, places, all_rows, strict=True):
            utils._populate_response_from_feature_data(
                names, rows, indexes, response, full_feature_names, table, length, include_feature_view_version_metadata
            )

    async def _read_features_per_fv_async(self, *args: Any, **kwargs: Any) -> None:
        await asyncio.to_thread(self._read_features_per_fv, *args, **kwargs)

    def read_precomputed_vectors(self, config: Any, feature_service_name: str, *_: Any, **__: Any) -> Any:
        """Raise ``RequestError``: there are no precomputed vectors."""
        raise RequestError(
            f"Feature service {feature_service_name!r} has precompute_online=True, and ray-statestore has no "
            "precomputed vectors: it answers from the streams. Leave precompute_online out."
        )

    def _read(
        self, config: Any, requests: Sequence[tuple[FeatureView, Sequence[EntityKey], Sequence[str] | None]]
    ) -> list[list[FeastRow]]:
        client = self._client(config.online_store)
        asked = [(view_of(table), _keys(client, table, entity_keys)) for table, entity_keys, _ in requests]
        answers = client.features_of_views(asked, defaults=config.online_store.defaults)
        now = client.now()
        return [
            _rows(table, names or [field.name for field in table.features], answer, now)
            for (table, _, names), answer in zip(requests, answers, strict=True)
        ]

    def _client(self, config: RayStatestoreOnlineStoreConfig) -> QueryableStateClient:
        with self._lock:
            if self._connected is None:
                token = None if config.token is None else config.token.get_secret_value()
                self._connected = QueryableStateClient.connect(
                    config.namespace, address=config.address, token=token, tls=config.tls, timeout=config.timeout
                )
            return self._connected

    async def close(self) -> None:
        """Close the connections. The next read connects again."""
        with self._lock:
            client, self._connected = self._connected, None
        if client is not None:
            client.close()

    # -- declarations --------------------------------------------------------------------------

    def update(
        self,
        config: Any,
        tables_to_delete: Sequence[FeatureView],
        tables_to_keep: Sequence[FeatureView],
        entities_to_delete: Sequence[Any],
        entities_to_keep: Sequence[Any],
        partial: bool,
    ) -> None:
        """Check that the streams have the views, for ``feast apply``; change nothing.

        Raises ``RequestError`` for views, entities, fields or types that they do not have, or if no host answers.
        """
        if not tables_to_keep:
            return
        client = self._client(config.online_store)
        try:
            views = {view["view"]: view for view in client.feature_views()}
            problems = [problem for table in tables_to_keep for problem in _problems(client, table, views)]
        except (QueryableStateError, OSError) as error:
            raise RequestError(
                "feast apply compares the views with those of the running streams, and they could not be read: "
                f"{str(error).rstrip('.')}. Start the streams, correct the address below online_store or "
                "STATESTORE_TOKEN, and apply again."
            ) from error
        if problems:
            raise RequestError("\n".join(["Feast's views differ from the streams' feature views:", *problems]))

    def teardown(self, config: Any, tables: Sequence[FeatureView], entities: Sequence[Any]) -> None:
        """Do nothing: state and feature views belong to the streams."""

    def online_write_batch(self, config: Any, table: FeatureView, data: Any, progress: Any) -> None:
        """Raise ``RequestError``: streams alone write state."""
        raise RequestError(
            f"View {table.name!r} cannot be written through Feast: its stream writes it with each batch, and "
            "get_online_features reads it at once. Remove the feast materialize or push job of this view."
        )

    async def online_write_batch_async(self, config: Any, table: FeatureView, data: Any, progress: Any) -> None:
        """Raise ``RequestError``: streams alone write state."""
        self.online_write_batch(config, table, data, progress)


def view_of(table: FeatureView) -> str:
    """Return the name of the feature view that a view of Feast stands for."""
    return str(table.tags.get(VIEW_TAG, table.name))


def _keys(client: QueryableStateClient, table: FeatureView, entity_keys: Sequence[EntityKey]) -> list[Any]:
    """Return keys as ``features`` takes them. Raises ``RequestError`` for join keys that are not the view's columns."""
    names = client.entity_schema(view_of(table)).names
    asked = {tuple(key.join_keys) for key in entity_keys}
    wrong = next((join_keys for join_keys in asked if sorted(join_keys) != sorted(names)), None)
    if wrong is not None:
        raise RequestError(
            f"View {table.name!r} was asked by join keys {list(wrong)}, and its entity has the columns {names}. "
            "Correct the entity, and run feast apply."
        )
    if len(names) == 1:
        return [_plain(key.entity_values[0]) for key in entity_keys]
    by_name = (dict(zip(key.join_keys, map(_plain, key.entity_values), strict=True)) for key in entity_keys)
    return [tuple(key[name] for name in names) for key in by_name]


def _plain(value: Value) -> Any:
    field = value.WhichOneof("val")
    return None if field is None else getattr(value, field)


def _rows(table: FeatureView, names: Sequence[str], answer: FeatureRows, now: dt.datetime) -> list[FeastRow]:
    """Return the answer as Feast's rows. A null is an empty ``Value``, as in Feast's own stores."""
    kinds = {field.name: _kind(field.dtype) for field in table.features}
    columns = _number_columns(answer, {name: kinds[name] for name in names}) if len(answer) > 1 else {}
    values = answer.values([name for name in names if name not in columns])
    name = ""
    try:
        for name, column in values.items():
            columns[name] = _converted(kinds[name], column)
    except (AttributeError, OverflowError, TypeError, ValueError) as error:
        raise RequestError(
            f"Feature {name!r} of view {table.name!r} has a value that is not of Feast's type {kinds[name]}: {error} "
            "If the stream's view has changed, run feast apply, which compares the types."
        ) from error
    time = None if answer.age is None else now - dt.timedelta(seconds=answer.age)
    rows: list[FeastRow] = []
    has_nulls = all(NULL in column for column in columns.values())
    for row in zip(*(columns[name] for name in names), strict=True):
        is_absent = has_nulls and all(value is NULL for value in row)
        rows.append((None, None) if is_absent else (time, dict(zip(names, row, strict=True))))
    return rows


def _kind(dtype: Any) -> str:
    return _PRIMITIVE.get(id(dtype)) or str(dtype.to_value_type().name)


def _converted(kind: str, values: list[Any]) -> list[Value]:
    if (make := _COLUMNS.get(kind)) is not None:
        return make(values)
    field = VALUE_TYPE_TO_PROTO_VALUE_MAP[ValueType[kind]]
    item, is_list, _ = kind.partition("_LIST")
    convert = CONVERTED.get(item)
    if is_list:
        lists = (v if v is None or convert is None else [*map(convert, v)] for v in values)
        return [NULL if v is None else Value(**{field: {"val": v}}) for v in lists]
    return [NULL if v is None else Value(**{field: v if convert is None else convert(v)}) for v in values]


def _number_columns(answer: FeatureRows, kinds: Mapping[str, str]) -> dict[str, list[Value]]:
    """Return the columns of these features that have numbers without nulls."""
    made: dict[str, list[Value]] = {}
    for kind, (dtype, *_) in _WIRE.items():
        columns = {
            name: column.to_numpy()
            for name, column in zip(answer.columns.schema.names, answer.columns.columns, strict=True)
            if kinds.get(name) == kind and not column.null_count and column.type == dtype
        }
        if columns:
            values, length = _numbers(kind, np.concatenate([*columns.values()])), len(answer)
            made |= {name: values[i * length : (i + 1) * length] for i, name in enumerate(columns)}
    return made


def _numbers(kind: str, array: np.ndarray[Any, Any]) -> list[Value]:
    """Parse the values from one message that numpy encodes, in a third of the time of as many ``Value(...)``.

    An integer takes ten bytes there, as the longest one does; parsers take that.
    """
    _, tag, width = _WIRE[kind]
    encoded = np.empty((len(array), 3 + width), np.uint8)
    encoded[:, :3] = 0x0A, 1 + width, tag
    if kind == "DOUBLE":
        encoded[:, 3:] = array.view(np.uint8).reshape(-1, width)
    else:
        encoded[:, 3:] = (array.view(np.uint64)[:, None] >> _SHIFTS) & np.uint64(0x7F) | _CONTINUED
    return list(RepeatedValue.FromString(encoded.tobytes()).val)


def _feast_types(kind: str) -> list[str]:
    """Return the types of Feast for an Arrow type by its name."""
    of_list = re.fullmatch(r"(?:large_)?list<\w+: (.+?)(?: not null)?>", kind)
    item = re.split(r"[\[(]", kind if of_list is None else of_list[1])[0]
    return [name if of_list is None else f"{name}_LIST" for name in FEATURE_TYPES.get(item, ())]


def _problems(client: QueryableStateClient, table: FeatureView, views: Mapping[str, Any]) -> Iterator[str]:
    """Give what the streams do not have of a view of Feast, and the remedies."""
    name = view_of(table)
    if not isinstance(table, FeatureView):
        yield (
            f"{table.name!r} is a {type(table).__name__}, and Feast would write it: set write_to_online_store=False or "
            "online=False."
        )
        return
    if (view := views.get(name)) is None:
        yield (
            f"There is no feature view {name!r} for {table.name!r}; there are {', '.join(sorted(views)) or 'none'}. "
            f"Declare it next to its stream (declare_feature_view), or name another one by the tag {VIEW_TAG!r}."
        )
        return
    if view["problem"]:
        yield f"View {name!r} cannot be read now: {view['problem']}"
        return
    columns = {field.name: str(field.type) for field in client.entity_schema(name)}
    entity = {field.name: field.dtype.to_value_type().name for field in table.entity_columns}
    if entity.keys() != columns.keys():
        yield (
            f"View {name!r} has the entity {', '.join(columns)}, and Feast's view the join keys "
            f"{', '.join(entity) or 'none'}. Give its entities these columns as join_keys."
        )
    for column in columns.keys() & entity.keys():
        possible = [kind for kind, names in KEY_TYPES.items() if columns[column] in names]
        if entity[column] not in possible:
            yield (
                f"Join key {column!r} of view {name!r} is {columns[column]}, and Feast's {entity[column]} cannot name "
                f"each such key. {_remedy('entity', possible)}"
            )
    types = {feature["feature"]: feature["type"] for feature in view["features"]}
    for field in table.features:
        if (kind := types.get(field.name)) is None:
            yield f"View {name!r} has no feature {field.name!r}; it has {', '.join(types)}."
            continue
        possible = _feast_types(kind)
        if field.dtype.to_value_type().name not in possible:
            yield (
                f"Feature {field.name!r} of view {name!r} is {kind}, and Feast's field {field.dtype}. "
                f"{_remedy('field', possible)}"
            )


def _remedy(what: str, possible: Sequence[str]) -> str:
    if not possible:
        return "Feast has no type for it: convert the column in the stream."
    return f"Give the {what} the type {' or '.join(possible)}."
