"""Each kind of token tries on every interface for more than its scope allows: client port, client, SQL, HTTP, page."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import httpx
import msgspec
import pyarrow as pa
import pytest
from fastapi.testclient import TestClient
from starlette.testclient import TestClient as PageClient

from backends.encoding.key_groups import key_groups
from backends.encoding.keys import encode_keys
from backends.encoding.operator_schema import OperatorSchema
from backends.formats.changelog import Changes
from coordinator_actor.access_tokens import ALL, AccessTokens, MemoryTokenStore, Scope
from coordinator_actor.exceptions import RetiredRunError
from coordinator_actor.feature_views import Feature, FeatureView
from coordinator_actor.messages import OperatorSpec
from spark_bridge.exceptions import OutOfScopeError, QueryableStateError, RequestError, UnknownOperatorError
from spark_bridge.queryable import protocol
from spark_bridge.queryable.client.async_client import AsyncQueryableStateClient
from spark_bridge.queryable.client.client import QueryableStateClient, scoped_client
from spark_bridge.queryable.reads.host_reads import HostReads
from spark_bridge.queryable.routing.scopes import ScopedReads
from spark_bridge.queryable.server.tokens import ClusterTokens
from spark_bridge.state_http.access import HttpLimits
from spark_bridge.state_http.app import add_overview, create_app
from spark_bridge.state_http.service import StateService
from spark_bridge.task.executor import Endpoints
from spark_bridge.transport.protocol import HostFile, TaskIdentity
from spark_bridge.ui.app import POSTED, SEEN, create_ui
from spark_bridge.ui.requests import form_token
from tests.patience import PATIENCE
from tests.spark_bridge.queryable.client_world import TOKEN, TOTALS, Cluster
from tests.spark_bridge.queryable.memory_reads import RawClient
from tests.spark_bridge.ui.browser import serving
from tests.spark_bridge.ui.systems import Served, served

# Two queries. "payments" has the operators "totals" and "cards"; "ledger" has "totals" and "vault".
READABLE = [("payments", "totals"), ("payments", "cards"), ("ledger", "totals"), ("ledger", "vault")]
SCOPES = {
    "all": ALL,
    "query": Scope(queries=("payments",)),
    "query id": Scope(queries=("q",)),
    "operator": Scope(operators=("totals",)),
    "operator of query": Scope(queries=("payments",), operators=("totals",)),
    "nothing there": Scope(queries=("payments",), operators=("vault",)),
    "view": Scope(views=("card_fraud",)),
    "view and operator": Scope(views=("card_fraud",), operators=("cards",)),
}
ALLOWED = {
    "all": READABLE,
    "query": READABLE[:2],
    "query id": READABLE[:2],
    "operator": [READABLE[0], READABLE[2]],
    "operator of query": READABLE[:1],
    "nothing there": [],
    "view": [],
    "view and operator": [READABLE[1]],
}
VIEWS = {"card_fraud": ("payments", "cards"), "secrets": ("ledger", "vault"), "broken": ("ledger", "gone")}
"""The views, and the query and the operator of each; "broken" cannot be read."""
KINDS = pytest.mark.parametrize("kind", SCOPES)
RUNS = {"payments": "run1", "ledger": "run-ledger"}
KEY = 7


class TwoQueries(Cluster):
    """The query "payments" with data, and the query "ledger" without."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, name="payments")
        schema = OperatorSchema.of_rows(TOTALS)
        self.batch({user: (user, "x") for user in range(20)})
        self.batch({user: (user + 1, "y") for user in range(10)})
        place = str(root / "ledger")
        ledger = self.world.registration(
            RUNS["ledger"],
            query_id="q-ledger",
            name="ledger",
            checkpoint_location=place,
            state_location=f"{place}/statestore",
            operators=tuple(OperatorSpec(name, 4, schema.to_json(), backend="file") for name in ("totals", "vault")),
            key_groups=64,
        )
        assert self.c.register_query(ledger).refusal is None
        for host in self.hosts:
            host.host.heartbeat()
        self.tokens = AccessTokens(TOKEN, MemoryTokenStore(), lambda: 1e9)
        for view, (query, operator) in VIEWS.items():
            self.c.declare_view(RUNS[query], FeatureView(view, "user", [Feature("n", operator)]))

    def start(self, run: str, operators: Any = None) -> None:
        super().start(run, operators or dict.fromkeys(("totals", "cards"), OperatorSchema.of_rows(TOTALS)))

    def _run_task(self, p: int, batch: int, changes: Changes) -> None:
        for operator in ("totals", "cards"):
            task = TaskIdentity(self.run, operator, p, batch, f"{operator}{batch}", f"{operator}{p}{batch}")
            owner = next(h for h in self.hosts if h.host.open(task).redirect is None)
            owner.host.commit(task, changes, {})

    def token(self, kind: str, *, admin: bool = False) -> str:
        name = f"{kind} {len(self.tokens.list_tokens())}"
        return self.tokens.issue_token(name, admin=admin, scope=SCOPES[kind])


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    made = served(tmp_path_factory.mktemp("scopes"), TwoQueries)
    yield made
    made.cluster.close()


