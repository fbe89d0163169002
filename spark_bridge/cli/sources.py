"""Where a command looks: at a running cluster, or at the checkpoint of a query, with no cluster at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from coordinator_actor.coordinator_conf import COORDINATOR_NAME, NAMESPACE
from spark_bridge.cli.joined_ray import joined_ray
from spark_bridge.cli.storage_options import options_of
from spark_bridge.overview.from_storage import overview_of_checkpoint
from spark_bridge.overview.model import Overview

Checkpoint = Annotated[
    str | None,
    typer.Option(
        "--checkpoint",
        metavar="LOCATION",
        help="Look at the checkpoint of a query there, in place of a cluster. The query may run or not.",
    ),
]
StateLocation = Annotated[
    str | None, typer.Option(help="The directory of spark.statestore.location, if the query has one.")
]
Address = Annotated[
    str | None,
    typer.Option("--address", envvar="RAY_ADDRESS", help="The Ray cluster; default: the one on this machine."),
]
Namespace = Annotated[str, typer.Option("--namespace", help="The Ray namespace of the coordinator.")]
CoordinatorName = Annotated[str, typer.Option("--coordinator", help="The name of the coordinator.")]


def looked_at(
    checkpoint: str | None,
    state_location: str | None,
    storage_option: list[str] | None,
    address: str | None,
    namespace: str = NAMESPACE,
    coordinator: str = COORDINATOR_NAME,
) -> Overview:
    """Return the overview of a checkpoint if one is named, else of the cluster.

    Raises what ``overview_of_checkpoint`` and ``cluster_overview`` raise.
    """
    if checkpoint is not None:
        return overview_of_checkpoint(checkpoint, state_location, options_of(storage_option))
    return _asked(address, namespace, coordinator)()


def _asked(address: str | None, namespace: str, coordinator: str) -> Callable[[], Overview]:
    from spark_bridge.overview.on_ray import cluster_overview

    def ask() -> Overview:
        with joined_ray(address, namespace):
            return cluster_overview(namespace, coordinator)

    return ask
