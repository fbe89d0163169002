"""Partitions move from one living host to another: warm, between two batches, and no more of them than must."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from backends.exceptions import LoadEndedError, LocalDiskFullError, StorageError
from backends.partition.partition_state import PartitionState
from coordinator_actor.messages import HandOver, HostOrders, OpenGrant
from tests.coordinator_actor.savepoints.savepoint_streams import Stream
from tests.patience import PATIENCE

ALL = dict.fromkeys(range(30), 1)


@pytest.fixture
def stream(tmp_path: Path) -> Iterator[Callable[..., Stream]]:
    made: list[Stream] = []

    def make(batches: int = 1, *, n: int = 4, **kwargs: Any) -> Stream:
        made.append(Stream(tmp_path / str(len(made)), n, **kwargs))
        made[-1].batches(0, batches)
        return made[-1]

    yield make
    for one in made:
        one.close()


def owners(s: Stream) -> list[str]:
    return [s.c.open_for_read("run1", "op", p).owner.host_id for p in range(s.n)]


def leave(s: Stream, *hosts: int) -> tuple[str, ...]:
    return s.c.place_session("s", (), [f"h{i}" for i in hosts])


def beat(s: Stream, i: int, hand_over: HandOver | None = None) -> HostOrders:
    """A heartbeat of the test's own, in the place of the host's."""
    info = s.world.host(i)
    s.c.expire()
    return s.c.heartbeat_host(info.host_id, info.incarnation, {"run1": 1}, hand_over)


def shares(s: Stream) -> list[str]:
    """The owners of the partitions of a run whose first batch has not begun, sorted."""
    current = s.c.registries.runs.by_id["run2"].assignment.current
    return sorted(current.find("op", p).host_id for p in range(s.n))


def is_warm(s: Stream, i: int, partitions: list[int], run: str = "run1") -> bool:
    return s.hosts[i].hand_overs.report().warm.get(run, {}).get("op", {}).keys() == set(partitions)


def test_a_new_host_loads_its_share_while_the_owner_serves_and_no_batch_waits_for_a_load(stream):
    s = stream(hosts=1)
    s.begin(1, ALL, range(2))
    host = s.add_host(1)
    s.world.now += 2  # the host's answer about the batch is old by now: it asks again
    s.begin(1, ALL, range(2, 4))
    s.heartbeat_until(lambda: host.counters.read()["loads"] == 2)
    s.heartbeat()
    assert set(owners(s)) == {"h0"}, "in a batch nothing moves"
    s.commit(1)
    s.at[2] = {**s.at[1], **ALL}
    s.heartbeat_until(lambda: sorted(owners(s)) == ["h0", "h0", "h1", "h1"])
    assert s.rows() == s.at[2]
    s.batch(2)
    assert sorted(owners(s)) == ["h0", "h0", "h1", "h1"] and s.rows() == s.at[3]


def test_nothing_moves_to_a_host_that_has_not_loaded_it(stream):
    s = stream(hosts=1)
    s.c.register_host(s.world.host(1), msgspec.convert({}, type(s.hosts[0].cache.report())))
    (order,) = beat(s, 1).warm_up
    assert order.version == 1 and len(order.heads["op"]) == 2
    s.heartbeat(), s.heartbeat()
    s.batch(1)
    s.batch(2)
    assert set(owners(s)) == {"h0"} and s.rows() == s.at[3]
    warm = {"run1": {"op": dict.fromkeys(order.heads["op"], 1)}}
    beat(s, 1, HandOver(1, warm))
    s.c.expire()
    assert sorted(p for p, owner in enumerate(owners(s)) if owner == "h1") == sorted(order.heads["op"])


def test_nothing_moves_before_the_owner_has_said_that_it_looks_at_sparks_log(stream):
    s = stream(hosts=1)
    s.add_host(1)
    wanted = [p for order in beat(s, 1).warm_up for p in order.heads["op"]]
    s.heartbeat(1)
    while not is_warm(s, 1, wanted):
        s.heartbeat(1)
    s.heartbeat(1)
    assert set(owners(s)) == {"h0"}, "the owner has sent no heartbeat since"
    assert not s.hosts[0].hand_overs.gives("run1")
    s.heartbeat(0)
    assert s.hosts[0].hand_overs.gives("run1") and set(owners(s)) == {"h0"}
    s.heartbeat(0)
    s.c.expire()
    assert sorted(owners(s)) == ["h0", "h0", "h1", "h1"]


def test_a_move_that_is_cancelled_and_planned_again_waits_until_the_owner_looks_at_sparks_log_again(stream):
    """The owner's last heartbeat still says that it looks, and the answer says that it need not any more."""
    s = stream(hosts=1, n=2)
    s.add_host(1)
    leave(s, 0)
    s.heartbeat(1)
    while not is_warm(s, 1, [0, 1]):
        s.heartbeat(1)
    s.heartbeat(1)
    owner = s.hosts[0]
    owner.heartbeat()
    assert owner.hand_overs.gives("run1") and set(owners(s)) == {"h0"}
    leave(s, 1)
    s.c.expire()
    owner.heartbeat()
    assert not owner.hand_overs.gives("run1")
    leave(s, 0)
    s.c.expire()
    s.c.expire()
    assert set(owners(s)) == {"h0"}, "the owner would answer from its version after Spark's next commit"
    s.heartbeat_until(lambda: set(owners(s)) == {"h1"})
    s.begin(1, ALL)
    s.world.commit_spark(1)  # without a report to the owner
    owner.prepared.settle("run1", PATIENCE)
    assert owner.completed.newest("run1").version == 2


