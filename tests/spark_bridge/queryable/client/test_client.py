"""The client against real hosts, proxies and a coordinator in this process."""

from __future__ import annotations

import datetime as dt
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from spark_bridge.exceptions import (
    AccessDeniedError,
    HostUnavailableError,
    QueryableStateError,
    QueryEndedError,
    QueryTimeoutError,
    RequestError,
    RequestLimitError,
    StateVersionError,
    TooManyRequestsError,
    UnknownKeyOrNamespaceError,
    UnknownKvStateIdError,
    UnknownOperatorError,
)
from spark_bridge.queryable.client.client import QueryableStateClient
from spark_bridge.queryable.client.discovery import CoordinatorDiscovery, addresses_of
from spark_bridge.queryable.connections import KvConnections
from spark_bridge.queryable.reads import operator_plan
from spark_bridge.queryable.routing.router import StateRouter
from spark_bridge.queryable.server.limits import RequestLimits
from tests.coordinator_actor.coordinator_world import World
from tests.effort import only_thorough
from tests.patience import HANG, PATIENCE
from tests.spark_bridge.queryable.client.client_rows import UntilGone
from tests.spark_bridge.queryable.client_world import TOKEN, Cluster, served
from tests.spark_bridge.queryable.memory_reads import eventually
from tests.spark_bridge.state_flows import Flow

