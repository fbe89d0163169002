"""``statestore ui``: the page, served by this process, of a running cluster or of a checkpoint."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

import typer

from backends.storage.sending.prices import Prices
from spark_bridge.cli.joined_ray import joined_ray
from spark_bridge.cli.output import complain, errors_explained
from spark_bridge.cli.prices import PricesOption
from spark_bridge.cli.sources import Source, with_state_source
from spark_bridge.exceptions import EnvironmentProblemError

if TYPE_CHECKING:
    from spark_bridge.overview.model import Overview
    from spark_bridge.ui.sign_in import OwnToken
    from spark_bridge.ui.system import System

PORT = 8170
LOOPBACK = ("127.0.0.1", "localhost", "::1")
UI_COORDINATOR_SECONDS = 10.0
UI_OVERVIEW_SECONDS = 3.0
"""How long hosts are waited for: one that is gone must not hold up the page."""
CLIENT_SECONDS = 10.0


@with_state_source
def ui(
    source: Source,
    host: Annotated[str, typer.Option(help="The address to listen at. Others than the loopback need TLS before.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port to listen at; 0 chooses one.")] = PORT,
    prices: PricesOption = "",
    sql_memory: Annotated[
        int, typer.Option(min=64, metavar="MIB", help="Memory of all SQL statements together; four may run at once.")
    ] = 1024,
) -> None:
    """Serve the page: what is wrong and what to do, where time goes, hosts, keys, SQL, savepoints.

    The address that is printed signs in once. Further people sign in with a token of 'statestore token issue', or with
    the token that is printed for a checkpoint.

    Examples: statestore ui; statestore ui --checkpoint s3://bucket/ck --port 9000
    """
    with errors_explained():
        place = _Place(host, port, Prices.parse(prices), sql_memory)
        _check_packages()
        if source.checkpoint is not None:
            _serve_checkpoint(source.checkpoint, source, place)
        else:
            with joined_ray(source.address, source.namespace):
                _serve_cluster(source, place)


@dataclass(frozen=True)
class _Place:
    """The address at which the page listens, the prices of storage that the page shows, and SQL's memory in MiB."""

    host: str
    port: int
    prices: Prices
    sql_memory: int


def _serve_checkpoint(location: str, source: Source, place: _Place) -> None:
    from spark_bridge.ui.sign_in import OwnToken
    from spark_bridge.ui.stored import StoredSystem

    system = StoredSystem(location, source.state_location, source.options)
    system.overview()  # a wrong location is an error before anything is served
    _run(system, OwnToken(None, admin=False), place)


def _serve_cluster(source: Source, place: _Place) -> None:
    from coordinator_actor.on_ray.ray_port import RayCoordinatorPort
    from spark_bridge.overview.from_cluster import KnownCheckpoints
    from spark_bridge.overview.on_ray import cluster_overview
    from spark_bridge.queryable.client.client import QueryableStateClient
    from spark_bridge.queryable.server.tokens.coordinator_tokens import CoordinatorTokens
    from spark_bridge.ui.live import LiveSystem
    from spark_bridge.ui.sign_in import OwnToken

    namespace, coordinator = source.namespace, source.coordinator
    calls = RayCoordinatorPort(namespace, coordinator, UI_COORDINATOR_SECONDS)
    tokens = CoordinatorTokens(calls.call)

    known = KnownCheckpoints()

    def overview() -> Overview:
        return cluster_overview(namespace, coordinator, UI_OVERVIEW_SECONDS, known)

    def connect() -> QueryableStateClient:
        return QueryableStateClient.connect(namespace, coordinator, tls=source.tls, timeout=CLIENT_SECONDS)

    @asynccontextmanager
    async def running() -> AsyncIterator[None]:
        async with tokens.kept_up():
            yield
        calls.close()

    system = LiveSystem(namespace, overview, connect, calls.call, source.options)
    _run(system, OwnToken(tokens, admin=True), place, running)


def _run(
    system: System,
    own: OwnToken,
    place: _Place,
    lifespan: Callable[[], AbstractAsyncContextManager[None]] | None = None,
) -> None:
    """Serve until the process is interrupted."""
    import uvicorn

    from spark_bridge.ui.app import create_ui
    from spark_bridge.ui.views.sql import PAGE_SQL

    class Server(uvicorn.Server):
        """Says where it listens, once it does."""

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                _tell(system, own, place.host, self.servers[0].sockets[0].getsockname()[1])

    config = uvicorn.Config(
        create_ui(system, own, own, lifespan, place.prices, replace(PAGE_SQL, memory_bytes=place.sql_memory << 20)),
        host=place.host,
        port=place.port,
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
        complain("What the page shows and the tokens go over the network unencrypted: put TLS before it.")


def _check_packages() -> None:
    """Raise ``EnvironmentProblemError`` if the page's packages are not installed."""
    for name in ("jinja2", "starlette", "uvicorn"):
        if find_spec(name) is None:
            raise EnvironmentProblemError(f"The page needs the package {name}: install ray-statestore[ui].")
