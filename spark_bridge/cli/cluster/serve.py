"""``statestore serve``: answer queries from a checkpoint or a savepoint, by Ray actors, until the command is ended."""

from __future__ import annotations

import signal
import threading
from typing import Annotated

import typer

from coordinator_actor.coordinator_conf import NAMESPACE
from spark_bridge.cli.output import errors_explained, printer
from spark_bridge.cli.sources import Address, Namespace, StateLocation
from spark_bridge.cli.storage_options import Option, options_of


def serve(
    location: Annotated[str, typer.Argument(help="A checkpoint, or a savepoint.")],
    operator: Annotated[
        list[str] | None, typer.Option("--operator", help="Serve this operator; may be repeated. Default: all.")
    ] = None,
    replicas: Annotated[int, typer.Option(min=1, help="This many hosts share the partitions.")] = 1,
    name: Annotated[str, typer.Option(help="The name by which clients find the state.")] = "serving",
    follow: Annotated[bool, typer.Option("--follow", help="Go on to each version that the query completes.")] = False,
    scratch: Annotated[
        str | None, typer.Option(help="A new directory to which a savepoint is restored, readable by all nodes.")
    ] = None,
    query_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Host i answers at this port + i; 0: at any free port.")
    ] = 0,
    state_location: StateLocation = None,
    storage_option: Option = None,
    address: Address = None,
    namespace: Namespace = NAMESPACE,
) -> None:
    """Serve the state of a checkpoint or a savepoint from Ray actors, without Spark, until Ctrl-C or SIGTERM.

    Nothing is written to the checkpoint. Where no Ray cluster runs, one is started on this machine.

    Examples: statestore serve ck/; statestore serve s3://bucket/ck --replicas 4 --follow
    """
    from spark_bridge.serving.serve import serve_state

    out, ended = printer(), threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    with errors_explained():
        out.print(f"Starting to serve {location} ...", markup=False)
        with serve_state(
            location,
            operator,
            replicas=replicas,
            name=name,
            follow=follow,
            state_location=state_location,
            storage_options=options_of(storage_option),
            scratch=scratch,
            ray_address=address,
            namespace=namespace,
            query_port=query_port,
        ) as serving:
            out.print(f"Serving {', '.join(serving.operators)} at {', '.join(serving.addresses)}.", markup=False)
            out.print(
                f"In the cluster: QueryableStateClient.connect(coordinator_name={serving.coordinator_name!r}). From "
                f"outside, with a token: statestore token issue --name NAME --coordinator {serving.coordinator_name}.",
                markup=False,
            )
            ended.wait()
            out.print("Ending ...", markup=False)