NAMES = {i: (i, f"user {i}") for i in range(200)}


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Users 0 to 199 at version 1; at version 2, user 7 is gone, and 8 and None are (80, None). Only read."""
    made = Cluster(tmp_path_factory.mktemp("filled"))
    made.batch(NAMES)
    made.batch({7: None, 8: (80, "eight"), None: (1, "nobody")})
    yield made
    made.close()


@pytest.fixture(scope="module", params=["direct", "forwarded"])
def client(filled: Cluster, request: pytest.FixtureRequest) -> QueryableStateClient:
    made: QueryableStateClient = filled.client(direct=request.param == "direct")
    return made


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Cluster]]:
    """Makes queries whose hosts soon ask the coordinator where these are."""
    monkeypatch.setattr(operator_plan, "DIRECTORY_SECONDS", 0.05)
    made: list[Cluster] = []

    def make(**arguments: Any) -> Cluster:
        made.append(Cluster(tmp_path, **arguments))
        return made[-1]

    yield make
    for one in made:
        one.close()


# -- values ----------------------------------------------------------------------------------


def test_get_returns_a_dict_or_none(client: QueryableStateClient) -> None:
    for _ in range(2):  # the second time the short way
        assert client.get("totals", 5) == {"n": 5, "name": "user 5"}
        assert client.get("totals", (5,)) == client.get("totals", {"user": 5}) == {"n": 5, "name": "user 5"}
        assert client.get("totals", np.int8(5)) == client.get("totals", 5.0) == {"n": 5, "name": "user 5"}
        assert client.get("totals", None) == {"n": 1, "name": "nobody"}
        assert client.get("totals", 7) is None
        assert client.get("totals", 5, query="name", state="default") == {"n": 5, "name": "user 5"}


def test_versions_and_isolations(client: QueryableStateClient) -> None:
    assert client.get("totals", 8) == client.get("totals", 8, isolation="latest") == {"n": 80, "name": "eight"}
    assert client.get("totals", 8, version=1) == {"n": 8, "name": "user 8"}
    assert client.get("totals", 7, version=1) == {"n": 7, "name": "user 7"}
    assert client.get_many("totals", [7, 8], version=1).column("n").to_pylist() == [7, 8]
    assert client.count("totals", version=1) == 200
    assert client.scan("totals", version=1, where=[("n", "=", 8)]).to_pylist() == [
        {"user": 8, "n": 8, "name": "user 8"}
    ]
    with pytest.raises(StateVersionError, match="9"):
        client.get("totals", 8, version=9)
    for wrong in ({"version": -1}, {"version": "1"}, {"isolation": "dirty"}, {"version": 1, "isolation": "latest"}):
        with pytest.raises(RequestError):
            client.get("totals", 8, **wrong)  # type: ignore[arg-type]


def test_get_many_has_a_row_per_key_asked_in_that_order(client: QueryableStateClient) -> None:
    table = client.get_many("totals", [9, 7, None, 9, 1000])
    assert table.schema.names == ["user", "n", "name"]
    assert table.to_pydict() == {
        "user": [9, 7, None, 9, 1000],
        "n": [9, None, 1, 9, None],
        "name": ["user 9", None, "nobody", "user 9", None],
    }
    assert client.get_many("totals", iter([9])).to_pylist() == [{"user": 9, "n": 9, "name": "user 9"}]
    empty = client.get_many("totals", [])
    assert (empty.num_rows, empty.schema) == (0, table.schema)
    assert client.get_many("totals", {"user": [9]}, as_="pylist") == [{"user": 9, "n": 9, "name": "user 9"}]
    assert client.get_many("totals", pd.Series([9]), as_="pandas").equals(table.slice(0, 1).to_pandas())
    assert client.get_many("totals", pl.Series([9]), as_="polars").equals(pl.from_arrow(table.slice(0, 1)))
    shuffled = np.random.default_rng(1).permutation(200)
    assert client.get_many("totals", shuffled).column("user").to_pylist() == shuffled.tolist()


def test_more_keys_than_a_host_allows_are_asked_in_several_requests(cluster: Callable[..., Cluster]) -> None:
    small = cluster(limits=RequestLimits(max_keys=16))
    small.batch(NAMES)
    for direct in (True, False):
        client = small.client(direct=direct)
        assert client.get_many("totals", list(NAMES)).column("n").to_pylist() == list(NAMES)
        assert sorted(client.key_rows("totals", list(NAMES), columns=["n"]).to_arrow()["n"].to_pylist()) == list(NAMES)


def test_lists_and_maps_of_more_keys_than_a_host_allows(tmp_path: Path) -> None:
    def fill(n: int) -> Callable[[Any], None]:
        def of(state: Any) -> None:
            state.visits.appendList([("/", n), ("/b", n)])
            state.pages.updateValue(("/a", "x"), (n, None))

        return of

    flow = Flow(tmp_path)
    flow.batch({("k", n): fill(n) for n in range(30)})
    keys: list[Any] = [("k", n) for n in [*range(30), 99, 3]]
    with served(flow, RequestLimits(max_keys=4)) as client:
        visits = client.get_many("op", keys, state="visits", as_="pylist")
        expected = [{"page": "/", "at": 3}, {"page": "/b", "at": 3}]
        assert [row["list_value"] for row in visits][3] == visits[-1]["list_value"] == expected
        assert [row["list_value"] and row["list_value"][1]["at"] for row in visits] == [*range(30), None, 3]
        pages = client.get_many("op", keys, state="pages", as_="pylist")
        assert [row["map_value"] and row["map_value"][0][1]["n"] for row in pages] == [*range(30), None, 3]
        assert client.key_rows("op", keys, state="visits").to_arrow().num_rows == 60
    flow.close()


def test_answers_before_a_limit_are_not_requested_again(filled: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """And columns are in chunks, as all of one may be more than an Arrow array can have."""
    monkeypatch.setattr("spark_bridge.queryable.client.lookups.KEYS_PER_REQUEST", 80)
    client = filled.client(direct=True)
    asked: list[int] = []
    lookup = client._router.lookup

    def limited(location: Any, family: str, keys: pa.BinaryArray, *args: Any) -> Any:
        if asked and len(keys) > 30:
            raise RequestLimitError("too many")
        asked.append(len(keys))
        return lookup(location, family, keys, *args)

    monkeypatch.setattr(client._router, "lookup", limited)
    users = [k for k in NAMES if k not in (7, 8)]
    table = client.get_many("totals", users)
    assert table.column("user").to_pylist() == table.column("n").to_pylist() == users
    assert (asked[0], sum(asked), max(asked[1:])) == (80, len(users), 20)
    assert table.column("n").num_chunks == len(asked)


# -- scans -----------------------------------------------------------------------------------


def test_scans_have_all_rows_and_can_be_bounded(client: QueryableStateClient) -> None:
    with client.scan("totals") as rows:
        assert rows.version == 2
        assert rows.schema.names == ["user", "n", "name"]
        table = pa.Table.from_batches(list(rows))
    assert sorted(table.column("user").to_pylist(), key=repr) == sorted([None, *(NAMES.keys() - {7})], key=repr)

    def users(**asked: Any) -> list[int]:
        return sorted(client.scan("totals", columns=["user"], **asked).to_arrow().column("user").to_pylist())

    assert users(start=6, end=10) == users(start=(6,), end=(10,)) == [6, 8, 9]
    assert users(prefix=6) == users(prefix=(6,)) == [6]
    assert users(where=[("n", ">=", 197), ("name", "!=", "user 198")]) == [197, 199]
    assert users(where=[("name", "in", ["user 3", "eight", "x"])]) == [3, 8]
    assert len(users(limit=5)) == 5
    assert users(limit=0) == []
    assert client.count("totals") == 200
    assert client.count("totals", start=6, end=10) == client.count("totals", where=[("user", "in", [6, 8, 9])]) == 3
    everything = client.scan("totals", columns=["partition_id", "key_group", "user"], limit=1)
    assert everything.to_arrow().schema.names == ["partition_id", "key_group", "user"]


def test_a_scan_in_every_form(client: QueryableStateClient) -> None:
    one = [{"user": 3, "n": 3, "name": "user 3"}]

    def scan() -> Any:
        return client.scan("totals", prefix=3)

    assert scan().to_pylist() == one
    assert scan().to_arrow().to_pylist() == one
    assert scan().to_reader().read_all().to_pylist() == one
    assert scan().to_pandas().to_dict("records") == one
    assert scan().to_polars().to_dicts() == one
    closed = scan()
    closed.close()
    assert list(closed) == []


def test_the_rows_of_some_keys(client: QueryableStateClient) -> None:
    rows = client.key_rows("totals", [8, 7, 8], columns=["n", "user"])
    assert rows.version == 2
    assert rows.to_pylist() == [{"n": 80, "user": 8}]
    assert client.key_rows("totals", [8]).schema.names == ["user", "n", "name"]


# -- what there is, and what there is not ------------------------------------------------------


def test_operators_and_description(
    client: QueryableStateClient, filled: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spark_bridge.queryable.server.proxy.DESCRIBE_SECONDS", PATIENCE)
    client.get("totals", 1)
    (operator,) = client.operators()
    assert (operator["operator"], operator["query_name"], operator["completed_version"]) == ("totals", "name", 2)
    described = client.describe("totals")
    assert described["key"] == [{"name": "user", "type": "int64"}]
    assert [c["name"] for c in described["states"][0]["columns"]] == ["user", "n", "name"]
    assert {p["address"] for p in described["partitions"]} == {h.address for h in filled.hosts}
    assert len(described["hosts"]) == 2
    assert described["requests"]["lookup"]["requests"] >= 1


def test_errors_name_the_request_and_the_candidates(client: QueryableStateClient) -> None:
    with pytest.raises(UnknownOperatorError, match=r"'nothing'.*'totals'"):
        client.get("nothing", 1)
    with pytest.raises(UnknownOperatorError, match="'other'"):
        client.get("totals", 1, query="other")
    with pytest.raises(UnknownKvStateIdError, match=r"'state'.*'default' \(rows\)"):
        client.get("totals", 1, state="state")
    for _ in range(2):
        with pytest.raises(UnknownKeyOrNamespaceError, match=r"1\.5.*user: int64"):
            client.get("totals", 1.5)
        client.get("totals", 1)
    with pytest.raises(UnknownKeyOrNamespaceError, match="'x'"):
        client.get_many("totals", [1, "x"])
    with pytest.raises(RequestError, match="'spark'"):
        client.get_many("totals", [1], as_="spark")
    with pytest.raises(RequestError, match="'nothing'"):
        client.scan("totals", columns=["nothing"])
    with pytest.raises(RequestError, match="no windows"):
        client.get("totals", 1, window=dt.datetime(2024, 1, 1))
    with pytest.raises(RequestError, match="limit"):
        client.scan("totals", limit=-1)


def test_no_token_no_answer(filled: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    address = filled.hosts[0].address
    with pytest.raises(QueryableStateError, match="token"):
        QueryableStateClient.connect(address=address)
    with QueryableStateClient.connect(address=address, token="wrong", timeout=PATIENCE) as stranger:
        with pytest.raises(AccessDeniedError):
            stranger.get("totals", 1)
        with pytest.raises(AccessDeniedError):
            stranger.operators()
    monkeypatch.setenv("STATESTORE_ADDRESS", f"statestore://{address}")
    monkeypatch.setenv("STATESTORE_TOKEN", TOKEN)
    with QueryableStateClient.connect(timeout=PATIENCE) as known:
        assert known.get("totals", 1) == {"n": 1, "name": "user 1"}


def test_addresses() -> None:
    assert addresses_of("statestore://10.0.0.1:70, 10.0.0.2:71") == ["10.0.0.1:70", "10.0.0.2:71"]
    assert addresses_of(["[::1]:70/"]) == ["[::1]:70"]
    for wrong in ("grpc://10.0.0.1:70:80", "10.0.0.1", "10.0.0.1:x", "", []):
        with pytest.raises(RequestError, match="address"):
            addresses_of(wrong)


def test_silence_is_a_timeout_that_names_the_last_failure() -> None:
    with QueryableStateClient.connect(address="127.0.0.1:1", token=TOKEN, timeout=0.3) as client:
        failure = r"HostUnavailableError.*127\.0\.0\.1:1"
        with pytest.raises(QueryTimeoutError, match=rf"get\('totals', 1\).*within 0\.3 s.*{failure}"):
            client.get("totals", 1)
        with pytest.raises(QueryTimeoutError, match=rf"operators.*{failure}"):
            client.operators(timeout=0.1)


@pytest.mark.parametrize("error", [HostUnavailableError("it hangs"), TooManyRequestsError("busy")])
def test_a_lookup_that_fails_has_one_deadline(
    filled: Cluster, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    client = filled.client(direct=True, timeout=HANG)
    assert client.get("totals", 5) == {"n": 5, "name": "user 5"}
    asked: list[float] = []

    def lookup_one(location: Any, family: str, key: bytes, at: Any, deadline: float) -> Any:
        asked.append(time.monotonic())
        if isinstance(error, HostUnavailableError):
            time.sleep(max(0.0, deadline - time.monotonic()))
        raise error

    def attempts() -> int:
        asked.clear()
        begun = time.monotonic()
        with pytest.raises(QueryTimeoutError, match=rf"within 0\.4 s.*{error}"):
            client.get("totals", 5, timeout=0.4)
        assert time.monotonic() - begun < PATIENCE
        return len(asked)

    monkeypatch.setattr(client._router, "lookup_one", lookup_one)
    if isinstance(error, HostUnavailableError):
        assert attempts() == 1
    else:
        # Again if the machine stood still: all the time was over with the first attempt then.
        eventually(lambda: attempts() > 1)
        assert asked[1] - asked[0] >= 0.01, "who is busy is left alone for a moment"


# -- when hosts, coordinator and queries come and go -------------------------------------------


@pytest.mark.parametrize("direct", [True, only_thorough(False)])
def test_a_killed_host_makes_answers_slower_and_not_wrong(cluster: Callable[..., Cluster], direct: bool) -> None:
    c = cluster()
    c.batch(NAMES)
    client = c.client(direct=direct)
    expected = [client.get("totals", k) for k in range(20)]
    c.hosts[1].kill()
    threading.Timer(0.3, c.replace_host, [1]).start()
    assert [client.get("totals", k) for k in range(20)] == expected
    assert client.get_many("totals", list(NAMES)).column("n").to_pylist() == list(NAMES)
    assert client.count("totals") == 200


@pytest.mark.parametrize("given", [(0, 1), (0,)])
def test_client_fails_over_to_another_proxy(cluster: Callable[..., Cluster], given: tuple[int, ...]) -> None:
    """With another given proxy, or with one that the first one has named; a restarted host has another address."""
    c = cluster()
    c.batch(NAMES)
    client = c.client(hosts=given)
    assert client.get("totals", 3) == {"n": 3, "name": "user 3"}
    c.hosts[0].kill()
    c.replace_host(0)
    assert [client.get("totals", k)["n"] for k in range(20)] == list(range(20))
    assert client.operators()[0]["operator"] == "totals"
    assert client.scan("totals").to_arrow().num_rows == 200


def test_a_replaced_coordinator_is_not_noticed(cluster: Callable[..., Cluster]) -> None:
    c = cluster()
    c.batch(NAMES)
    client = c.client(direct=True)
    assert client.get("totals", 3) is not None
    c.replace_coordinator()
    assert client.get("totals", 4) == {"n": 4, "name": "user 4"}
    with c.client() as another:
        assert another.get("totals", 4) == {"n": 4, "name": "user 4"}


def test_a_restarted_query_is_found_again_with_other_partitions(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("discovery", "client"):  # it is not by chance that the location is looked up again
        monkeypatch.setattr(f"spark_bridge.queryable.client.{module}.REFRESH_SECONDS", 1000.0)
    c = cluster()
    c.batch(NAMES)
    client = c.client(direct=True)
    assert client.get("totals", 3) == {"n": 3, "name": "user 3"}
    c.partitions = 7
    c.start("run2")
    c.batch({3: (33, "again")})
    assert client.get("totals", 3) == {"n": 33, "name": "again"}
    assert client.get("totals", 4) == {"n": 4, "name": "user 4"}
    assert client.count("totals") == 200


def test_ended_query_is_an_error_that_names_the_end(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    c = cluster()
    c.batch(NAMES)
    client = c.client()
    assert client.get("totals", 3) == {"n": 3, "name": "user 3"}
    c.c.deactivate_instances("run1")
    for h in c.hosts:
        h.host.heartbeat()
    # One that has had answers waits for the query to be started again.
    with monkeypatch.context() as patched, pytest.raises(QueryEndedError, match="'totals', ended"):
        patched.setattr("spark_bridge.queryable.client.discovery.Attempts", UntilGone)
        client.get("totals", 3)
    with c.client() as another, pytest.raises(QueryEndedError, match="ended"):
        another.get("totals", 3)
    threading.Timer(0.3, c.start, ["run2"]).start()
    assert client.get("totals", 3) == {"n": 3, "name": "user 3"}


def test_no_answer_is_older_than_one_before(cluster: Callable[..., Cluster]) -> None:
    """A host that does not know a version yet asks the coordinator for it if the client has seen it."""
    c = cluster()
    c.batch(NAMES)
    client = c.client(direct=True)
    keys = list(range(30))
    for n in range(2, 6):
        c.batch({k: (k + n, "x") for k in keys}, complete=False)
        c.c.batch_committed(c.run, c.version - 1)
        c.hosts[n % 2].host.heartbeat()  # the other host learns of it later
        seen = -1
        for k in [*keys, *keys]:
            version = client.get("totals", k)["n"] - k
            assert version >= seen
            seen = version
        assert len({row["n"] - row["user"] for row in client.get_many("totals", keys, as_="pylist")}) == 1
        for h in c.hosts:
            h.host.heartbeat()
        assert client.get("totals", 0)["n"] == n


def test_locations_are_refreshed_in_the_background(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    c = cluster()
    c.batch(NAMES)
    client = c.client(direct=True)
    client.get("totals", 3)
    first = client._access.known(("totals", None), time.monotonic() + PATIENCE)
    monkeypatch.setattr("spark_bridge.queryable.client.discovery.REFRESH_SECONDS", 0.01)
    monkeypatch.setattr("spark_bridge.queryable.client.client.REFRESH_SECONDS", 0.01)
    deadline = time.monotonic() + PATIENCE
    while client._access.known(("totals", None), time.monotonic() + PATIENCE).location is first.location:
        assert client.get("totals", 3) == {"n": 3, "name": "user 3"}
        assert time.monotonic() < deadline
        time.sleep(0.01)


# -- in the cluster --------------------------------------------------------------------------


def test_a_client_that_asks_the_coordinator_finds_all_hosts(filled: Cluster) -> None:
    connections = KvConnections(TOKEN)
    entry = CoordinatorDiscovery(filled.c)
    with QueryableStateClient(entry, connections, StateRouter(connections), PATIENCE) as client:
        assert client.operators()[0]["operator"] == "totals"
        assert client.get("totals", 5) == {"n": 5, "name": "user 5"}
        assert len(client.describe("totals")["hosts"]) == 2
        with pytest.raises(UnknownOperatorError, match="'totals'"):
            client.get("nothing", 5)


def test_short_timeout_bounds_the_wait_for_the_coordinator(filled: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spark_bridge.queryable.client.discovery.DISCOVERY_SECONDS", 2 * PATIENCE)
    given: list[float] = []

    def within(seconds: float) -> Any:
        given.append(seconds)
        return filled.c

    entry = CoordinatorDiscovery(filled.c, within)
    assert entry.proxy()
    entry.locate("totals", None, time.monotonic() + 3 * PATIENCE)
    assert given == []
    entry.locate("totals", None, time.monotonic() + PATIENCE)
    assert 0 < given[0] <= PATIENCE
    with pytest.raises(HostUnavailableError, match="timeout ended"):
        entry.locate("totals", None, time.monotonic() - 1)


def test_a_client_tells_the_coordinator_which_host_takes_no_connection(filled: Cluster) -> None:
    told: list[str] = []
    filled.c.suspect_host = told.append  # type: ignore[method-assign]
    entry = CoordinatorDiscovery(filled.c)
    unreachable = ["10.0.0.1:9"]
    entry.take_unreachable = lambda: unreachable.pop() if unreachable else ""
    for _ in range(2):
        entry.locate("totals", None, time.monotonic() + PATIENCE)
    assert told == ["10.0.0.1:9"]


def test_no_operators_without_queries(tmp_path: Path) -> None:
    connections = KvConnections(TOKEN)
    entry = CoordinatorDiscovery(World(tmp_path).coordinator())
    with QueryableStateClient(entry, connections, StateRouter(connections), PATIENCE) as client:
        assert client.operators() == []


# -- threads and processes ---------------------------------------------------------------------


def test_many_threads_share_a_client(filled: Cluster) -> None:
    client = filled.client(direct=True)
    failures: list[BaseException] = []

    def ask(begin: int) -> None:
        try:
            for k in range(begin, begin + 50):
                expected = None if k == 7 else {"n": 80, "name": "eight"} if k == 8 else {"n": k, "name": f"user {k}"}
                assert client.get("totals", k) == expected
        except BaseException as error:  # noqa: BLE001 - the test raises it
            failures.append(error)

    threads = [threading.Thread(target=ask, args=(begin,)) for begin in (0, 50, 100, 150)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_forked_process_keeps_using_its_client(filled: Cluster) -> None:
    """Parent and child use one client object, each with its own connections."""
    code = f"""
