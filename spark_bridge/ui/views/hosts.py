"""The hosts: memory by its use, counters of their work, and statistics of their answers to requests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response

from spark_bridge.overview.process_faults import COORDINATOR_PROCESS
from spark_bridge.overview.processes import HostOverview
from spark_bridge.ui.charts import Part, strip
from spark_bridge.ui.requests import PageCall
from spark_bridge.ui.views.overview import BUDGET

HOSTS_AT_ONCE = 50
MOST_REQUEST_ROWS = 100
"""At most this many rows of requests are shown, those with the most requests first."""


@dataclass(frozen=True)
class HostRow:
    """A host with its memory: the strip, and bytes by holder, the largest first."""

    host: HostOverview
    held: int
    budget: int
    strip: list[Part]
    holders: list[tuple[str, int]]


@dataclass(frozen=True)
class RequestRow:
    """The requests of one operator and verb that a host has answered."""

    host: str
    operator: str
    verb: str
    figures: dict[str, Any]


def hosts(call: PageCall) -> Response:
    """Show the hosts."""
    there = call.overview.hosts
    first = call.number("from", 0)
    shown = there[first : first + HOSTS_AT_ONCE]
    kinds = sorted({name for host in there for name, nbytes in host.memory.items() if name != BUDGET and nbytes})
    rows = [_row(host, kinds) for host in shown]
    requests = [request for host in shown for request in _requests(host)]
    requests.sort(key=lambda r: (-r.figures.get("failures", 0), -r.figures["requests"]))
    subjects = {"hosts", COORDINATOR_PROCESS, *(f"host {host.host_id}" for host in there)}
    return call.render(
        "hosts.html",
        faults=[fault for fault in call.overview.faults if fault.subject in subjects],
        rows=rows,
        kinds=kinds,
        first=first,
        at_once=HOSTS_AT_ONCE,
        requests=requests[:MOST_REQUEST_ROWS],
        requests_left=max(0, len(requests) - MOST_REQUEST_ROWS),
        storage=sorted({kind for host in shown for kind in host.storage_requests}),
    )


def _row(host: HostOverview, kinds: list[str]) -> HostRow:
    holders = {f"m{i % 8}": float(host.memory.get(kind, 0)) for i, kind in enumerate(kinds)}
    held = sum(n for name, n in host.memory.items() if name != BUDGET)
    budget = host.memory.get(BUDGET, 0)
    by_size = sorted(((k, host.memory[k]) for k in kinds if host.memory.get(k)), key=lambda item: -item[1])
    return HostRow(host, held, budget, strip(holders, float(max(budget, held))), by_size)


def _requests(host: HostOverview) -> Iterator[RequestRow]:
    for operator, verbs in host.requests.items():
        for verb, figures in verbs.items():
            yield RequestRow(host.host_id, operator, verb, figures)