@pytest.fixture(scope="module")
def cluster(world: Served) -> TwoQueries:
    assert isinstance(world.cluster, TwoQueries)
    return world.cluster


def assert_names_nothing_else(text: str, kind: str, *asked: str) -> None:
    """An answer to such a token names no operator and no query outside of the scope, but those that were asked for."""
    if kind == "all":
        return
    scope, seen = SCOPES[kind], {name for pair in ALLOWED[kind] for name in pair}
    for name in {"payments", "ledger", "totals", "cards", "vault"} - {*seen, *scope.queries, *scope.operators, *asked}:
        assert name not in text, f"{name!r} in {text}"


# -- the port of hosts: every kind of request ----------------------------------------------------


def body_of(*users: int) -> bytes:
    columns = pa.record_batch([pa.array(users, pa.int64())], names=["user"])
    return protocol.pack_bytes(encode_keys(columns, key_groups(columns, 64)))


Ask = Callable[[str, str, bool], tuple[Any, bytes]]
REQUESTS: dict[type[Any], Ask] = {
    protocol.LookupRequest: lambda run, o, f: (protocol.LookupRequest(run, o, forward=f), body_of(KEY)),
    protocol.KeyRowsRequest: lambda run, o, f: (protocol.KeyRowsRequest(run, o, forward=f), body_of(KEY)),
    protocol.ScanRequest: lambda run, o, f: (protocol.ScanRequest(run, o, forward=f), b""),
    protocol.CountRequest: lambda run, o, f: (protocol.CountRequest(protocol.ScanRequest(run, o, forward=f)), b""),
    protocol.ChangesRequest: lambda run, o, f: (protocol.ChangesRequest(run, o, 0, 0), b""),
    protocol.LocateOperatorRequest: lambda run, o, f: (protocol.LocateOperatorRequest(o, run), b""),
    protocol.DescribeRequest: lambda run, o, f: (protocol.DescribeRequest(o, run, f), b""),
    protocol.AwaitRequest: lambda run, o, f: (protocol.AwaitRequest(run, 0, 0.0), b""),
    protocol.OperatorsRequest: lambda run, o, f: (protocol.OperatorsRequest(), b""),
}
OF_VIEWS: dict[type[Any], Callable[[str], tuple[Any, bytes]]] = {
    protocol.ViewsRequest: lambda view: (protocol.ViewsRequest(view), b""),
    protocol.FeaturesRequest: lambda view: (protocol.FeaturesRequest(view, "another", []), body_of(KEY)),
}
OF_OPERATORS: list[Ask] = [
    *(ask for kind, ask in REQUESTS.items() if kind not in (protocol.AwaitRequest, protocol.OperatorsRequest)),
    lambda run, o, f: (protocol.LookupRequest(run, o, forward=f), body_of(KEY, 8)),
]
REFUSALS = {"OutOfScopeError", "RetiredRunError", "UnknownOperatorError", "WrongOperatorError"}


