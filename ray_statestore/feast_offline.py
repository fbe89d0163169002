"""An offline store of Feast that joins rows with the state of their time, from the checkpoints of streams.

It is ``state_as_of`` for the feature views that ``ray_statestore.feast`` serves, by the same names and tags.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from feast import utils
from feast.feature_view import FeatureView
from feast.infra.offline_stores.offline_store import OfflineStore, RetrievalJob, RetrievalMetadata
from feast.infra.offline_stores.offline_utils import infer_event_timestamp_from_entity_df
from feast.repo_config import FeastConfigBaseModel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from coordinator_actor.feature_views import Feature
from coordinator_actor.feature_views import FeatureView as StreamView
from ray_statestore.feast import view_of
from spark_bridge.exceptions import RequestError
from spark_bridge.lookups import state_as_of
from spark_bridge.operators.columns import arrow_type, spark_struct
from spark_bridge.state_data.checkpoint_client import CheckpointClient

ROW_COLUMN = "__statestore_row"
"""The place of a row in ``entity_df``: Spark returns rows in another order."""


class RayStatestoreOfflineStoreConfig(FeastConfigBaseModel):  # type: ignore[misc]
    """The section ``offline_store`` of ``feature_store.yaml``.

    ``checkpoints`` are the checkpoint locations of the queries that the views read, by query name. ``state_location``
    and ``storage_options`` are those of ``read_state``. With ``defaults: false``, features of absent keys are null.
    """

    type: Literal["ray_statestore.feast_offline.RayStatestoreOfflineStore"]
    checkpoints: dict[str, str]
    state_location: str | None = None
    storage_options: dict[str, str] | None = None
    defaults: bool = True


class RayStatestoreOfflineStore(OfflineStore):  # type: ignore[misc]
    """Joins the rows of ``get_historical_features`` with the state of their time, by ``state_as_of``. It never writes.

    It uses the running Spark session, or starts one.
    """

    @staticmethod
    def get_historical_features(
        config: Any,
        feature_views: Sequence[FeatureView],
        feature_refs: Sequence[str],
        entity_df: Any,
        registry: Any,
        project: str,
        full_feature_names: bool = False,
        **options: Any,
    ) -> RetrievalJob:
        """Return the job that joins ``entity_df``, a DataFrame of pandas or a query of Spark SQL.

        A row has the features of the last version completed by its event timestamp, nulls before the first one, and the
        defaults of the view. Raises ``RequestError`` for views, features and join keys that the checkpoints do not
        have, and ``InvalidOperatorError`` as ``state_as_of`` does.
        """
        if entity_df is None or options:
            raise RequestError(
                "get_historical_features takes entity_df here, rows with join keys and an event timestamp; give no "
                f"{', '.join(sorted(options)) or 'range of time'}."
            )
        on_demand = utils._get_requested_on_demand_feature_views(feature_refs, project, registry)
        names, _ = utils._get_requested_feature_views_to_features_dict(feature_refs, feature_views, on_demand)
        spark = SparkSession.getActiveSession() or SparkSession.builder.appName("feast").getOrCreate()
        is_query = isinstance(entity_df, str)
        entities = spark.sql(entity_df) if is_query else spark.createDataFrame(entity_df, _schema_of(entity_df))
        kinds = {f.name: np.dtype("M8[us]" if f.dataType.typeName() == "timestamp" else "O") for f in entities.schema}
        time = infer_event_timestamp_from_entity_df(kinds)
        states = _StoredViews(config.offline_store)
        rows = entities.withColumn(ROW_COLUMN, F.monotonically_increasing_id())
        for table, features in names.items():
            prefix = f"{table.projection.name_to_use()}__" if full_feature_names else ""
            rows = states.joined(rows, table, {feature: prefix + feature for feature in features}, time)
        keys = [name for name in entities.columns if name != time]
        return _AsOfJob(rows, RetrievalMetadata(list(feature_refs), keys), full_feature_names, on_demand)

    @staticmethod
    def pull_latest_from_table_or_query(*_: Any, **__: Any) -> RetrievalJob:
        """Raise ``RequestError``: there is nothing to materialize."""
        raise RequestError(
            "The online store reads the streams themselves, and nothing is materialized: remove the feast materialize "
            "job of this view."
        )

    @staticmethod
    def pull_all_from_table_or_query(*_: Any, **__: Any) -> RetrievalJob:
        """Raise ``RequestError``: a checkpoint has versions of state, and no table of all rows."""
        raise RequestError("Read the rows of an operator by ray_statestore.read_state.")


class _StoredViews:
    """The feature views of checkpoints, and the checkpoint of each operator."""

    def __init__(self, config: RayStatestoreOfflineStoreConfig) -> None:
        self._config = config
        self._views: dict[str, StreamView] = {}
        self._operators: dict[str, set[str]] = {}
        for query, checkpoint in config.checkpoints.items():
            client = CheckpointClient.open(checkpoint, config.state_location, config.storage_options)
            for running in client.reads.feature_views():
                if running.view.name in self._views:
                    raise RequestError(
                        f"Two checkpoints below offline_store have a feature view {running.view.name!r}, that of "
                        f"{query!r} among them. Name only the one whose view is to be read."
                    )
                self._views[running.view.name] = running.view
            self._operators[query] = {operator["operator"] for operator in client.operators()}

    def joined(self, rows: DataFrame, table: FeatureView, outputs: Mapping[str, str], time: str) -> DataFrame:
        name = view_of(table)
        if (view := self._views.get(name)) is None:
            raise RequestError(
                f"The checkpoints below offline_store have no feature view {name!r}; they have "
                f"{', '.join(sorted(self._views)) or 'none'}. Name the checkpoint of its query, and declare the view "
                "next to its stream (declare_feature_view)."
            )
        renamed = table.projection.join_key_map
        on = {renamed.get(key, key): key for key in view.keys}
        if missing := [column for column in on if column not in rows.columns]:
            raise RequestError(
                f"entity_df has no column {', '.join(missing)}, a join key of view {table.name!r}; it has "
                f"{', '.join(name for name in rows.columns if name != ROW_COLUMN)}."
            )
        if twice := [output for output in outputs.values() if output in rows.columns]:
            raise RequestError(
                f"entity_df and view {table.name!r} both have {', '.join(twice)}: ask with full_feature_names=True, or "
                "rename the columns of entity_df."
            )
        declared = {feature.name: feature for feature in view.features}
        by_source = defaultdict[tuple[str, str, str | None], list[Feature]](list)
        for asked in outputs:
            if asked not in declared:
                raise RequestError(f"View {name!r} has no feature {asked!r}; it has {', '.join(declared)}.")
            source = declared[asked]
            by_source[self._checkpoint_of(name, source), source.operator, source.state].append(source)
        own = {column: f"__row_{i}" for i, column in enumerate(rows.columns)}  # the state has columns of its own
        rows = rows.toDF(*own.values())
        for (checkpoint, operator, state), features in by_source.items():
            columns = list(dict.fromkeys(feature.column or feature.name for feature in features))
            rows = state_as_of(
                rows,
                checkpoint,
                operator,
                on={own[column]: key for column, key in on.items()},
                time=own[time],
                columns=columns,
                state=state,
                state_location=self._config.state_location,
                storage_options=self._config.storage_options,
            )
            for feature in features:
                quoted = (feature.column or feature.name).replace("`", "``")
                value = F.col(f"`{quoted}`")
                if self._config.defaults and feature.default is not None:
                    value = F.coalesce(value, F.lit(feature.default))
                rows = rows.withColumn(f"__feature_{feature.name}", value)
            rows = rows.drop(*columns)
        return rows.toDF(*own, *(outputs[feature.name] for features in by_source.values() for feature in features))

    def _checkpoint_of(self, view: str, feature: Feature) -> str:
        queries = [q for q, operators in self._operators.items() if feature.operator in operators]
        if feature.query is not None:
            queries = [q for q in queries if q == feature.query]
        if len(queries) != 1:
            of_query = "" if feature.query is None else f" of query {feature.query!r}"
            raise RequestError(
                f"Feature {feature.name!r} of view {view!r} is of operator {feature.operator!r}{of_query}, which "
                f"{len(queries)} of the checkpoints below offline_store have ({', '.join(self._config.checkpoints)}): "
                "name one checkpoint with it, by the name of its query."
            )
        return self._config.checkpoints[queries[0]]


def _schema_of(frame: Any) -> StructType:
    """Return the columns of a pandas frame as Spark's, also of an empty one. A column without values has strings."""
    fields = []
    for field in pa.Schema.from_pandas(frame, preserve_index=False):
        kind = pa.timestamp("us", field.type.tz) if pa.types.is_timestamp(field.type) else field.type
        fields.append(pa.field(field.name, pa.string() if pa.types.is_null(kind) else kind))
    return spark_struct(pa.schema(fields))


