"""The state of running streams over HTTP: a Ray Serve application.

    serve run deploy.state_api:app                 # on a machine of the Ray cluster, in the directory of this repository
    serve deploy deploy/state-api.yaml             # with settings of your own
    curl -H "Authorization: Bearer $(statestore token issue curl)" http://127.0.0.1:8000/v1/operators

Routes, values and errors are described at ``/openapi.json`` and in ``deploy/README.md``; ``state_http`` has them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from ray.serve import Application

from deploy.state_http.app import create_app
from deploy.state_http.limits import HttpLimits
from deploy.state_http.service import AsyncStateClient
from spark_bridge.exceptions import AccessDeniedError, HostUnavailableError
from spark_bridge.queryable.access import ClusterTokens, Grant
from spark_bridge.queryable.tls import TlsConf

log = logging.getLogger(__name__)

REVOCATION_SECONDS = 2.0
"""How often a replica asks which tokens have been revoked."""
STALE_SECONDS = 60.0
"""A replica that has not been told for so long answers no read-only token any more."""
COORDINATOR_SECONDS = 10.0


class Settings(BaseModel):
    """The ``args`` of the application in a Serve configuration file."""

    model_config = ConfigDict(extra="forbid")

    namespace: str = "statestore"
    coordinator_name: str = "StateStoreCoordinator"
    limits: HttpLimits = HttpLimits()
    tls_ca: str | None = Field(None, description="The authorities of the hosts' certificates (PEM), if hosts use TLS.")
    tls_certificate: str | None = Field(None, description="This application's own certificate, if hosts ask for one.")
    tls_key: str | None = None
    tls_server_name: str | None = None

    def tls(self) -> TlsConf | None:
        """For the client."""
        if self.tls_ca is None:
            return None
        return TlsConf(self.tls_ca, self.tls_certificate, self.tls_key, server_name=self.tls_server_name)


class CoordinatorTokens:
    """Verifies callers' tokens (``access.TokenVerifier``), and learns from the coordinator which ones have been revoked.

    ``call`` calls a method of the coordinator by name, and blocks meanwhile.
    """

    def __init__(self, call: Callable[[str], Any], clock: Callable[[], float] = time.monotonic) -> None:
        self._call = call
        self._clock = clock
        self._verifier: ClusterTokens | None = None
        self._revoked: frozenset[str] = frozenset()
        self._told_at = 0.0

    def verify(self, token: str) -> Grant:
        """See ``TokenVerifier``. Raises ``HostUnavailableError`` as long as the coordinator has not been reached."""
        if self._verifier is None:
            if not token:
                raise AccessDeniedError("No token was given, and without one nothing is answered.")
            raise HostUnavailableError(
                "This application has not reached the coordinator yet, and cannot tell which tokens are valid."
            )
        return self._verifier.verify(token)

    def ask(self) -> None:
        """Ask the coordinator once."""
        secret: str = self._call("token")
        self._revoked = frozenset(token.id for token in self._call("list_tokens") if token.revoked is not None)
        self._told_at = self._clock()
        self._verifier = ClusterTokens(secret, self._known)

    def _known(self) -> frozenset[str] | None:
        return self._revoked if self._clock() - self._told_at < STALE_SECONDS else None

    @asynccontextmanager
    async def kept_up(self) -> AsyncIterator[None]:
        """Go on asking."""
        asking = asyncio.create_task(self._keep_asking())
        try:
            yield
        finally:
            asking.cancel()

    async def _keep_asking(self) -> None:
        while True:
            try:
                await asyncio.to_thread(self.ask)
            except Exception as error:  # noqa: BLE001 - the coordinator is being restarted, or there is none yet; verify() says so
                log.warning("The coordinator could not be asked for revoked tokens: %s", error)
            await asyncio.sleep(REVOCATION_SECONDS)


def build_http(settings: Settings) -> FastAPI:
    """What a replica runs: the application on a client of this Ray cluster."""
    from spark_bridge import AsyncQueryableStateClient
    from spark_bridge.host_actor import RayCoordinatorPort

    port = RayCoordinatorPort(settings.namespace, settings.coordinator_name, COORDINATOR_SECONDS)
    tokens = CoordinatorTokens(port.call)
    made: list[AsyncQueryableStateClient] = []

    async def connect() -> AsyncStateClient:
        tls = settings.tls()
        client = await AsyncQueryableStateClient.connect(
            settings.namespace,
            settings.coordinator_name,
            tls=None if tls is None else tls.client_context(),
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
        ray_actor_options={"num_cpus": 0.1},
        health_check_period_s=10,
    )
    application: Application = deployment.bind()
    return application


app = build_app(Settings())