def last_reply(client: RawClient, asked: tuple[Any, bytes]) -> tuple[Any, bytes]:
    client.say(*asked)
    while True:
        reply, body = client.hear()
        if not isinstance(reply, protocol.RowsReply):
            return reply, body


def test_every_kind_of_request_is_tried() -> None:
    assert {*REQUESTS, *OF_VIEWS, protocol.Hello} == set(get_args(protocol.Request))


@KINDS
@pytest.mark.parametrize("forward", [False, True])
def test_a_host_answers_what_a_token_is_for(cluster: TwoQueries, kind: str, forward: bool) -> None:
    token, tried = cluster.token(kind), 0
    for host in cluster.hosts:
        with RawClient(host.address, token=token) as client:
            for ask in OF_OPERATORS:
                for query, operator in READABLE:
                    asked = ask(RUNS[query], operator, forward)
                    for _ in range(2):  # the second time it is known to the connection
                        reply, body = last_reply(client, asked)
                        is_refused = isinstance(reply, protocol.Failure) and reply.error in REFUSALS
                        assert is_refused == ((query, operator) not in ALLOWED[kind]), (asked, reply)
                        text = reply.message if isinstance(reply, protocol.Failure) else str(bytes(body))
                        assert_names_nothing_else(text, kind, operator, query, RUNS[query])
                        tried += 1
    assert tried == 2 * len(OF_OPERATORS) * len(READABLE) * 2


@KINDS
def test_a_host_lists_and_describes_what_a_token_is_for(cluster: TwoQueries, kind: str) -> None:
    with RawClient(cluster.hosts[0].address, token=cluster.token(kind)) as client:
        _, body = client.ask(protocol.OperatorsRequest())
        assert sorted((o["query_name"], o["operator"]) for o in json.loads(body)) == sorted(ALLOWED[kind])
        _, body = client.ask(protocol.DescribeRequest())
        described = json.loads(body)
        assert sorted((o["query_name"], o["operator"]) for o in described["operators"]) == sorted(ALLOWED[kind])
        assert kind == "all" or set(described["requests"]) <= {operator for _, operator in ALLOWED[kind]}
        assert_names_nothing_else(str(described), kind)
        for query, run in RUNS.items():
            reply, _ = client.ask(protocol.AwaitRequest(run, 0, 0.0))
            is_visible = query in {of for of, _ in ALLOWED[kind]}
            assert isinstance(reply, protocol.CountReply) == is_visible, reply


@KINDS
def test_locating_by_a_name_finds_what_a_token_is_for(cluster: TwoQueries, kind: str) -> None:
    with RawClient(cluster.hosts[0].address, token=cluster.token(kind)) as client:
        for operator in ("totals", "cards", "vault", "other"):
            reply, body = client.ask(protocol.LocateOperatorRequest(operator))
            visible = [query for query, name in ALLOWED[kind] if name == operator]
            if len(visible) == 1:
                assert json.loads(body)["query_name"] == visible[0]
                continue
            assert isinstance(reply, protocol.Failure) and reply.error in REFUSALS
            assert_names_nothing_else(reply.message, kind, operator)


def test_a_restarted_query_stays_in_the_scope(tmp_path: Path) -> None:
    cluster = TwoQueries(tmp_path)
    try:
        with cluster.client(token=cluster.token("operator of query"), timeout=PATIENCE) as client:
            assert client.get("totals", KEY) == {"n": 8, "name": "y"}
            cluster.start("run2")
            assert client.get("totals", KEY) == {"n": 8, "name": "y"}
            with pytest.raises(OutOfScopeError, match=r"queries: payments; operators: totals.*--operator"):
                client.get("cards", KEY)
    finally:
        cluster.close()


