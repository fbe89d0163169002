"""Tokens of clients and people: issued, saved, listed, revoked, verified by the secret; hosts learn of revocations."""

from __future__ import annotations

import hmac
import math
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.storage.checkpoint_storage import CheckpointStorage
from coordinator_actor.access_tokens import (
    ALL,
    AccessTokens,
    IssuedToken,
    MemoryTokenStore,
    Scope,
    is_admin,
    is_issued,
    scope_of,
    verified_id,
)
from coordinator_actor.coordinator import Coordinator
from coordinator_actor.exceptions import InvalidRequestError, InvalidTokenError
from coordinator_actor.messages import HostInfo, HostReport
from spark_bridge.exceptions import AccessDeniedError
from spark_bridge.queryable.server.tokens import ClusterTokens, Grant
from tests.effort import examples

SECRET = "5ec4e7" * 8


@dataclass
class World:
    now: float = 1_800_000_000.5
    store: MemoryTokenStore = field(default_factory=MemoryTokenStore)

    def tokens(self, secret: str = SECRET) -> AccessTokens:
        return AccessTokens(secret, self.store, lambda: self.now)


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def tokens(world: World) -> AccessTokens:
    return world.tokens()


def test_a_token_names_itself_and_is_verified_by_the_secret(world: World, tokens: AccessTokens) -> None:
    token = tokens.issue_token("dashboard", 60)
    (issued,) = tokens.list_tokens()
    assert token.startswith(f"ssr1.{issued.id}.1800000061.") and is_issued(token)
    assert verified_id(token, SECRET, (), world.now) == issued.id
    assert (issued.name, issued.created, issued.expires, issued.revoked) == (
        "dashboard",
        world.now,
        1_800_000_061,
        None,
    )


def test_a_token_of_an_administrator_is_recognized_by_its_signature(world: World, tokens: AccessTokens) -> None:
    act, look = tokens.issue_token("act", admin=True), tokens.issue_token("look")
    assert is_admin(act) and not is_admin(look) and is_issued(act)
    assert [t.admin for t in tokens.list_tokens()] == [True, False] == [t.admin for t in world.tokens().list_tokens()]
    assert verified_id(act, SECRET, (), world.now)
    with pytest.raises(InvalidTokenError, match="altered"):
        verified_id(look.replace("ssr1.", "ssa1."), SECRET, (), world.now)
    assert ClusterTokens(SECRET, lambda: ()).verify(act) == Grant(tokens.list_tokens()[0].id, True, admin=True)
    assert ClusterTokens(SECRET, lambda: ()).verify(look) == Grant(tokens.list_tokens()[1].id, True, admin=False)


def test_a_scope_is_in_the_token_and_signed(world: World, tokens: AccessTokens) -> None:
    scope = Scope(queries=("payments",), operators=("user_totals", "karten-\u00fcbersicht"))
    token = tokens.issue_token("model", 60, scope=scope)
    token_id = verified_id(token, SECRET, (), world.now)
    assert token.startswith(f"ssr2.{token_id}.1800000061.") and is_issued(token) and not is_admin(token)
    assert scope_of(token) == scope == tokens.list_tokens()[0].scope == world.tokens().list_tokens()[0].scope
    assert ClusterTokens(SECRET, lambda: ()).verify(token) == Grant(token_id, True, scope=scope)
    with pytest.raises(AccessDeniedError, match="expired"):
        ClusterTokens(SECRET, lambda: (), lambda: world.now + 61).verify(token)
    tokens.revoke_token("model")
    with pytest.raises(AccessDeniedError, match="revoked"):
        ClusterTokens(SECRET, tokens.revoked).verify(token)
    act = tokens.issue_token("act", admin=True, scope=Scope(queries=("payments",)))
    assert act.startswith("ssa2.") and is_admin(act) and verified_id(act, SECRET, (), world.now)

    wider = tokens.issue_token("wider", scope=Scope(queries=("payments", "orders")))
    mixed = ".".join([*token.split(".")[:3], wider.split(".")[3], token.split(".")[4]])
    for altered in (mixed, token.replace("ssr2.", "ssa2."), ".".join(token.split(".")[:3] + token.split(".")[4:])):
        with pytest.raises(InvalidTokenError, match=r"altered|malformed"):
            verified_id(altered, SECRET, (), world.now)
    assert verified_id(wider, SECRET, (), world.now) and scope_of(tokens.issue_token("all")) == ALL


