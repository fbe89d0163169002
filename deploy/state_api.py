"""The state of running streams over HTTP: a Ray Serve application.

    serve run deploy.state_api:app                 # on a machine of the Ray cluster, in the directory of this repository
    serve deploy deploy/state-api.yaml             # with settings of your own
    TOKEN=$(statestore token issue --name curl)    # once: it is not shown again
    curl -H "Authorization: Bearer $TOKEN" http://127.0.0.1:8000/v1/operators

Routes, values and errors are described at ``/openapi.json`` and in ``deploy/README.md``; ``state_http`` has them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from ray.serve import Application

from deploy.state_http.app import create_app
from deploy.state_http.coordinator_tokens import CoordinatorTokens
from deploy.state_http.limits import HttpLimits
from deploy.state_http.service import AsyncStateClient
from spark_bridge.transport.tls import TlsConf

COORDINATOR_SECONDS = 10.0


class Settings(BaseModel):
    """The ``args`` of the application in a Serve configuration file."""

    model_config = ConfigDict(extra="forbid")

    namespace: str = "statestore"
    coordinator_name: str = "StateStoreCoordinator"
    limits: HttpLimits = HttpLimits()
    tls_ca: Annotated[
        str | None, Field(description="The authorities of the hosts' certificates (PEM), if hosts use TLS.")
    ] = None
    tls_certificate: Annotated[
        str | None, Field(description="This application's own certificate, if hosts ask for one.")
    ] = None
    tls_key: str | None = None
    tls_server_name: str | None = None

    def tls(self) -> TlsConf | None:
        """For the client."""
        if self.tls_ca is None:
            return None
        return TlsConf(self.tls_ca, self.tls_certificate, self.tls_key, server_name=self.tls_server_name)


def build_http(settings: Settings) -> FastAPI:
    """What a replica runs: the application on a client of this Ray cluster."""
    from coordinator_actor.on_ray.ray_port import RayCoordinatorPort
    from spark_bridge import AsyncQueryableStateClient

    port = RayCoordinatorPort(settings.namespace, settings.coordinator_name, COORDINATOR_SECONDS)
    tokens = CoordinatorTokens(port.call)
    made: list[AsyncQueryableStateClient] = []

    async def connect() -> AsyncStateClient:
        client = await AsyncQueryableStateClient.connect(
            settings.namespace,
            settings.coordinator_name,
            tls=settings.tls(),
            timeout=settings.limits.timeout,
        )
        made.append(client)
        return client

    @asynccontextmanager
    async def running() -> AsyncIterator[None]:
        async with tokens.kept_up():
            yield
        for client in made:
            await client.close()

    return create_app(connect, tokens, settings.limits, running)


def build_app(args: Settings) -> Application:
    """The Serve application with these settings; Serve calls it with the ``args`` of a configuration file."""

    def http() -> FastAPI:
        return build_http(args)

    # One more request than the application answers itself, so that it is the application that says 429.
    most = args.limits.max_requests + 8
    deployment = serve.deployment(
        serve.ingress(http)(),
        name="StateApi",
        max_ongoing_requests=most,
        max_queued_requests=most,
        # None: the executors of a stream may have taken them all, and then it would wait for ever.
        ray_actor_options={"num_cpus": 0},
        health_check_period_s=10,
    )
    application: Application = deployment.bind()
    return application


app = build_app(Settings())