def test_a_run_of_another_query_is_not_told_apart_from_one_that_is_over(cluster: TwoQueries) -> None:
    with RawClient(cluster.hosts[0].address, token=cluster.token("operator of query")) as client:
        runs = ("gone", RUNS["ledger"])
        replies = [client.ask(*REQUESTS[protocol.LookupRequest](run, "totals", True))[0] for run in runs]
    gone, other = (
        msgspec.structs.replace(r, message=r.message.replace(run, "")) for run, r in zip(runs, replies, strict=True)
    )
    assert gone == other and gone.error == "RetiredRunError"


def test_a_token_of_another_namespace_is_refused(cluster: TwoQueries) -> None:
    here = AccessTokens(TOKEN, MemoryTokenStore(), lambda: 1e9, "fraud")
    token = here.issue_token("fraud", scope=Scope(namespaces=("fraud",)))
    assert ClusterTokens(TOKEN, lambda: (), namespace="fraud").verify(token).scope.is_all
    with pytest.raises(QueryableStateError, match="for hosts of fraud"):
        cluster.client(token=token).get("cards", KEY)


READS: dict[str, Callable[[ScopedReads, str, str], Any]] = {
    "locate": lambda r, run, o: r.locate(o, run),
    "lookup": lambda r, run, o: r.lookup(protocol.LookupRequest(run, o), pa.array([b"k"])),
    "lookup_one": lambda r, run, o: r.lookup_one(protocol.LookupRequest(run, o), b"k"),
    "key_rows": lambda r, run, o: r.key_rows(protocol.KeyRowsRequest(run, o), pa.array([b"k"])),
    "scan": lambda r, run, o: r.scan(protocol.ScanRequest(run, o)),
    "count": lambda r, run, o: r.count(protocol.ScanRequest(run, o)),
    "changes": lambda r, run, o: r.changes(protocol.ChangesRequest(run, o, 0, 0), None),
    "await_completed": lambda r, run, o: r.await_completed(run, 0, 0.0),
    "described": lambda r, run, o: r.described(lambda _: {}, protocol.DescribeRequest(o, run)),
}


@pytest.mark.parametrize("name", READS)
def test_each_read_checks_the_scope_by_itself(cluster: TwoQueries, name: str) -> None:
    """The handler also looks up the run beforehand, so that no request waits for that while it is worked on."""
    others = {"features", "lag_ms", "operators", "prepare", "views"}
    assert {*READS, *others} == {n for n in vars(ScopedReads) if not n.startswith("_")}
    reads: Any = HostReads(cluster.hosts[0].host)
    reads = ScopedReads(SCOPES["operator of query"], reads, nullcontext)
    with pytest.raises((OutOfScopeError, RetiredRunError, UnknownOperatorError)):
        READS[name](reads, RUNS["ledger"], "totals")


# -- the client and SQL --------------------------------------------------------------------------


def found(client: Any, operator: str, query: str) -> int:
    """The rows that ``find`` would read, if the operator had an index: it has none, which only its readers may know."""
    with pytest.raises(RequestError, match="none of its columns has one"):
        client.find(operator, n=1, query=query)
    return int(client.count(operator, query=query))


CALLS: dict[str, Callable[[Any, str, str], Any]] = {
    "get": lambda c, o, q: c.get(o, KEY, q),
    "get_each": lambda c, o, q: c.get_each(o, [KEY, 8], q),
    "get_many": lambda c, o, q: c.get_many(o, [KEY, 8], q),
    "key_rows": lambda c, o, q: c.key_rows(o, [KEY], query=q).to_arrow(),
    "scan": lambda c, o, q: c.scan(o, query=q).to_arrow(),
    "find": found,
    "count": lambda c, o, q: c.count(o, query=q),
    "diff": lambda c, o, q: c.diff(o, 1, 2, query=q).to_arrow() if q == "payments" else c.count(o, query=q),
    "watch": lambda c, o, q: next(c.watch(o, query=q, from_version=1)) if q == "payments" else c.count(o, query=q),
    "sql": lambda c, o, q: c.sql(f'select count(*) from "{q}"."{o}"').arrow(),
    "describe": lambda c, o, q: c.describe(o, q),
    "key_schema": lambda c, o, q: c.key_schema(o, q),
}
NOT_OF_OPERATORS = {"answered_at", "answered_version", "now", "connect", "close", "operators", "timeout", "lag_seconds"}
VIEW_METHODS = {"features", "features_of_views", "feature_views", "entity_schema"}


