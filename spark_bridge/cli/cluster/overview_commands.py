"""``statestore status``, ``queries``, ``checkpoints``, ``partitions`` and ``hosts``: views of one overview."""

from __future__ import annotations

from typing import Annotated

import typer

from backends.storage.sending.prices import Prices
from spark_bridge.cli.cluster import views
from spark_bridge.cli.output import FOUND, AsJson, errors_explained, show
from spark_bridge.cli.prices import PricesOption
from spark_bridge.cli.sources import Source, with_source
from spark_bridge.overview.model import ERROR, to_plain

QueryArgument = Annotated[str | None, typer.Argument(help="Name, query id or run id; needed if there are several.")]


@with_source
def status(
    source: Source,
    as_json: AsJson = False,
) -> None:
    """Show the queries and the hosts, what is wrong, and what to do about it.

    The exit code is 1 if there is an error among the faults.

    Examples: statestore status; statestore status --checkpoint s3://bucket/ck --json
    """
    with errors_explained():
        found = source.looked_at()
    source.damages.clear()  # they are faults
    show(lambda: to_plain(found), lambda: views.status_view(found), as_json=as_json)
    if any(fault.severity == ERROR for fault in found.faults):
        raise typer.Exit(FOUND)


@with_source
def queries(
    source: Source,
    as_json: AsJson = False,
) -> None:
    """List the running queries, with their operators and versions.

    Example: statestore queries --json
    """
    with errors_explained():
        found = source.looked_at()
    show(lambda: to_plain(found.queries), lambda: views.queries_view(found.queries), as_json=as_json)


@with_source
def checkpoints(
    source: Source,
    query: QueryArgument = None,
    most: Annotated[int, typer.Option("--last", min=1, help="This many of the last checkpoints.")] = 20,
    requests: Annotated[bool, typer.Option("--requests", help="Requests by kind, bytes, cost in place of times.")] = (
        False
    ),
    prices: PricesOption = "",
    as_json: AsJson = False,
) -> None:
    """Show how the last checkpoints of a query went: durations by step, bytes, rows, retried tasks, requests, cost.

    Durations: "tasks" until the first task was done, "acknowledge" until the last was, "manifest" until that was
    durable, "commit" until Spark's commit was seen. "added" are bytes of changelogs, "full" those of all files from
    which the version is loaded. Requests are those of hosts and coordinator to storage since the version before;
    "sent" and "received" are the bytes of their files. The history outlives the cluster.

    Examples: statestore checkpoints clicks; statestore checkpoints --checkpoint ck/ --last 300 --json; statestore
    checkpoints --requests --prices put=0.0054,get=0.00043
    """
    with errors_explained():
        by = Prices.parse(prices)
        found = source.looked_at().query(query)
    show(
        lambda: [
            {**to_plain(c), "dollars": by.dollars(c.storage) if c.storage else None} for c in found.checkpoints[-most:]
        ],
        lambda: (views.requests_view if requests else views.checkpoints_view)(found, most, by),
        as_json=as_json,
    )


@with_source
def partitions(
    source: Source,
    query: QueryArgument = None,
    operator: Annotated[str | None, typer.Option(help="Only those of this operator.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show the partitions of a query: owner, version, keys, bytes, and how far snapshots are behind.

    From a checkpoint, owners, keys and memory are not known.

    Examples: statestore partitions clicks --operator user_totals; statestore partitions --checkpoint ck/
    """
    with errors_explained():
        found = source.looked_at().query(query)
        names = [o.name for o in found.operators]
        if operator is not None and operator not in names:
            raise LookupError(f"Query {found.title} has no operator {operator!r}; it has {', '.join(names) or 'none'}.")
    show(
        lambda: to_plain([o for o in found.operators if operator in (None, o.name)]),
        lambda: views.partitions_view(found, operator),
        as_json=as_json,
    )


@with_source
def hosts(
    source: Source,
    as_json: AsJson = False,
) -> None:
    """Show the hosts of a cluster: addresses, partitions, memory, loads under way, and when they were heard of.

    Example: statestore hosts --json
    """
    if source.checkpoint is not None:
        raise typer.BadParameter("a checkpoint has no hosts; leave --checkpoint out to look at a cluster")
    with errors_explained():
        found = source.looked_at()
    show(lambda: to_plain(found.hosts), lambda: views.hosts_view(found.hosts), as_json=as_json)
