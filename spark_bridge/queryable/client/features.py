"""The answers of ``features`` and ``feature_views``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from msgspec import to_builtins

from backends.encoding.user_values import python_values
from spark_bridge.exceptions import RequestError
from spark_bridge.queryable.client.results import formed
from spark_bridge.queryable.protocol import At, FeatureAnswer, ViewLocation


@dataclass(frozen=True)
class FeatureRows:
    """Features of entities: a row per key asked, in that order.

    ``keys`` are the columns of the entity, ``columns`` the features in the order of the view. ``versions`` has the
    version that was read of each query, by its name or else its id. ``ages`` has the age of each feature's version in
    seconds, None if it is not known: for a version that was asked for, and before the first batch.
    """

    keys: pa.RecordBatch
    columns: pa.RecordBatch
    versions: dict[str, int]
    ages: dict[str, float | None]

    @classmethod
    def of(cls, location: ViewLocation, keys: pa.RecordBatch, answer: FeatureAnswer) -> FeatureRows:
        """Return the rows that a host has answered for keys."""
        seconds = [None if age is None else age / 1000 for age in answer.ages_ms]
        return cls(
            keys,
            answer.columns,
            {query.title: version for query, version in zip(location.queries, answer.versions, strict=True)},
            {f.name: seconds[i] for f, i in zip(location.view.features, location.of_feature, strict=True)},
        )

    def __len__(self) -> int:
        return int(self.keys.num_rows)

    def to_arrow(self) -> pa.Table:
        """Return the columns of the entity and the features as a table."""
        schema = pa.schema([*self.keys.schema, *self.columns.schema])
        return pa.Table.from_arrays([*self.keys.columns, *self.columns.columns], schema=schema)

    def to_dict(self) -> dict[str, list[Any]]:
        """Return the columns of the entity and the features as lists of Python values, None for null."""
        table = self.to_arrow()
        return {name: python_values(column) for name, column in zip(table.column_names, table.columns, strict=True)}

    def to_pandas(self) -> Any:
        """Return the columns of the entity and the features as a pandas frame."""
        return formed(self.to_arrow(), "pandas")

    def to_numpy(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return the features as arrays, as ``torch.as_tensor`` takes them.

        Numbers without nulls are not copied; such arrays are read-only. A null is NaN in floats, NaT in times, and None
        in columns of other types than numbers and booleans. Integers and booleans have no value for null: then raises
        ``RequestError``.
        """
        return {
            name: _array(name, column) for name, column in zip(self.columns.schema.names, self.columns, strict=True)
        }


def _array(name: str, column: pa.Array) -> np.ndarray[Any, Any]:
    kind = column.type
    if column.null_count and (pa.types.is_integer(kind) or pa.types.is_boolean(kind)):
        raise RequestError(
            f"Feature {name!r} is null in {column.null_count} of {len(column)} rows, and a numpy array of {kind} has "
            "no value for that. Declare a default= for it, or take to_arrow(), to_dict() or to_pandas()."
        )
    array: np.ndarray[Any, Any] = column.to_numpy(zero_copy_only=False)
    return array


def versions_of(location: ViewLocation, versions: Mapping[str, int]) -> list[At]:
    """Return the version of each query of a view. Raises ``RequestError`` for other queries than it has."""
    titles = [query.title for query in location.queries]
    if sorted(versions) != sorted(titles):
        raise RequestError(
            f"versions={dict(versions)!r} must have a version for each query of view {location.view.name!r}: "
            f"{', '.join(map(repr, titles))}."
        )
    wrong = {title: v for title, v in versions.items() if isinstance(v, bool) or not isinstance(v, int) or v < 0}
    if wrong:
        raise RequestError(f"versions={wrong!r} are not versions: give integers from 0 on, as an answer has them.")
    return [At("version", versions[title]) for title in titles]


def described_view(location: ViewLocation) -> dict[str, Any]:
    """Return a view ready for JSON: its declaration, the types of its columns, and its queries."""
    view = location.view
    types = (
        pa.ipc.read_schema(pa.py_buffer(location.columns)).types if location.columns else [None] * len(view.features)
    )
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
