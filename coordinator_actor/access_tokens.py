"""Tokens for clients outside the cluster: issued, listed, revoked, verified.

A read-only token is ``ssr1.<id>.<expiry>.<signature>``. An administrator's token, ``ssa1....``, also allows actions on
the page, such as triggering a savepoint; to hosts it is a read-only token. A token with a scope begins with ``ssr2`` or
``ssa2``, and has the scope before the signature, as JSON in base64. The expiry is in seconds since 1970, or ``never``.
The signature is HMAC-SHA256 with the cluster's secret. So every process that has the secret, as every host does,
verifies a token and its scope by itself, and needs only the ids of the revoked tokens from the coordinator. The
registry does not keep the tokens themselves: a lost token cannot be shown again.
"""

from __future__ import annotations

import base64
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
SCOPED_PREFIX = "ssr2"
SCOPED_ADMIN_PREFIX = "ssa2"
_PREFIXES = (TOKEN_PREFIX, ADMIN_PREFIX, SCOPED_PREFIX, SCOPED_ADMIN_PREFIX)
NEVER = "never"
MAX_NAME = 100
MAX_SCOPED_TOKEN = 2048
"""The most characters of a token with a scope: it must fit into a cookie, and into the first message to a host."""
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


class Scope(Struct, frozen=True, omit_defaults=True):
    """The part of a cluster that a token is for. A field without names sets no limit; the limits hold together.

    ``namespaces`` are Ray namespaces. ``queries`` are names, query ids or run ids. ``operators`` and ``views`` are
    names. A token that names operators or views is for those alone: one for views sees no operator, and one for
    operators no view. One that names queries sees no view, unless it names the view too. A further field needs another
    prefix of tokens: older hosts would ignore it.
    """

    namespaces: tuple[str, ...] = ()
    queries: tuple[str, ...] = ()
    operators: tuple[str, ...] = ()
    views: tuple[str, ...] = ()

    @property
    def is_all(self) -> bool:
        """Whether all operators and views of the namespaces may be seen."""
        return not (self.queries or self.operators or self.views)

    @property
    def has_whole_queries(self) -> bool:
        """Whether all of each query in the scope may be seen, as a savepoint has it."""
        return not (self.operators or self.views)

    def allows_query(self, *names: str | None) -> bool:
        """Return whether a query may be seen, by its name, query id and run id."""
        return not self.queries or any(name in self.queries for name in names)

    def allows_operator(self, operator: str) -> bool:
        """Return whether operators of that name may be read, in a query that may be seen."""
        return operator in self.operators or self.has_whole_queries

    def allows(self, operator: str, *queries: str | None) -> bool:
        """Return whether an operator of a query may be read. ``queries`` are the names of the query."""
        return self.allows_operator(operator) and self.allows_query(*queries)

    def allows_view(self, view: str) -> bool:
        return view in self.views or self.is_all

    def in_words(self) -> str:
        """Return the limits for people: "" if there are none."""
        parts = ((name, getattr(self, name)) for name in self.__struct_fields__)
        return "; ".join(f"{name}: {', '.join(names)}" for name, names in parts if names)


ALL = Scope()
"""The scope of tokens without one."""


class IssuedToken(Struct, frozen=True):
    """One token, without the token itself. Times are in seconds since 1970; ``expires`` None means never."""

    id: str
    name: str
    created: float
    expires: int | None = None
    revoked: float | None = None
    admin: bool = False
    scope: Scope = ALL

    def is_valid(self, now: float) -> bool:
        """Return whether the token is neither revoked nor expired."""
        return self.revoked is None and (self.expires is None or now < self.expires)


