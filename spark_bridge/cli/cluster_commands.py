"""Commands about a running cluster: ``drain``, ``token``, ``features``, ``serve``, ``ui`` and ``grafana``."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.table import Table

from backends.conf import SECOND, parse_duration
from backends.storage.requests import Prices
from coordinator_actor.access_tokens import ALL, IssuedToken, Scope
from coordinator_actor.coordinator_conf import COORDINATOR_NAME, NAMESPACE
from coordinator_actor.messages import RunningOperator
from spark_bridge.cli import output, sources
from spark_bridge.exceptions import EnvironmentProblemError, RequestError, UnknownFeatureViewError
from spark_bridge.grafana import config_map, dashboard, written
from spark_bridge.queryable.client.features import age_of
from spark_bridge.queryable.client_connection import LOOPBACK

if TYPE_CHECKING:
    from spark_bridge.overview.model import Overview
    from spark_bridge.ui.requests import OwnToken, System

# ``statestore drain``: let the hosts of a node hand over their partitions, so that the machine may be removed.


DRAIN_POLL_SECONDS = 1.0
DRAIN_ANSWER_SECONDS = 10.0


def drain(
    node: Annotated[str, typer.Argument(help="IP address, host name or id of a node of Ray.")],
    undo: Annotated[bool, typer.Option("--undo", help="The node stays after all.")] = False,
    timeout: Annotated[float, typer.Option(min=0.0, help="Seconds to wait until the node has no host.")] = 600.0,
    address: sources.Address = None,
    namespace: sources.Namespace = NAMESPACE,
    coordinator: sources.CoordinatorName = COORDINATOR_NAME,
    as_json: output.AsJson = False,
) -> None:
    """Make the hosts of a node hand over their partitions while the streams run, and wait for that.

    No host is started there from then on, until --undo. The exit code is 1 if hosts are still there after --timeout.

    Examples: statestore drain 10.0.0.7; statestore drain 10.0.0.7 --undo
    """
    import ray

    from coordinator_actor.actor import ClusterStore

    with output.errors_explained(), sources.joined_ray(address, namespace):
        store, node_id = ClusterStore(namespace, coordinator), node_named(node, ray.nodes())
        if undo:
            store.keep(node_id)
            kept = {"node_id": node_id, "drained": False}
            output.show(lambda: kept, lambda: f"{node} takes hosts again.", as_json=as_json)
            return
        store.drain(node_id)
        deadline = time.monotonic() + timeout
        while (remaining_hosts := _hosts_on(namespace, coordinator, node_id)) and time.monotonic() < deadline:
            time.sleep(DRAIN_POLL_SECONDS)
    plain = {"node_id": node_id, "drained": not remaining_hosts, "hosts_left": remaining_hosts}
    text = f"No host is left on {node}; the machine may be removed."
    if remaining_hosts:
        text = f"{remaining_hosts} hosts are still on {node}; see statestore status."
    output.show(lambda: plain, lambda: text, as_json=as_json)
    if remaining_hosts:
        raise typer.Exit(output.FOUND)


def node_named(node: str, nodes: Sequence[Mapping[str, Any]]) -> str:
    """Return the id of the living node that has this id, beginning of an id, IP address or host name.

    Raises ``EnvironmentProblemError`` if none or several do.
    """
    alive = [n for n in nodes if n["Alive"]]
    matches = [n for n in alive if node in (n["NodeID"], n["NodeManagerAddress"], n["NodeManagerHostname"])]
    matches = matches or [n for n in alive if len(node) >= 6 and n["NodeID"].startswith(node)]
    if len(matches) != 1:
        alive_nodes = ", ".join(f"{n['NodeManagerAddress']} ({n['NodeManagerHostname']}, {n['NodeID']})" for n in alive)
        how_many = "Several nodes are" if matches else "No living node of Ray is"
        raise EnvironmentProblemError(
            f"{how_many} named {node!r}; give an address, a host name or an id of: {alive_nodes}."
        )
    return str(matches[0]["NodeID"])


def _hosts_on(namespace: str, name: str, node_id: str) -> int:
    """Return how many hosts the coordinator knows on a node; 0 without a coordinator, because no stream runs then."""
    import ray
    from ray.exceptions import RayError

    try:
        coordinator = ray.get_actor(name, namespace=namespace)
    except ValueError:
        return 0
    try:
        described = ray.get(coordinator.describe.remote(), timeout=DRAIN_ANSWER_SECONDS)
    except RayError as error:
        raise EnvironmentProblemError(
            f"The node is drained, but the coordinator (namespace {namespace!r}) does not report the progress: {error}"
        ) from error
    return sum(host["node_id"] == node_id for host in described["hosts"])


# ``statestore token ...``: tokens for clients and people outside the Ray cluster.


TOKEN_ANSWER_SECONDS = 10.0

app = typer.Typer(
    name="token", help="Issue, list and revoke tokens of clients and people outside.", no_args_is_help=True
)


def seconds_of(duration: str) -> float:
    """Return the seconds of ``90s``, ``12h``, ``30 days`` or ``2w``. Raises ``typer.BadParameter``."""
    parsed = parse_duration(duration)
    if parsed is None:
        raise typer.BadParameter(f"{duration!r} is not a duration; write a number and s, m, h, d or w, such as 30d")
    return float(parsed.us / SECOND)


@app.command()
def issue(
    name: Annotated[str, typer.Option("--name", help="A name for the token: its user.")],
    expires: Annotated[
        str | None, typer.Option("--expires", help="When it ends by itself, such as 12h, 30d, 2w; by default never.")
    ] = None,
    admin: Annotated[
        bool, typer.Option("--admin", help="It may also act on the page, such as trigger a savepoint.")
    ] = False,
    namespaces: Annotated[
        list[str] | None, typer.Option("--only-namespace", help="Only for hosts of this Ray namespace; repeatable.")
    ] = None,
    queries: Annotated[
        list[str] | None, typer.Option("--query", help="Only for this query, by name or query id; repeatable.")
    ] = None,
    operators: Annotated[
        list[str] | None, typer.Option("--operator", help="Only for operators of this name; repeatable.")
    ] = None,
    views: Annotated[list[str] | None, typer.Option("--view", help="Only for this feature view; repeatable.")] = None,
    address: sources.Address = None,
    namespace: sources.Namespace = NAMESPACE,
    coordinator: sources.CoordinatorName = COORDINATOR_NAME,
    as_json: output.AsJson = False,
) -> None:
    """Issue a token, read-only by default. It is printed alone, and cannot be shown again.

    Without --query, --operator and --view it is for everything in the namespace. A token that names operators or views
    sees those alone.

    Examples: statestore token issue --name dashboard --expires 30d; statestore token issue --name fraud-model --query
    payments --operator user_totals
    """
    expires_in = None if expires is None else seconds_of(expires)
    scope = Scope(*(tuple(names or ()) for names in (namespaces, queries, operators, views)))
    more: dict[str, Any] = {"admin": True} if admin else {}
    unknown: list[str] = []
    if scope != ALL:
        more["scope"] = scope  # a coordinator of an earlier version refuses it
        unknown = not_running(scope, _ask(address, namespace, coordinator, "operators"))
    token = _ask(address, namespace, coordinator, "issue_token", name, expires_in, **more)
    plain = {"name": name, "token": token, "expires_in": expires_in, "scope": msgspec.to_builtins(scope)}
    typer.echo(output.json_line(plain) if as_json else token)
    if as_json:
        return
    ends = "until it is revoked" if expires is None else f"for {expires}"
    kind = "an administrator's" if admin else "the read-only"
    limits = f", for {scope.in_words()} alone" if scope != ALL else ""
    output.complain(
        f"This is {kind} token {name!r}, valid {ends}{limits}. Keep it: it is not stored, and not shown again. Clients "
        "give it as token= or in STATESTORE_TOKEN.",
        style=None,
    )
    if unknown:
        output.complain(f"Not running now: {', '.join(unknown)}. If a name is misspelled, revoke the token.")


def not_running(scope: Scope, running: Sequence[RunningOperator]) -> list[str]:
    """Return the queries and operators of a scope that no running query has."""
    queries = {name for of in running for name in (of.query_name, of.query_id, of.run_id)}
    operators = {of.operator.name for of in running}
    unknown = [f"query {name!r}" for name in scope.queries if name not in queries]
    return [*unknown, *(f"operator {name!r}" for name in scope.operators if name not in operators)]


@app.command("list")
def list_tokens(
    address: sources.Address = None,
    namespace: sources.Namespace = NAMESPACE,
    coordinator: sources.CoordinatorName = COORDINATOR_NAME,
    as_json: output.AsJson = False,
) -> None:
    """List the tokens that were issued: names, ids and scopes, not the tokens themselves.

    Example: statestore token list --json
    """
    tokens: tuple[IssuedToken, ...] = _ask(address, namespace, coordinator, "list_tokens")
    output.show(lambda: msgspec.to_builtins(tokens), lambda: rendered(tokens, time.time()), as_json=as_json)


@app.command()
def revoke(
    name_or_id: str,
    address: sources.Address = None,
    namespace: sources.Namespace = NAMESPACE,
    coordinator: sources.CoordinatorName = COORDINATOR_NAME,
    as_json: output.AsJson = False,
) -> None:
    """Revoke the token NAME_OR_ID permanently; hosts refuse it within about two seconds.

    Example: statestore token revoke dashboard
    """
    token: IssuedToken = _ask(address, namespace, coordinator, "revoke_token", name_or_id)
    if as_json:
        typer.echo(output.json_line({"name": token.name, "id": token.id, "revoked": token.revoked}))
        return
    output.complain(f"Revoked the token {token.name!r} ({token.id}).", style=None)


def rendered(tokens: tuple[IssuedToken, ...], now: float) -> Table:
    """Return the tokens as a table; ``now`` is in seconds since 1970."""
    rows = (
        (
            token.name,
            token.id,
            "admin" if token.admin else "read-only",
            token.scope.in_words() or "everything",
            _time(token.created),
            "never" if token.expires is None else _time(token.expires),
            "revoked" if token.revoked is not None else "valid" if token.is_valid(now) else "expired",
        )
        for token in tokens
    )
    return output.filled(rows, "name", "id", "kind", "scope", "created", "expires", "state")


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


def _ask(address: str | None, namespace: str, coordinator: str, method: str, *args: object, **named: object) -> Any:
    """Send one message to the coordinator and return the answer; print an error on stderr and exit with 2."""
    with output.errors_explained(), sources.joined_ray(address, namespace):
        return _sent(namespace, coordinator, method, *args, **named)


def _sent(namespace: str, coordinator: str, method: str, *args: object, **named: object) -> Any:
    import ray
    from ray.exceptions import RayError, RayTaskError

    from coordinator_actor.reference import ask

    try:
        actor = ray.get_actor(coordinator, namespace=namespace)
    except ValueError as error:
        raise EnvironmentProblemError(
            f"There is no coordinator {coordinator!r} in the Ray namespace {namespace!r}: it is there once a stream "
            "with state has been started (init_spark or attach)."
        ) from error
    try:
        return ask(actor, method, *args, timeout=TOKEN_ANSWER_SECONDS, **named)
    except RayTaskError:
        raise
    except RayError as error:
        raise EnvironmentProblemError(
            f"The coordinator {coordinator!r} (namespace {namespace!r}) did not answer: {error}. It may be restarting, "
            "so try again."
        ) from error


# ``statestore features``: the feature views, and dropping one.


@sources.with_state_source
def features(
    source: sources.Source,
    view: Annotated[str | None, typer.Argument(metavar="[VIEW]", help="Show the features of this view.")] = None,
    drop: Annotated[bool, typer.Option("--drop", help="Drop VIEW; its program may declare it again.")] = False,
    as_json: output.AsJson = False,
) -> None:
    """List the feature views, with their owners, bounds and ages; or show the features of one.

    Examples: statestore features; statestore features card_fraud --json; statestore features card_fraud --drop;
    statestore features --checkpoint s3://bucket/ck
    """
    if drop:
        _drop_view(source, view)
        return
    with output.errors_explained(), source.client() as client:
        views = [one for one in client.feature_views() if view in (None, one["view"])]
        if view is not None and not views:
            raise UnknownFeatureViewError(f"There is no feature view {view!r}; 'statestore features' lists them.")
    output.show(lambda: views if view is None else views[0], lambda: _views(views, view), as_json=as_json)


def _views(views: list[dict[str, Any]], view: str | None) -> Table:
    if view is not None:
        features_of_view = (map(output.cell, one.values()) for one in views[0]["features"])
        title = ": ".join(filter(None, (view, views[0]["problem"] or views[0]["description"])))
        return output.filled(features_of_view, "feature", "operator", "column", "type", "default", title=title)
    rows: list[list[object]] = []
    for one in views:
        about = one["problem"] or one["description"]
        entity = ", ".join(one["entity"])
        rows.append([one["view"], one["owner"], entity, len(one["features"]), age_of(one), one["max_age"], about])
    return output.filled(rows, "view", "owner", "entity", "features", "age", "max age", "description")


def _drop_view(source: sources.Source, view: str | None) -> None:
    with output.errors_explained():
        if view is None or source.checkpoint is not None:
            raise RequestError("--drop needs the VIEW of a running query: its coordinator drops it.")
        with sources.joined_ray(source.address, source.namespace):
            all_views = _sent(source.namespace, source.coordinator, "feature_views")
            having = [running.run_id for running in all_views if running.view.name == view]
            if not having:
                raise UnknownFeatureViewError(f"No running query has a feature view {view!r}.")
            for run_id in having:
                _sent(source.namespace, source.coordinator, "drop_view", run_id, view)
    output.complain(f"Dropped the feature view {view!r}; hosts forget it within two seconds.", style=None)


# ``statestore serve``: answer queries from a checkpoint or a savepoint, by Ray actors, until the command is ended.


def serve(
    location: Annotated[str, typer.Argument(help="A checkpoint, or a savepoint.")],
    operator: Annotated[
        list[str] | None, typer.Option("--operator", help="Serve this operator; may be repeated. Default: all.")
    ] = None,
    replicas: Annotated[int, typer.Option(min=1, help="This many hosts share the partitions.")] = 1,
    name: Annotated[str, typer.Option(help="The name that clients use to find the state.")] = "serving",
    follow: Annotated[bool, typer.Option("--follow", help="Follow each version that the query completes.")] = False,
    scratch: Annotated[
        str | None, typer.Option(help="A new directory for the restored savepoint, readable by all nodes.")
    ] = None,
    query_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Host i answers at this port + i; 0: at any free port.")
    ] = 0,
    state_location: sources.StateLocation = None,
    storage_option: sources.Option = None,
    address: sources.Address = None,
    namespace: sources.Namespace = NAMESPACE,
) -> None:
    """Serve the state of a checkpoint or a savepoint from Ray actors, without Spark, until Ctrl-C or SIGTERM.

    Nothing is written to the checkpoint. If no Ray cluster runs, one is started on this machine.

    Examples: statestore serve ck/; statestore serve s3://bucket/ck --replicas 4 --follow
    """
    from spark_bridge.serving import serve_state

    out, ended = output.printer(), threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    with output.errors_explained():
        out.print(f"Starting to serve {location} ...", markup=False)
        with serve_state(
            location,
            operator,
            replicas=replicas,
            name=name,
            follow=follow,
            state_location=state_location,
            storage_options=sources.options_of(storage_option),
            scratch=scratch,
            ray_address=address,
            namespace=namespace,
            query_port=query_port,
        ) as serving:
            out.print(f"Serving {', '.join(serving.operators)} at {', '.join(serving.addresses)}.", markup=False)
            out.print(
                f"In the cluster: QueryableStateClient.connect(coordinator_name={serving.coordinator_name!r}). From "
                f"outside, with a token: statestore token issue --name NAME --coordinator {serving.coordinator_name}.",
                markup=False,
            )
            ended.wait()
            out.print("Ending ...", markup=False)


# ``statestore ui``: the page, served by this process, of a running cluster or of a checkpoint.


PORT = 8170
UI_COORDINATOR_SECONDS = 10.0
UI_OVERVIEW_SECONDS = 3.0
"""How long to wait for hosts: a dead one must not hold up the page."""
CLIENT_SECONDS = 10.0


@sources.with_state_source
def ui(
    source: sources.Source,
    host: Annotated[str, typer.Option(help="The address to listen at. Others than the loopback need TLS before.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port to listen at; 0 chooses one.")] = PORT,
    prices: output.PricesOption = "",
    sql_memory: Annotated[
        int, typer.Option(min=64, metavar="MIB", help="Memory of all SQL statements together; four may run at once.")
    ] = 1024,
) -> None:
    """Serve the page: problems and remedies, where time goes, hosts, keys, SQL, savepoints.

    The printed address signs in once. Further people sign in with a token of 'statestore token issue', or with
    the token that is printed for a checkpoint.

    Examples: statestore ui; statestore ui --checkpoint s3://bucket/ck --port 9000
    """
    with output.errors_explained():
        run = partial(_run, host=host, port=port, prices=Prices.parse(prices), sql_memory=sql_memory)
        for name in ("jinja2", "starlette", "uvicorn"):
            if find_spec(name) is None:
                raise EnvironmentProblemError(f"The page needs the package {name}: install ray-statestore[ui].")
        if source.checkpoint is None:
            with sources.joined_ray(source.address, source.namespace):
                _serve_cluster(source, run)
            return
        from spark_bridge.ui.live import StoredSystem
        from spark_bridge.ui.requests import OwnToken

        system = StoredSystem(source.checkpoint, source.state_location, source.options)
        system.overview()  # a wrong location is an error before anything is served
        run(system, OwnToken(None, admin=False))


def _serve_cluster(source: sources.Source, run: Callable[..., None]) -> None:
    from coordinator_actor.reference import RayCoordinatorPort
    from spark_bridge.overview.from_cluster import KnownCheckpoints, cluster_overview
    from spark_bridge.queryable.client.client import QueryableStateClient
    from spark_bridge.queryable.server.tokens import CoordinatorTokens
    from spark_bridge.ui.live import LiveSystem
    from spark_bridge.ui.requests import OwnToken

    namespace, coordinator = source.namespace, source.coordinator
    calls = RayCoordinatorPort(namespace, coordinator, UI_COORDINATOR_SECONDS)
    tokens = CoordinatorTokens(calls.call, namespace=namespace)
    checkpoints = KnownCheckpoints()

    def overview() -> Overview:
        return cluster_overview(namespace, coordinator, UI_OVERVIEW_SECONDS, checkpoints)

    def connect() -> QueryableStateClient:
        return QueryableStateClient.connect(namespace, coordinator, tls=source.tls, timeout=CLIENT_SECONDS)

    @asynccontextmanager
    async def running() -> AsyncIterator[None]:
        async with tokens.kept_up():
            yield
        calls.close()

    system = LiveSystem(namespace, overview, connect, calls.call, source.options)
    run(system, OwnToken(tokens, admin=True), running)


def _run(
    system: System,
    own: OwnToken,
    lifespan: Callable[[], AbstractAsyncContextManager[None]] | None = None,
    *,
    host: str,
    port: int,
    prices: Prices,
    sql_memory: int,
) -> None:
    """Serve until the process is interrupted. ``sql_memory`` is in MiB."""
    import uvicorn

    from spark_bridge.ui.app import create_ui
    from spark_bridge.ui.state_pages import PAGE_SQL

    class Server(uvicorn.Server):
        """Prints its address once it listens."""

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                _tell(system, own, host, self.servers[0].sockets[0].getsockname()[1])

    config = uvicorn.Config(
        create_ui(system, own, own, lifespan, prices, replace(PAGE_SQL, memory_bytes=sql_memory << 20)),
        host=host,
        port=port,
        log_level="warning",
        server_header=False,
        timeout_graceful_shutdown=2,
        timeout_keep_alive=30,
    )
    Server(config).run()


def _tell(system: System, own: OwnToken, host: str, port: int) -> None:
    shown = f"[{host}]" if ":" in host else host
    typer.echo(f"The page of {system.place} is at http://{shown}:{port}/signin?code={own.code}")
    typer.echo(f"That address signs in once. To sign in again, use the token {own.token}")
    if host not in LOOPBACK:
        output.complain("The page's content and the tokens go over the network unencrypted: put TLS before it.")


# ``statestore grafana``: the dashboard for Grafana, where Ray's own set-up or Kubernetes finds the file.


DIRECTORY_VARIABLE = "RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR"
"""Where Ray writes its dashboards, if it is set; Ray's own default is in the directory of its session."""

