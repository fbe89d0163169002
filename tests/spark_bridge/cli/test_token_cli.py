"""``statestore token``: its arguments and output, and that tokens outlive the coordinator that issued them."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray
import typer
from pyspark.sql import SparkSession
from rich.console import Console

from coordinator_actor.access_tokens import (
    AccessTokens,
    IssuedToken,
    MemoryTokenStore,
    Scope,
    scope_of,
    verified_id,
)
from coordinator_actor.actor import get_or_create_coordinator
from coordinator_actor.exceptions import InvalidTokenError
from coordinator_actor.messages import OperatorSpec, RunningOperator
from spark_bridge.cli import cluster_commands
from spark_bridge.cli.cluster_commands import rendered, seconds_of
from spark_bridge.cli.main import app
from tests.command_line import CliRunner
from tests.patience import HANG, PATIENCE
from tests.spark_bridge.conftest import wait_until


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("45 minutes", 2700), ("12h", 43_200), ("1d2h", 93_600), (" 2w", 1_209_600)]
)
def test_times(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "30", "d", "0s", "-1d", "1d 2", "never"])
def test_invalid_times_are_rejected(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="such as 30d"):
        seconds_of(text)


def test_tokens_are_listed_with_their_state() -> None:
    tokens = (
        IssuedToken("01", "old", 0.0, 100),
        IssuedToken("02", "gone", 0.0, None, 5.0),
        IssuedToken("03", "dashboard", 86_400.0, 1_800_000_000),
        IssuedToken("04", "for ever", 86_400.0, admin=True),
        IssuedToken("05", "model", 0.0, scope=Scope(queries=("payments", "q2"), views=("card_fraud",))),
    )
    out = io.StringIO()
    Console(file=out, width=160).print(rendered(tokens, 1_700_000_000.0))
    lines = [line.split() for line in out.getvalue().splitlines()]
    assert lines[0] == ["name", "id", "kind", "scope", "created", "expires", "state"]
    assert [line[-1] for line in lines[1:]] == ["expired", "revoked", "valid", "valid", "valid"]
    created, expires = ("1970-01-02", "00:00:00", "UTC"), ("2027-01-15", "08:00:00", "UTC")
    assert lines[3] == ["dashboard", "03", "read-only", "everything", *created, *expires, "valid"]
    assert lines[4][-2] == "never" and lines[4][3] == "admin"
    assert " ".join(lines[5]).startswith("model 05 read-only queries: payments, q2; views: card_fraud 1970-01-01")


def test_names_that_look_like_markup_are_shown_as_they_are() -> None:
    names = ("a[/b]", "[red]x", "back\\", "[link=http://x]")
    out = io.StringIO()
    Console(file=out, width=160).print(rendered(tuple(IssuedToken("01", n, 0.0, None) for n in names), 1.0))
    assert tuple(line.split()[0] for line in out.getvalue().splitlines()[1:]) == names


def test_a_name_is_needed() -> None:
    assert CliRunner().invoke(app, ["token", "issue"]).exit_code == 2


def test_a_token_is_issued_with_the_scope_of_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = AccessTokens("secret", MemoryTokenStore(), lambda: 0.0, "fraud")
    asked: list[dict[str, Any]] = []

    def ask(address: Any, namespace: str, coordinator: str, method: str, *args: Any, **named: Any) -> Any:
        if method == "operators":
            return (RunningOperator("q2", "run", "orders", OperatorSpec("spent", 1, ""), 1, 0, 0),)
        asked.append(named)
        return getattr(tokens, method)(*args, **named)

    monkeypatch.setattr(cluster_commands, "_ask", ask)
    options = [
        "--query",
        "payments",
        "--query",
        "q2",
        "--operator",
        "totals",
        "--view",
        "v",
        "--only-namespace",
        "fraud",
    ]
    issued = CliRunner().invoke(app, ["token", "issue", "--name", "model", *options])
    scope = Scope(("fraud",), ("payments", "q2"), ("totals",), ("v",))
    assert asked == [{"scope": scope}] and scope_of(issued.stdout.strip()) == scope
    assert "for namespaces: fraud; queries: payments, q2; operators: totals; views: v alone" in issued.stderr
    assert "Not running now: query 'payments', operator 'totals'. If a name is misspelled" in issued.stderr
    assert "Not running" not in CliRunner().invoke(app, ["token", "issue", "--name", "all"]).stderr
    assert asked[1:] == [{}], "a coordinator of an earlier version issues tokens without a scope"
    listed = json.loads(CliRunner().invoke(app, ["token", "list", "--json"]).stdout)
    assert [token["scope"].get("operators") for token in listed] == [["totals"], None]


# The program as it is installed, but for how long it waits for the coordinator.
PROGRAM = f"""
import runpy, sys
from spark_bridge.cli import cluster_commands
cluster_commands.TOKEN_ANSWER_SECONDS = {PATIENCE}
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_cli(*args: str) -> subprocess.CompletedProcess[str]:
    program = str(Path(sys.executable).with_name("statestore"))
    address = ray.get_runtime_context().gcs_address
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, program, "token", *args, "--address", address, "--coordinator", "of-tokens"],
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG,
    )


