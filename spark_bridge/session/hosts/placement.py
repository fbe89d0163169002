"""Computes the places of a session's hosts: beside its executors, on all machines that have executors.

Plain functions over names and numbers; ``host_placement.py`` asks Spark and Ray, and starts the hosts.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Placement:
    """The number of hosts for each node, by node id, and warnings for people."""

    hosts: Mapping[str, int]
    problems: tuple[str, ...] = ()


def place_hosts(
    executors: Mapping[str, int],
    nodes: Mapping[str, str],
    num_hosts: int | None,
    standing: Mapping[str, int],
    going: Collection[str] = (),
) -> Placement:
    """Return where the hosts of a session are to stand.

    ``executors`` has the cores of the executors on each machine, by IP address; ``nodes`` the IP address of each node
    of Ray that can take hosts; ``standing`` how many hosts stand on each node now. Without ``num_hosts`` there is one
    host per core. Nodes at one address share its cores. Where no node has an executor, all nodes count alike. ``going``
    are the addresses of machines that are to go, and so take no hosts: their cores ask for none elsewhere.
    """
    sharing = Counter(nodes.values())
    cores = {node: executors[ip] / sharing[ip] for node, ip in nodes.items() if executors.get(ip)}
    problems = []
    without_node = sorted(ip for ip in executors if ip not in sharing)
    if drained := [ip for ip in without_node if ip in going]:
        problems.append(
            f"{', '.join(drained)}, where executors run, are to go: hosts stand elsewhere, and tasks there reach state "
            "over the network until their executors end."
        )
    if missing := [ip for ip in without_node if ip not in going]:
        problems.append(
            f"No node of Ray that can take hosts is at {', '.join(missing)}, where executors run: their tasks reach "
            "state over the network. Start Ray there."
        )
    total = max(1, num_hosts or sum(n for ip, n in executors.items() if ip in sharing or ip not in going))
    hosts = spread(total, cores or dict.fromkeys(nodes, 1.0), standing)
    if not executors:
        problems.append("No executor is there, so that the hosts stand on any nodes.")
    without = sorted({nodes[node] for node in cores if not hosts.get(node)})
    if without:
        problems.append(
            f"The executors at {', '.join(without)} have no host beside them: num_hosts={num_hosts} is fewer than the "
            f"{len(cores)} machines with executors."
        )
    return Placement(hosts, tuple(problems))


def spread(total: int, weights: Mapping[str, float], standing: Mapping[str, int]) -> dict[str, int]:
    """Divide ``total`` hosts among nodes: one for each first, then in proportion to the weights (D'Hondt's method).

    Among equals comes first who has more hosts now. If there are as many hosts as the weights add up to, they follow
    the weights exactly.
    """
    hosts: dict[str, int] = {}
    # The next host of a node is worth the less the more it has; the first one is worth more than any other.
    queue = [(0.0, -weight, -standing.get(node, 0), node) for node, weight in weights.items()]
    heapq.heapify(queue)
    for _ in range(total if queue else 0):
        _, weight, stands, node = queue[0]
        hosts[node] = hosts.get(node, 0) + 1
        heapq.heapreplace(queue, ((hosts[node] + 1) / -weight, weight, stands, node))
    return hosts
