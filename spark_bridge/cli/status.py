"""``statestore status``: the queries, the coordinator and the hosts of a Ray cluster as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from coordinator_actor.coordinator_conf import COORDINATOR_NAME, NAMESPACE
from spark_bridge.cli.joined_ray import joined_ray
from spark_bridge.exceptions import EnvironmentProblemError

HOST_NAME_PREFIX = "StateStoreHost-"
ANSWER_SECONDS = 10.0
Description = Mapping[str, Any]


def gather(
    address: str | None, namespace: str = NAMESPACE, coordinator_name: str = COORDINATOR_NAME
) -> tuple[Description | None, list[Description]]:
    """Join Ray, and ask the coordinator (None if there is none) and all hosts of a namespace to describe themselves.

    A host that is being restarted is left out. Raises ``EnvironmentProblemError`` if no Ray cluster answers.
    """
    import ray
    from ray.exceptions import RayError

    with joined_ray(address, namespace):
        names = {
            actor["name"]
            for actor in ray.util.list_named_actors(all_namespaces=True)
            if actor["namespace"] == namespace
        }
        if coordinator_name not in names:
            return None, []
        hosts = sorted(name for name in names if name.startswith(HOST_NAME_PREFIX))
        answers = [ray.get_actor(name, namespace=namespace).describe.remote() for name in [coordinator_name, *hosts]]
        ready, _ = ray.wait(answers, num_returns=len(answers), timeout=ANSWER_SECONDS)
        described: dict[Any, Description] = {}
        for answer in ready:
            try:
                described[answer] = ray.get(answer)
            except RayError:
                continue  # a host that died a moment ago is not shown
        if answers[0] not in described:
            raise EnvironmentProblemError(
                f"The coordinator {coordinator_name!r} (namespace {namespace!r}) did not answer within "
                f"{ANSWER_SECONDS:.0f} s; it may be restarting, so try again."
            )
        return described[answers[0]], [described[a] for a in answers[1:] if a in described]


def render(coordinator: Description | None, hosts: Sequence[Description]) -> RenderableType:
    """Return the descriptions as tables."""
    if coordinator is None:
        return "No coordinator: no stream with state has run in this namespace of the cluster."
    head = f"Coordinator on {coordinator['node_ip']}, pid {coordinator['pid']}, namespace {coordinator['namespace']}"
    problems = [Text(problem, style="yellow") for problem in coordinator["problems"]]
    return Group(Text(head), *problems, _queries(coordinator["queries"]), _hosts(hosts))


def _queries(queries: Sequence[Description]) -> Table:
    table = _table("Queries", "query", "run", "operators (partitions)", "completed", "prepared", "waits for", "epoch")
    for query in queries:
        _add_row(
            table,
            str(query["name"] or query["query_id"]),
            f"{query['run_id']}{' (retired)' if query['retired_by'] else ''}",
            ", ".join(f"{name} ({partitions})" for name, partitions in query["operators"].items()),
            str(query["completed_version"]),
            str(query["prepared_version"]),
            f"{query['pending_partitions']} partitions" if query["pending_partitions"] else "",
            str(query["epoch"]),
        )
    return table


def _hosts(hosts: Sequence[Description]) -> Table:
    table = _table(
        "Hosts",
        "machine",
        "host",
        "query address",
        "pid",
        "operator / partition",
        "version",
        "keys (about)",
        "last commit ms",
    )
    # By machine, which the address begins with.
    for host in sorted(hosts, key=lambda host: str(host["query_address"]).rpartition(":")[0]):
        first = [str(host["host_id"]), str(host["query_address"]), str(host["pid"])]
        for instance in host["instances"] or [None]:
            if instance is None:
                _add_row(table, *first)
                continue
            commit = instance["last_commit"] or {}
            spent = sum(value for name, value in commit.items() if name.endswith("_ms"))
            _add_row(
                table,
                *first,
                f"{instance['operator']} / {instance['partition']}",
                str(instance["version"]),
                f"{instance['keys']:,}",
                f"{spent:.0f}" if commit else "",
            )
            first = ["", "", ""]
    return table


def _add_row(table: Table, *cells: str) -> None:
    """Add cells as plain text: names may contain text that rich takes for markup."""
    table.add_row(*map(Text, cells))


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2))
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table