def test_an_owner_that_has_given_partitions_away_never_answers_from_before_sparks_last_batch(stream):
    """Neither while it waits for the move, nor after the move, when the owner does not know of a later version."""
    s = stream(hosts=1)
    s.add_host(1)
    s.heartbeat_until(lambda: sorted(owners(s)) == ["h0", "h0", "h1", "h1"])
    host = s.hosts[0]
    s.begin(1, ALL)
    host.prepared._prepared.clear()  # as if it had nothing of the run any more
    s.world.commit_spark(1)  # without a report to the host
    host.prepared.settle("run1", 10.0)
    assert host.completed.newest("run1").version == 2
    s.heartbeat()
    s.heartbeat()
    assert not host.hand_overs.gives("run1"), "it knows what it owns"


def test_a_host_that_is_to_go_hands_over_all_it_has_and_is_released(stream):
    s = stream(hosts=3, n=6)
    before = owners(s)
    assert leave(s, 2) == ()
    s.heartbeat_until(lambda: "h2" not in owners(s))
    after = owners(s)
    assert [a for a, b in zip(after, before, strict=True) if b != "h2"] == [b for b in before if b != "h2"]
    assert leave(s, 2) == ("h2",)
    assert s.rows() == s.at[1]
    s.hosts.pop(2).close()
    s.batch(1)
    assert s.rows() == s.at[2]


def test_a_host_that_is_to_go_gets_nothing_more(stream):
    s = stream(hosts=2)
    leave(s, 1)
    s.heartbeat_until(lambda: set(owners(s)) == {"h0"})
    s.add_host(2)
    s.heartbeat_until(lambda: set(owners(s)) == {"h0", "h2"})
    s.lose(2)
    assert set(owners(s)) == {"h0"}
    assert leave(s) == ()
    s.heartbeat_until(lambda: set(owners(s)) == {"h0", "h1"})


def test_hosts_keep_their_partitions_when_all_of_them_leave(stream):
    s = stream()
    before = owners(s)
    assert leave(s, 0, 1) == ()
    s.batch(1)
    assert owners(s) == before and leave(s, 0, 1) == ()


