"""Feast's point-in-time joins over the checkpoint of a real stream, in the environment of ``test_feast.py``."""

from __future__ import annotations

import datetime as dt
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

pytest.importorskip("feast", reason="Feast has an environment of its own: the cell feast of tests/matrix.py")

import ray
from feast import Entity, FeatureStore, FeatureView, Field, RepoConfig
from feast import types as feast_types
from feast.value_type import ValueType
from pyspark.sql import SparkSession

from ray_statestore import Feature, aggregate, attach, declare_feature_view, stop_spark
from ray_statestore import FeatureView as StreamView
from ray_statestore import functions as S
from spark_bridge.exceptions import RequestError
from tests.scratch import SCRATCH

USER = Entity(name="user", join_keys=["user"], value_type=ValueType.INT64)
FIELDS = {"user": feast_types.Int64, "n": feast_types.Int64, "revenue": feast_types.Float64}
STORE = "ray_statestore.feast_offline.RayStatestoreOfflineStore"
BEFORE = dt.datetime(2020, 1, 1, tzinfo=dt.timezone.utc)


@dataclass
class World:
    """A stream over two batches, and the moment after each: user 7 has 1, then 3 rows, user 8 none, then one."""

    root: Path
    after: list[dt.datetime]

    @property
    def checkpoint(self) -> str:
        return str(self.root / "totals")

    def store(self, **offline_store: Any) -> FeatureStore:
        config = RepoConfig(
            project="shop",
            provider="local",
            registry=str(self.root / "registry.db"),
            online_store=None,
            offline_store={"type": STORE, "checkpoints": {"clicks": self.checkpoint}, **offline_store},
            entity_key_serialization_version=3,
        )
        return FeatureStore(config=config)


def view_of(name: str, fields: dict[str, Any] = FIELDS, **options: Any) -> FeatureView:
    schema = [Field(name=field, dtype=dtype) for field, dtype in fields.items()]
    return FeatureView(name=name, entities=[USER], schema=schema, online=False, **options)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    root = tmp_path_factory.mktemp("world")
    ray_dir = tempfile.mkdtemp(prefix="rs-", dir=SCRATCH)
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    ray.init(
        address="local",
        num_cpus=4,
        namespace="statestore",
        log_to_driver=False,
        include_dashboard=False,
        _temp_dir=ray_dir,
        object_store_memory=200 << 20,
    )
    settings = {"spark.sql.shuffle.partitions": "2", "spark.ui.enabled": "false", "spark.sql.session.timeZone": "UTC"}
    spark = SparkSession.builder.master("local[2]").config(map=settings).getOrCreate()
    attach(spark, num_hosts=1)
    try:
        (root / "clicks").mkdir()
        clicks = spark.readStream.schema("user long, amount double").parquet(str(root / "clicks"))
        totals = aggregate(clicks, by="user", operator="user_totals", n=S.count(), spent=S.sum("amount"))
        writer = totals.writeStream.outputMode("update").option("checkpointLocation", str(root / "totals"))
        query = writer.queryName("clicks").format("noop").start()
        after = list[dt.datetime]()
        for i, rows in enumerate(([(7, 1.5)], [(7, 10.0), (7, 20.0), (8, 2.0)])):
            pd.DataFrame(rows, columns=["user", "amount"]).to_parquet(root / "clicks" / f"{i}.parquet")
            query.processAllAvailable()
            after.append(dt.datetime.now(dt.timezone.utc))
        features = [Feature("n", "user_totals", default=0), Feature("revenue", "user_totals", column="spent")]
        declare_feature_view(StreamView("user_value", "user", features))
        query.stop()
        world = World(root, after)
        named = view_of("worth", tags={"statestore.view": "user_value"})
        missing = view_of("no_such_view")
        wrong = view_of("wrong", FIELDS | {"price": feast_types.Float64}, tags={"statestore.view": "user_value"})
        world.store().apply([USER, view_of("user_value"), named, missing, wrong])
        yield world
    finally:
        stop_spark()
        spark.stop()
        ray.shutdown()
        shutil.rmtree(ray_dir, ignore_errors=True)


