"""Standbys: copies on other machines that follow each version, and own the partitions of a host that is lost."""

from __future__ import annotations

import itertools
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.exceptions import HostMemoryBusyError, StorageError
from backends.partition.partition_state import PartitionState
from backends.storage.checkpoint_storage import CheckpointStorage
from coordinator_actor.messages import HandOver, HostOrders
from coordinator_actor.run.owners import standby_hosts
from coordinator_actor.run.query_state import QueryState
from tests.coordinator_actor.savepoints.savepoint_streams import Stream, run_and_clean
from tests.patience import PATIENCE

ALL = dict.fromkeys(range(30), 1)


@pytest.fixture(params=["file", "rocksdb"])
def stream(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Stream]]:
    streams: list[Stream] = []

    def make(batches: int = 1, *, n: int = 6, **kwargs: Any) -> Stream:
        root = tmp_path / str(len(streams))
        streams.append(Stream(root, n, backend=request.param, **{"standby_replicas": 1, "hosts": 3, **kwargs}))
        streams[-1].batches(0, batches)
        return streams[-1]

    yield make
    for one in streams:
        one.close()


def owners(s: Stream) -> list[str]:
    return [s.c.open_for_read("run1", "op", p).owner.host_id for p in range(s.n)]


def copies(s: Stream) -> dict[int, dict[int, int]]:
    """Return by host the versions of the copies that it reports."""
    return {i: dict(host.hand_overs.report().warm.get("run1", {}).get("op", {})) for i, host in s.hosts.items()}


def standby_of(s: Stream, partition: int) -> int:
    assignment = s.c.registries.runs.by_id["run1"].assignment.current
    return int(assignment.standbys[assignment.find("op", partition).host_id][0].removeprefix("h"))


def are_current(s: Stream) -> bool:
    """Return whether each partition has its copy at the completed version."""
    version = max(s.at)
    return all(copies(s)[standby_of(s, p)].get(p) == version for p in range(s.n))


def at_once(s: Stream, batch: int) -> None:
    """Run the tasks of a batch side by side, as executors do: each host stores its changelogs in one object."""
    barrier = threading.Barrier(s.n)

    def run(p: int) -> None:
        barrier.wait()
        s.begin(batch, ALL, [p])

    with ThreadPoolExecutor(s.n) as tasks:
        list(tasks.map(run, range(s.n)))
    s.commit(batch)
    s.at[batch + 1] = {**s.at[batch], **ALL}


def loads(s: Stream) -> int:
    return sum(host.counters.read()["loads"] for host in s.hosts.values())


def test_each_partition_has_a_copy_on_another_machine_which_follows_without_loading(stream):
    s = stream(batches=2)
    s.heartbeat_until(lambda: are_current(s))
    assert all(standby_of(s, p) != int(owner.removeprefix("h")) for p, owner in enumerate(owners(s)))
    before = loads(s)
    for batch in range(2, 9):
        s.batch(batch)
        s.heartbeat_until(lambda: are_current(s))
    assert loads(s) == before and s.rows() == s.at[9]


def test_a_copy_that_lags_behind_follows_several_versions_and_loads_if_it_lags_further(stream):
    s = stream(batches=2)
    s.heartbeat_until(lambda: are_current(s))
    before = loads(s)
    s.batches(2, 8)
    s.heartbeat_until(lambda: are_current(s))
    assert loads(s) == before
    s.batches(8, 20)
    s.heartbeat_until(lambda: are_current(s))
    assert loads(s) == before + s.n and s.rows() == s.at[20]


def test_the_standby_of_a_lost_host_owns_its_partitions_and_loads_nothing(stream):
    s = stream(batches=3)
    s.heartbeat_until(lambda: are_current(s))
    lost = [p for p, owner in enumerate(owners(s)) if owner == "h1"]
    expected = {p: f"h{standby_of(s, p)}" for p in lost}
    taker = s.hosts[standby_of(s, lost[0])]
    before = taker.counters.read()["loads"]
    s.lose(1)
    assert {p: owners(s)[p] for p in lost} == expected
    s.begin(3, ALL, lost)
    assert taker.counters.read()["loads"] == before
    s.begin(3, ALL, [p for p in range(s.n) if p not in lost])
    s.commit(3)
    s.at[4] = {**s.at[3], **ALL}
    assert s.rows() == s.at[4]
    s.heartbeat_until(lambda: are_current(s))  # copies of all partitions again, on the machines that are left


