"""The token check: a client without a valid token gets no answer.

There are two kinds of tokens. The cluster's secret token allows everything on every port. The coordinator gives it to
every process of the Ray cluster, because Ray's namespaces are no boundary between processes. Read-only tokens
(``coordinator_actor.access_tokens``) are for clients outside; they are valid for the query port, which only reads, and
for HTTP. Those of administrators are the same to both, and may act on the page.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from coordinator_actor.access_tokens import is_admin, is_issued, verified_id
from coordinator_actor.exceptions import InvalidTokenError
from spark_bridge.exceptions import AccessDeniedError, HostUnavailableError


@dataclass(frozen=True)
class Grant:
    """The rights of a token.

    ``name`` is ``cluster``, or the id of a token as ``statestore token list`` shows it. ``read_only`` is for the
    cluster's ports; ``admin`` may act on the page.
    """

    name: str
    read_only: bool
    admin: bool = False


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


class ClusterTokens:
    """Checks the tokens of one cluster: its secret, and read-only tokens signed with the secret.

    ``revoked`` returns the ids of revoked tokens, None while they are not known; ``clock`` returns seconds since 1970.
    """

    def __init__(
        self, secret: str, revoked: Callable[[], Collection[str] | None], clock: Callable[[], float] = time.time
    ) -> None:
        self._secret = secret
        self._encoded = secret.encode()
        self._revoked = revoked
        self._clock = clock

    def verify(self, token: str) -> Grant:
        """See ``TokenVerifier``.

        Raises also ``HostUnavailableError`` if revocations are not known; the remedy is to ask again.
        """
        if not token:
            raise AccessDeniedError(
                "No token was given, and without one nothing is answered: a process attached to the Ray cluster gets "
                "one by itself, "
                "others need token= or STATESTORE_TOKEN (statestore token issue)."
            )
        if not is_issued(token):
            if not hmac.compare_digest(token.encode(errors="replace"), self._encoded):
                raise AccessDeniedError("The token is unknown: it is of another cluster, or none at all.")
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
        return Grant(name, read_only=True, admin=is_admin(token))