def asked(world: World) -> pd.DataFrame:
    first, last = world.after
    times = {"user": [8, 7, 7, 7, 8, 99], "event_timestamp": [last, first, last, BEFORE, first, last]}
    return pd.DataFrame(times | {"label": list("abcdef")})


def test_rows_have_the_features_of_their_time_in_their_order(world: World) -> None:
    job = world.store().get_historical_features(asked(world), ["user_value:n", "user_value:revenue"])
    table = job.to_arrow()
    assert table.column_names == ["user", "event_timestamp", "label", "n", "revenue"]
    assert table["label"].to_pylist() == list("abcdef")
    assert table["n"].to_pylist() == [1, 1, 3, 0, 0, 0]
    assert table["revenue"].to_pylist() == [2.0, 1.5, 31.5, None, None, None]
    assert table["event_timestamp"].to_pylist() == asked(world)["event_timestamp"].tolist()
    assert job.to_df()["n"].tolist() == [1, 1, 3, 0, 0, 0]
    assert job.metadata.keys == ["user", "label"] and not job.full_feature_names


def test_names_keys_and_defaults_are_those_of_the_request(world: World) -> None:
    store = world.store(defaults=False)
    frame = asked(world).rename(columns={"label": "n"})
    features = ["user_value:n", "worth:revenue", "worth:n"]
    table = store.get_historical_features(frame, features, full_feature_names=True).to_arrow()
    assert table["user_value__n"].to_pylist() == table["worth__n"].to_pylist() == [1, 1, 3, None, None, None]
    assert table["worth__revenue"].to_pylist() == [2.0, 1.5, 31.5, None, None, None]
    assert store.get_historical_features(frame[:0], features, full_feature_names=True).to_arrow().num_rows == 0
    last = world.after[1].isoformat()
    query = f"select 7L as user, timestamp '{last}' as asked_at union all select 8L, timestamp '{last}'"
    assert store.get_historical_features(query, ["user_value:n"]).to_arrow()["n"].to_pylist() == [3, 1]


@pytest.mark.parametrize(
    ("features", "changes", "why"),
    [
        (["no_such_view:n"], {}, "have no feature view 'no_such_view'; they have user_value. Name the checkpoint"),
        (["wrong:price"], {}, "has no feature 'price'; it has n, revenue"),
        (["user_value:n"], {"user": "person"}, "entity_df has no column user, a join key of view 'user_value'"),
        (["user_value:n"], {"label": "n"}, "entity_df and view 'user_value' both have n: ask with full_feature_names"),
    ],
)
def test_what_does_not_fit_is_refused(world: World, features: list[str], changes: dict[str, str], why: str) -> None:
    with pytest.raises(RequestError, match=why):
        world.store().get_historical_features(asked(world).rename(columns=changes), features)


def test_checkpoints_must_name_each_view_and_operator_once(world: World) -> None:
    both = {"clicks": world.checkpoint, "copy": world.checkpoint}
    with pytest.raises(RequestError, match="Two checkpoints below offline_store have a feature view 'user_value'"):
        world.store(checkpoints=both).get_historical_features(asked(world), ["user_value:n"])


def test_what_the_store_does_not_do_is_refused(world: World, tmp_path: Path) -> None:
    store = world.store()
    job = store.get_historical_features(asked(world), ["user_value:n"])
    with pytest.raises(RequestError, match="Write the rows yourself"):
        job.persist(None)
    with pytest.raises(RequestError, match="takes entity_df here"):
        store.get_historical_features(None, ["user_value:n"], start_date=BEFORE, end_date=world.after[0])
    provider = store._get_provider().offline_store
    with pytest.raises(RequestError, match="remove the feast materialize job"):
        provider.pull_latest_from_table_or_query(None)
    with pytest.raises(RequestError, match="read_state"):
        provider.pull_all_from_table_or_query(None)