def test_every_method_of_the_client_is_tried() -> None:
    assert {*CALLS, *NOT_OF_OPERATORS, *VIEW_METHODS} == {
        n for n in vars(QueryableStateClient) if not n.startswith("_")
    }


@KINDS
@pytest.mark.parametrize("way", ["direct", "proxy", "scoped"])
def test_a_client_reads_what_its_token_is_for(cluster: TwoQueries, kind: str, way: str) -> None:
    """``scoped`` is the client of HTTP and the page, whose own token reads everything."""
    if way == "scoped":
        client = scoped_client(cluster.client(), SCOPES[kind])
    else:
        client = cluster.client(token=cluster.token(kind), direct=way == "direct")
    for name, call in CALLS.items():
        for query, operator in READABLE:
            if (query, operator) in ALLOWED[kind]:
                assert call(client, operator, query) is not None or query == "ledger", name
                continue
            with pytest.raises((QueryableStateError, RequestError, Exception)) as refused:
                call(client, operator, query)
            assert type(refused.value).__name__ in REFUSALS | {"CatalogException"}, refused.value
            assert_names_nothing_else(str(refused.value), kind, operator, query)
    seen = sorted((o["query_name"], o["operator"]) for o in client.operators())
    assert seen == sorted(ALLOWED[kind])


# -- HTTP ----------------------------------------------------------------------------------------

ROUTES: dict[str, Callable[[TestClient, str, str], Any]] = {
    "/v1/operators/{operator}": lambda h, o, q: h.get(f"/v1/operators/{o}?query={q}"),
    "/v1/operators/{operator}/keys/{key:path}": lambda h, o, q: h.get(f"/v1/operators/{o}/keys/{KEY}?query={q}"),
    "/v1/operators/{operator}/lookup": lambda h, o, q: h.post(
        f"/v1/operators/{o}/lookup", json={"keys": [KEY], "query": q}
    ),
    "/v1/operators/{operator}/scan": lambda h, o, q: h.post(f"/v1/operators/{o}/scan", json={"query": q}),
    "/v1/sql": lambda h, o, q: h.post("/v1/sql", json={"sql": f'select count(*) from "{q}"."{o}"'}),
}
WATCH, LISTS = "/v1/operators/{operator}/watch", ("/v1/operators", "/v1/overview")
VIEW_ROUTES = ("/v1/features", "/v1/features/{view}")


@pytest.fixture(scope="module")
def app(world: Served, cluster: TwoQueries) -> Any:
    made = AsyncQueryableStateClient(cluster.client())

    async def connect() -> AsyncQueryableStateClient:
        return made

    made_app = create_app(connect, ClusterTokens(TOKEN, lambda: ()))
    add_overview(made_app, world.system.overview)
    return made_app


def test_every_route_is_tried(app: Any) -> None:
    assert {route.path for route in app.routes} == {*ROUTES, WATCH, *LISTS, *VIEW_ROUTES, "/openapi.json"}


@KINDS
def test_http_answers_what_a_token_is_for(app: Any, cluster: TwoQueries, kind: str) -> None:
    with TestClient(app, headers={"Authorization": f"Bearer {cluster.token(kind)}"}) as http:
        for path, ask in ROUTES.items():
            for query, operator in READABLE:
                answer = ask(http, operator, query)
                is_refused = answer.status_code in (400, 403, 404) and "has nothing in" not in answer.text
                assert is_refused == ((query, operator) not in ALLOWED[kind]), (path, query, operator, answer.text)
                assert_names_nothing_else(answer.text, kind, operator, query)
        for query, operator in READABLE:
            if (query, operator) not in ALLOWED[kind]:
                answer = http.get(f"/v1/operators/{operator}/watch?query={query}")
                assert answer.status_code in (403, 404), answer.text
                assert_names_nothing_else(answer.text, kind, operator, query)
        listed = http.get("/v1/operators").json()["operators"]
        assert sorted((o["query_name"], o["operator"]) for o in listed) == sorted(ALLOWED[kind])
        overview = http.get("/v1/overview").json()
        shown = [(q["name"], o["name"]) for q in overview["queries"] for o in q["operators"]]
        assert sorted(shown) == sorted(ALLOWED[kind])
        assert_names_nothing_else(json.dumps(overview), kind)