class AccessTokens:
    """The read-only tokens of a cluster. Safe from any thread. Changes are saved before they are answered.

    ``secret`` signs the tokens. ``clock`` gives seconds since 1970. ``namespace`` is the coordinator's, "" if it has
    none. The public methods answer messages of ``CoordinatorPort``, except ``revoked``.
    """

    def __init__(self, secret: str, store: TokenStore, clock: Callable[[], float], namespace: str = "") -> None:
        self._namespace = namespace
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

    def issue_token(
        self, name: str, expires_in: float | None = None, *, admin: bool = False, scope: Scope = ALL
    ) -> str:
        if not name.isprintable() or not name.strip() or len(name) > MAX_NAME:
            raise InvalidRequestError(
                f"{name!r} is not a valid name of a token: it needs 1 to {MAX_NAME} printable characters."
            )
        if expires_in is not None and not 1 <= expires_in <= MAX_SECONDS:
            raise InvalidRequestError(
                f"A token cannot expire in {expires_in} s; it must be 1 s to {MAX_SECONDS:.0f} s."
            )
        self._check(scope, admin)
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
                scope=scope,
            )
            token_text = _signed(issued, self._secret)
            if scope != ALL and len(token_text) > MAX_SCOPED_TOKEN:
                raise InvalidRequestError(
                    f"The token would have {len(token_text):,} characters, because of the names in its scope, and "
                    f"{MAX_SCOPED_TOKEN:,} are allowed: name fewer, or issue several tokens."
                )
            kept = (t for t in self._tokens.values() if t.expires is None or now - t.expires < EXPIRED_TOKEN_SECONDS)
            self._save({**{t.id: t for t in kept}, issued.id: issued})
        return token_text

    def _check(self, scope: Scope, admin: bool) -> None:
        """Raise ``InvalidRequestError`` for a scope that no token can have."""
        for kind in scope.__struct_fields__:
            names: tuple[str, ...] = getattr(scope, kind)
            for named in names:
                if not named.strip() or not named.isprintable():
                    raise InvalidRequestError(
                        f"{named!r} among the {kind} of the token is not a name; leave it out, or write the name."
                    )
            if len(set(names)) != len(names):
                raise InvalidRequestError(f"The {kind} of the token are {', '.join(names)}: name each only once.")
        if scope.namespaces and self._namespace not in scope.namespaces:
            raise InvalidRequestError(
                f"The token is for the namespaces {', '.join(scope.namespaces)}, and only hosts of namespace "
                f"{self._namespace!r} know tokens of this coordinator: name it too, or ask that coordinator."
            )
        if admin and not scope.has_whole_queries:
            raise InvalidRequestError(
                "An administrator acts on whole queries, as by savepoints: limit the token by queries, not by "
                "operators or views, or issue a read-only one."
            )

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
    return token.startswith(tuple(f"{prefix}." for prefix in _PREFIXES))


def is_admin(token: str) -> bool:
    """Return whether an issued token that was verified is one of an administrator."""
    return token.startswith((f"{ADMIN_PREFIX}.", f"{SCOPED_ADMIN_PREFIX}."))


def scope_of(token: str) -> Scope:
    """Return the scope of an issued token that was verified."""
    if not token.startswith((f"{SCOPED_PREFIX}.", f"{SCOPED_ADMIN_PREFIX}.")):
        return ALL
    encoded = token.split(".")[3]
    return _decode_scope(base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)))


def verified_id(token: str, secret: str, revoked: Collection[str], now: float) -> str:
    """Return the id of an issued token of this cluster that is valid at ``now`` (seconds since 1970).

    Raises ``InvalidTokenError``. Only the holder of a rightly signed token learns whether it was revoked or has
    expired.
    """
    signed, _, signature = token.rpartition(".")
    prefix, *parts = signed.split(".")
    if prefix not in _PREFIXES or len(parts) != (2 if prefix in (TOKEN_PREFIX, ADMIN_PREFIX) else 3):
        raise InvalidTokenError(
            "The token is malformed: a read-only token looks like ssr1.<id>.<expiry>.<signature>, or like "
            "ssr2.<id>.<expiry>.<scope>.<signature>. Was it cut short when it was copied?"
        )
    if not hmac.compare_digest(signature.encode(), _signature(signed, secret).encode()):
        raise InvalidTokenError(
            "The token is unknown: it was issued by another cluster, or before this one was started again, or altered. "
            "Issue a new one in this cluster (statestore token issue)."
        )
    token_id, expiry = parts[:2]
    if token_id in revoked:
        raise InvalidTokenError(f"The token {token_id} has been revoked; ask for another one (statestore token issue).")
    if expiry != NEVER and now >= int(expiry):
        raise InvalidTokenError(f"The token {token_id} has expired; ask for another one (statestore token issue).")
    return token_id


_decode_scope = json_decoder(Scope).decode


def _revoked(tokens: Iterable[IssuedToken]) -> tuple[str, ...]:
    return tuple(token.id for token in tokens if token.revoked is not None)


def _signed(token: IssuedToken, secret: str) -> str:
    old_and_scoped = (ADMIN_PREFIX, SCOPED_ADMIN_PREFIX) if token.admin else (TOKEN_PREFIX, SCOPED_PREFIX)
    signed = f"{old_and_scoped[token.scope != ALL]}.{token.id}.{NEVER if token.expires is None else token.expires}"
    if token.scope != ALL:
        signed += "." + base64.urlsafe_b64encode(msgspec.json.encode(token.scope)).rstrip(b"=").decode()
    return f"{signed}.{_signature(signed, secret)}"


def _signature(signed: str, secret: str) -> str:
    return hmac.digest(secret.encode(), signed.encode(), "sha256").hex()