def test_a_copy_that_lacks_the_last_versions_when_its_owner_is_lost_serves_exactly_the_completed_one(stream):
    s = stream(batches=3)
    s.heartbeat_until(lambda: are_current(s))
    s.batches(3, 6)
    s.begin(6, ALL)  # prepared, and Spark has not committed it
    s.lose(1)
    assert s.rows() == s.at[6]
    s.begin(6, ALL)
    s.commit(6)
    s.at[7] = {**s.at[6], **ALL}
    assert s.rows() == s.at[7]
    s.batch(7)
    assert s.rows() == s.at[8]


def test_owner_and_standby_are_lost_at_once(stream):
    s = stream(batches=3)
    s.heartbeat_until(lambda: are_current(s))
    s.kill(0)
    s.lose(1)
    s.batch(3)
    assert set(owners(s)) == {"h2"} and s.rows() == s.at[4]
    assert not any(copies(s).values()), "one machine has no place for a copy"


def test_partitions_of_a_leaving_host_move_to_their_copies(stream):
    s = stream(batches=2, hosts=2, n=4)
    s.heartbeat_until(lambda: are_current(s))
    before = loads(s)
    s.c.place_session("s", (), ["h1"])
    s.heartbeat_until(lambda: set(owners(s)) == {"h0"})
    assert loads(s) == before
    s.batch(2)
    assert s.rows() == s.at[3]


def test_all_changelogs_of_a_version_in_one_object_are_one_request(stream, monkeypatch):
    s = stream(batches=2, n=8, hosts=2)
    s.heartbeat_until(lambda: are_current(s))
    requests: list[int] = []
    read_together = CheckpointStorage.read_together

    def counted(self: CheckpointStorage, refs: Any) -> dict[str, bytes]:
        assert len({ref.stored_in for ref in refs}) == 1
        requests.append(len(refs))
        return read_together(self, refs)

    monkeypatch.setattr(CheckpointStorage, "read_together", counted)
    s.batch(2)
    s.heartbeat_until(lambda: are_current(s))
    objects = {e.changelog.stored_in for e in s.log().chain()[3].operators["op"].partitions.values()}
    assert sum(requests) == s.n and len(requests) == len(objects)


def test_eight_hosts_on_object_storage_read_each_object_of_a_batch_once(stream, monkeypatch):
    """Each host stores its changelogs in one object, or in two on a busy computer: so there is a request per host."""
    s = stream(batches=0, n=16, hosts=8)
    s.world.is_local = False
    at_once(s, 0)
    s.heartbeat_until(lambda: are_current(s))
    requests: list[str] = []
    read_together, read = CheckpointStorage.read_together, CheckpointStorage.read
    monkeypatch.setattr(
        CheckpointStorage,
        "read_together",
        lambda self, refs: (requests.append(refs[0].stored_in), read_together(self, refs))[1],
    )
    monkeypatch.setattr(CheckpointStorage, "read", lambda self, ref: (requests.append(ref.path), read(self, ref))[1])
    for batch in (1, 2):
        requests.clear()
        at_once(s, batch)
        s.heartbeat_until(lambda: are_current(s))
        entries = s.log().chain()[batch + 1].operators["op"].partitions.values()
        objects = {entry.changelog.stored_in for entry in entries}
        assert sorted(requests) == sorted(objects)


def test_a_copy_of_exchanged_files_is_loaded_again(stream):
    s = stream(batches=2)
    s.heartbeat_until(lambda: are_current(s))
    before = loads(s)
    for host in s.hosts.values():
        completed = s.c.completed("run1", host.info.host_id)
        host.loader.complete(msgspec.structs.replace(completed, rewritten="rewritten/1"))
    assert not any(copies(s).values())
    s.heartbeat_until(lambda: are_current(s))
    assert loads(s) >= before + s.n


def test_a_missing_changelog_makes_the_copy_load(stream, monkeypatch):
    s = stream(batches=2)
    s.heartbeat_until(lambda: are_current(s))
    before = loads(s)
    monkeypatch.setattr(CheckpointStorage, "read_together", lambda self, refs: {})
    s.batch(2)
    s.heartbeat_until(lambda: are_current(s))
    assert loads(s) == before + s.n


