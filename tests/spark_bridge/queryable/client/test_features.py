"""Feature views against real hosts, proxies and a coordinator in this process."""

from __future__ import annotations

import asyncio
import datetime as dt
import math
import threading
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from msgspec.structs import replace

from backends.encoding.schema import StateSchema
from coordinator_actor.exceptions import InvalidRequestError, RetiredRunError, listed_names
from coordinator_actor.feature_views import Feature, FeatureView
from coordinator_actor.messages import LocatedView
from spark_bridge.exceptions import (
    HostUnavailableError,
    QueryTimeoutError,
    RequestError,
    StaleFeatureError,
    StateVersionError,
    UnknownFeatureViewError,
    UnknownKeyOrNamespaceError,
)
from spark_bridge.queryable.client.async_client import GATHERED_KEYS, AsyncQueryableStateClient
from spark_bridge.queryable.client.client import QueryableStateClient
from spark_bridge.queryable.client.features import versions_of
from spark_bridge.queryable.protocol import At, ViewLocation, ViewQuery
from spark_bridge.queryable.routing import feature_reads
from spark_bridge.queryable.routing.feature_reads import ResolvedView
from spark_bridge.session.feature_views import check_declaration
from spark_bridge.state_data.checkpoint_client import CheckpointClient
from tests.patience import PATIENCE
from tests.spark_bridge.queryable.client_world import KEYS, G, QueryHost
from tests.spark_bridge.queryable.feature_world import VIEW, FeatureCluster
from tests.spark_bridge.queryable.memory_reads import eventually

TOTALS_ROWS = {i: (i, f"user {i}") for i in range(100)}
PROFILE_ROWS = {i: (i / 4, None if i % 2 else i, True) for i in range(50)}


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FeatureCluster]:
    """Users 0 to 99 have totals, 0 to 49 a profile; at version 2 user 7 has other totals. Only read."""
    made = FeatureCluster(tmp_path_factory.mktemp("filled"))
    made.write({"totals": TOTALS_ROWS, "profile": PROFILE_ROWS})
    made.write({"totals": {7: (700, "seven")}})
    made.declare()
    yield made
    made.close()


@pytest.fixture(scope="module", params=["direct", "forwarded"])
def client(filled: FeatureCluster, request: pytest.FixtureRequest) -> QueryableStateClient:
    made: QueryableStateClient = filled.client(direct=request.param == "direct")
    return made


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FeatureCluster]:
    """One whose hosts look a view up again with each request."""
    monkeypatch.setattr(feature_reads, "VIEW_SECONDS", 0.0)
    monkeypatch.setattr(feature_reads, "LOOK_AGAIN_SECONDS", 0.0)
    made = FeatureCluster(tmp_path)
    made.write({"totals": TOTALS_ROWS, "profile": PROFILE_ROWS})
    made.declare()
    yield made
    made.close()


def expected(user: int, *, defaults: bool = True) -> dict[str, Any]:
    n, name = (700, "seven") if user == 7 else TOTALS_ROWS.get(user, (0, "unknown") if defaults else (None, None))
    score, level, _ = PROFILE_ROWS.get(user, (None, None, None))
    return {"user": user, "n": n, "score": score, "user_name": name, "level": level}


# -- answers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("defaults", [True, False])
@pytest.mark.parametrize("users", [[7], [1000], [3, 60, 3, 1000, 7], list(range(120)), []])
def test_features_of_several_operators_come_in_order(
    client: QueryableStateClient, users: list[int], defaults: bool
) -> None:
    rows = client.features("risk", users, defaults=defaults)
    assert rows.to_arrow().to_pylist() == [expected(user, defaults=defaults) for user in users]
    assert rows.to_dict() == {name: rows.to_arrow().column(name).to_pylist() for name in rows.to_arrow().column_names}
    assert rows.to_arrow().column_names == ["user", "n", "score", "user_name", "level"]
    assert rows.columns.schema.types == [pa.int64(), pa.float64(), pa.string(), pa.int64()]
    assert rows.versions == {"name": 2}
    assert len(rows) == len(users)


def test_keys_come_in_any_form_that_get_many_takes(client: QueryableStateClient) -> None:
    wanted = [expected(3), expected(4)]
    for keys in ([3, 4], np.array([3, 4]), pa.array([3, 4]), {"user": [3, 4]}, iter([3, 4]), [(3,), {"user": 4}]):
        assert client.features("risk", keys).to_arrow().to_pylist() == wanted
    for wrong in (["three"], ["three", "four"]):
        with pytest.raises(UnknownKeyOrNamespaceError, match="feature view 'risk' \\(key columns user: int64\\)"):
            client.features("risk", wrong)