def _packed(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Give each batch as one value, so that ``collect`` returns Arrow's own types."""
    for batch in batches:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as stream:
            stream.write_batch(batch)
        yield pa.RecordBatch.from_arrays([pa.array([sink.getvalue().to_pybytes()])], ["rows"])


class _AsOfJob(RetrievalJob):  # type: ignore[misc]
    """Rows with their features, which Spark computes when they are asked for."""

    def __init__(
        self, rows: DataFrame, metadata: RetrievalMetadata, full_feature_names: bool, on_demand: Sequence[Any]
    ) -> None:
        self._rows = rows
        self._metadata = metadata
        self._full_feature_names = full_feature_names
        self._on_demand = list(on_demand)

    def _to_arrow_internal(self, timeout: int | None = None) -> pa.Table:
        schema = pa.schema([(field.name, arrow_type(field.dataType)) for field in self._rows.schema])
        packed = self._rows.mapInArrow(_packed, "rows binary").collect()
        pieces = [pa.ipc.open_stream(row["rows"]).read_all().cast(schema) for row in packed]
        return pa.concat_tables([schema.empty_table(), *pieces]).sort_by(ROW_COLUMN).drop_columns([ROW_COLUMN])

    def _to_df_internal(self, timeout: int | None = None) -> Any:
        return self._to_arrow_internal(timeout).to_pandas()

    @property
    def full_feature_names(self) -> bool:
        return self._full_feature_names

    @property
    def on_demand_feature_views(self) -> list[Any]:
        return self._on_demand

    @property
    def metadata(self) -> RetrievalMetadata:
        return self._metadata

    def persist(self, storage: Any, allow_overwrite: bool = False, timeout: int | None = None) -> None:
        """Raise ``RequestError``: this store has no tables."""
        raise RequestError("Write the rows yourself: pyarrow.parquet.write_table(job.to_arrow(), path).")
