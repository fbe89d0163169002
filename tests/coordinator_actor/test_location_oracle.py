"""The view of who owns which key groups."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator_actor.exceptions import InvalidRequestError, UnknownOperatorError
from coordinator_actor.messages import HostInfo, KvStateLocationOracle, OperatorOwners

HOSTS = tuple(HostInfo(f"h{i}", "a", f"grpc://10.0.0.{i}:1", f"n{i // 2}", "s") for i in range(5))


def oracle(owners: dict[str, list[int]], key_groups: int = 64, name: str | None = "totals") -> KvStateLocationOracle:
    hosts = {operator: [HOSTS[i] for i in indices] for operator, indices in owners.items()}
    return KvStateLocationOracle.of("q", "run", name, key_groups, 7, hosts)


@given(
    st.integers(1, 300).flatmap(
        lambda g: st.tuples(st.just(g), st.lists(st.integers(0, 4), min_size=1, max_size=min(g, 40)))
    )
)
def test_each_key_group_is_with_the_owner_of_its_partition(case: tuple[int, list[int]]) -> None:
    key_groups, owners = case
    view, n = oracle({"op": owners}, key_groups), len(owners)
    partitions = [view.partition_of("op", g) for g in range(key_groups)]
    # The rule of the design, the other way round: p owns the contiguous groups with g * n // G == p, and none is left
    # out.
    assert partitions == [p for p in range(n) for g in range(key_groups) if g * n // key_groups == p]
    assert [view.location_of("op", g) for g in range(key_groups)] == [HOSTS[owners[p]] for p in partitions]
    assert view.owners("op") == tuple(HOSTS[i] for i in owners)
    assert view.num_partitions("op") == n


def test_operators_have_separate_owners() -> None:
    view = oracle({"a": [0, 1], "b": [1, 1, 2]})
    assert view.location_of("a", 63) == HOSTS[1] and view.location_of("b", 63) == HOSTS[2]
    assert [h.host_id for h in view.hosts] == ["h0", "h1", "h2"]
    assert view.completed_version == 7


def test_the_error_for_an_unknown_operator_names_the_existing_ones() -> None:
    view = oracle({"clicks": [0], "views": [1]})
    for ask in (
        lambda: view.location_of("nobody", 0),
        lambda: view.partition_of("nobody", 0),
        lambda: view.owners("nobody"),
        lambda: view.num_partitions("nobody"),
    ):
        with pytest.raises(UnknownOperatorError, match=r"totals \(q, run run\).*'nobody'.*'clicks', 'views'"):
            ask()
    with pytest.raises(UnknownOperatorError, match=r"unnamed.*exist: none"):
        oracle({}, name=None).owners("op")


@pytest.mark.parametrize("key_group", [-1, 64])
def test_there_are_only_so_many_key_groups(key_group: int) -> None:
    with pytest.raises(InvalidRequestError, match=rf"key group {key_group}: .*has 64"):
        oracle({"op": [0]}).location_of("op", key_group)


def test_more_partitions_than_key_groups_or_none_cannot_be() -> None:
    for owners in ([0, 1, 2], []):
        with pytest.raises(InvalidRequestError, match=rf"has {len(owners)} partitions"):
            oracle({"op": owners}, key_groups=2)


@pytest.mark.parametrize("kind", [msgspec.json, msgspec.msgpack])
def test_it_is_small_to_send_and_the_same_afterwards(kind: object) -> None:
    codec = msgspec.json if kind is msgspec.json else msgspec.msgpack
    view = oracle({"op": [i % 5 for i in range(10_000)]}, key_groups=65_536)
    data = codec.encode(view)
    # A host is listed once, an owner is a number of one digit and a comma.
    assert len(data) < 10_000 * 2 + 2_000
    assert codec.decode(data, type=KvStateLocationOracle) == view


@pytest.mark.parametrize("index", [-1, 1])
def test_a_damaged_message_is_refused(index: int) -> None:
    good = msgspec.structs.asdict(oracle({"op": [0, 0]}))
    damaged = msgspec.json.encode({**good, "operators": [OperatorOwners("op", (0, index))]})
    with pytest.raises(InvalidRequestError, match="damaged"):
        msgspec.json.decode(damaged, type=KvStateLocationOracle)


def test_it_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        oracle({"op": [0]}).completed_version = 8  # type: ignore[misc]