def test_an_answer_keeps_its_keys_when_the_caller_reuses_theirs(
    filled: FeatureCluster, client: QueryableStateClient
) -> None:
    forms: list[Any] = [[3, 4], [3], [{"user": 3}], np.array([3, 4]), {"user": [3, 4]}]
    answers = [client.features("risk", keys) for keys in forms]

    async def gathered() -> list[Any]:
        asynchronous, lists = AsyncQueryableStateClient(client), [[3], [4, 5]]
        asked = asyncio.gather(*(asynchronous.features("risk", keys) for keys in lists))
        await asyncio.sleep(0)
        for keys in lists:
            keys[:] = [9]
        return await asked

    together = asyncio.run(gathered())
    forms[2][0]["user"] = forms[0][0] = forms[1][0] = forms[3][0] = forms[4]["user"][0] = 9
    forms[0].clear()
    assert [answer.to_dict()["user"] for answer in answers] == [[3, 4], [3], [3], [3, 4], [3, 4]]
    assert [answer.to_arrow().to_pylist()[0] for answer in answers] == [expected(3)] * 5
    assert [answer.to_dict()["user"] for answer in together] == [[3], [4, 5]]
    assert [len(answer) for answer in (*answers, *together)] == [2, 1, 1, 2, 2, 1, 2]


@pytest.mark.parametrize("users", [[2], [2, 4], [2, 1000]])
def test_numpy_has_the_columns_own_types(client: QueryableStateClient, users: list[int]) -> None:
    view = client.features("risk", users)
    if 1000 in users:
        with pytest.raises(RequestError, match="'level' is null in 1 of 2 rows"):
            view.to_numpy()
        return
    arrays = view.to_numpy()
    assert {name: array.dtype.kind for name, array in arrays.items()} == {
        "n": "i",
        "score": "f",
        "user_name": "O",
        "level": "i",
    }
    assert arrays["score"].tolist() == [user / 4 for user in users]


def test_nulls_are_nan_in_floats_and_refused_in_integers(client: QueryableStateClient) -> None:
    with pytest.raises(RequestError, match="'level' is null in 1 of 1 rows"):
        client.features("risk", [1000]).to_numpy()
    frame = client.features("risk", [1000]).to_pandas()
    assert np.isnan(frame["score"][0]) and frame["n"][0] == 0


def test_numbers_are_not_copied_into_numpy(client: QueryableStateClient) -> None:
    rows = client.features("risk", [2, 4])
    array = rows.to_numpy()["n"]
    assert array.__array_interface__["data"][0] == rows.columns.column(0).buffers()[1].address
    assert not array.flags.writeable


def test_an_earlier_version_can_be_read_again(client: QueryableStateClient) -> None:
    before = client.features("risk", [7, 8], versions={"name": 1})
    assert before.to_dict()["n"] == [7, 8]
    assert (before.versions, set(before.ages.values())) == ({"name": 1}, {None})
    assert client.features("risk", [7], versions=before.versions).to_dict()["n"] == [7]
    for wrong in ({}, {"other": 1}, {"name": -1}):
        with pytest.raises(RequestError, match="versions="):
            client.features("risk", [7], versions=wrong)
    with pytest.raises(RequestError, match="already select the versions; leave isolation='latest' out"):
        client.features("risk", [7], versions=before.versions, isolation="latest")
    with pytest.raises(StateVersionError, match="Version 9 "):
        client.features("risk", [7], versions={"name": 9})


def test_queries_of_one_name_are_told_apart_by_their_ids() -> None:
    names = {"id-a": "same", "id-b": "same", "id-c": "other", "id-d": None}
    queries = tuple(ViewQuery(query_id, name, f"run of {query_id}", 1) for query_id, name in names.items())
    location = ViewLocation(VIEW, queries=queries)
    versions = {"id-a": 1, "id-b": 2, "other": 3, "id-d": 4}
    assert [at.version for at in versions_of(location, versions, At())] == [1, 2, 3, 4]
    with pytest.raises(RequestError, match="'id-a', 'id-b', 'other', 'id-d'"):
        versions_of(location, {"same": 1, "other": 3, "id-d": 4}, At())


def test_a_moment_is_for_rolling_aggregates(client: QueryableStateClient) -> None:
    with pytest.raises(RequestError, match="View 'risk' has no rolling aggregates, and at= is the time"):
        client.features("risk", [7], at=dt.datetime(2026, 1, 1))


def test_async_client_answers_as_the_other_one(filled: FeatureCluster) -> None:
    async def both() -> tuple[Any, Any]:
        client = AsyncQueryableStateClient(filled.client())
        rows, views = await client.features("risk", [7]), await client.feature_views()
        return rows.to_dict(), views

    rows, views = asyncio.run(both())
    assert rows["n"] == [700]
    assert [view["view"] for view in views] == ["risk"]