def test_a_lost_owners_partitions_move_to_the_host_that_has_loaded_them(stream):
    s = stream(hosts=2, n=6)
    leave(s, 1)
    wanted = sorted(p for order in beat(s, 0).warm_up for p in order.heads["op"])
    assert wanted == [p for p, owner in enumerate(owners(s)) if owner == "h1"]
    s.add_host(2)
    planned = dict(s.c.registries.runs.by_id["run1"].assignment.planned)
    s.heartbeat(0)
    s.lose(1)
    after = owners(s)
    assert "h1" not in after
    again = {p: host for (_, p), host in s.c.registries.runs.by_id["run1"].assignment.planned.items()}
    assert {p: after[p] for (_, p), host in planned.items() if host == "h0"} | again


def test_partitions_of_a_lost_host_are_loaded_before_a_task_asks_for_them(stream):
    s = stream(batches=2, hosts=2, n=6)
    lost = [p for p, owner in enumerate(owners(s)) if owner == "h1"]
    s.begin(2, ALL, [p for p in range(6) if p not in lost])
    s.lose(1)
    s.heartbeat_until(lambda: is_warm(s, 0, lost))
    assert s.hosts[0].counters.read()["loads"] == len(lost)
    s.begin(2, ALL, lost)
    s.commit(2)
    s.at[3] = {**s.at[2], **ALL}
    assert s.rows() == s.at[3]
    assert beat(s, 0).warm_up == (), "tasks have opened all partitions since"


def test_a_query_that_is_started_again_is_loaded_while_spark_plans_its_first_batch(stream):
    s = stream(batches=3, hosts=2, n=4)
    s.registration = msgspec.structs.replace(s.registration, run_id="run2")
    s.register()
    ordered = [p for i in range(2) for order in beat(s, i).warm_up for p in order.heads["op"]]
    assert sorted(ordered) == [0, 1, 2, 3]
    s.heartbeat_until(lambda: sum(host.counters.read()["loads"] for host in s.hosts.values()) == 4)
    s.batch(3)
    assert s.rows() == s.at[4]


def test_the_copies_of_a_quiet_query_stay(stream):
    s = stream(batches=2, hosts=2, n=6)
    lost = [p for p, owner in enumerate(owners(s)) if owner == "h1"]
    s.lose(1)
    s.heartbeat_until(lambda: is_warm(s, 0, lost))
    for _ in range(4):
        s.world.now += 400
        s.c.driver_heartbeat("run1")
        s.c.heartbeat_host("h0", "a", {"run1": 2})
        s.heartbeat()
        s.hosts[0].cache.drop_unused()
        assert is_warm(s, 0, lost)
    assert s.hosts[0].counters.read()["loads"] == len(lost)


def test_copies_of_files_that_were_exchanged_go(stream):
    s = stream(batches=2, hosts=2, n=6)
    lost = [p for p, owner in enumerate(owners(s)) if owner == "h1"]
    s.lose(1)
    s.heartbeat_until(lambda: is_warm(s, 0, lost))
    host = s.hosts[0]
    (order,) = beat(s, 0).warm_up
    other = OpenGrant(host.info, order.version, "a changelog of other files", order.registration, order.epoch)
    assert not host.loader.is_warm(other, "op", lost[0])
    completed = s.c.completed("run1", "h0")
    host.loader.complete(msgspec.structs.replace(completed, rewritten="rewritten/1"))
    assert "run1" not in host.hand_overs.report().warm
    s.heartbeat_until(lambda: is_warm(s, 0, lost))
    assert host.counters.read()["loads"] == 2 * len(lost)


