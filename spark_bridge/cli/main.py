"""The command line program ``statestore``."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from coordinator_actor.coordinator_conf import NAMESPACE
from spark_bridge.cli import checkpoint as checkpoint_cli
from spark_bridge.cli import savepoint as savepoint_cli
from spark_bridge.cli import token as token_cli

PIPE_WIDTH = 240

app = typer.Typer(
    name="statestore",
    help="Versioned, fault-tolerant, queryable state for PySpark streams on Ray clusters.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class Backend(str, Enum):
    """The backends that belong to this project."""

    rocksdb = "rocksdb"
    file = "file"


app.add_typer(checkpoint_cli.app)
app.add_typer(savepoint_cli.app)
app.add_typer(token_cli.app)


@app.command()
def demo(
    kill_host: Annotated[
        bool, typer.Option("--kill-host", help="Kill one StateStoreHost process mid-stream (kill -9).")
    ] = False,
    checkpoint: Annotated[
        Path | None,
        typer.Option(file_okay=False, help="Keep files and checkpoint here; a later run goes on from there."),
    ] = None,
    stop_after: Annotated[
        int | None, typer.Option(min=1, help="Stop after this many batches; needs --checkpoint.")
    ] = None,
    batches: Annotated[int, typer.Option(min=1, max=1000, help="In how many batches the year is split.")] = 50,
    partitions: Annotated[
        int, typer.Option(min=1, max=1024, help="Partitions of the state; a later run may take other ones.")
    ] = 2,
    backend: Annotated[
        Backend, typer.Option(help="What keeps the state; a later run may take the other one.")
    ] = Backend.rocksdb,
) -> None:
    """Replay a year of flights as a stream, look into its state meanwhile, and check it at the end."""
    from spark_bridge.demo.app import run_demo
    from spark_bridge.demo.flights import ReplayMismatchError

    if stop_after is not None and checkpoint is None:
        raise typer.BadParameter("--stop-after needs --checkpoint DIR, or there is nothing to go on from")
    console = Console()
    try:
        code = run_demo(
            console,
            kill_host=kill_host,
            checkpoint=checkpoint,
            stop_after=stop_after,
            batches=batches,
            partitions=partitions,
            backend=backend.value,
        )
    except (ModuleNotFoundError, ReplayMismatchError) as error:
        Console(stderr=True).print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        code = 2
    raise typer.Exit(code)


@app.command()
def status(
    address: Annotated[
        str | None, typer.Option(envvar="RAY_ADDRESS", help="The Ray cluster; default: the one on this machine.")
    ] = None,
    namespace: Annotated[str, typer.Option(help="The Ray namespace of the coordinator.")] = NAMESPACE,
) -> None:
    """Show the coordinator, the queries and the hosts of a Ray cluster, and what they hold."""
    from spark_bridge.cli.status import gather, render
    from spark_bridge.exceptions import EnvironmentProblemError

    try:
        coordinator, hosts = gather(address, namespace)
    except EnvironmentProblemError as error:
        Console(stderr=True).print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2) from error
    # A pipe has no width, so lines must not be folded.
    console = Console() if Console().is_terminal else Console(width=PIPE_WIDTH)
    console.print(render(coordinator, hosts))


@app.command()
def drain(
    node: Annotated[str, typer.Argument(help="IP address, host name or id of a node of Ray.")],
    undo: Annotated[bool, typer.Option("--undo", help="The node stays after all.")] = False,
    timeout: Annotated[float, typer.Option(min=0.0, help="Seconds to wait until no host stands there.")] = 600.0,
    address: Annotated[
        str | None, typer.Option(envvar="RAY_ADDRESS", help="The Ray cluster; default: the one on this machine.")
    ] = None,
    namespace: Annotated[str, typer.Option(help="The Ray namespace of the coordinator.")] = NAMESPACE,
) -> None:
    """Let the hosts of a node hand over their partitions while the streams run, and wait for that.

    No host is started there any more, until --undo. Exit code 1: hosts are still there behind --timeout.
    """
    from spark_bridge.cli import drain as drain_cli
    from spark_bridge.exceptions import EnvironmentProblemError

    console = Console(width=None if Console().is_terminal else PIPE_WIDTH)
    try:
        if undo:
            drain_cli.keep(address, namespace, node)
            console.print(f"{node} takes hosts again.", markup=False)
            return
        is_empty = drain_cli.drain(address, namespace, node, timeout, lambda line: console.print(line, markup=False))
    except EnvironmentProblemError as error:
        Console(stderr=True).print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2) from error
    if not is_empty:
        console.print(f"Hosts still stand on {node}; see statestore status.", markup=False)
        raise typer.Exit(1)
    console.print(f"No host stands on {node} any more; the machine may go.", markup=False)


def main() -> None:
    """Run the program: the entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