def test_views_are_described(client: QueryableStateClient) -> None:
    (view,) = client.feature_views()
    (query,) = view["queries"]
    assert (view["owner"], view["entity"], view["max_age"], view["problem"]) == ("fraud", ["user"], None, "")
    assert [(f["feature"], f["operator"], f["column"], f["type"]) for f in view["features"]] == [
        ("n", "totals", "n", "int64"),
        ("score", "profile", "score", "double"),
        ("user_name", "totals", "name", "string"),
        ("level", "profile", "level", "int64"),
    ]
    assert (query["query_name"], query["version"]) == ("name", 2)
    assert 0 <= query["age"] < PATIENCE


def test_columns_of_any_type_are_features(tmp_path: Path) -> None:
    """A view with a time has no row in msgpack."""
    seen = StateSchema(KEYS, pa.schema([("at.last.value", pa.timestamp("us", "UTC")), ("n.count.count", pa.int64())]))
    cluster = FeatureCluster(tmp_path, {"seen": seen})
    cluster.write({"seen": {1: (1_700_000_000_000_000, 4)}})
    cluster.declare(FeatureView("seen_at", "user", [Feature("at", "seen"), Feature("n", "seen", default=9)]))
    client = cluster.client()
    for users in ([1], [1, 2]):
        rows = client.features("seen_at", users)
        assert rows.columns.column(0).to_pylist()[0].year == 2023
        assert rows.to_dict()["n"] == [4, 9][: len(users)]
        assert rows.to_numpy()["at"].dtype.kind == "M"
    cluster.close()


# -- one version -------------------------------------------------------------------------------


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("users", [[1], list(range(20))])
def test_all_operators_are_read_at_one_version(tmp_path: Path, direct: bool, users: list[int]) -> None:
    cluster = FeatureCluster(tmp_path, partitions=4)
    both = FeatureView("both", "user", [Feature("n", "totals"), Feature("level", "profile")])

    def write(i: int) -> None:
        cluster.write({"totals": dict.fromkeys(users, (i, "")), "profile": dict.fromkeys(users, (0.0, i, True))})

    write(1)
    cluster.declare(both)
    client, stop = cluster.client(direct=direct, hosts=(0, 1)), threading.Event()
    failures: list[str] = []

    def read() -> None:
        last = 0
        while not stop.is_set():
            rows = client.features("both", users)
            numbers = {*rows.to_dict()["n"], *rows.to_dict()["level"]}
            if len(numbers) != 1 or rows.versions["name"] != max(numbers) or rows.versions["name"] < last:
                failures.append(f"{numbers} at {rows.versions} after {last}")
                return
            last = rows.versions["name"]

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for i in range(2, 25):
        write(i)
    stop.set()
    for thread in threads:
        thread.join()
    cluster.close()
    assert failures == []


def test_a_version_that_completes_between_two_operators_is_not_mixed_in(tmp_path: Path) -> None:
    """The fast path of one key, in a host that has it in all operators, reads one after the other."""
    cluster = FeatureCluster(tmp_path, hosts=1)
    both = FeatureView("both", "user", [Feature("n", "totals"), Feature("level", "profile")])
    cluster.declare(both)
    cluster.write({"totals": {1: (100, "")}, "profile": {1: (0.0, 100, True)}})
    client = cluster.client(direct=True)
    client.features("both", [1])
    asked: list[str] = []
    own: Any = cluster.hosts[0].proxy._reads.own  # type: ignore[attr-defined]
    of_host = own.lookup_one

    def lookup_one(request: Any, key: bytes) -> Any:
        answer = of_host(request, key)
        asked.append(request.operator)
        if len(asked) == 1:
            cluster.write({"totals": {1: (200, "")}, "profile": {1: (0.0, 200, True)}})
        return answer

    own.lookup_one = lookup_one
    rows = client.features("both", [1])
    assert len(asked) > 2, "the fast path did not find two versions"
    assert rows.to_dict()["n"] == rows.to_dict()["level"] == [200]
    cluster.close()


