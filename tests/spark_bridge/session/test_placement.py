"""Where hosts are to stand: properties for any machines, executors and hosts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spark_bridge.session.state_cluster import place_hosts, spread

EXECUTORS = st.dictionaries(st.sampled_from([f"10.0.0.{i}" for i in range(6)]), st.integers(1, 9), max_size=6)
NODES = st.dictionaries(
    st.sampled_from([f"n{i}" for i in range(8)]),
    st.sampled_from([f"10.0.0.{i}" for i in range(6)]),
    min_size=1,
    max_size=8,
)
STANDING = st.dictionaries(st.sampled_from([f"n{i}" for i in range(8)]), st.integers(0, 4))


@given(EXECUTORS, NODES, st.none() | st.integers(1, 20), STANDING)
def test_hosts_run_on_every_machine_with_executors(
    executors: dict[str, int], nodes: dict[str, str], num_hosts: int | None, standing: dict[str, int]
) -> None:
    placed = place_hosts(executors, nodes, num_hosts, standing)
    total = num_hosts or max(1, sum(executors.values()))
    assert sum(placed.hosts.values()) == total
    beside = {node for node, ip in nodes.items() if ip in executors}
    assert set(placed.hosts) <= (beside or set(nodes))
    assert len(placed.hosts) == min(total, len(beside or nodes))
    is_right = executors and set(executors) <= set(nodes.values()) and total >= len(beside)
    assert bool(placed.problems) == (not is_right)


@given(EXECUTORS.filter(bool))
def test_there_is_one_host_for_each_core(executors: dict[str, int]) -> None:
    nodes = {f"n{ip}": ip for ip in executors}
    placed = place_hosts(executors, nodes, None, {})
    assert placed.hosts == {f"n{ip}": cores for ip, cores in executors.items()}


def test_nodes_at_one_address_share_its_cores() -> None:
    placed = place_hosts({"10.0.0.1": 4}, {"a": "10.0.0.1", "b": "10.0.0.1"}, None, {})
    assert placed.hosts == {"a": 2, "b": 2}


@given(st.integers(1, 20), st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 9).map(float), min_size=1))
def test_balanced_placement_stays(total: int, weights: dict[str, float]) -> None:
    once = spread(total, weights, {})
    assert spread(total, weights, once) == once


def test_among_equals_a_node_keeps_its_hosts() -> None:
    assert spread(3, {"a": 1.0, "b": 1.0}, {"b": 2}) == {"b": 2, "a": 1}
    assert spread(3, {"a": 1.0, "b": 1.0}, {"a": 2}) == {"a": 2, "b": 1}


def test_few_hosts_go_to_the_machines_with_most_cores() -> None:
    placed = place_hosts({"x": 1, "y": 5, "z": 3}, {"a": "x", "b": "y", "c": "z"}, 2, {})
    assert placed.hosts == {"b": 1, "c": 1}
    assert placed.problems == (
        "The executors at x have no local host: num_hosts=2 is fewer than the 3 machines with executors.",
    )


def test_machines_that_ray_does_not_know_are_named() -> None:
    placed = place_hosts({"x": 1, "y": 5}, {"a": "x"}, None, {})
    assert placed.hosts == {"a": 6}
    assert "is at y, where executors run" in placed.problems[0]


def test_no_advice_to_start_ray_on_draining_machines() -> None:
    placed = place_hosts({"x": 1, "y": 1, "z": 1}, {"a": "x"}, None, {}, going={"y"})
    said_of_y, said_of_z = placed.problems
    assert said_of_y.startswith("Executors run on y, which are being drained") and "Start Ray" not in said_of_y
    assert "is at z, where executors run" in said_of_z and "Start Ray there" in said_of_z
    assert placed.hosts == {"a": 2}, "for the cores at x and z: those at y are to go"


def test_last_machine_gets_at_most_one_host_per_core() -> None:
    executors, drained = dict.fromkeys("wxyz", 1), set("xyz")
    assert place_hosts(executors, {"a": "w"}, None, {"a": 1}, drained).hosts == {"a": 1}
    assert place_hosts(executors, {"a": "w"}, 4, {"a": 1}, drained).hosts == {"a": 4}, "four were asked for"
    assert place_hosts(executors, {"a": "v"}, None, {}, set(executors)).hosts == {"a": 1}, "state must be somewhere"
