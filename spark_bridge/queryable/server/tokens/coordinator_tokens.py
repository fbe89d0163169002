"""Token check of the HTTP application, by the tokens that the coordinator has issued and revoked."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from spark_bridge.exceptions import AccessDeniedError, HostUnavailableError
from spark_bridge.queryable.server.tokens.token_verifier import ClusterTokens, Grant

log = logging.getLogger(__name__)

REVOCATION_SECONDS = 2.0
"""Seconds after which a replica asks again which tokens have been revoked."""
STALE_SECONDS = 60.0
"""A replica that has had no answer for this many seconds accepts read-only tokens no more."""


class CoordinatorTokens:
    """Verifies callers' tokens (a ``TokenVerifier``), and asks the coordinator which tokens have been revoked.

    ``call`` calls a method of the coordinator by name, and blocks meanwhile.
    """

    def __init__(self, call: Callable[[str], Any], clock: Callable[[], float] = time.monotonic) -> None:
        self._call = call
        self._clock = clock
        self._verifier: ClusterTokens | None = None
        self._revoked: frozenset[str] = frozenset()
        self._told_at = 0.0

    def verify(self, token: str) -> Grant:
        """Verify a token; see ``TokenVerifier``.

        Raises ``HostUnavailableError`` as long as the coordinator has not been reached.
        """
        if self._verifier is None:
            if not token:
                raise AccessDeniedError("No token was given, and without one nothing is answered.")
            raise HostUnavailableError(
                "This application has not reached the coordinator yet, and cannot tell which tokens are valid."
            )
        return self._verifier.verify(token)

    def ask(self) -> None:
        """Ask the coordinator once for its tokens."""
        secret: str = self._call("token")
        self._revoked = frozenset(token.id for token in self._call("list_tokens") if token.revoked is not None)
        self._told_at = self._clock()
        self._verifier = ClusterTokens(secret, self._known)

    def _known(self) -> frozenset[str] | None:
        return self._revoked if self._clock() - self._told_at < STALE_SECONDS else None

    @asynccontextmanager
    async def kept_up(self) -> AsyncIterator[None]:
        """Ask again every ``REVOCATION_SECONDS`` while the context is open."""
        asking = asyncio.create_task(self._keep_asking())
        try:
            yield
        finally:
            asking.cancel()

    async def _keep_asking(self) -> None:
        while True:
            try:
                await asyncio.to_thread(self.ask)
            except Exception as error:  # noqa: BLE001 - the coordinator may be restarting; ``verify`` says so
                log.warning("The coordinator could not be asked for revoked tokens: %s", error)
            await asyncio.sleep(REVOCATION_SECONDS)