@pytest.mark.parametrize("direct", [True, False])
def test_views_over_several_queries_have_a_version_of_each(cluster: FeatureCluster, direct: bool) -> None:
    devices = StateSchema(KEYS, pa.schema([("devices.count.count", pa.int64())]))
    with cluster.other_query({"devices": devices}, key_groups=G // 4):
        for i in range(1, 4):
            cluster.write({"devices": {u: (u + i,) for u in range(30)}}, ago=100.0)
    wide = FeatureView(
        "wide", "user", [Feature("devices", "devices", query="other"), Feature("n", "totals", default=0)]
    )
    cluster.c.declare_view("other-run", wide)
    client = cluster.client(direct=direct)
    for users in ([5], list(range(40))):
        rows = client.features("wide", users)
        assert rows.to_dict()["devices"] == [u + 3 if u < 30 else None for u in users]
        assert rows.to_dict()["n"] == users
        assert rows.versions == {"other": 3, "name": 1}
        assert rows.ages["devices"] > 99 > rows.ages["n"]


# -- age ---------------------------------------------------------------------------------------


def test_an_older_version_than_max_age_is_an_error(cluster: FeatureCluster) -> None:
    client = cluster.client()
    cluster.declare(replace(VIEW, max_age="5 minutes"))
    cluster.write({}, ago=290.0)
    assert 289 < client.features("risk", [1]).ages["n"] < 300
    cluster.write({}, ago=310.0)
    for users in ([1], [1, 2]):
        with pytest.raises(StaleFeatureError, match=r"'n' of view 'risk' is 31\d.\d s old, and max_age='5 minutes'"):
            client.features("risk", users)
    assert client.features("risk", [1], versions={"name": 2}).to_dict()["n"] == [1]
    cluster.write({})
    assert client.features("risk", [1]).to_dict()["n"] == [1]


def test_an_older_version_than_max_age_gives_nulls_if_the_view_says_so(cluster: FeatureCluster) -> None:
    client = cluster.client()
    cluster.declare(replace(VIEW, max_age="5 minutes", on_stale="null"))
    cluster.write({}, ago=310.0)
    for users in ([1], [1, 2]):
        rows = client.features("risk", users)
        assert set(map(tuple, rows.to_dict().values())) == {tuple(users), (None,) * len(users)}, "defaults hide nothing"
        assert rows.ages["score"] > 300


def test_the_latest_version_has_the_age_of_the_completed_one(cluster: FeatureCluster) -> None:
    cluster.declare(replace(VIEW, max_age="5 minutes"))
    cluster.write({}, ago=100.0)
    cluster.write({"totals": {1: (50, "")}}, committed=False)
    client = cluster.client()
    for users in ([1], [1, 2]):
        rows = client.features("risk", users, isolation="latest")
        assert (rows.to_dict()["n"][0], rows.versions) == (50, {"name": 3})
        assert 99 < rows.ages["n"] < 100 + PATIENCE
        assert client.features("risk", users).to_dict()["n"][0] == 1


@pytest.mark.parametrize("users", [[1000], [1000, 1]])
def test_a_default_has_the_columns_type(cluster: FeatureCluster, users: list[int]) -> None:
    cluster.declare(replace(VIEW, features=[Feature("score", "profile", default=1)]))
    assert repr(cluster.client().features("risk", users).to_dict()["score"][0]) == "1.0"


def test_before_the_first_batch_a_bound_is_exceeded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_reads, "LOOK_AGAIN_SECONDS", 0.0)
    cluster = FeatureCluster(tmp_path)
    cluster.declare(replace(VIEW, max_age="1 day"))
    with pytest.raises(StaleFeatureError, match=r"unknown age: no batch of query 'name' .* Wait for its first batch"):
        cluster.client().features("risk", [1])
    cluster.declare()
    rows = cluster.client().features("risk", [1])
    assert (rows.to_dict()["n"], rows.ages["n"]) == ([0], None)
    cluster.close()


def test_a_host_that_has_just_come_knows_the_age(cluster: FeatureCluster) -> None:
    """It has no partitions, so gets no messages about versions of the query, and asks."""
    cluster.hosts.append(QueryHost(cluster, 2))
    client = cluster.client(hosts=(2,))
    for users, ago in (([1], 40.0), ([1, 2], 30.0), ([1], 20.0)):
        cluster.write({}, ago=ago)
        assert ago - 1 < client.features("risk", users).ages["n"] < ago + PATIENCE