grafana_app = typer.Typer(name="grafana", help="The dashboard for Grafana.", no_args_is_help=True)


@grafana_app.command()
def install(
    directory: Annotated[
        Path | None,
        typer.Argument(help=f"Where Grafana takes dashboards from. Default: the environment's {DIRECTORY_VARIABLE}."),
    ] = None,
    as_json: output.AsJson = False,
) -> None:
    """Write the dashboard where Ray's Grafana set-up keeps its own; Grafana shows the file within seconds.

    Example: statestore grafana install /var/lib/grafana/dashboards/ray
    """
    configured = os.environ.get(DIRECTORY_VARIABLE) if directory is None else str(directory)
    if not configured:
        output.complain(
            f"Where does Grafana look? Name the directory, or set {DIRECTORY_VARIABLE} as for 'ray start': the "
            "directory must outlive Ray's session."
        )
        raise typer.Exit(output.FAILED)
    if not Path(configured).is_dir():
        output.complain(
            f"{configured} is not a directory. Create it, and give it to Grafana's provisioning of dashboards."
        )
        raise typer.Exit(output.FAILED)
    try:
        path = written(Path(configured))
    except OSError as error:
        output.complain(f"The dashboard could not be written to {configured}: {error}")
        raise typer.Exit(output.FAILED) from error
    typer.echo(output.json_line({"path": str(path)}) if as_json else f"Written: {path}")


@grafana_app.command("show")
def show_dashboard(as_json: output.AsJson = False) -> None:
    """Print the dashboard, for a manual import: as JSON, with and without --json.

    Example: statestore grafana show > dashboard.json
    """
    typer.echo(output.json_line(dashboard()))


@grafana_app.command("config-map")
def show_config_map(
    namespace: Annotated[str | None, typer.Option(help="The namespace of the ConfigMap. Default: kubectl's.")] = None,
    as_json: output.AsJson = False,
) -> None:
    """Print a ConfigMap with the dashboard, for Grafana on Kubernetes: as JSON, with and without --json.

    Example: statestore grafana config-map --namespace monitoring | kubectl apply -f -
    """
    typer.echo(output.json_line(config_map(namespace)))