def test_copies_whose_storage_fails_try_again_with_backoff(stream, monkeypatch, caplog):
    s = stream(batches=2)
    s.heartbeat_until(lambda: are_current(s))
    tried: list[float] = []

    def failing(self: CheckpointStorage, refs: Any) -> dict[str, bytes]:
        tried.append(s.world.now)
        raise StorageError("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointStorage, "read_together", failing)
        s.batch(2)
        for _ in range(8):
            s.world.now += 1
            s.heartbeat()
            for host in s.hosts.values():
                for thread in list(host.hand_overs._orders._threads.values()):
                    thread.join(PATIENCE)
    assert len(tried) == 4 * len(s.hosts), "behind 1, 2 and 4 s"
    for _ in range(9):
        s.world.now += 1
        s.heartbeat()
    s.heartbeat_until(lambda: are_current(s))
    assert s.rows() == s.at[3] and "cannot follow, and try again in 4 s: no answer" in caplog.text


def test_a_copy_that_fails_to_load_is_tried_with_backoff_although_versions_go_on(stream, monkeypatch):
    s = stream(batches=2, hosts=2, n=1)
    tried: list[float] = []

    def failing(grant: Any, operator: str, partition: int, is_abandoned: Any) -> None:
        tried.append(s.world.now)
        raise StorageError("no answer")

    for host in s.hosts.values():
        monkeypatch.setattr(host.loader, "warm_up", failing)
    for batch in range(2, 18):
        s.world.now += 1
        s.batch(batch)
        s.heartbeat()
        for host in s.hosts.values():
            for thread in list(host.hand_overs._orders._threads.values()):
                thread.join(PATIENCE)
    assert len(tried) == 5, "behind 1, 2, 4 and 8 s"


def test_one_copy_that_cannot_apply_stops_no_other(stream, monkeypatch):
    s = stream(batches=2, n=8, hosts=2)
    s.heartbeat_until(lambda: are_current(s))
    bad = next(iter(copies(s)[0]))
    follow = PartitionState.follow

    def failing(self: PartitionState, ref: Any, data: bytes) -> Any:
        if f"/{bad}/default" in ref.file.path:
            raise HostMemoryBusyError("no room")
        return follow(self, ref, data)

    monkeypatch.setattr(PartitionState, "follow", failing)
    s.batches(2, 5)
    others = [p for p in range(s.n) if p != bad]
    s.heartbeat_until(lambda: all(copies(s)[standby_of(s, p)].get(p) == 5 for p in others))
    assert copies(s)[0][bad] == 2


def test_a_copy_is_reported_while_it_applies_changes(stream, monkeypatch):
    s = stream(batches=2, n=2, hosts=2)
    s.heartbeat_until(lambda: are_current(s))
    before = loads(s)
    seen: list[dict[int, int]] = []
    apply = PartitionState._apply

    def seeing(self: PartitionState, delta: Any, before: Any) -> None:
        real = delta.apply.result()

        def write(state: Any) -> None:
            seen.extend(of_host for of_host in copies(s).values() if of_host)
            real(state)

        delta.apply = Future()
        delta.apply.set_result(write)
        apply(self, delta, before)

    monkeypatch.setattr(PartitionState, "_apply", seeing)
    s.batch(2)
    s.heartbeat_until(lambda: are_current(s))
    assert seen and all(len(of_host) == 1 for of_host in seen) and loads(s) == before


def test_a_full_disk_takes_standby_copies_one_by_one_and_spares_what_this_host_is_to_own(stream):
    s = stream(batches=2, n=8, hosts=2)
    s.heartbeat_until(lambda: are_current(s))
    cache = s.hosts[0].cache
    all_copies = [kept.key for kept in cache.kept_copies()]
    soon, standbys = all_copies[:1], all_copies[1:]
    cache.want(frozenset(soon), frozenset(standbys))
    cache._kept[standbys[0]].note_read()
    dropped = [cache.drop_least_wanted().key for _ in standbys]
    assert sorted(dropped) == sorted(standbys) and dropped[-1] == standbys[0], "the one that was read goes last"
    assert cache.drop_least_wanted() is None and [kept.key for kept in cache.kept_copies()] == soon


def test_orders_to_copies_name_the_newest_snapshots_of_their_owners(stream):
    s = stream(batches=0, hosts=0)
    for i in range(3):
        s.add_host(i, deltas_per_snapshot=1)

    def ordered() -> dict[int, int]:
        orders = [s.c.heartbeat_host(f"h{i}", "a", {"run1": 0}).warm_up for i in s.hosts]
        return {p: v for (order,) in orders for p, v in order.snapshots.get("op", {}).items()}

    s.batch(0)
    assert ordered() == {}
    run_and_clean(s, 1, 5)
    s.batch(5)
    versions = s.c.registries.runs.by_id["run1"].versions
    newest = {p: versions.snapshots("op", p, 6)[-1].version for p in range(s.n)}
    assert ordered() == newest
    run_and_clean(s, 6, 10)
    s.batch(10)
    later = {p: versions.snapshots("op", p, 11)[-1].version for p in range(s.n)}
    assert ordered() == later and all(later[p] > newest[p] for p in range(s.n))


def test_promoted_copies_are_not_all_due_for_a_snapshot(stream):
    s = stream(batches=0, hosts=0)
    for i in range(3):
        s.add_host(i, deltas_per_snapshot=4)
    s.batch(0)
    s.heartbeat_until(lambda: are_current(s))
    run_and_clean(s, 1, 9)
    s.heartbeat_until(lambda: are_current(s))
    s.batch(9)
    s.heartbeat_until(lambda: are_current(s))
    newest = {(p, v) for i in s.hosts for p, v in snapshot_versions(s, i).items()}
    of_copies = {(kept.partition, kept.snapshot_version) for h in s.hosts.values() for kept in h.cache.kept_copies()}
    assert of_copies == newest


def snapshot_versions(s: Stream, i: int) -> dict[int, int]:
    """Return the newest snapshots of the partitions that a host owns."""
    return {instance.partition: instance.snapshot_version for instance in s.hosts[i].cache.all()}


def test_only_copies_with_something_to_do_are_ordered_and_all_are_named(stream, monkeypatch):
    s = stream(batches=3, n=12)
    kept = sorted(p for p in range(s.n) if standby_of(s, p) == 0)
    assert len(kept) == 4
    numbers = itertools.count(1000)

    def orders(copied: dict[int, int], exchanged: str = "") -> HostOrders:
        report = HandOver(next(numbers), {"run1": {"op": copied}}, exchanged={"run1": exchanged} if exchanged else {})
        answer = s.c.heartbeat_host("h0", "a", {"run1": 3}, report)
        assert answer.standbys == {"run1": {"op": kept}}
        return answer

    def ordered(answer: HostOrders) -> set[int]:
        return {p for order in answer.warm_up for p in order.heads["op"]}

    current = dict.fromkeys(kept, 3)
    assert ordered(orders({})) == set(kept)
    assert orders(current).warm_up == ()
    behind = orders({**current, kept[0]: 2})
    assert ordered(behind) == {kept[0]} and len(behind.warm_up[0].changelogs["op"][kept[0]]) == 1
    monkeypatch.setattr(QueryState, "last_exchange", "rewritten/1")
    assert ordered(orders(current)) == set(kept), "the host may hold files from before the exchange"
    assert orders(current, "rewritten/1").warm_up == ()
    monkeypatch.undo()
    s.batch(3)
    assert ordered(orders(current)) == set(kept)


def test_queries_without_standbys_have_no_copies(stream):
    s = stream(batches=2, standby_replicas=0)
    s.heartbeat(), s.heartbeat()
    assert not any(copies(s).values())
    assert s.c.heartbeat_host("h0", "a", {"run1": 2}).standbys == {}


def test_each_host_keeps_the_copies_of_one_other_host():
    nodes = {f"h{i}": f"n{i // 2}" for i in range(10)}
    standbys = standby_hosts(nodes, {}, 1, salt="q")
    assert sorted(h for (h,) in standbys.values()) == sorted(nodes)
    assert all(nodes[h] != nodes[owner] for owner, (h,) in standbys.items())
    two = standby_hosts(nodes, {}, 2, salt="q")
    assert all(len({nodes[owner], *(nodes[h] for h in hosts)}) == 3 for owner, hosts in two.items())


def test_a_lost_machine_changes_only_the_standbys_of_its_neighbours():
    nodes = {f"h{i}": f"n{i}" for i in range(10)}
    before = standby_hosts(nodes, {}, 1)
    (neighbour,) = (h for h, standbys in before.items() if standbys == ("h3",))
    del nodes["h3"]
    after = standby_hosts(nodes, {}, 1)
    assert {h for h in after if after[h] != before[h]} == {neighbour}


def test_standbys_are_in_other_zones_if_there_are_any():
    nodes = {f"h{i}": f"n{i}" for i in range(9)}
    zones = {f"n{i}": "abc"[i % 3] for i in range(9)}
    standbys = standby_hosts(nodes, zones, 2)
    for owner, hosts in standbys.items():
        assert len({zones[nodes[h]] for h in (owner, *hosts)}) == 3
    assert max(kept_by(standbys).values()) <= 3


def kept_by(standbys: dict[str, tuple[str, ...]]) -> Counter[str]:
    """Return for each host of how many hosts it keeps the copies."""
    return Counter(h for hosts in standbys.values() for h in hosts)


def cluster(sizes: Sequence[int], name: str = "") -> tuple[dict[str, str], dict[str, str]]:
    """Return hosts with their nodes, and the nodes with their zones, of as many nodes as ``sizes`` says."""
    zones = {f"{name}n{z}-{i}": f"z{z}" for z, size in enumerate(sizes) for i in range(size)}
    return {f"h{node}": node for node in zones}, zones


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=14),
    st.lists(st.integers(1, 3), min_size=14, max_size=14),
    st.integers(1, 3),
    st.text(max_size=3),
)
def test_standbys_of_any_cluster_are_on_other_nodes_in_other_zones_with_room(
    zone_of_node: list[int], hosts_of_node: list[int], replicas: int, salt: str
) -> None:
    zones = {f"n{i}": "abcd"[zone] for i, zone in enumerate(zone_of_node)}
    nodes = {f"h{i}-{k}": f"n{i}" for i in range(len(zones)) for k in range(hosts_of_node[i])}
    standbys = standby_hosts(nodes, zones, replicas, salt=salt)
    loads = kept_by(standbys)
    room = replicas + 1
    assert sorted(standbys) == sorted(nodes)
    for owner, hosts in standbys.items():
        own_and_chosen = [nodes[owner]]
        assert len(hosts) == min(replicas, len(zones) - 1)
        for host in hosts:
            used_zones = {zones[node] for node in own_and_chosen}
            assert nodes[host] not in own_and_chosen
            free = [h for h in nodes if nodes[h] not in own_and_chosen and loads[h] < room]
            if zones[nodes[host]] in used_zones:
                assert not any(zones[nodes[h]] not in used_zones for h in free), (owner, hosts)
            own_and_chosen.append(nodes[host])
    if len(set(hosts_of_node[: len(zones)])) == 1:
        assert max(loads.values(), default=0) <= room