def test_concurrent_requests_of_few_keys_go_together(cluster: FeatureCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each caller gets its own rows, or its own error; requests with other defaults or of another view go apart."""
    cluster.declare(replace(VIEW, name="score", features=[Feature("score", "profile"), Feature("vip", "profile")]))
    plain = cluster.client()
    asked: list[int] = []
    packed = plain._router._host_of_features

    def counting(location: Any, keys: Any, deadline: float) -> Any:
        asked.append(1 if isinstance(keys, bytes) else len(keys))
        return packed(location, keys, deadline)

    monkeypatch.setattr(plain._router, "_host_of_features", counting)
    monkeypatch.setattr(plain._router, "begin_features", lambda *_: None)  # all requests run in threads
    requests = [[user] for user in (1, 8, 1000, 3)] + [[3, 60, 3], [1000, 8]]

    async def run() -> None:
        client = AsyncQueryableStateClient(plain)
        rows = await asyncio.gather(*(client.features("risk", keys) for keys in requests))
        assert asked == [9]
        for keys, answer in zip(requests, rows, strict=True):
            wanted = [expected(user) for user in keys]
            assert len(answer) == len(keys) and answer.versions == {"name": cluster.version}
            assert answer.to_dict() == {name: [row[name] for row in wanted] for name in wanted[0]}
            assert answer.to_arrow().to_pylist() == wanted
            assert answer.values(["n"]) == {"n": [row["n"] for row in wanted]}
        assert rows[1].to_numpy()["n"].tolist() == [8]
        asked.clear()
        both = await asyncio.gather(
            *(client.features("risk", [1000], defaults=defaults) for defaults in (True, False, True)),
            client.features("score", [1]),
        )
        assert sorted(asked) == [1, 1, 2]
        assert [answer.to_dict()["n"] for answer in both[:3]] == [[0], [None], [0]]
        wrong, right, none = await asyncio.gather(
            client.features("risk", ["no number"]), client.features("risk", [1]), client.features("no view", [1]),
            return_exceptions=True,
        )  # fmt: skip
        assert isinstance(wrong, UnknownKeyOrNamespaceError) and isinstance(none, UnknownFeatureViewError)
        assert right.to_dict()["n"] == [expected(1)["n"]]
        asked.clear()
        apart = await asyncio.gather(
            client.features("risk", list(range(GATHERED_KEYS + 1))),
            client.features("risk", [1], versions=rows[0].versions),
            client.features("risk", []),
        )
        assert sorted(asked) == [0, 1, GATHERED_KEYS + 1] and [len(answer) for answer in apart] == [17, 1, 0]

    asyncio.run(run())


# -- several views -----------------------------------------------------------------------------


def test_several_views_are_of_one_version(cluster: FeatureCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch is completed between the two reads: the first one is repeated, and has the age of the new version."""
    cluster.declare(replace(VIEW, name="score", features=[Feature("score", "profile")]))
    client = cluster.client()
    read = client._ask_features

    def read_and_write(target: Any, at: Any, *arguments: Any) -> Any:
        answer = read(target, at, *arguments)
        if at[0].isolation == "completed" and target.location.view.name == "risk":
            cluster.write({"totals": {1: (50, "")}, "profile": {1: (9.5, 0, True)}})
        return answer

    monkeypatch.setattr(client, "_ask_features", read_and_write)
    for users in ([1], iter([1, 1000])):
        before = cluster.version
        risk, score = client.features_of_views([("risk", users), ("score", [1, 2])])
        assert risk.versions == score.versions == {"name": before + 1}
        assert risk.to_dict()["n"][0] == 50 and score.to_dict()["score"] == [9.5, 0.5]
        assert risk.ages["n"] == score.ages["score"] and 0 <= risk.ages["n"] < PATIENCE
        assert risk.at is None
    assert client.features_of_views([]) == []


@pytest.mark.parametrize("completes", [True, False])
def test_several_views_are_of_one_version_of_a_query_that_is_started_again(
    cluster: FeatureCluster, monkeypatch: pytest.MonkeyPatch, completes: bool
) -> None:
    """Also if the new run has completed no other version: it may have begun at an earlier one of another content."""
    cluster.declare(replace(VIEW, name="other"))
    client = cluster.client()
    read, asked = client._ask_features, []

    def read_and_restart(target: Any, *arguments: Any) -> Any:
        answer = read(target, *arguments)
        asked.append(target.location.queries[0].run_id)
        if len(asked) == 1:
            cluster.start("run2")
            if completes:
                cluster.write({"totals": {1: (50, "")}})
        return answer

    monkeypatch.setattr(client, "_ask_features", read_and_restart)
    one, two = client.features_of_views([("risk", [1]), ("other", [1])])
    assert asked[1:] == ["run2", "run2"] and asked[0] != "run2"
    assert one.versions == two.versions == {"name": cluster.version}
    assert one.to_dict() == two.to_dict() and one.ages == two.ages


@pytest.mark.parametrize("users", [[1], [1, 2], list(range(40))])
@pytest.mark.parametrize("on_stale", ["null", "error"])
def test_an_answer_that_is_repeated_is_not_older_than_max_age(
    cluster: FeatureCluster, monkeypatch: pytest.MonkeyPatch, users: list[int], on_stale: Any
) -> None:
    """A batch of one query is completed between the reads; the age of the other one exceeds the bound by then."""
    limits = StateSchema(KEYS, pa.schema([("cap.last.value", pa.int64())]))
    with cluster.other_query({"limits": limits}, key_groups=G):
        cluster.write({"limits": dict.fromkeys(users, (500,))}, ago=100.0)
    features = [Feature("n", "totals"), Feature("cap", "limits", query="other", default=7)]
    cluster.declare(FeatureView("both", "user", features, max_age="1 minute", on_stale=on_stale))
    client = cluster.client()
    read, is_first = client._ask_features, True

    def read_and_write(*arguments: Any) -> Any:
        nonlocal is_first
        answer = read(*arguments)
        if is_first:
            is_first = False
            cluster.write({"totals": dict.fromkeys(users, (50, ""))})
        return answer

    monkeypatch.setattr(client, "_ask_features", read_and_write)
    if on_stale == "error":  # the first answer is as if it had been within the bound
        monkeypatch.setattr(ResolvedView, "stale", lambda *_: [])
        with pytest.raises(StaleFeatureError, match=r"'cap' of view 'both' is 10\d.\d s old, and max_age='1 minute'"):
            client.features_of_views([("both", users), ("risk", [1])])
        return
    both, _ = client.features_of_views([("both", users), ("risk", [1])])
    assert both.versions == {"name": cluster.version, "other": 1} and both.ages["cap"] > 99
    assert both.to_dict() == {"user": users, "n": [50] * len(users), "cap": [None] * len(users)}
    assert both.to_arrow().column("cap").null_count == len(users)


def test_rolling_features_of_several_views_are_as_of_one_time(
    filled: FeatureCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = filled.client()
    find = client._access.find_views

    def rolling(request: Any, deadline: float) -> Any:
        return [replace(location, is_rolling=location.view.name == "risk") for location in find(request, deadline)]

    monkeypatch.setattr(client._access, "find_views", rolling)
    filled.declare(replace(VIEW, name="other"))
    one, plain, two = client.features_of_views([("risk", [1]), ("other", [1]), ("risk", [2, 3])])
    assert one.at == two.at == client.answered_at is not None
    assert plain.at is None
    assert filled.c.drop_view(filled.run, "other")


# -- declarations ------------------------------------------------------------------------------


def test_a_view_that_is_declared_again_has_its_new_columns_at_once(cluster: FeatureCluster) -> None:
    client = cluster.client()
    assert client.features("risk", [1]).columns.schema.names == ["n", "score", "user_name", "level"]
    cluster.declare(replace(VIEW, features=[Feature("vip", "profile", default=False)]))
    assert client.features("risk", [1]).to_dict() == {"user": [1], "vip": [True]}
    assert client.features("risk", [1, 1000]).to_dict() == {"user": [1, 1000], "vip": [True, False]}


def test_a_dropped_view_is_unknown(cluster: FeatureCluster) -> None:
    client = cluster.client(timeout=0.5)
    client.features("risk", [1])
    assert cluster.c.drop_view(cluster.run, "risk") is True
    assert cluster.c.drop_view(cluster.run, "risk") is False
    with pytest.raises(UnknownFeatureViewError, match="feature view 'risk'; feature views that exist: none"):
        cluster.client().features("risk", [1])
    # It had answers, so it waits for a query that is being restarted.
    with pytest.raises((UnknownFeatureViewError, QueryTimeoutError)):
        client.features("risk", [1])
    assert client.feature_views() == []


def test_views_outlive_runs_and_coordinators(cluster: FeatureCluster) -> None:
    client = cluster.client()
    cluster.declare(replace(VIEW, name="other"))
    cluster.declare(replace(VIEW, name="third"))
    assert client.features("risk", [1]).to_dict()["n"] == [1]
    cluster.start("run2")
    assert client.features("risk", [1]).to_dict()["n"] == [1]
    cluster.c.drop_view("run2", "third")
    cluster.replace_coordinator()
    eventually(lambda: len(client.feature_views()) == 2)
    assert client.features("other", [1]).to_dict()["n"] == [1]
    files = sorted(path.name for path in (cluster.root / "ck/statestore/feature-views").iterdir())
    assert files == [f"{3:020d}.json", f"{4:020d}.json"], "an earlier one stays, in case the newest is damaged"


def test_an_ended_query_keeps_its_views(cluster: FeatureCluster) -> None:
    client = cluster.client()
    registration = cluster.c.registries.runs.get(cluster.run).registration
    cluster.c.serve_ended(registration)
    assert client.features("risk", [1]).to_dict()["n"] == [1]
    with pytest.raises(RetiredRunError, match="is over"):
        cluster.c.drop_view(cluster.run, "risk")
    fresh = cluster.world.coordinator()
    fresh.serve_ended(registration)
    assert [running.view for running in fresh.feature_views()] == [VIEW]
    assert [location.operator.name for location in fresh.locate_view("risk").operators] == ["totals", "profile"]


def test_a_damaged_record_is_not_used(cluster: FeatureCluster, caplog: pytest.LogCaptureFixture) -> None:
    """The declaration before it counts, and the query starts."""
    cluster.declare(replace(VIEW, owner="other"))
    newest = max((cluster.root / "ck/statestore/feature-views").iterdir())
    newest.write_bytes(newest.read_bytes()[:-20])
    fresh = cluster.world.coordinator(0)
    registration = cluster.c.registries.runs.get(cluster.run).registration
    assert fresh.register_query(replace(registration, run_id="run2")).refusal is None
    assert [running.view for running in fresh.feature_views()] == [VIEW]
    assert "The last declaration of feature views is lost, declare it again" in caplog.text


def test_hosts_answer_while_no_coordinator_does(cluster: FeatureCluster) -> None:
    client = cluster.client()
    client.features("risk", [1])
    real = cluster.port.c

    class Gone:
        def __getattr__(self, name: str) -> Any:
            from spark_bridge.exceptions import HostUnavailableError

            raise HostUnavailableError("The coordinator does not answer.")

    cluster.port.c = Gone()
    assert client.features("risk", [1, 2]).to_dict()["n"] == [1, 2]
    cluster.port.c = real


def test_a_lost_host_is_waited_for(cluster: FeatureCluster) -> None:
    client = cluster.client(hosts=(0, 1), timeout=PATIENCE)
    users = list(range(40))
    before = client.features("risk", users).to_dict()
    cluster.hosts[1].kill()
    with pytest.raises(QueryTimeoutError):
        client.features("risk", users, timeout=0.3)
    cluster.replace_host(1)
    assert client.features("risk", users).to_dict() == before


@pytest.mark.parametrize("direct", [True, False])
def test_a_replaced_host_answers_at_its_new_address(cluster: FeatureCluster, direct: bool) -> None:
    """Every key is asked for alone, so that its own host is asked first."""
    client = cluster.client(hosts=(0,), direct=direct, timeout=20.0)
    users = list(range(40))
    before = [client.features("risk", [user]).to_dict() for user in users]
    for i, incarnation in ((1, "b"), (0, "b"), (1, "c")) if direct else ((0, "b"),):
        cluster.hosts[i].kill()
        cluster.replace_host(i, incarnation)
        assert [client.features("risk", [user]).to_dict() for user in users] == before


def test_an_unchanged_declaration_writes_nothing(cluster: FeatureCluster) -> None:
    cluster.world.put_hook = lambda path: pytest.fail(f"{path} was written")
    cluster.declare()
    cluster.world.put_hook = None


def test_another_query_cannot_take_the_name(cluster: FeatureCluster) -> None:
    devices = StateSchema(KEYS, pa.schema([("devices.count.count", pa.int64())]))
    taken = pytest.raises(InvalidRequestError, match=r"'risk' is declared for query name .* Drop it first")
    with cluster.other_query({"devices": devices}, key_groups=G), taken:
        cluster.declare(FeatureView("risk", "user", [Feature("devices", "devices")]))


def test_a_view_whose_operator_is_gone_says_so(cluster: FeatureCluster) -> None:
    cluster.declare(replace(VIEW, name="broken", features=[Feature("x", "no_such"), Feature("n", "totals")]))
    views = {view["view"]: view for view in cluster.client().feature_views()}
    assert views["risk"]["problem"] == ""
    assert "operator 'no_such'" in views["broken"]["problem"]


def test_features_of_a_checkpoint_need_no_cluster(cluster: FeatureCluster) -> None:
    cluster.declare(replace(VIEW, max_age="1 hour"))
    (cluster.root / "ck/metadata").write_text('{"id": "q"}')
    client = CheckpointClient.open(str(cluster.root / "ck"))
    rows = client.features("risk", [1, 1000])
    assert rows.to_dict()["user_name"] == ["user 1", "unknown"]
    assert client.features("risk", [3]).to_dict()["score"] == [0.75]
    assert 0 <= rows.ages["n"] < PATIENCE
    assert client.features("risk", [1], versions={"as a host named it": 1}).to_dict()["n"] == [1]
    assert [view["owner"] for view in client.feature_views()] == ["fraud"]
    why = r"has no feature view 'risks'; feature views that exist: 'risk'\. Did you mean 'risk'\?"
    with pytest.raises(UnknownFeatureViewError, match=why):
        client.features("risks", [1])


@pytest.mark.parametrize("keys", [[1, 2], {"user": [1, 2]}])
def test_an_error_names_the_number_of_keys(cluster: FeatureCluster, monkeypatch: pytest.MonkeyPatch, keys: Any) -> None:
    client = cluster.client()

    def gone(*_: Any) -> Any:
        raise HostUnavailableError("gone")

    monkeypatch.setattr(client, "_ask_features", gone)
    with pytest.raises(QueryTimeoutError, match=r"features\('risk'\) of 2 keys"):
        client.features("risk", keys, timeout=0.1)


def test_an_error_about_an_unknown_name_lists_ten_names() -> None:
    assert listed_names("x", []) == "none."
    assert listed_names("sum", ["sums", "totals", "sums"]) == "'sums', 'totals'. Did you mean 'sums'?"
    names = [f"view_{i:02}" for i in range(12)]
    assert listed_names("other", names) == ", ".join(map(repr, names[:10])) + " and 2 more."


# -- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"features": [Feature("x", "totals")]}, "operator 'totals' has no column 'x'; it has 'n', 'name'"),
        ({"entity": "card"}, r"the key of operator 'totals' is \(user: int64\)"),
        ({"features": [Feature("n", "totals", default="none")]}, "default='none', and its column is int64"),
        ({"features": [Feature("n", "totals", default=1.5)]}, "default=1.5, and its column is int64"),
        ({"features": [Feature("n", "totals", state="no")]}, "state='no' names none; there are 'default'"),
    ],
)
def test_views_that_operators_cannot_give_are_refused(
    filled: FeatureCluster, changes: dict[str, Any], why: str
) -> None:
    view = replace(VIEW, **changes)
    located = LocatedView(view, tuple(filled.c.locate(*source) for source in view.sources))
    with pytest.raises(RequestError, match=why):
        ResolvedView.of(located)


