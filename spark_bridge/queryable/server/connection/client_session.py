"""The client of a connection: whether its token still allows requests, and whether the client is still there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spark_bridge.queryable.server.connection.framed_socket import ClientGoneError, FramedSocket

if TYPE_CHECKING:
    from spark_bridge.queryable.server.tokens.token_verifier import TokenVerifier

TOKEN_SECONDS = 1.0
"""A token that was checked longer ago is checked again: a revoked token ends its connections by the next request or
rows.
"""


class ClientSession:
    """The session of one client. For the thread of its connection. Times are of ``time.monotonic``."""

    def __init__(self, frames: FramedSocket, tokens: TokenVerifier) -> None:
        self._frames = frames
        self._tokens = tokens
        self._token = ""
        self._checked_at = 0.0

    def authenticate(self, token: str, now: float) -> None:
        """Check the client's token, and keep it. Raises ``AccessDeniedError``."""
        self._token = token
        self._verify(now)

    def check_token(self, now: float) -> None:
        """Check the token again if the last check is ``TOKEN_SECONDS`` old. Raises ``AccessDeniedError``."""
        if now - self._checked_at > TOKEN_SECONDS:
            self._verify(now)

    def _verify(self, now: float) -> None:
        self._tokens.verify(self._token)
        self._checked_at = now

    def check_client(self, now: float) -> None:
        """Check that the client is connected and its token valid.

        Raises ``ClientGoneError`` or ``AccessDeniedError``.
        """
        if self._frames.is_closed_by_client():
            raise ClientGoneError("The client has left.")
        self.check_token(now)
