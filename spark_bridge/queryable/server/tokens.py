"""The token check: a client without a valid token gets no answer.

There are two kinds of tokens. The cluster's secret token allows everything on every port. The coordinator gives it to
every process of the Ray cluster, because Ray's namespaces do not separate processes. Read-only tokens
(``coordinator_actor.access_tokens``) are for clients outside; they are valid for the query port, which only reads, and
for HTTP. Those of administrators are treated the same by both, and may act on the page. A token with a scope is for a
part of the namespace: ``ScopedReads`` of hosts and ``scoped_client`` of HTTP and the page limit it.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from coordinator_actor.access_tokens import ALL, Scope, is_admin, is_issued, scope_of, verified_id
from coordinator_actor.exceptions import InvalidTokenError
from spark_bridge.exceptions import AccessDeniedError, HostUnavailableError


@dataclass(frozen=True)
class Grant:
    """The rights of a token.

    ``name`` is ``cluster``, or the id of a token as ``statestore token list`` shows it. ``read_only`` is for the
    cluster's ports; ``admin`` may act on the page. ``scope`` is the part of the namespace that it is for.
    """

    name: str
    read_only: bool
    admin: bool = False
    scope: Scope = ALL


MAX_TOKEN = 4096
"""Longer tokens are refused unread."""
CLUSTER_GRANT = Grant("cluster", read_only=False, admin=True)


class TokenVerifier(Protocol):
    """Checks tokens."""

    def verify(self, token: str) -> Grant:
        """Return the rights that a token has now. Raises ``AccessDeniedError``.

        The check takes a few microseconds, so a connection can be checked again while it is used, and a revocation ends
        it.
        """


@dataclass(frozen=True, repr=False)
class ClusterTokens:
    """Checks the tokens of one cluster: its secret, and read-only tokens signed with the secret.

    ``revoked`` returns the ids of revoked tokens, None while they are not known; ``clock`` returns seconds since 1970.
    Tokens for certain namespaces are accepted if ``namespace`` is one of them.
    """

    _secret: str
    _revoked: Callable[[], Collection[str] | None]
    _clock: Callable[[], float] = time.time
    namespace: str = ""

    def verify(self, token: str) -> Grant:
        """See ``TokenVerifier``. Raises also ``HostUnavailableError`` if revocations are not known: ask again."""
        if not token:
            raise AccessDeniedError(
                "No token was given, and without one nothing is answered: a process attached to the Ray cluster gets "
                "one by itself, others need token= or STATESTORE_TOKEN (statestore token issue)."
            )
        if not is_issued(token):
            if not hmac.compare_digest(token.encode(errors="replace"), self._secret.encode()):
                raise AccessDeniedError("The token is unknown: it belongs to another cluster, or is not a token.")
            return CLUSTER_GRANT
        revoked = self._revoked()
        if revoked is None:
            raise HostUnavailableError(
                "It is not known here at the moment which tokens have been revoked; ask again soon."
            )
        try:
            name = verified_id(token, self._secret, revoked, self._clock())
        except InvalidTokenError as error:
            raise AccessDeniedError(str(error)) from error
        scope = scope_of(token)
        if scope.namespaces and self.namespace not in scope.namespaces:
            raise AccessDeniedError(
                f"The token {name} is for hosts of {', '.join(scope.namespaces)}, and this is {self.namespace!r}; ask "
                "for another one (statestore token issue)."
            )
        return Grant(name, read_only=True, admin=is_admin(token), scope=scope)


# Token check of the HTTP application, by the tokens that the coordinator has issued and revoked.


log = logging.getLogger(__name__)

REVOCATION_SECONDS = 2.0
"""Seconds after which a replica asks again which tokens have been revoked."""
STALE_SECONDS = 60.0
"""A replica that has had no answer for this many seconds accepts read-only tokens no more."""


@dataclass(eq=False, repr=False)
class CoordinatorTokens:
    """Verifies callers' tokens (a ``TokenVerifier``), and asks the coordinator which tokens have been revoked.

    ``call`` calls a method of the coordinator by name, and blocks until it returns. ``namespace`` is the coordinator's.
    """

    _call: Callable[[str], Any]
    _clock: Callable[[], float] = time.monotonic
    namespace: str = ""
    _verifier: ClusterTokens | None = None
    _revoked: frozenset[str] = frozenset()
    _told_at: float = 0.0

    def verify(self, token: str) -> Grant:
        """See ``TokenVerifier``. Raises ``HostUnavailableError`` until the coordinator has been reached."""
        if self._verifier is None:
            if not token:
                raise AccessDeniedError("No token was given, and without one nothing is answered.")
            raise HostUnavailableError(
                "This application has not reached the coordinator yet, and cannot verify tokens."
            )
        return self._verifier.verify(token)

    def ask(self) -> None:
        secret: str = self._call("token")
        self._revoked = frozenset(token.id for token in self._call("list_tokens") if token.revoked is not None)
        self._told_at = self._clock()
        self._verifier = ClusterTokens(secret, self._known, namespace=self.namespace)

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
            except Exception as error:  # noqa: BLE001 - the coordinator may be restarting; ``verify`` reports it
                log.warning("The coordinator could not be asked for revoked tokens: %s", error)
            await asyncio.sleep(REVOCATION_SECONDS)