@pytest.mark.parametrize(
    ("sizes", "in_own_zone"), [((1, 9), 7), ((2, 8), 4), ((2, 4, 6), 0), ((10, 10, 10), 0), ((15, 15), 0)]
)
def test_no_host_keeps_the_copies_of_more_than_two_whatever_the_zones(sizes: tuple[int, ...], in_own_zone: int) -> None:
    for name in "abcdefgh":
        nodes, zones = cluster(sizes, name)
        standbys = standby_hosts(nodes, zones, 1)
        assert max(kept_by(standbys).values()) <= 2
        assert sum(zones[nodes[owner]] == zones[nodes[h]] for owner, (h,) in standbys.items()) == in_own_zone


def other_changes(nodes: dict[str, str], zones: dict[str, str], replicas: int) -> list[int]:
    """Return for each node how many copies change their host if it is lost, or joins, apart from its own copies."""
    all_of_them = standby_hosts(nodes, zones, replicas)
    changes: list[int] = []
    for lost in sorted(set(nodes.values())):
        rest = standby_hosts({h: node for h, node in nodes.items() if node != lost}, zones, replicas)
        changes.append(
            sum(nodes[h] != lost and h not in hosts for owner, hosts in rest.items() for h in all_of_them[owner])
        )
    return changes


@pytest.mark.parametrize(
    ("sizes", "replicas", "mean", "most"),
    [
        ((30,), 1, 0, 0),
        ((30,), 2, 0, 0),
        ((10, 10, 10), 1, 0.5, 3),
        ((10, 10, 10), 2, 2.5, 8),
        ((15, 15), 1, 1, 4),
        ((3, 9, 18), 1, 1.5, 6),
    ],
)
def test_a_node_that_is_lost_or_joins_changes_few_standbys(
    sizes: tuple[int, ...], replicas: int, mean: float, most: int
) -> None:
    changes = [n for name in "abcd" for n in other_changes(*cluster(sizes, name), replicas)]
    assert max(changes) <= most
    assert sum(changes) <= mean * len(changes)


def test_in_small_clusters_with_any_zones_at_most_half_of_the_standbys_change() -> None:
    rng = random.Random(1)
    for number in range(60):
        nodes, zones = cluster([rng.randint(0, 4) for _ in range(4)], str(number))
        replicas = rng.randint(1, 3)
        assert max(other_changes(nodes, zones, replicas), default=0) <= len(nodes) * replicas / 2


def test_leaving_hosts_and_the_only_machine_keep_no_copies():
    nodes = {"h0": "n0", "h1": "n0", "h2": "n1", "h3": "n2"}
    assert standby_hosts({"h0": "n0", "h1": "n0"}, {}, 1) == {"h0": (), "h1": ()}
    standbys = standby_hosts(nodes, {}, 1, staying=["h0", "h1", "h2"])
    assert standbys["h2"][0] in ("h0", "h1") and standbys["h0"] == standbys["h1"] == ("h2",)
    assert standbys["h3"][0] != "h3"