import os
from spark_bridge import QueryableStateClient
where = dict(address={filled.hosts[0].address!r}, token={TOKEN!r}, timeout={PATIENCE}, direct=True)
client = QueryableStateClient.connect(**where)
assert client.get("totals", 5)["n"] == 5
child = os.fork()
for k in range(100, 150):
    assert client.get("totals", k)["n"] == k
if child:
    assert os.waitpid(child, 0)[1] == 0
else:
    os._exit(0)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=HANG, env=in_this_tree())


BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        # All that is not msgspec, numpy, pyarrow or xxhash.
        storage, tools = ("rocksdict", "obstore"), ("pandas", "psutil", "rich", "typer", "polars")
        if name.split(".")[0] in ("ray", "pyspark", "py4j", "raydp", *storage, *tools) or name == "pyarrow.flight":
            raise ImportError(f"{name} is not installed here")

sys.meta_path.insert(0, Blocked())
"""


def test_a_process_with_neither_ray_nor_spark_nor_rocksdb(filled: Cluster) -> None:
    code = f"""{BLOCKED}
import asyncio
from spark_bridge import AsyncQueryableStateClient, QueryableStateClient
from spark_bridge.exceptions import EnvironmentProblemError

where = dict(address={filled.hosts[0].address!r}, token={TOKEN!r}, timeout={PATIENCE})
for direct in (True, False):
    with QueryableStateClient.connect(**where, direct=direct) as client:
        assert client.get("totals", 5) == {{"n": 5, "name": "user 5"}}
        assert client.get_many("totals", [5, 7]).column("n").to_pylist() == [5, None]
        assert client.scan("totals", prefix=5).to_pylist() == [{{"user": 5, "n": 5, "name": "user 5"}}]
        assert client.count("totals") == 200
        assert client.describe("totals")["operator"] == client.operators()[0]["operator"] == "totals"
        with client.watch("totals", keys=[8], from_version=1, every_version=True) as changes:
            assert next(changes).version == 2
from spark_bridge import KafkaSink

async def main():
    async with await AsyncQueryableStateClient.connect(**where) as client:
        assert (await client.get("totals", 5))["n"] == 5

asyncio.run(main())
try:
    QueryableStateClient.connect()
except EnvironmentProblemError as error:
    assert "STATESTORE_ADDRESS" in str(error)
else:
    raise AssertionError("connected without Ray")
assert not [m for m in ("ray", "pyspark", "rocksdict", "obstore") if m in sys.modules]
of_hosts = ("host", "host_actor", "task", "session", "operators", "stateful", "queryable.server", "queryable.reads")
assert not [m for m in sys.modules if m.startswith(tuple(f"spark_bridge.{{one}}" for one in of_hosts))]
of_storage = ("backends.partition", "backends.engines", "backends.storage.checkpoint")
assert not [m for m in sys.modules if m.startswith(of_storage)]
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=HANG, env=in_this_tree())


def in_this_tree() -> dict[str, str]:
    root = Path(__file__).parents[4]
    return {**os.environ, "PYTHONPATH": str(root)}
