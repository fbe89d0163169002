"""``statestore checkpoint ...``: checkpoints that were moved or copied, without a running Ray or Spark."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from spark_bridge.cli.output import AsJson, json_line
from spark_bridge.cli.storage_options import Option, options_of, or_exit

app = typer.Typer(
    name="checkpoint",
    help="Say what a checkpoint is that was moved or copied while its state lies elsewhere.",
    no_args_is_help=True,
)

MovedStateLocation = Annotated[
    str, typer.Option(help="The directory of spark.statestore.location (state_location=) of the session.")
]


@app.command()
def move(
    checkpoint_location: str, state_location: MovedStateLocation, storage_option: Option = None, as_json: AsJson = False
) -> None:
    """Bind the state to CHECKPOINT_LOCATION, where its checkpoint has been moved to.

    Example: statestore checkpoint move s3://new/ck --state-location s3://bucket/state
    """
    from coordinator_actor.durable.moved_checkpoints import move_checkpoint

    bound = or_exit(lambda: move_checkpoint(checkpoint_location, state_location, options_of(storage_option)))
    if as_json:
        typer.echo(json_line(bound))
        return
    done = "now belongs" if bound.is_new else "belongs already"
    Console().print(
        f"The state at {bound.state_location} {done} to {bound.checkpoint_location}", soft_wrap=True, highlight=False
    )


@app.command()
def fork(
    checkpoint_location: str, state_location: MovedStateLocation, storage_option: Option = None, as_json: AsJson = False
) -> None:
    """Give the copy of a checkpoint at CHECKPOINT_LOCATION a state of its own; the original stays as it is.

    Example: statestore checkpoint fork ck-copy/ --state-location /mnt/state --json
    """
    from coordinator_actor.durable.moved_checkpoints import fork_checkpoint

    console = Console()
    bound = or_exit(
        lambda: fork_checkpoint(
            checkpoint_location,
            state_location,
            options_of(storage_option),
            progress=lambda step: None if as_json else console.print(step, soft_wrap=True, highlight=False),
        )
    )
    if as_json:
        typer.echo(json_line(bound))
        return
    what = "has its own state" if bound.is_new else "has its own state already"
    console.print(
        f"{bound.checkpoint_location} {what}, at {bound.state_location}, as query {bound.query_id}",
        soft_wrap=True,
        highlight=False,
    )
