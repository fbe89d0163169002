"""``statestore token ...``: tokens for clients and people outside the Ray cluster."""

from __future__ import annotations

import re
from datetime import datetime, timezone
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from coordinator_actor.access_tokens import IssuedToken
from coordinator_actor.coordinator_conf import COORDINATOR_NAME, NAMESPACE
from coordinator_actor.exceptions import CoordinatorError
from spark_bridge.cli.joined_ray import joined_ray
from spark_bridge.cli.output import AsJson, json_line, show
from spark_bridge.cli.sources import Address, CoordinatorName, Namespace
from spark_bridge.exceptions import EnvironmentProblemError, SparkBridgeError

TOKEN_ANSWER_SECONDS = 10.0
UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_DURATION = re.compile(r"(\d+)([smhdw])")

app = typer.Typer(
    name="token",
    help="Issue, list and revoke tokens of clients and people outside.",
    no_args_is_help=True,
)


def seconds_of(duration: str) -> float:
    """Return the seconds of ``90s``, ``45m``, ``12h``, ``30d`` or ``2w``. Raises ``typer.BadParameter``."""
    found = _DURATION.fullmatch(duration.strip())
    if found is None:
        raise typer.BadParameter(f"{duration!r} is no time; write a number and s, m, h, d or w, such as 30d")
    return float(int(found[1]) * UNIT_SECONDS[found[2]])


@app.command()
def issue(
    name: Annotated[str, typer.Option("--name", help="What to call it: who will use it.")],
    expires: Annotated[
        str | None, typer.Option("--expires", help="When it ends by itself, such as 12h, 30d, 2w; by default never.")
    ] = None,
    admin: Annotated[
        bool, typer.Option("--admin", help="It may also act on the page, such as trigger a savepoint.")
    ] = False,
    address: Address = None,
    namespace: Namespace = NAMESPACE,
    coordinator: CoordinatorName = COORDINATOR_NAME,
    as_json: AsJson = False,
) -> None:
    """Issue a token, read-only by default. It is printed alone, and cannot be shown again.

    Example: statestore token issue --name dashboard --expires 30d
    """
    expires_in = None if expires is None else seconds_of(expires)
    more = {"admin": True} if admin else {}
    token = _ask(address, namespace, coordinator, "issue_token", name, expires_in, **more)
    typer.echo(json_line({"name": name, "token": token, "expires_in": expires_in}) if as_json else token)
    if as_json:
        return
    ends = "until it is revoked" if expires is None else f"for {expires}"
    kind = "an administrator's" if admin else "the read-only"
    _explain(
        f"This is {kind} token {name!r}, valid {ends}. Keep it: it is not stored, and not shown again. Clients "
        "give it as token= or in STATESTORE_TOKEN."
    )


@app.command("list")
def list_tokens(
    address: Address = None,
    namespace: Namespace = NAMESPACE,
    coordinator: CoordinatorName = COORDINATOR_NAME,
    as_json: AsJson = False,
) -> None:
    """List the read-only tokens that were issued: their names and ids, not the tokens themselves.

    Example: statestore token list --json
    """
    tokens: tuple[IssuedToken, ...] = _ask(address, namespace, coordinator, "list_tokens")
    show(
        lambda: [msgspec.structs.asdict(token) for token in tokens],
        lambda: rendered(tokens, datetime.now(timezone.utc).timestamp()),
        as_json=as_json,
    )


@app.command()
def revoke(
    name_or_id: str,
    address: Address = None,
    namespace: Namespace = NAMESPACE,
    coordinator: CoordinatorName = COORDINATOR_NAME,
    as_json: AsJson = False,
) -> None:
    """Revoke the token NAME_OR_ID, for good; hosts refuse it within about two seconds.

    Example: statestore token revoke dashboard
    """
    token: IssuedToken = _ask(address, namespace, coordinator, "revoke_token", name_or_id)
    if as_json:
        typer.echo(json_line({"name": token.name, "id": token.id, "revoked": token.revoked}))
        return
    _explain(f"Revoked the token {token.name!r} ({token.id}).")


def rendered(tokens: tuple[IssuedToken, ...], now: float) -> Table:
    """Return the tokens as a table; ``now`` is in seconds since 1970."""
    table = Table(box=None, padding=(0, 2))
    for heading in ("name", "id", "kind", "created", "expires", "state"):
        table.add_column(heading, overflow="fold")
    for token in tokens:
        state = "revoked" if token.revoked is not None else "valid" if token.is_valid(now) else "expired"
        expires = "never" if token.expires is None else _time(token.expires)
        kind = "admin" if token.admin else "read-only"
        table.add_row(Text(token.name), token.id, kind, _time(token.created), expires, state)
    return table


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


def _explain(text: str, style: str | None = None) -> None:
    Console(stderr=True).print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def _ask(address: str | None, namespace: str, coordinator: str, method: str, *args: object, **named: object) -> Any:
    """Send one message to the coordinator and return the answer; print an error on stderr and exit with 2."""
    try:
        with joined_ray(address, namespace):
            return _sent(namespace, coordinator, method, *args, **named)
    except (CoordinatorError, SparkBridgeError) as error:
        _explain(str(error), "red")
        raise typer.Exit(2) from error


def _sent(namespace: str, coordinator: str, method: str, *args: object, **named: object) -> Any:
    import ray
    from ray.exceptions import RayError, RayTaskError

    from coordinator_actor.on_ray.ray_port import ask

    try:
        actor = ray.get_actor(coordinator, namespace=namespace)
    except ValueError as error:
        raise EnvironmentProblemError(
            f"There is no coordinator {coordinator!r} in the Ray namespace {namespace!r}: tokens are issued once a "
            "stream with state has been started (init_spark or attach)."
        ) from error
    try:
        return ask(actor, method, *args, timeout=TOKEN_ANSWER_SECONDS, **named)
    except RayTaskError:
        raise
    except RayError as error:
        raise EnvironmentProblemError(
            f"The coordinator {coordinator!r} (namespace {namespace!r}) did not answer: {error}. It may be restarting, "
            "so try again."
        ) from error
