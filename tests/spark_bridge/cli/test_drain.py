"""Which node ``statestore drain`` takes; ``session/test_host_placement.py`` has what follows."""

from __future__ import annotations

import pytest

from spark_bridge.cli.cluster_commands import node_named
from spark_bridge.exceptions import EnvironmentProblemError

NODES = [
    {"NodeID": "aaaaaa1", "NodeManagerAddress": "10.0.0.1", "NodeManagerHostname": "one", "Alive": True},
    {"NodeID": "aaaaaa2", "NodeManagerAddress": "10.0.0.2", "NodeManagerHostname": "two", "Alive": True},
    {"NodeID": "bbbbbb3", "NodeManagerAddress": "10.0.0.2", "NodeManagerHostname": "two", "Alive": False},
    {"NodeID": "cccccc4", "NodeManagerAddress": "10.0.0.4", "NodeManagerHostname": "one", "Alive": True},
]


@pytest.mark.parametrize("name", ["aaaaaa2", "10.0.0.2", "two"])
def test_a_living_node_is_named_by_id_address_or_host_name(name: str) -> None:
    assert node_named(name, NODES) == "aaaaaa2"
    assert node_named("cccccc", NODES) == "cccccc4"


@pytest.mark.parametrize(("name", "why"), [("bbbbbb3", "No living"), ("one", "Several"), ("aaaaaa", "Several")])
def test_unknown_or_ambiguous_node_name_lists_the_nodes(name: str, why: str) -> None:
    with pytest.raises(EnvironmentProblemError, match=rf"{why} .*'{name}'; .*10.0.0.1 \(one, aaaaaa1\)"):
        node_named(name, NODES)
