"""Feast itself against real hosts, proxies and a coordinator in this process.

Feast does not fit the versions of ``constraints.txt``: the cell "feast" of ``tests/matrix.py`` runs this module in an
environment of its own.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import decimal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from msgspec.structs import replace

pytest.importorskip("feast", reason="Feast has an environment of its own: the cell feast of tests/matrix.py")

from feast import Entity, FeatureService, FeatureStore, FeatureView, Field, FileSource, PushSource, RepoConfig
from feast import types as feast_types
from feast.data_source import PushMode
from feast.protos.feast.types.EntityKey_pb2 import EntityKey
from feast.protos.feast.types.Value_pb2 import Value
from feast.value_type import ValueType

from backends.encoding.schema import StateSchema
from coordinator_actor import feature_views
from ray_statestore.feast import RayStatestoreOnlineStore, RayStatestoreOnlineStoreConfig, _keys, _numbers, _problems
from spark_bridge.exceptions import RequestError, StaleFeatureError, UnknownKeyOrNamespaceError
from spark_bridge.queryable.routing import feature_reads
from tests.patience import PATIENCE
from tests.spark_bridge.queryable.client_world import KEYS, TOKEN
from tests.spark_bridge.queryable.feature_world import VIEW, FeatureCluster

KINDS = {
    "i8": (pa.int8(), feast_types.Int32, -3, -3),
    "i32": (pa.int32(), feast_types.Int64, 7, 7),
    "f32": (pa.float32(), feast_types.Float64, 0.5, 0.5),
    "f64": (pa.float64(), feast_types.Float64, 0.1, 0.1),
    "flag": (pa.bool_(), feast_types.Bool, True, True),
    "raw": (pa.binary(), feast_types.Bytes, b"\x00\xff", b"\x00\xff"),
    "price": (pa.decimal128(10, 2), feast_types.Decimal, decimal.Decimal("1.20"), decimal.Decimal("1.20")),
    "seen": (
        pa.timestamp("us", "UTC"),
        feast_types.UnixTimestamp,
        dt.datetime(2024, 3, 9, 1, 2, 3, 4, tzinfo=dt.timezone.utc),
        dt.datetime(2024, 3, 9, 1, 2, 3, tzinfo=dt.timezone.utc),
    ),
    "places": (pa.list_(pa.string()), feast_types.Array(feast_types.String), ["de", "fr"], ["de", "fr"]),
    "times": (
        pa.list_(pa.timestamp("us", "UTC")),
        feast_types.Array(feast_types.UnixTimestamp),
        [dt.datetime(2024, 3, 9, tzinfo=dt.timezone.utc)],
        [dt.datetime(2024, 3, 9, tzinfo=dt.timezone.utc)],
    ),
}
"""Columns by name: their type, that of Feast, a value, and what Feast makes of it."""
SCHEMAS = {
    "totals": StateSchema(KEYS, pa.schema([("n.count.count", pa.int64()), ("name.last.value", pa.string())])),
    "profile": StateSchema(KEYS, pa.schema([("score.last.value", pa.float64()), ("level.last.value", pa.int64())])),
    "kinds": StateSchema(KEYS, pa.schema([(f"{name}.last.value", kind) for name, (kind, *_) in KINDS.items()])),
}
USER = Entity(name="user", join_keys=["user"], value_type=ValueType.INT64)
FIELDS = {
    "user": feast_types.Int64,
    "n": feast_types.Int64,
    "score": feast_types.Float64,
    "user_name": feast_types.String,
    "level": feast_types.Int64,
}
PLAIN = feature_views.FeatureView(
    "plain", "user", [feature_views.Feature("score", "profile"), feature_views.Feature("level", "profile")]
)


def view_of(name: str, fields: dict[str, Any], **options: Any) -> FeatureView:
    schema = [Field(name=field, dtype=dtype) for field, dtype in fields.items()]
    return FeatureView(name=name, **{"entities": [USER], "schema": schema, **options})


RISK = view_of("risk", FIELDS)
PLAIN_FIELDS = {name: FIELDS[name] for name in ("user", "score", "level")}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FeatureCluster]:
    """Users 0 to 19 have totals, 0 to 9 a profile. Hosts look a view up again with each request."""
    monkeypatch.setattr(feature_reads, "VIEW_SECONDS", 0.0)
    monkeypatch.setattr(feature_reads, "LOOK_AGAIN_SECONDS", 0.0)
    made = FeatureCluster(tmp_path / "cluster", SCHEMAS)
    made.write(
        {
            "totals": {i: (i, f"user {i}") for i in range(20)},
            "profile": {i: (i / 4, None if i % 2 else i) for i in range(10)},
            "kinds": {1: tuple(value for _, _, value, _ in KINDS.values()), 2: (None,) * len(KINDS)},
        }
    )
    made.declare()
    made.declare(PLAIN)
    yield made
    made.close()


def config_of(cluster: FeatureCluster, root: Path, **options: Any) -> RepoConfig:
    return RepoConfig(
        project="shop",
        provider="local",
        registry=str(root / "registry.db"),
        online_store={
            "type": "ray_statestore.feast.RayStatestoreOnlineStore",
            "address": cluster.hosts[0].address,
            "token": TOKEN,
            "timeout": PATIENCE,
            **options,
        },
        entity_key_serialization_version=3,
    )


@pytest.fixture
def store(cluster: FeatureCluster, tmp_path: Path) -> Iterator[FeatureStore]:
    """A repository of Feast with both views."""
    made = FeatureStore(config=config_of(cluster, tmp_path))
    made.apply([USER, RISK, view_of("plain", PLAIN_FIELDS)])
    yield made
    close(made)


def online(store: FeatureStore) -> RayStatestoreOnlineStore:
    return store._get_provider().online_store


def close(store: FeatureStore) -> None:
    asyncio.run(online(store).close())


def keys_of(*users: int) -> list[EntityKey]:
    return [EntityKey(join_keys=["user"], entity_values=[Value(int64_val=user)]) for user in users]


# -- reads -------------------------------------------------------------------------------------


def test_features_come_from_the_running_stream(cluster: FeatureCluster, store: FeatureStore) -> None:
    """Nothing is materialized: a batch is seen with the next request."""
    features = [f"risk:{name}" for name in FIELDS if name != "user"]
    rows = [{"user": user} for user in (3, 1000, 4, 3)]
    expected = {
        "user": [3, 1000, 4, 3],
        "n": [3, 0, 4, 3],
        "score": [0.75, None, 1.0, 0.75],
        "user_name": ["user 3", "unknown", "user 4", "user 3"],
        "level": [None, None, 4, None],
    }
    assert store.get_online_features(features, rows).to_dict() == expected
    assert asyncio.run(store.get_online_features_async(features, rows)).to_dict() == expected
    cluster.write({"totals": {3: (300, "three")}})
    answer = store.get_online_features(["risk:n"], [{"user": 3}], full_feature_names=True)
    assert answer.to_dict() == {"user": [3], "risk__n": [300]}
    assert online(store).async_supported.read and not online(store).async_supported.write


@pytest.mark.parametrize("users", [[3], [1000], [3, 1000, 4, 15, 3], []])
def test_rows_come_in_order_and_absent_keys_have_none(
    cluster: FeatureCluster, store: FeatureStore, users: list[int]
) -> None:
    table = store.get_feature_view("plain")
    cluster.write({}, ago=50.0)
    rows = online(store).online_read(store.config, table, keys_of(*users))
    assert len(rows) == len(users)
    now = dt.datetime.now(dt.timezone.utc)
    for user, (time, features) in zip(users, rows, strict=True):
        if user >= 10:
            assert (time, features) == (None, None)
            continue
        level = Value() if user % 2 else Value(int64_val=user)
        assert features == {"score": Value(double_val=user / 4), "level": level}
        assert time is not None and 49 < (now - time).total_seconds() < 50 + PATIENCE
    read = online(store).online_read_async(store.config, table, keys_of(*users), ["level"])
    assert [None if f is None else [*f] for _, f in asyncio.run(read)] == [
        ["level"] if user < 10 and user % 2 == 0 else None for user in users
    ]


def test_defaults_are_left_out_if_the_store_says_so(cluster: FeatureCluster, tmp_path: Path) -> None:
    store = FeatureStore(config=config_of(cluster, tmp_path, defaults=False))
    store.apply([USER, RISK])
    answer = store.get_online_features(["risk:n", "risk:level"], [{"user": 1000}, {"user": 15}])
    assert answer.to_dict() == {"user": [1000, 15], "n": [None, 15], "level": [None, None]}
    statuses = {str(v.statuses) for v in answer.proto.results[1:]}
    assert len(statuses) == 1 and len(set(answer.proto.results[1].statuses)) == 2, "1000 is not found"
    close(store)


@pytest.mark.parametrize("user", [1, 2])
def test_values_have_feasts_types(cluster: FeatureCluster, store: FeatureStore, user: int) -> None:
    cluster.declare(
        feature_views.FeatureView("kinds", "user", [feature_views.Feature(name, "kinds") for name in KINDS])
    )
    store.apply(
        [
            view_of(
                "all",
                {name: dtype for name, (_, dtype, *_) in KINDS.items()} | {"user": feast_types.Int64},
                tags={"statestore.view": "kinds"},
            )
        ]
    )
    for users in ([user], [user, 15]):
        answer = store.get_online_features([f"all:{name}" for name in KINDS], [{"user": u} for u in users]).to_dict()
        expected = {name: value if user == 1 else None for name, (*_, value) in KINDS.items()}
        assert {name: values[0] for name, values in answer.items() if name != "user"} == expected


@pytest.mark.parametrize("call", ["get_online_features", "get_online_features_async"])
def test_all_views_of_a_service_are_of_one_version(
    cluster: FeatureCluster, store: FeatureStore, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """A batch is completed between the reads of the two views."""
    service = FeatureService(name="model", features=[RISK[["n"]], store.get_feature_view("plain")[["score"]]])
    store.apply([service])
    client = online(store)._client(store.config.online_store)
    read = client._ask_features

    def read_and_write(target: Any, at: Any, *arguments: Any) -> Any:
        answer = read(target, at, *arguments)
        if at[0].isolation == "completed" and target.location.view.name == "risk":
            cluster.write({"totals": {1: (100, "")}, "profile": {1: (9.5, 0)}})
        return answer

    monkeypatch.setattr(client, "_ask_features", read_and_write)
    answer = getattr(store, call)(store.get_feature_service("model"), [{"user": 1}, {"user": 2}])
    answer = asyncio.run(answer) if asyncio.iscoroutine(answer) else answer
    assert answer.to_dict() == {"user": [1, 2], "n": [100, 2], "score": [9.5, 0.5]}, "both of version 2"
    times = {str(t) for result in answer.proto.results[1:] for t in result.event_timestamps}
    assert len(times) == 1


def test_a_bound_on_the_age_is_the_views(cluster: FeatureCluster, store: FeatureStore) -> None:
    cluster.write({}, ago=310.0)
    cluster.declare(replace(VIEW, max_age="5 minutes"))
    with pytest.raises(StaleFeatureError, match=r"max_age='5 minutes'"):
        store.get_online_features(["risk:n"], [{"user": 1}])


def test_many_numbers_are_the_values_that_single_ones_are() -> None:
    integers = [0, 1, -1, 127, 128, 2**63 - 1, -(2**63), 2**32, -300, 99]
    assert _numbers("INT64", np.array(integers)) == [Value(int64_val=number) for number in integers]
    floats = [0.0, -0.0, 0.1, float("inf"), -1e308, 5e-324]
    assert _numbers("DOUBLE", np.array(floats)) == [Value(double_val=number) for number in floats]


def test_keys_of_several_columns_come_in_the_views_order() -> None:
    key = EntityKey(join_keys=["b", "a"], entity_values=[Value(string_val="x"), Value(int32_val=7)])
    null = EntityKey(join_keys=["a", "b"], entity_values=[Value(), Value(string_val="y")])
    client: Any = SimpleNamespace(entity_schema=lambda view: pa.schema([("a", pa.int32()), ("b", pa.string())]))
    assert _keys(client, RISK, [key, null]) == [(7, "x"), (None, "y")]
    with pytest.raises(RequestError, match=r"join keys \['user'\], and its entity has the columns \['a', 'b'\]"):
        _keys(client, RISK, [key, *keys_of(1)])


def test_a_key_of_another_type_is_refused(store: FeatureStore) -> None:
    table = store.get_feature_view("risk")
    key = EntityKey(join_keys=["user"], entity_values=[Value(string_val="three")])
    with pytest.raises(UnknownKeyOrNamespaceError, match="'risk' \\(key columns user: int64\\)"):
        online(store).online_read(store.config, table, [key])


def test_a_view_that_has_changed_since_apply_says_so(cluster: FeatureCluster, store: FeatureStore) -> None:
    cluster.declare(replace(PLAIN, features=[feature_views.Feature("score", "totals", column="name")]))
    for users in ([1], [1, 2]):
        rows = [{"user": user} for user in users]
        with pytest.raises(RequestError, match="'score' of view 'plain' has a value that is not of Feast's type"):
            store.get_online_features(["plain:score"], rows)
        with pytest.raises(RequestError, match="View 'plain' has no feature 'level'; it has 'score'"):
            store.get_online_features(["plain:level"], rows)


# -- writes ------------------------------------------------------------------------------------


def test_feast_writes_nothing(cluster: FeatureCluster, store: FeatureStore, tmp_path: Path) -> None:
    import pandas as pd

    frame = pd.DataFrame({"user": [3], "n": [0], "ts": [pd.Timestamp("2024-03-09", tz="UTC")]})
    frame.to_parquet(tmp_path / "totals.parquet")
    file = FileSource(name="file", path=str(tmp_path / "totals.parquet"), timestamp_field="ts")
    push = PushSource(name="push", batch_source=file)
    store.apply(
        [
            view_of(
                "pushed", {name: FIELDS[name] for name in ("user", "n")}, source=push, tags={"statestore.view": "risk"}
            )
        ]
    )
    refused = pytest.raises(RequestError, match="'pushed' cannot be written through Feast: its stream writes it")
    with refused:
        store.push("push", frame, to=PushMode.ONLINE)
    with refused:
        asyncio.run(store.push_async("push", frame, to=PushMode.ONLINE))
    with refused:
        store.write_to_online_store("pushed", frame)
    with refused:
        store.materialize(dt.datetime(2024, 3, 1), dt.datetime(2024, 4, 1), ["pushed"])
    assert store.get_online_features(["risk:n"], [{"user": 3}]).to_dict()["n"] == [3]


def test_deleted_views_and_torn_down_stores_leave_the_state(cluster: FeatureCluster, store: FeatureStore) -> None:
    files = sorted(str(path) for path in cluster.root.rglob("*") if "statestore" in str(path))
    store.delete_feature_view("plain")
    store.apply([], objects_to_delete=[store.get_feature_view("risk")], partial=False)
    store.teardown()
    assert sorted(str(path) for path in cluster.root.rglob("*") if "statestore" in str(path)) == files
    client = cluster.client()
    assert client.features("risk", [3]).to_dict()["n"] == [3]
    assert client.features("plain", [4]).to_dict()["score"] == [1.0]


def test_precomputed_vectors_are_refused(store: FeatureStore) -> None:
    service = FeatureService(name="fast", features=[RISK[["n"]]], precompute_online=True)
    store.apply([service])
    for read in (store.get_online_features, lambda *given: asyncio.run(store.get_online_features_async(*given))):
        with pytest.raises(RequestError, match="'fast' has precompute_online=True"):
            read(store.get_feature_service("fast"), [{"user": 1}])


# -- apply -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "options", "why"),
    [
        ({"user": feast_types.Float64}, {}, "'user' of view 'risk' is int64, and Feast's DOUBLE .* INT32 or INT64"),
        ({"user": feast_types.String}, {}, "'user' of view 'risk' is int64, and Feast's STRING .* INT32 or INT64"),
        ({"user": feast_types.UnixTimestamp}, {}, "and Feast's UNIX_TIMESTAMP cannot name each such key"),
        ({"n": feast_types.Int32}, {}, "'n' of view 'risk' is int64, and Feast's field Int32. Give .* the type INT64"),
        ({"score": feast_types.Float32}, {}, "'score' .* is double, and Feast's field Float32. .* the type DOUBLE"),
        ({"other": feast_types.Int64}, {}, "has no feature 'other'; it has n, score, user_name, level"),
        ({}, {"entities": []}, "has the entity user, and Feast's view the join keys __dummy_id"),
        (
            {"card": feast_types.Int64},
            {"entities": [Entity(name="card", join_keys=["card"], value_type=ValueType.INT64)]},
            "has the entity user, and Feast's view the join keys card",
        ),
        ({}, {"name": "risky"}, "no feature view 'risky' for 'risky'; there are plain, risk"),
        ({}, {"tags": {"statestore.view": "rysk"}}, "no feature view 'rysk' for 'risk'"),
    ],
)
def test_apply_refuses_what_streams_do_not_have(
    cluster: FeatureCluster, tmp_path: Path, fields: dict[str, Any], options: dict[str, Any], why: str
) -> None:
    config = config_of(cluster, tmp_path)
    store = FeatureStore(config=config)
    dtype = fields.get("user", feast_types.Int64)
    user = Entity(name="user", join_keys=["user"], value_type=dtype.to_value_type())
    table = view_of(options.pop("name", "risk"), FIELDS | fields, **{"entities": [user], **options})
    with pytest.raises(RequestError, match=why):
        store.apply([user, *options.get("entities", []), table])
    assert FeatureStore(config=config).list_feature_views() == []
    close(store)


@pytest.mark.parametrize("kind", ["map<string, int64>", "struct<a: int64>", "date32[day]", "list<item: date32[day]>"])
def test_a_column_without_a_type_of_feast_is_refused(kind: str) -> None:
    client: Any = SimpleNamespace(entity_schema=lambda view: pa.schema([("user", pa.int64())]))
    views = {"risk": {"problem": "", "features": [{"feature": "n", "type": kind}]}}
    table = view_of("risk", {"user": feast_types.Int64, "n": feast_types.Int64})
    (problem,) = _problems(client, table, views)
    assert "Feast has no type for it: convert the column in the stream." in problem
    (problem,) = _problems(client, table, {"risk": {"problem": "operator 'x' is gone"}})
    assert problem == "View 'risk' cannot be read now: operator 'x' is gone"
    written: Any = SimpleNamespace(name="on_demand", tags={})
    (problem,) = _problems(client, written, views)
    assert problem.startswith("'on_demand' is a SimpleNamespace, and Feast would write it: set write_to_online")


def test_apply_says_that_no_host_answers(cluster: FeatureCluster, tmp_path: Path) -> None:
    for host in cluster.hosts:
        host.kill()
    store = FeatureStore(config=config_of(cluster, tmp_path, timeout=0.3))
    with pytest.raises(RequestError, match=r"could not be read: .* Start the streams, correct the address"):
        store.apply([USER, RISK])
    wrong = FeatureStore(config=config_of(cluster, tmp_path, timeout=0.3, token="wrong"))
    with pytest.raises(RequestError, match="could not be read: "):
        wrong.apply([USER, RISK])


# -- configuration -----------------------------------------------------------------------------


def test_a_file_names_the_class_and_the_environment_has_the_token(
    cluster: FeatureCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STATESTORE_TOKEN", TOKEN)
    (tmp_path / "feature_store.yaml").write_text(
        "project: shop\nprovider: local\nregistry: registry.db\nentity_key_serialization_version: 3\nonline_store:\n"
        f"  type: ray_statestore.feast.RayStatestoreOnlineStore\n  address: {cluster.hosts[0].address}\n"
    )
    store = FeatureStore(repo_path=str(tmp_path))
    store.apply([USER, RISK])
    assert store.get_online_features(["risk:n"], [{"user": 3}]).to_dict()["n"] == [3]
    close(store)
    assert store.get_online_features(["risk:n"], [{"user": 3}]).to_dict()["n"] == [3], "it connects again"
    close(store)


def test_settings_are_checked_and_the_token_is_not_shown(cluster: FeatureCluster, tmp_path: Path) -> None:
    assert TOKEN not in repr(config_of(cluster, tmp_path).online_store)
    with pytest.raises(ValueError, match="adress"):
        RayStatestoreOnlineStoreConfig(adress="127.0.0.1:7070")
    with pytest.raises(ValueError, match="adress"):
        config_of(cluster, tmp_path, adress="127.0.0.1:7070")
    settings = RayStatestoreOnlineStoreConfig(tls={"ca": "/etc/ca.pem"})
    assert settings.tls is not None and settings.tls.ca == "/etc/ca.pem"