def test_nothing_is_answered_to_a_request_that_no_gate_has_let_in(cluster: TwoQueries) -> None:
    async def ask() -> None:
        made = AsyncQueryableStateClient(cluster.client())

        async def connect() -> AsyncQueryableStateClient:
            return made

        await StateService(connect, HttpLimits()).client()

    with pytest.raises(LookupError):
        asyncio.run(ask())


# -- the page ------------------------------------------------------------------------------------


def page_of(world: Served, token: str) -> PageClient:
    page = create_ui(world.system, ClusterTokens(TOKEN, lambda: ()))
    return PageClient(page, headers={"Authorization": f"Bearer {token}"})


@dataclass(frozen=True)
class Place:
    query: str
    operator: str

    @property
    def parameters(self) -> dict[str, str]:
        query_id = {"payments": "q", "ledger": "q-ledger"}[self.query]
        table = f"{query_id}/{self.operator}/default"
        return {"query": query_id, "operator": self.operator, "table": table, "key.user": str(KEY), "limit": "5"}


OF_OPERATOR = {"/operator", "/operator/hottest", "/keys", "/scan", "/scan.csv"}
OF_QUERY = {"/query", "/savepoints", "/savepoint"}


def test_every_page_is_tried() -> None:
    assert {*OF_OPERATOR, *OF_QUERY, "/", "/hosts", "/sql", "/features"} == set(SEEN)
    assert set(POSTED) == {"/sql", "/sql.csv", "/savepoints", "/savepoint"}


@KINDS
def test_the_page_shows_what_a_token_is_for(world: Served, cluster: TwoQueries, kind: str) -> None:
    token = cluster.token(kind)
    page = page_of(world, token)
    for query, operator in READABLE:
        place = Place(query, operator)
        is_allowed = (query, operator) in ALLOWED[kind]
        asked = (operator, query, *place.parameters.values())
        for path in sorted(OF_OPERATOR):
            answer = page.get(path, params=place.parameters)
            assert (answer.status_code == 200) == is_allowed, (path, answer.text)
            assert_names_nothing_else(answer.text, kind, *asked)
        if not is_allowed:
            answer = page.get("/watch", params=place.parameters)
            assert answer.status_code == 404, answer.text
            assert_names_nothing_else(answer.text, kind, *asked)
        for path in ("/sql", "/sql.csv"):
            statement = f'select count(*) from "{query}"."{operator}"'
            answer = page.post(path, data={"statement": statement, "form_token": form_token(token)})
            assert (answer.status_code == 200) == is_allowed, (path, answer.text)
            assert_names_nothing_else(answer.text, kind, *asked)
        for path in sorted(OF_QUERY):
            answer = page.get(path, params={**place.parameters, "name": "none"})
            may = query in {of for of, _ in ALLOWED[kind]}
            whole = SCOPES[kind].has_whole_queries
            refused = answer.status_code in (403, 404)
            assert refused == (not may or (path != "/query" and not whole)), (path, answer.status_code)
            assert_names_nothing_else(answer.text, kind, *asked)
    assert (page.get("/hosts").status_code == 200) == (kind == "all")
    for path in ("/", "/keys", "/scan", "/sql"):
        answer = page.get(path)
        assert answer.status_code == 200
        assert_names_nothing_else(answer.text, kind)