def ask(method: str, *args: object) -> Any:
    actor = ray.get_actor("of-tokens", namespace="statestore")
    return ray.get(getattr(actor, method).remote(*args), timeout=PATIENCE)


@pytest.mark.ray
@pytest.mark.spark
@pytest.mark.thorough  # otherwise: the tests above, and tests/coordinator_actor/handlers
def test_tokens_outlive_the_coordinator(spark: SparkSession) -> None:
    actor = get_or_create_coordinator(name="of-tokens")
    secret = ask("token")
    issued = run_cli("issue", "--name", "dashboard", "--expires", "30d")
    assert issued.returncode == 0, issued.stderr
    token = issued.stdout.removesuffix("\n")
    token_id = verified_id(token, secret, (), 0.0)
    assert "read-only token 'dashboard', valid for 30d" in issued.stderr and token not in issued.stderr
    refused = run_cli("issue", "--name", "model", "--only-namespace", "elsewhere")
    assert refused.returncode == 2 and "hosts of namespace 'statestore' know tokens" in refused.stderr
    model = run_cli(
        "issue", "--name", "model", "--query", "clicks", "--only-namespace", "statestore", "--expires", "1s"
    )
    assert scope_of(model.stdout.strip()) == Scope(("statestore",), ("clicks",)), model.stderr
    run_cli("revoke", "model")

    os.kill(ask("describe")["pid"], signal.SIGKILL)
    assert wait_for_tokens()[:1] == [token_id]
    assert ask("token") == secret
    revoked = run_cli("revoke", "dashboard")
    assert revoked.returncode == 0 and not revoked.stdout and token_id in revoked.stderr

    # Not one that Ray starts again, but another one under that name, as with the next stream.
    ray.kill(actor, no_restart=True)
    wait_until_gone()
    get_or_create_coordinator(name="of-tokens")
    assert ask("token") == secret
    orders = ask("heartbeat_host", "nobody", "a")
    assert orders.revoked_tokens[:1] == (token_id,)
    with pytest.raises(InvalidTokenError, match="revoked"):
        verified_id(token, secret, orders.revoked_tokens, 0.0)
    assert [t.revoked is None for t in ask("list_tokens")] == [False, False]
    ray.kill(ray.get_actor("of-tokens", namespace="statestore"), no_restart=True)


def wait_for_tokens() -> list[str]:
    """The ids of the tokens, once Ray has started the coordinator again."""

    def ids() -> list[str] | None:
        try:
            return [t.id for t in ask("list_tokens")]
        except ray.exceptions.RayError:
            return None

    found: list[str] = wait_until(ids)
    return found


def wait_until_gone() -> None:
    def is_gone() -> bool:
        try:
            ray.get_actor("of-tokens", namespace="statestore")
        except ValueError:
            return True
        return False

    wait_until(is_gone)