def test_tokens_without_a_scope_look_as_before(world: World, tokens: AccessTokens) -> None:
    """As an earlier version issued and saved them."""
    secret = "a-secret"
    signed = "ssr1.0123456789abcdef.never"
    old = f"{signed}.{hmac.digest(secret.encode(), signed.encode(), 'sha256').hex()}"
    assert verified_id(old, secret, (), 0.0) == "0123456789abcdef" and scope_of(old).is_all
    world.store.content = b'[{"id":"01","name":"old","created":1.0,"expires":null,"revoked":null,"admin":true}]'
    assert world.tokens().list_tokens() == (IssuedToken("01", "old", 1.0, admin=True),)
    assert tokens.issue_token("new").startswith("ssr1.") and tokens.issue_token("act", admin=True).startswith("ssa1.")


@pytest.mark.parametrize(
    ("scope", "admin", "problem"),
    [
        (Scope(queries=("a", "")), False, "'' among the queries of the token is not a name; leave it out"),
        (Scope(operators=("two\nlines",)), False, "among the operators"),
        (Scope(views=("v", "v")), False, "The views of the token are v, v: name each only once"),
        (Scope(operators=tuple(f"operator {i}" for i in range(200))), False, "2,048 are allowed: name fewer, or issue"),
        (Scope(namespaces=("elsewhere",)), False, "namespace 'fraud' know tokens of this coordinator: name it too"),
        (Scope(operators=("totals",)), True, "An administrator acts on whole queries.*limit the token by queries"),
        (Scope(views=("v",)), True, "An administrator acts on whole queries"),
    ],
)
def test_scopes_that_cannot_be(world: World, scope: Scope, admin: bool, problem: str) -> None:
    tokens = AccessTokens(SECRET, world.store, lambda: world.now, "fraud")
    with pytest.raises(InvalidRequestError, match=problem):
        tokens.issue_token("a", scope=scope, admin=admin)
    assert tokens.list_tokens() == () and world.store.content is None


def test_a_token_ends_at_its_time(world: World, tokens: AccessTokens) -> None:
    soon, never = tokens.issue_token("soon", 60), tokens.issue_token("never")
    assert never.split(".")[2] == "never"
    assert verified_id(soon, SECRET, (), 1_800_000_060.9)
    with pytest.raises(InvalidTokenError, match="expired"):
        verified_id(soon, SECRET, (), 1_800_000_061.0)
    assert verified_id(never, SECRET, (), 1e12)
    world.now += 61
    assert [t.is_valid(world.now) for t in tokens.list_tokens()] == [False, True]


def test_the_registry_outlives_the_coordinator_and_has_no_tokens(world: World, tokens: AccessTokens) -> None:
    issued = [tokens.issue_token("a"), tokens.issue_token("b", 3600)]
    tokens.revoke_token("a")
    again = world.tokens()
    assert again.list_tokens() == tokens.list_tokens() and again.revoked() == tokens.revoked() != ()
    saved = world.store.content
    assert saved is not None
    for token in issued:
        assert token.rpartition(".")[2].encode() not in saved
    assert SECRET.encode() not in saved