def test_an_administrator_acts_on_the_queries_of_the_token(world: Served, cluster: TwoQueries, tmp_path: Path) -> None:
    token = cluster.token("query", admin=True)
    page = page_of(world, token)
    triggered: list[str] = []
    world.system.trigger_savepoint = lambda request, query, path: triggered.append(query)  # type: ignore[method-assign]

    def send(address: str, **fields: str) -> Any:
        return page.post(address, data={**fields, "form_token": form_token(token)}, follow_redirects=False)

    assert send("/savepoints", query="q-ledger").status_code == 404
    assert send("/savepoints", query=RUNS["ledger"]).status_code == 404
    assert send("/savepoints", query="q", path=str(tmp_path)).status_code == 400
    assert send("/savepoint", query="q-ledger", name="s").status_code == 404
    assert send("/savepoint", query="q", name="s", directory=str(tmp_path)).status_code == 400
    assert page.get("/savepoints", params={"query": "q", "directory": str(tmp_path)}).status_code == 400
    assert triggered == []
    assert send("/savepoints", query="q").status_code == 303 and triggered == ["run1"]
    look = cluster.token("query")
    refused = page_of(world, look).post("/savepoints", data={"query": "q", "form_token": form_token(look)})
    assert refused.status_code == 403 and triggered == ["run1"]


def test_watches_give_what_a_token_is_for_and_nothing_else(world: Served, cluster: TwoQueries, app: Any) -> None:
    token = cluster.token("operator of query")
    page = create_ui(world.system, ClusterTokens(TOKEN, lambda: ()))
    with serving(app) as http, serving(page) as ui, httpx.Client(timeout=PATIENCE) as client:
        client.headers = httpx.Headers({"Authorization": f"Bearer {token}", "Last-Event-ID": "1"})
        urls = (f"{http}/v1/operators/%s/watch?key={KEY}", f"{ui}/watch?table=q/%s/default&key.user={KEY}")
        for url in urls:
            with client.stream("GET", url % "totals") as answer:
                data = next(line for line in answer.iter_lines() if line.startswith("data: "))
                assert json.loads(data.removeprefix("data: "))["version"] == 2
            assert client.get(url % "cards").status_code in (403, 404)


# -- views ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "is_allowed"),
    [("all", True), ("view", True), ("view and operator", True), ("query", False), ("operator", False)],
)
def test_a_token_for_a_view_is_for_no_other(kind: str, is_allowed: bool) -> None:
    assert SCOPES[kind].allows_view("card_fraud") == is_allowed
    assert SCOPES[kind].allows_view("other") == (kind == "all")


def allowed_views(kind: str) -> list[str]:
    return [view for view in VIEWS if SCOPES[kind].allows_view(view)]


@KINDS
def test_a_host_answers_for_the_views_of_a_token(cluster: TwoQueries, kind: str) -> None:
    for ask in OF_VIEWS.values():
        for view, place in VIEWS.items():
            with RawClient(cluster.hosts[0].address, token=cluster.token(kind)) as client:
                reply, body = last_reply(client, ask(view))
            is_refused = isinstance(reply, protocol.Failure) and reply.error == "OutOfScopeError"
            assert is_refused == (view not in allowed_views(kind)), reply
            seen = place if not is_refused else ()
            assert_names_nothing_else(f"{getattr(reply, 'message', '')} {bytes(body)!r}", kind, *seen)
    with RawClient(cluster.hosts[0].address, token=cluster.token(kind)) as client:
        _, body = client.ask(protocol.ViewsRequest())
    assert [view["view"]["name"] for view in json.loads(body)] == allowed_views(kind)
    assert_names_nothing_else(str(bytes(body)), kind, *(name for view in allowed_views(kind) for name in VIEWS[view]))


