"""``statestore savepoint ...``: list, describe, restore and delete savepoints, without a running Ray or Spark."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from backends.exceptions import DamagedFileError
from coordinator_actor.savepoints.savepoint_format import SavepointInfo
from spark_bridge.cli.output import FOUND, AsJson, complain, json_line
from spark_bridge.cli.storage_options import Option, options_of, or_exit

app = typer.Typer(name="savepoint", help="List, describe, restore and delete savepoints.", no_args_is_help=True)


@app.command("list")
def list_command(base: str, storage_option: Option = None, as_json: AsJson = False) -> None:
    """List the savepoints directly below the directory BASE.

    Example: statestore savepoint list s3://bucket/savepoints --json
    """
    from spark_bridge.session.savepoints import list_savepoints

    found = or_exit(lambda: list_savepoints(base, options_of(storage_option)))
    if as_json:
        typer.echo(json_line([_plain(info) for info in found]))
        return
    table = Table(box=None, padding=(0, 2))
    for heading in ("path", "query", "version", "rows", "bytes"):
        table.add_column(heading, overflow="fold")
    for info in found:
        made = info.metadata
        if made is None:
            table.add_row(info.path, f"damaged: {info.damage}")
        else:
            name = made.query_name or made.query_id
            table.add_row(info.path, name, str(made.version), f"{info.rows:,}", f"{info.size:,}")
    Console().print(table)


@app.command()
def describe(
    path: str,
    check_files: Annotated[
        bool, typer.Option("--check-files", help="Read every file and compare it with what was written.")
    ] = False,
    storage_option: Option = None,
    as_json: AsJson = False,
) -> None:
    """Describe the savepoint at PATH: query, version, rows, operators. The exit code is 1 if it is damaged.

    Example: statestore savepoint describe s3://bucket/savepoints/savepoint-clicks-7 --check-files
    """
    from spark_bridge.session.savepoints import describe_savepoint

    def described() -> SavepointInfo:
        try:
            return describe_savepoint(path, options_of(storage_option), check_files=check_files)
        except DamagedFileError as error:
            return SavepointInfo(path, None, str(error))

    info = or_exit(described)
    made = info.metadata
    if as_json:
        typer.echo(json_line(_plain(info)))
    elif made is None:
        complain(str(info.damage))
    if made is None:
        raise typer.Exit(FOUND)
    if as_json:
        return
    console = Console()
    console.print(
        f"Savepoint {made.checkpoint_id} of query {made.query_name or made.query_id} at {info.path}", soft_wrap=True
    )
    console.print(
        f"State after batch {made.batch_id} (version {made.version}), {info.rows:,} rows, {info.size:,} bytes"
    )
    for operator in made.operators:
        for variable in operator.variables:
            console.print(
                f"  {operator.name}/{variable.name}: {variable.rows:,} rows, {operator.num_partitions} partitions, "
                f"{operator.backend}; {path.rstrip('/')}/operators/{operator.name}/{variable.name}/*.parquet",
                soft_wrap=True,
                highlight=False,
            )


@app.command()
def delete(path: str, storage_option: Option = None, as_json: AsJson = False) -> None:
    """Remove the savepoint at PATH.

    Example: statestore savepoint delete s3://bucket/savepoints/savepoint-clicks-7
    """
    from spark_bridge.session.savepoints import delete_savepoint

    or_exit(lambda: delete_savepoint(path, options_of(storage_option)))
    if as_json:
        typer.echo(json_line({"removed": path}))
        return
    Console().print(f"Removed {path}", soft_wrap=True, highlight=False)


@app.command()
def restore(
    path: str,
    checkpoint_location: str,
    num_partitions: Annotated[int | None, typer.Option(min=1, help="Of all operators; default: as it was.")] = None,
    backend: Annotated[str | None, typer.Option(help="rocksdb or file; default: as it was.")] = None,
    operator: Annotated[list[str] | None, typer.Option(help="Only this operator. Repeatable.")] = None,
    state_only: Annotated[bool, typer.Option("--state-only", help="For a new query that starts with batch 0.")] = False,
    storage_option: Option = None,
    as_json: AsJson = False,
) -> None:
    """Make the new CHECKPOINT_LOCATION from the savepoint at PATH; a query started there goes on after it.

    Example: statestore savepoint restore s3://bucket/savepoints/savepoint-clicks-7 s3://bucket/ck2 --num-partitions 8
    """
    from spark_bridge.session.savepoints import restore_savepoint

    console = Console()
    restored = or_exit(
        lambda: restore_savepoint(
            path,
            checkpoint_location,
            num_partitions,
            backend,
            operator,
            state_only=state_only,
            storage_options=options_of(storage_option),
            progress=lambda step: None if as_json else console.print(step, soft_wrap=True, highlight=False),
        )
    )
    if as_json:
        typer.echo(json_line(restored))
        return
    begins = "batch 0" if restored.batch_id is None else f"batch {restored.batch_id + 1}"
    console.print(
        f"{restored.checkpoint_location} is ready: the query begins with {begins}", soft_wrap=True, highlight=False
    )


def _plain(info: SavepointInfo) -> dict[str, Any]:
    """Return the description of a savepoint for people, without the names of its files."""
    made = info.metadata
    if made is None:
        return {"path": info.path, "damage": info.damage}
    return {
        "path": info.path,
        "checkpoint_id": made.checkpoint_id,
        "query_id": made.query_id,
        "query_name": made.query_name,
        "version": made.version,
        "batch_id": made.batch_id,
        "rows": info.rows,
        "bytes": info.size,
        "operators": [
            {
                "name": o.name,
                "num_partitions": o.num_partitions,
                "backend": o.backend,
                "variables": [{"name": v.name, "rows": v.rows} for v in o.variables],
            }
            for o in made.operators
        ],
    }