@pytest.mark.parametrize("error", [StorageError("no answer"), OSError("too many open files")])
def test_loading_a_copy_is_retried_with_backoff(stream, monkeypatch, caplog, error):
    s = stream(batches=2, hosts=2, n=6)
    lost = [p for p, owner in enumerate(owners(s)) if owner == "h1"]
    host, tried = s.hosts[0], []

    def failing(grant: Any, operator: str, partition: int, is_abandoned: Any) -> None:
        tried.append(partition)
        raise error

    monkeypatch.setattr(host.loader, "warm_up", failing)
    s.lose(1)
    s.heartbeat_until(lambda: sorted(tried) == lost)
    for _ in range(12):
        s.world.now += 1
        s.heartbeat()
        for thread in list(host.hand_overs._orders._threads.values()):
            thread.join(PATIENCE)
    assert len(tried) == 4 * len(lost), "behind 1, 2 and 4 s"
    told = [r for r in caplog.records if "could not be loaded ahead" in r.message]
    assert sum(r.exc_info is not None and bool(r.exc_info) for r in told) == len(lost), "why is said once"


@pytest.mark.parametrize("error", [StorageError("no answer"), OSError("too many open files")])
def test_copies_that_cannot_follow_are_retried_with_backoff(stream, monkeypatch, error):
    s = stream(batches=2, hosts=2, n=6)
    s.lose(1)
    (order,) = beat(s, 0).warm_up
    overs = s.hosts[0].hand_overs

    def failing(*_: Any) -> None:
        raise error

    monkeypatch.setattr(s.hosts[0].loader, "follow", failing)
    overs._follow(order)
    assert not overs._backoff.is_due("run1")
    s.world.now += 1
    assert overs._backoff.is_due("run1")


def test_a_copy_without_room_evicts_no_other(stream, monkeypatch):
    s = stream(batches=2, hosts=2, n=6)
    lost = [p for p, owner in enumerate(owners(s)) if owner == "h1"]
    host = s.hosts[0]
    load = PartitionState.load

    def with_room_for_all_but_one(self: Any, *args: Any) -> None:
        if f"{self._context.directory}/".endswith(f"/{lost[-1]}/default/"):
            raise LocalDiskFullError("no space left") if is_warm(s, 0, lost[:-1]) else LoadEndedError("later")
        load(self, *args)

    monkeypatch.setattr(PartitionState, "load", with_room_for_all_but_one)
    s.lose(1)
    s.heartbeat_until(lambda: is_warm(s, 0, lost[:-1]) and len(host.hand_overs._backoff._failed) == 1)
    assert host.counters.read()["loads"] == len(lost) - 1


def test_hosts_that_join_before_the_first_batch_of_a_query_have_their_share(stream):
    s = stream(batches=2, hosts=1, n=4)
    s.registration = msgspec.structs.replace(s.registration, run_id="run2")
    s.register()
    s.add_host(1)
    s.c.expire()
    assert shares(s) == ["h0", "h0", "h1", "h1"]
    s.heartbeat_until(lambda: sum(host.counters.read()["loads"] for host in s.hosts.values()) == 4)
    s.heartbeat()
    s.add_host(2)
    s.c.expire()
    assert shares(s) == ["h0", "h0", "h1", "h1"], "the host with copies keeps its share until another one has them"


def test_a_host_that_was_started_again_loads_what_it_owns(stream):
    s = stream(batches=2, hosts=2, n=6)
    mine = [p for p, owner in enumerate(owners(s)) if owner == "h1"]
    s.kill(1)
    s.add_host(1, "b")
    s.c.expire()
    s.heartbeat_until(lambda: is_warm(s, 1, mine))
    assert s.hosts[1].counters.read()["loads"] == len(mine)


def test_a_query_without_state_has_nothing_loaded(stream):
    s = stream(batches=0)
    s.begin(0, ALL, range(2))
    assert beat(s, 0).warm_up == () == beat(s, 1).warm_up


def test_heartbeats_and_answers_that_overtake_each_other_change_nothing(stream):
    s = stream(hosts=1)
    s.add_host(1)
    beat(s, 0, HandOver(7, {}, ("run1",)))
    beat(s, 0, HandOver(6, {}, ()))
    assert s.c.registries.hosts.leases["h0"].hand_over.giving == ("run1",)
    overs = s.hosts[0].hand_overs
    overs.follow(9, HostOrders(True, giving={"run1": 1}))
    overs.follow(8, HostOrders(True))
    assert overs.gives("run1")