@KINDS
@pytest.mark.parametrize("way", ["direct", "proxy", "scoped"])
def test_a_client_reads_the_views_of_its_token(cluster: TwoQueries, kind: str, way: str) -> None:
    if way == "scoped":
        client = scoped_client(cluster.client(), SCOPES[kind])
    else:
        client = cluster.client(token=cluster.token(kind), direct=way == "direct")
    assert [view["view"] for view in client.feature_views()] == allowed_views(kind)
    calls = [
        lambda v: client.features(v, [KEY]),
        lambda v: client.features(v, [KEY, 8]),
        lambda v: client.features_of_views([(v, [KEY])])[0],
        client.entity_schema,
    ]
    for view, place in VIEWS.items():
        for call in calls:
            if view in allowed_views(kind) and view != "broken":
                assert len(call(view))
                continue
            with pytest.raises((OutOfScopeError, UnknownOperatorError)) as refused:
                call(view)
            assert isinstance(refused.value, OutOfScopeError) == (view not in allowed_views(kind))
            assert_names_nothing_else(str(refused.value), kind, *(place if view in allowed_views(kind) else ()))


def test_errors_about_a_view_name_nothing_of_others(cluster: TwoQueries) -> None:
    """Its view is gone, or an operator: the message of the coordinator lists what there is."""
    scope = Scope(views=("broken", "none"))
    token = cluster.tokens.issue_token("broken", scope=scope)
    for client in (cluster.client(token=token), scoped_client(cluster.client(), scope)):
        for view in scope.views:
            with pytest.raises(UnknownOperatorError, match=f"'{view}' cannot be read as it is asked for") as refused:
                client.features(view, [KEY])
            for name in ("payments", "ledger", "totals", "cards", "vault", "secrets"):
                assert name not in str(refused.value)
        (broken,) = client.feature_views()
        assert "vault" not in broken["problem"] and "cannot be read" in broken["problem"]


@KINDS
def test_http_and_the_page_show_the_views_of_a_token(world: Served, app: Any, cluster: TwoQueries, kind: str) -> None:
    token = cluster.token(kind)
    seen = [name for view in allowed_views(kind) for name in VIEWS[view]]
    with TestClient(app, headers={"Authorization": f"Bearer {token}"}) as http:
        listed = http.get("/v1/features")
        assert [view["view"] for view in listed.json()["views"]] == allowed_views(kind)
        assert_names_nothing_else(listed.text, kind, *seen)
        for view, place in VIEWS.items():
            answer = http.post(f"/v1/features/{view}", json={"keys": [KEY]})
            wanted = 404 if view == "broken" else 200
            assert answer.status_code == (wanted if view in allowed_views(kind) else 403), answer.text
            assert_names_nothing_else(answer.text, kind, *(place if view in allowed_views(kind) else ()))
    page = page_of(world, token).get("/features")
    assert page.status_code == 200
    assert [view for view in VIEWS if f">{view}<" in page.text] == allowed_views(kind)
    assert_names_nothing_else(page.text, kind, *seen)


def test_scopes_are_compact_and_hashable() -> None:
    assert msgspec.json.encode(SCOPES["view"]) == b'{"views":["card_fraud"]}'
    assert len(dict.fromkeys(SCOPES.values())) == len(SCOPES)


# -- secrets -------------------------------------------------------------------------------------


def test_no_page_puts_a_token_into_the_arguments_of_a_process() -> None:
    root = Path(__file__).parents[3]
    pages = [*root.glob("*.md"), *root.glob("docs/**/*.md"), *root.glob("deploy/**/*.md")]
    for page in [*pages, root / "spark_bridge/state_http/serve_app.py"]:
        lines = [
            line for line in page.read_text().splitlines() if re.search(r"(Bearer|-u) *:?[$\"]|--token|token=ss", line)
        ]
        assert lines == [], page


def test_a_token_is_not_in_the_text_of_a_record() -> None:
    secret = "ssr1.do-not-show"
    records = [
        protocol.Hello(1, secret),
        HostFile("h", "a", "grpc://127.0.0.1:1", secret),
        Endpoints(("grpc://127.0.0.1:1",), secret, "/tmp", 1.0),
    ]
    assert secret not in repr(records) and secret not in str(records)
