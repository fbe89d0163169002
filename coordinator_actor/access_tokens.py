"""Tokens for clients outside the cluster: issued, listed, revoked, verified.

A read-only token is ``ssr1.<id>.<expiry>.<signature>``. An administrator's token, ``ssa1....``, also allows actions on
the page, such as triggering a savepoint; to hosts it is a read-only token. The expiry is in seconds since 1970, or
``never``. The signature is HMAC-SHA256 with the cluster's secret. So every process that has the secret, as every host
does, verifies a token by itself, and needs only the ids of the revoked tokens from the coordinator. The registry does
not keep the tokens themselves: a lost token cannot be shown again.
"""

from __future__ import annotations

import hmac
import math
import secrets
import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from backends.decoders import json_decoder
from coordinator_actor.exceptions import InvalidRequestError, InvalidTokenError
from coordinator_actor.messages import WIRE_VERSION

TOKEN_PREFIX = "ssr1"
ADMIN_PREFIX = "ssa1"
NEVER = "never"
MAX_NAME = 100
MAX_SECONDS = 36525 * 86400.0
EXPIRED_TOKEN_SECONDS = 30 * 86400.0
"""How long an expired token is still listed."""


class TokenStore(Protocol):
    """Keeps the registry of tokens for a restarted coordinator."""

    def load(self) -> bytes | None:
        """Return the content that was saved last; None if none was."""

    def save(self, content: bytes) -> None:
        """Keep ``content``. It is durable when this returns."""


@dataclass
class MemoryTokenStore:
    """Keeps the registry as long as the object lives: for tests, and for coordinators that are never restarted."""

    content: bytes | None = None

    def load(self) -> bytes | None:
        return self.content

    def save(self, content: bytes) -> None:
        self.content = content


class IssuedToken(Struct, frozen=True):
    """One token, without the token itself. Times are in seconds since 1970; ``expires`` None means never."""

    id: str
    name: str
    created: float
    expires: int | None = None
    revoked: float | None = None
    admin: bool = False

    def is_valid(self, now: float) -> bool:
        """Return whether the token is neither revoked nor expired."""
        return self.revoked is None and (self.expires is None or now < self.expires)


class AccessTokens:
    """The read-only tokens of a cluster. Safe from any thread. Changes are saved before they are answered.

    ``secret`` signs the tokens. ``clock`` gives seconds since 1970. The public methods answer messages of
    ``CoordinatorPort``, except ``revoked``.
    """

    def __init__(self, secret: str, store: TokenStore, clock: Callable[[], float]) -> None:
        self._secret = secret
        self._store = store
        self._clock = clock
        self._lock = threading.Lock()
        saved = store.load()
        tokens = [] if saved is None else json_decoder(list[IssuedToken]).decode(saved)
        self._tokens = {token.id: token for token in tokens}
        self._revoked = _revoked(tokens)

    def token(self) -> str:
        return self._secret

    def wire_version(self) -> int:
        return WIRE_VERSION

    def issue_token(self, name: str, expires_in: float | None = None, *, admin: bool = False) -> str:
        if not name.isprintable() or not name.strip() or len(name) > MAX_NAME:
            raise InvalidRequestError(
                f"{name!r} is not a valid name of a token: it needs 1 to {MAX_NAME} printable characters."
            )
        if expires_in is not None and not 1 <= expires_in <= MAX_SECONDS:
            raise InvalidRequestError(
                f"A token cannot expire in {expires_in} s; it must be 1 s to {MAX_SECONDS:.0f} s."
            )
        with self._lock:
            now = self._clock()
            for token in self._tokens.values():
                if token.name == name and token.is_valid(now):
                    raise InvalidRequestError(
                        f"A token {name!r} already exists ({token.id}); revoke it first, or choose another name."
                    )
            issued = IssuedToken(
                secrets.token_hex(8),
                name,
                now,
                None if expires_in is None else math.ceil(now + expires_in),
                admin=admin,
            )
            kept = (t for t in self._tokens.values() if t.expires is None or now - t.expires < EXPIRED_TOKEN_SECONDS)
            self._save({**{t.id: t for t in kept}, issued.id: issued})
        return _signed(issued, self._secret)

    def list_tokens(self) -> tuple[IssuedToken, ...]:
        with self._lock:
            return tuple(sorted(self._tokens.values(), key=lambda token: token.created))

    def revoke_token(self, id_or_name: str) -> IssuedToken:
        with self._lock:
            now = self._clock()
            token = self._tokens.get(id_or_name)
            named = [t for t in self._tokens.values() if t.name == id_or_name]
            # Of several tokens with one name at most one is still valid.
            token = token or next((t for t in named if t.is_valid(now)), named[-1] if named else None)
            if token is None:
                valid = ", ".join(f"{t.name!r} ({t.id})" for t in self._tokens.values() if t.is_valid(now)) or "none"
                raise InvalidRequestError(f"Token {id_or_name!r} does not exist; tokens that are valid: {valid}.")
            if token.revoked is None:
                token = replace(token, revoked=now)
                self._save({**self._tokens, token.id: token})
            return token

    def revoked(self) -> tuple[str, ...]:
        """Return the ids that hosts must reject despite a valid signature. Needs no lock."""
        return self._revoked  # no lock: its holder may wait for the store, and every heartbeat reads this

    def _save(self, tokens: dict[str, IssuedToken]) -> None:
        self._store.save(msgspec.json.encode(list(tokens.values())))
        self._tokens = tokens
        self._revoked = _revoked(tokens.values())


def is_issued(token: str) -> bool:
    """Return whether the token is, or pretends to be, one that was issued."""
    return token.startswith((f"{TOKEN_PREFIX}.", f"{ADMIN_PREFIX}."))


def is_admin(token: str) -> bool:
    """Return whether an issued token that was verified is one of an administrator."""
    return token.startswith(f"{ADMIN_PREFIX}.")


def verified_id(token: str, secret: str, revoked: Collection[str], now: float) -> str:
    """Return the id of an issued token of this cluster that is valid at ``now`` (seconds since 1970).

    Raises ``InvalidTokenError``. Only the holder of a rightly signed token learns whether it was revoked or has
    expired.
    """
    signed, _, signature = token.rpartition(".")
    prefix, *parts = signed.split(".")
    if prefix not in (TOKEN_PREFIX, ADMIN_PREFIX) or len(parts) != 2:
        raise InvalidTokenError(
            "The token is malformed: a read-only token looks like ssr1.<id>.<expiry>.<signature>. Was it cut short "
            "when it was copied?"
        )
    if not hmac.compare_digest(signature.encode(), _signature(signed, secret).encode()):
        raise InvalidTokenError("The token is unknown: it was issued by another cluster, or altered.")
    token_id, expiry = parts
    if token_id in revoked:
        raise InvalidTokenError(f"The token {token_id} has been revoked; ask for another one (statestore token issue).")
    if expiry != NEVER and now >= int(expiry):
        raise InvalidTokenError(f"The token {token_id} has expired; ask for another one (statestore token issue).")
    return token_id


def _revoked(tokens: Iterable[IssuedToken]) -> tuple[str, ...]:
    return tuple(token.id for token in tokens if token.revoked is not None)


def _signed(token: IssuedToken, secret: str) -> str:
    prefix = ADMIN_PREFIX if token.admin else TOKEN_PREFIX
    signed = f"{prefix}.{token.id}.{NEVER if token.expires is None else token.expires}"
    return f"{signed}.{_signature(signed, secret)}"


def _signature(signed: str, secret: str) -> str:
    return hmac.digest(secret.encode(), signed.encode(), "sha256").hex()