def test_operators_with_other_keys_are_refused(tmp_path: Path) -> None:
    text = StateSchema(pa.schema([("user", pa.string())]), pa.schema([("n.count.count", pa.int64())]))
    windows = pa.struct([("start", pa.timestamp("us", "UTC")), ("end", pa.timestamp("us", "UTC"))])
    by_window = StateSchema(pa.schema([("window", windows), ("user", pa.int64())]), text.value)
    cluster = FeatureCluster(tmp_path)
    with cluster.other_query({"by_name": text, "by_window": by_window}, key_groups=G):
        pass
    for operator, why in (("by_name", "same names, types and order"), ("by_window", "several rows per key")):
        view = replace(VIEW, features=[Feature("n", "totals"), Feature("m", operator, "n")])
        located = LocatedView(view, tuple(cluster.c.locate(*source) for source in view.sources))
        with pytest.raises(RequestError, match=why):
            ResolvedView.of(located)
    cluster.close()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"features": []}, "needs features"),
        ({"name": ""}, "needs a name"),
        ({"name": "card fraud"}, "'card fraud' cannot be the name of a feature view: use 1 to 200 letters"),
        ({"features": [Feature("n", "totals"), Feature("n", "profile")]}, "two features of one name: 'n'"),
        ({"features": [Feature("user", "totals", "n")]}, "features named like its entity: 'user'"),
        ({"on_stale": "ignore"}, r"cannot be stored: Invalid enum value 'ignore' - at `\$.on_stale`"),
        ({"max_age": "5 months"}, "max_age='5 months' .* write numbers with milliseconds, seconds"),
        ({"features": [Feature("n", "totals", column=5)]}, "cannot be stored: Expected `str"),  # type: ignore[arg-type]
        ({"features": [Feature("n", "totals", default=[1])]}, "'n' is a list or a map and cannot have a default: omit"),
        ({"features": [Feature("n", "totals", default=math.nan)]}, "'n' has default=nan, which cannot be stored"),
        ({"features": [Feature("n", "totals", default=-math.inf)]}, "default=-inf, which cannot be stored.*a finite"),
        ({"features": [Feature("n", "totals", default=Decimal("1.5"))]}, r"default=Decimal\('1.5'\), which cannot"),  # type: ignore[arg-type]
        ({"max_age": "0 days"}, "is not a duration above 0"),
        ({"features": ["n"]}, r"cannot be stored: Expected `object`, got `str` - at `\$.features\[0\]`"),
    ],
)
def test_declarations_without_sense_are_refused(changes: dict[str, Any], why: str) -> None:
    check_declaration(VIEW)
    with pytest.raises((RequestError, InvalidRequestError), match=why):
        check_declaration(replace(VIEW, **changes))


def test_durations_are_in_seconds() -> None:
    texts = {"90 seconds": 90, "1 minute": 60, "1.5 hours": 5400, "2 days": 172_800, "1 hour 30 minutes": 5400}
    texts |= {"5m": 300, "1h30m": 5400, "1 week": 604_800, "500 milliseconds": 0.5}
    assert {text: replace(VIEW, max_age=text).max_age_seconds for text in texts} == texts
