"""Owners of partitions: properties that hold for every number of partitions, hosts and nodes."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator_actor.exceptions import UnknownHostError
from coordinator_actor.run.owners import _scores, assign, place, shares

PARTITIONS = st.integers(0, 70).map(lambda n: [f"op/{p}" for p in range(n)])
HOSTS = st.lists(st.integers(0, 4), min_size=1, max_size=14).map(
    lambda ns: {f"h{i}": f"n{n}" for i, n in enumerate(ns)}
)
REBALANCE = st.booleans()


@st.composite
def owned(draw: st.DrawFn) -> tuple[list[str], dict[str, str], dict[str, str]]:
    """Partitions, hosts, and owners that came about in any way: some unassigned, some on hosts that are gone."""
    partitions, hosts = draw(PARTITIONS), draw(HOSTS)
    owners = [*hosts, "gone1", "gone2", None]
    # One byte each: lists of choices take hypothesis many times as long.
    drawn = draw(st.binary(min_size=len(partitions), max_size=len(partitions)))
    chosen = ((p, owners[byte % len(owners)]) for p, byte in zip(partitions, drawn, strict=True))
    return partitions, hosts, {p: h for p, h in chosen if h is not None}


def moved(before: dict[str, str], after: dict[str, str]) -> set[str]:
    return {p for p in before if after[p] != before[p]}


def check_even(partitions: list[str], hosts: dict[str, str], owners: dict[str, str]) -> None:
    """Every host and every node has its share, rounded down or up."""
    load, node_load = Counter(owners.values()), Counter(hosts[h] for h in owners.values())
    total, n = len(partitions), len(hosts)
    for host in hosts:
        assert total // n <= load[host] <= -(-total // n), (host, load)
    for node, size in Counter(hosts.values()).items():
        assert total * size // n <= node_load[node] <= -(-total * size // n), (node, node_load)


@given(owned(), REBALANCE)
def test_every_partition_has_a_live_host(
    case: tuple[list[str], dict[str, str], dict[str, str]], rebalance: bool
) -> None:
    partitions, hosts, current = case
    owners = assign(partitions, hosts, current, rebalance=rebalance)
    assert list(owners) == partitions
    assert set(owners.values()) <= set(hosts)


@given(owned())
def test_without_rebalancing_nothing_leaves_a_live_host_and_none_gets_too_much(
    case: tuple[list[str], dict[str, str], dict[str, str]],
) -> None:
    partitions, hosts, current = case
    owners = assign(partitions, hosts, current)
    kept = {p: h for p, h in current.items() if h in hosts}
    assert not moved(kept, owners)
    before, after = Counter(kept.values()), Counter(owners.values())
    nodes_before, nodes_after = (Counter(hosts[h] for h in o.values()) for o in (kept, owners))
    total, n = len(partitions), len(hosts)
    for host in hosts:
        assert after[host] <= max(before[host], -(-total // n))
    for node, size in Counter(hosts.values()).items():
        assert nodes_after[node] <= max(nodes_before[node], -(-total * size // n))


@given(owned())
def test_rebalancing_evens_out_whatever_there_was(case: tuple[list[str], dict[str, str], dict[str, str]]) -> None:
    partitions, hosts, current = case
    check_even(partitions, hosts, assign(partitions, hosts, current, rebalance=True))


@given(PARTITIONS, HOSTS, REBALANCE)
def test_from_scratch_it_is_even_and_then_stays(partitions: list[str], hosts: dict[str, str], rebalance: bool) -> None:
    owners = assign(partitions, hosts, {}, rebalance=rebalance)
    check_even(partitions, hosts, owners)
    assert assign(partitions, hosts, owners, rebalance=True) == owners
    assert assign(partitions, hosts, owners) == owners


@given(PARTITIONS, HOSTS, st.randoms(use_true_random=False), REBALANCE)
def test_the_order_of_the_inputs_does_not_matter(
    partitions: list[str], hosts: dict[str, str], rng: random.Random, rebalance: bool
) -> None:
    current = {p: rng.choice([*hosts, "gone"]) for p in partitions if rng.random() < 0.7}
    owners = assign(partitions, hosts, current, rebalance=rebalance)
    again = assign(
        rng.sample(partitions, len(partitions)),
        dict(rng.sample(list(hosts.items()), len(hosts))),
        dict(rng.sample(list(current.items()), len(current))),
        rebalance=rebalance,
    )
    assert again == owners


@given(PARTITIONS, HOSTS.filter(lambda h: len(h) > 1), st.data())
def test_a_lost_host_moves_only_its_own_partitions(
    partitions: list[str], hosts: dict[str, str], data: st.DataObject
) -> None:
    before = assign(partitions, hosts, {})
    lost = data.draw(st.sampled_from(sorted(hosts)))
    left = {h: n for h, n in hosts.items() if h != lost}
    after = assign(partitions, left, before)
    assert moved(before, after) == {p for p, h in before.items() if h == lost}
    assert max(Counter(after.values()).values(), default=0) <= -(-len(partitions) // len(left))


@given(PARTITIONS, HOSTS, st.integers(0, 5))
def test_a_new_host_takes_its_share(partitions: list[str], hosts: dict[str, str], node: int) -> None:
    before = assign(partitions, hosts, {})
    more = {**hosts, "new": f"n{node}"}
    assert assign(partitions, more, before) == before
    after = assign(partitions, more, before, rebalance=True)
    check_even(partitions, more, after)
    assert len(moved(before, after)) == fewest_moves(partitions, more, before)


@given(PARTITIONS, st.integers(1, 14))
def test_on_one_node_all_that_moves_moves_to_the_new_host(partitions: list[str], n: int) -> None:
    hosts = [f"h{i}" for i in range(n)]
    before = assign(partitions, hosts, {})
    after = assign(partitions, [*hosts, "new"], before, rebalance=True)
    assert {after[p] for p in moved(before, after)} <= {"new"}
    assert len(moved(before, after)) == len(partitions) // (n + 1)


@given(owned())
def test_rebalancing_moves_as_little_as_possible(case: tuple[list[str], dict[str, str], dict[str, str]]) -> None:
    partitions, hosts, current = case
    kept = {p: h for p, h in current.items() if h in hosts}
    after = assign(partitions, hosts, current, rebalance=True)
    assert len(moved(kept, after)) == fewest_moves(partitions, hosts, kept)


def fewest_moves(partitions: list[str], hosts: dict[str, str], current: dict[str, str]) -> int:
    """By trying every choice of nodes that are rounded up; within a node, the hosts that have most are."""
    load, total, n = Counter(current.values()), len(partitions), len(hosts)
    members = [[h for h in hosts if hosts[h] == node] for node in sorted(set(hosts.values()))]
    best = total
    for ups in itertools.product((0, 1), repeat=len(members)):
        parts = [total * len(m) // n + up for m, up in zip(members, ups, strict=True)]
        if sum(parts) != total or any(part > -(-total * len(m) // n) for m, part in zip(members, parts, strict=True)):
            continue
        moves = 0
        for m, part in zip(members, parts, strict=True):
            each, more = divmod(part, len(m))
            by_load = sorted((load[h] for h in m), reverse=True)
            moves += sum(max(0, have - each - (i < more)) for i, have in enumerate(by_load))
        best = min(best, moves)
    return best


def test_a_sequence_of_hosts_is_one_node() -> None:
    partitions = [f"op/{i}" for i in range(30)]
    assert assign(partitions, ["a", "b", "c"], {}) == assign(partitions, {"a": "n", "b": "n", "c": "n"}, {})


def test_nodes_get_shares_in_proportion_to_their_hosts() -> None:
    # By hosts alone, a node of two might have four of the six.
    pairs = {f"h{i}": f"n{i // 2}" for i in range(4)}
    for salt in map(str, range(20)):
        owners = assign([f"op/{i}" for i in range(6)], pairs, {}, salt=salt)
        assert Counter(pairs[h] for h in owners.values()) == {"n0": 3, "n1": 3}
    one_and_three = {"a": "big", "b": "big", "c": "big", "d": "small"}
    owners = assign([f"op/{i}" for i in range(40)], one_and_three, {})
    assert Counter(one_and_three[h] for h in owners.values()) == {"big": 30, "small": 10}


def test_owners_are_the_same_in_every_process() -> None:
    """Fixed figures: a restarted coordinator, or one of another release, must not move what the old one assigned."""
    hosts = {"h0": "n0", "h1": "n0", "h2": "n1"}
    assert list(assign([f"op/{i}" for i in range(9)], hosts, {}).values()) == [
        "h0",
        "h0",
        "h1",
        "h2",
        "h2",
        "h1",
        "h2",
        "h1",
        "h0",
    ]


def test_queries_of_few_partitions_do_not_meet_on_the_same_hosts() -> None:
    hosts = [f"h{i}" for i in range(50)]
    used = Counter(h for q in range(50) for h in assign(["op/0", "op/1"], hosts, {}, salt=f"query{q}").values())
    assert len(used) > 35 and max(used.values()) < 12
    assert assign(["op/0"], hosts, {}, salt="q") == assign(["op/0"], hosts, {}, salt="q")


def test_without_hosts_it_says_so() -> None:
    with pytest.raises(UnknownHostError, match="2 partitions"):
        assign(["a", "b"], {}, {})


def test_large_clusters_are_even_and_few_partitions_move() -> None:
    partitions = [f"op/{i}" for i in range(10_000)]
    hosts = {f"h{i}": f"n{i // 4}" for i in range(200)}
    owners = assign(partitions, hosts, {})
    assert set(Counter(owners.values()).values()) == {50}
    after = assign(partitions, {**hosts, "new": "n0"}, owners, rebalance=True)
    check_even(partitions, {**hosts, "new": "n0"}, after)
    assert 49 <= len(moved(owners, after)) <= 55


def test_placement_is_by_score() -> None:
    """With room for all everywhere, rendezvous decides: taking a host away moves only what it had."""
    rng = np.random.default_rng(1)
    partitions, hosts = (rng.integers(0, 2**63, n, np.uint64) for n in (2000, 10))
    room = np.full(10, 2000, np.int64)
    before = place(partitions, hosts, room)
    assert np.bincount(before, minlength=10).min() > 140
    room[3] = 0
    after = place(partitions, hosts, room)
    assert (after[before != 3] == before[before != 3]).all() and (after[before == 3] != 3).all()


def test_a_host_without_room_for_all_takes_those_that_score_highest() -> None:
    rng = np.random.default_rng(2)
    partitions, hosts = (rng.integers(0, 2**63, n, np.uint64) for n in (50, 2))
    scores = _scores(partitions, hosts)
    prefer = [p for p in range(50) if scores[p, 0] > scores[p, 1]]
    highest = sorted(prefer, key=lambda p: int(scores[p, 0]), reverse=True)[:5]
    assert np.flatnonzero(place(partitions, hosts, np.array([5, 45])) == 0).tolist() == sorted(highest)


def test_unequal_shares_go_to_the_hosts_that_own_most() -> None:
    assert shares(5, np.array([1, 2, 2]), ["a", "b", "c"]).tolist() == [1, 2, 2]
    assert shares(5, np.array([3, 1, 1, 0]), ["a", "a", "b", "b"]).tolist() in ([2, 1, 1, 1], [1, 1, 2, 1])
    assert shares(0, np.array([0]), ["a"]).tolist() == [0]
