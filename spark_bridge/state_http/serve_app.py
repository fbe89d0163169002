"""The state of running streams over HTTP: a Ray Serve application.

    serve run spark_bridge.state_http.serve_app:app  # on a machine of the Ray cluster
    serve deploy deploy/state-api.yaml               # with settings of your own
    (umask 077; statestore token issue --name curl | sed 's/^/Authorization: Bearer /' > token.header)
    curl -H @token.header http://127.0.0.1:8000/v1/operators

The page for people is at http://127.0.0.1:8000/ui/; they sign in with such a token.

``/openapi.json`` and ``deploy/README.md`` describe routes, values and errors.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from ray.serve import Application

from coordinator_actor.coordinator_conf import COORDINATOR_NAME, NAMESPACE
from spark_bridge.queryable.server.tokens import CoordinatorTokens
from spark_bridge.state_http.access import HttpLimits
from spark_bridge.state_http.app import add_overview, create_app
from spark_bridge.transport.tls import TlsConf

COORDINATOR_SECONDS = 10.0
OVERVIEW_SECONDS = 3.0
"""How long an overview waits for hosts: a dead one must not hold the others up."""


class Settings(BaseModel):
    """The ``args`` of the application in a Serve configuration file."""

    model_config = ConfigDict(extra="forbid")

    namespace: str = NAMESPACE
    coordinator_name: str = COORDINATOR_NAME
    limits: HttpLimits = HttpLimits()
    tls_ca: Annotated[
        str | None, Field(description="The authorities of the hosts' certificates (PEM), if hosts use TLS.")
    ] = None
    tls_certificate: Annotated[
        str | None, Field(description="This application's own certificate, if hosts ask for one.")
    ] = None
    tls_key: str | None = None
    tls_server_name: str | None = None
    storage_options: Annotated[
        dict[str, str], Field(description="The settings of the storage that the page searches for savepoints.")
    ] = {}

    def tls(self) -> TlsConf | None:
        """Return the TLS settings of the client; None if hosts do not use TLS."""
        if self.tls_ca is None:
            return None
        return TlsConf(self.tls_ca, self.tls_certificate, self.tls_key, server_name=self.tls_server_name)


def build_http(settings: Settings) -> FastAPI:
    """Return the application that a replica runs, with a client of this Ray cluster."""
    from coordinator_actor.reference import RayCoordinatorPort
    from spark_bridge import AsyncQueryableStateClient, QueryableStateClient
    from spark_bridge.overview.from_cluster import KnownCheckpoints, cluster_overview
    from spark_bridge.overview.model import Overview
    from spark_bridge.queryable.sql.sql import SqlLimits
    from spark_bridge.ui.app import create_ui
    from spark_bridge.ui.live import LiveSystem

    limits, place = settings.limits, (settings.namespace, settings.coordinator_name)
    port = RayCoordinatorPort(*place, COORDINATOR_SECONDS)
    tokens = CoordinatorTokens(port.call, namespace=settings.namespace)
    clients: list[AsyncQueryableStateClient] = []

    async def connect() -> AsyncQueryableStateClient:
        client = await AsyncQueryableStateClient.connect(*place, tls=settings.tls(), timeout=limits.timeout)
        clients.append(client)
        return client

    @asynccontextmanager
    async def running() -> AsyncIterator[None]:
        async with tokens.kept_up():
            yield
        for client in clients:
            await client.close()

    checkpoints = KnownCheckpoints()

    def overview() -> Overview:
        return cluster_overview(*place, OVERVIEW_SECONDS, checkpoints)

    def client_of_page() -> QueryableStateClient:
        return QueryableStateClient.connect(*place, tls=settings.tls(), timeout=limits.timeout)

    page = create_ui(
        LiveSystem(settings.namespace, overview, client_of_page, port.call, settings.storage_options),
        tokens,
        sql_limits=SqlLimits(limits.sql_memory_bytes, limits.sql_threads, limits.sql_temp_bytes),
    )
    application = create_app(connect, tokens, limits, running, page)
    add_overview(application, overview)
    return application


def build_app(args: Settings) -> Application:
    """Return the Serve application with these settings; Serve calls this with the ``args`` of a configuration file."""

    def http() -> FastAPI:
        return build_http(args)

    # Some more requests than the application answers, so that the application, not Serve, refuses with 429.
    most = args.limits.max_requests + 8
    deployment = serve.deployment(
        serve.ingress(http)(),
        name="StateApi",
        max_ongoing_requests=most,
        max_queued_requests=most,
        # No CPU slot: the executors of a stream may have taken all, and the replica would wait for ever.
        ray_actor_options={"num_cpus": 0},
        health_check_period_s=10,
    )
    application: Application = deployment.bind()
    return application


app = build_app(Settings())
