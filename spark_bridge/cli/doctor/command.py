"""The command ``statestore doctor``."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from coordinator_actor.coordinator_conf import COORDINATOR_NAME, NAMESPACE
from spark_bridge.cli.doctor import cluster, machine, storage
from spark_bridge.cli.doctor.checks import OK, SKIPPED, Check, checked
from spark_bridge.cli.output import FOUND, AsJson, show
from spark_bridge.cli.sources import Address, CoordinatorName, Namespace
from spark_bridge.cli.storage_options import Option, options_of
from spark_bridge.overview.model import ERROR, WARNING, to_plain

_STYLES = {OK: "green", WARNING: "yellow", ERROR: "bold red", SKIPPED: "dim"}


def doctor(
    checkpoint: Annotated[
        str | None,
        typer.Option(metavar="LOCATION", help="Check the storage there too, by a small file that is removed again."),
    ] = None,
    storage_option: Option = None,
    conf: Annotated[
        list[str] | None, typer.Option(help="A setting of Spark, name=value, as for spark-submit. Repeatable.")
    ] = None,
    no_cluster: Annotated[bool, typer.Option("--no-cluster", help="Look for no Ray cluster.")] = False,
    address: Address = None,
    namespace: Namespace = NAMESPACE,
    coordinator: CoordinatorName = COORDINATOR_NAME,
    as_json: AsJson = False,
) -> None:
    """Check this machine, storage and the cluster: versions, Java, settings, tokens, ports, clocks; with remedies.

    The exit code is 1 if a check has found an error. Without a cluster, that part is skipped.

    Examples: statestore doctor; statestore doctor --checkpoint s3://bucket/ck --storage-option
    spark.hadoop.fs.s3a.endpoint=http://minio:9000; statestore doctor --no-cluster --conf spark.speculation=true --json
    """
    options, settings = options_of(storage_option), options_of(conf)
    found = [
        *checked("machine", "python", machine.python_check),
        *checked("machine", "packages", machine.package_checks),
        *checked("machine", "java", machine.java_check),
        *checked("machine", "disk", machine.disk_check),
        *checked("spark", "settings", partial(machine.spark_checks, settings)),
    ]
    if checkpoint is not None:
        found += checked("storage", "storage", partial(storage.storage_checks, checkpoint, options))
    if not no_cluster:
        found += checked("cluster", "cluster", partial(cluster.cluster_checks, address, namespace, coordinator))
    is_well = all(check.status != ERROR for check in found)
    show(lambda: {"is_well": is_well, "checks": to_plain(found)}, lambda: _view(found), as_json=as_json)
    if not is_well:
        raise typer.Exit(FOUND)


def _view(found: list[Check]) -> RenderableType:
    lines = []
    for check in found:
        lines.append(Text(f"{check.status:>7}  {check.area} {check.name}: {check.found}", _STYLES[check.status]))
        if check.remedy:
            lines.append(Text(f"         {check.remedy}"))
    errors, warnings = (sum(check.status == status for check in found) for status in (ERROR, WARNING))
    lines.append(Text(f"{len(found)} checks: {errors} errors, {warnings} warnings."))
    return Group(*lines)
