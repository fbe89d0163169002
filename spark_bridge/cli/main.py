"""The command line program ``statestore``."""

from __future__ import annotations

import logging
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from spark_bridge.cli.cluster import drain as drain_cli
from spark_bridge.cli.cluster import grafana as grafana_cli
from spark_bridge.cli.cluster import logs, overview_commands, top
from spark_bridge.cli.cluster import serve as serve_cli
from spark_bridge.cli.cluster import token as token_cli
from spark_bridge.cli.cluster import ui as ui_cli
from spark_bridge.cli.doctor import command as doctor
from spark_bridge.cli.jobs import run as run_cli
from spark_bridge.cli.output import FAILED
from spark_bridge.cli.state import change_commands, state_commands, storage_commands, surgery_commands
from spark_bridge.cli.state import checkpoint as checkpoint_cli
from spark_bridge.cli.state import savepoint as savepoint_cli

log = logging.getLogger(__name__)

app = typer.Typer(
    name="statestore",
    help="Versioned, fault-tolerant, queryable state for PySpark streams on Ray clusters.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


class Backend(str, Enum):
    """The backends that belong to this project."""

    rocksdb = "rocksdb"
    file = "file"


app.add_typer(checkpoint_cli.app)
app.add_typer(savepoint_cli.app)
app.add_typer(token_cli.app)
app.add_typer(grafana_cli.app)
for command in (
    overview_commands.status,
    overview_commands.queries,
    overview_commands.checkpoints,
    overview_commands.partitions,
    overview_commands.hosts,
    state_commands.get,
    state_commands.scan,
    state_commands.sql,
    change_commands.watch,
    change_commands.diff,
    storage_commands.files,
    storage_commands.verify,
    surgery_commands.forget,
    surgery_commands.audit,
    top.top,
    logs.logs,
    doctor.doctor,
    drain_cli.drain,
    run_cli.run,
    serve_cli.serve,
    ui_cli.ui,
):
    app.command()(command)


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
    machines: Annotated[
        int | None,
        typer.Option(min=1, help="Run on this many machines of the Ray cluster that runs; all must see --checkpoint."),
    ] = None,
) -> None:
    """Replay a year of flights as a stream, look into its state meanwhile, and check it at the end.

    Example: statestore demo --kill-host --batches 20
    """
    from spark_bridge.demo.app import run_demo
    from spark_bridge.demo.flights import ReplayMismatchError

    if stop_after is not None and checkpoint is None:
        raise typer.BadParameter("--stop-after needs --checkpoint DIR, or there is nothing to go on from")
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

    Python ends with 1 for an error that nobody has caught, which would say that something was found.
    """
    try:
        app()
    except Exception:
        log.exception("Nobody expected this error; please report it")
        sys.exit(FAILED)


if __name__ == "__main__":
    main()
