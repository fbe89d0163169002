"""The command line program ``statestore``."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from enum import Enum
from importlib import import_module, metadata
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from backends.lazy_names import missing_package
from spark_bridge.cli import checkpoint_commands, cluster_commands, logs, overview, state_commands
from spark_bridge.cli.output import FAILED, complain

log = logging.getLogger(__name__)

app = typer.Typer(name="statestore", no_args_is_help=True, pretty_exceptions_enable=False)


class Backend(str, Enum):
    """The backends that belong to this project."""

    rocksdb = "rocksdb"
    file = "file"


def cluster_command(name: str, module: str) -> Callable[..., None]:
    """Return a command that only machines of the cluster can run; elsewhere it names the missing package."""
    try:
        command: Callable[..., None] = getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        missing = missing_package(error, f"statestore {name}")
        if missing is None:
            raise
        text = str(missing)

        def refuse(arguments: Annotated[list[str] | None, typer.Argument()] = None) -> None:
            complain(text)
            raise typer.Exit(FAILED)

        refuse.__name__, refuse.__doc__ = name, f"Not installed here: {text}"
        return refuse
    return command


app.add_typer(checkpoint_commands.checkpoint_app)
app.add_typer(checkpoint_commands.app)
app.add_typer(cluster_commands.app)
app.add_typer(cluster_commands.grafana_app)
for command in (
    overview.status,
    overview.queries,
    overview.checkpoints,
    overview.partitions,
    overview.hosts,
    state_commands.get,
    state_commands.scan,
    state_commands.sql,
    state_commands.watch,
    state_commands.diff,
    cluster_commands.features,
    checkpoint_commands.files,
    checkpoint_commands.verify,
    checkpoint_commands.forget,
    checkpoint_commands.audit,
    overview.top,
    logs.logs,
    cluster_command("doctor", "spark_bridge.cli.doctor"),
    cluster_commands.drain,
    cluster_command("run", "spark_bridge.cli.jobs"),
    cluster_commands.serve,
    cluster_commands.ui,
):
    app.command()(command)
app.command("changes")(state_commands.changes_to_kafka)
app.command("take-over")(state_commands.take_over_query)


def show_version(is_wanted: bool) -> None:
    """Print the version of the package, and end."""
    if is_wanted:
        print("ray-statestore", metadata.version("ray-statestore"))
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version, and end.")
    ] = False,
) -> None:
    """Versioned, fault-tolerant, queryable state for PySpark streams on Ray clusters."""


@app.command()
def demo(
    kill_host: Annotated[
        bool, typer.Option("--kill-host", help="Kill one StateStoreHost process mid-stream (kill -9).")
    ] = False,
    checkpoint: Annotated[
        Path | None,
        typer.Option(file_okay=False, help="Keep files and checkpoint here; a later run continues from there."),
    ] = None,
    stop_after: Annotated[
        int | None, typer.Option(min=1, help="Stop after this many batches; needs --checkpoint.")
    ] = None,
    batches: Annotated[int, typer.Option(min=1, max=1000, help="In how many batches the year is split.")] = 50,
    partitions: Annotated[
        int, typer.Option(min=1, max=1024, help="Partitions of the state; a later run may take other ones.")
    ] = 2,
    backend: Annotated[
        Backend, typer.Option(help="The storage engine of the state; a later run may take the other one.")
    ] = Backend.rocksdb,
    machines: Annotated[
        int | None,
        typer.Option(min=1, help="Run on this many machines of the Ray cluster that runs; all must see --checkpoint."),
    ] = None,
) -> None:
    """Replay a year of flights as a stream, look into its state while it runs, and check it at the end.

    Example: statestore demo --kill-host --batches 20
    """
    from spark_bridge.demo.app import run_demo
    from spark_bridge.demo.events import ReplayMismatchError

    if stop_after is not None and checkpoint is None:
        raise typer.BadParameter("--stop-after needs --checkpoint DIR, which a later run continues from")
    if machines is not None and checkpoint is None:
        raise typer.BadParameter("--machines needs --checkpoint DIR, a directory that all machines see under its path")
    if machines is not None and kill_host:
        raise typer.BadParameter("--kill-host kills a process of this machine; with --machines kill one yourself")
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
            machines=machines,
        )
    except (ModuleNotFoundError, ReplayMismatchError) as error:
        Console(stderr=True).print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        code = 2
    raise typer.Exit(code)


def main() -> None:
    """Run the program: the entry point of the console script.

    For an uncaught error, Python ends with 1, which would mean that the command has found something.
    """
    try:
        app()
    except ModuleNotFoundError as error:
        missing = missing_package(error, "This command")
        if missing is None:
            raise
        complain(str(missing))
        sys.exit(FAILED)
    except Exception:
        log.exception("Unexpected error; please report it")
        sys.exit(FAILED)


if __name__ == "__main__":
    main()