def test_a_token_change_that_cannot_be_saved_has_no_effect(
    world: World, tokens: AccessTokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens.issue_token("a")

    def fail(content: bytes) -> None:
        raise OSError("no store")

    monkeypatch.setattr(world.store, "save", fail)
    with pytest.raises(OSError, match="no store"):
        tokens.revoke_token("a")
    with pytest.raises(OSError, match="no store"):
        tokens.issue_token("b")
    assert [t.name for t in tokens.list_tokens()] == ["a"] and tokens.revoked() == ()


def test_a_token_is_revoked_permanently_by_name_or_id(world: World, tokens: AccessTokens) -> None:
    first, second = tokens.issue_token("first"), tokens.issue_token("second")
    by_name = tokens.revoke_token("first")
    world.now += 10
    assert tokens.revoke_token(by_name.id) == by_name == tokens.revoke_token("first"), "again changes nothing"
    assert tokens.revoked() == (by_name.id,)
    with pytest.raises(InvalidTokenError, match=f"{by_name.id} has been revoked"):
        verified_id(first, SECRET, tokens.revoked(), world.now)
    assert verified_id(second, SECRET, tokens.revoked(), world.now)
    another = tokens.issue_token("first", 5)  # as both errors say
    assert verified_id(another, SECRET, tokens.revoked(), world.now)
    with pytest.raises(InvalidTokenError, match=r"has expired; ask for another one \(statestore token issue\)"):
        verified_id(another, SECRET, tokens.revoked(), world.now + 6)
    world.now += 6
    assert verified_id(tokens.issue_token("first"), SECRET, tokens.revoked(), world.now)
    with pytest.raises(InvalidRequestError, match=r"Token 'third' does not exist; tokens that are valid: 'second' \("):
        tokens.revoke_token("third")


def test_a_name_is_used_by_one_valid_token(world: World, tokens: AccessTokens) -> None:
    tokens.issue_token("a")
    with pytest.raises(InvalidRequestError, match="already"):
        tokens.issue_token("a")
    old = tokens.revoke_token("a")
    new = tokens.issue_token("a", 5)
    assert tokens.revoke_token("a").id == new.split(".")[1] != old.id
    tokens.issue_token("a", 5)
    world.now += 6
    tokens.issue_token("a")


def test_tokens_that_have_long_expired_are_forgotten(world: World, tokens: AccessTokens) -> None:
    tokens.issue_token("short", 60)
    tokens.revoke_token("short")
    tokens.issue_token("long")
    tokens.revoke_token("long")
    world.now += 40 * 86400
    tokens.issue_token("new")
    assert [t.name for t in tokens.list_tokens()] == ["long", "new"]
    assert len(tokens.revoked()) == 1, "one that never expires must be refused for ever"


@pytest.mark.parametrize("name", ["", "  ", "two\nlines", "x" * 101, "\x1b[31m"])
def test_names_that_cannot_be(tokens: AccessTokens, name: str) -> None:
    with pytest.raises(InvalidRequestError, match="not a valid name"):
        tokens.issue_token(name)


@pytest.mark.parametrize("seconds", [0, -1, 0.5, math.nan, math.inf, 1e12])
def test_times_that_cannot_be(tokens: AccessTokens, seconds: float) -> None:
    with pytest.raises(InvalidRequestError, match="expire"):
        tokens.issue_token("a", seconds)


@settings(deadline=None, max_examples=examples(200))
@given(st.integers(0, 200), st.characters(exclude_categories=["Cs"]) | st.just(""))
def test_an_altered_token_is_refused(at: int, other: str) -> None:
    token = World().tokens().issue_token("a", 60, scope=Scope(queries=("q",)) if at % 2 else ALL)
    at %= len(token)
    if token[at] == other:
        return
    with pytest.raises(InvalidTokenError, match=r"malformed|unknown"):
        verified_id(token[:at] + other + token[at + 1 :], SECRET, (), 0.0)


@settings(deadline=None)
@given(st.text() | st.lists(st.text(max_size=5), max_size=6).map(".".join).map("ssr1.".__add__))
def test_anything_but_a_token_is_refused(text: str) -> None:
    with pytest.raises(InvalidTokenError, match=r"malformed|unknown"):
        verified_id(text, SECRET, (), 0.0)


def test_a_client_without_a_signed_token_learns_nothing_of_ids(world: World, tokens: AccessTokens) -> None:
    token = tokens.issue_token("a", 60)
    token_id = tokens.revoke_token("a").id
    forged = f"ssr1.{token_id}.never.{'0' * 64}"
    with pytest.raises(InvalidTokenError, match="unknown") as caught:
        verified_id(forged, SECRET, (token_id,), world.now)
    assert token_id not in str(caught.value)
    with pytest.raises(InvalidTokenError, match="unknown"):
        verified_id(token, "another secret", (), world.now)


def test_hosts_learn_of_revocations_with_every_heartbeat(world: World, tmp_path: Path) -> None:
    coordinator = Coordinator(lambda: world.now, CheckpointStorage.open, tokens=world.tokens())
    assert coordinator.heartbeat_host("h", "a").revoked_tokens == ()
    coordinator.tokens.issue_token("a")
    gone = coordinator.tokens.revoke_token("a").id
    assert coordinator.heartbeat_host("h", "a").revoked_tokens == (gone,), "also a host that has yet to register"
    coordinator.register_host(HostInfo("h", "a", "grpc://127.0.0.1:1", "node", "s"), HostReport())
    orders = coordinator.heartbeat_host("h", "a")
    assert orders.known and orders.revoked_tokens == (gone,)
