"""Once Spark has committed a batch, no answer is older, even if the host was not notified of the commit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from coordinator_actor.messages import HostOrders
from spark_bridge.exceptions import HostUnavailableError, NotOwnerError
from spark_bridge.host import prepared_versions
from spark_bridge.host.prepared_versions import MAX_OWN_LOOKS, PreparedVersions
from spark_bridge.host.registration import GRANT_SECONDS
from spark_bridge.queryable.reads.host_reads import HostReads
from tests.patience import HANG
from tests.spark_bridge.host.host_steps import opened
from tests.spark_bridge.queryable.host_world import COMPLETED, HostWorld, changes_of, partitions_of
from tests.spark_bridge.queryable.memory_reads import eventually

KEYS = range(8)


def filled(value: int) -> dict[int, int]:
    return dict.fromkeys(KEYS, value)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., HostWorld]]:
    made: list[HostWorld] = []

    def build(*args: Any, **kwargs: Any) -> HostWorld:
        made.append(HostWorld(tmp_path, *args, **kwargs))
        return made[-1]

    yield build
    for one in made:
        one.world.exists_hook = None
        one.close()


def committed_unheard(w: HostWorld, value: int) -> None:
    """Run a batch that Spark commits, without a message about that to anybody."""
    w.write(filled(value))
    w.world.commit_spark(w.version)
    w.version += 1


READS: dict[str, Callable[[HostWorld], Any]] = {
    "one": lambda w: w.one(3),
    "lookup": lambda w: w.lookup([3]),
    "scan": lambda w: w.scan(),
    "wait": lambda w: (w.reads[0].await_completed(w.run, w.version - 1, 0.0), None),
}


@pytest.mark.parametrize("how", READS)
def test_a_host_that_misses_every_message_answers_from_the_batch_that_spark_has_committed(make, how):
    w = make()
    for version in (1, 2, 3):
        committed_unheard(w, version)
        assert READS[how](w)[0] == version
    assert w.scan() == (3, filled(3))


def test_each_host_detects_a_missed_commit_itself(make):
    w = make(hosts=3, n=6)
    for version in (1, 2):
        committed_unheard(w, version)
        for i in range(3):
            assert w.scan(i=i)[0] == version


def test_restarted_host_is_not_behind_spark(make):
    """Its predecessor had accepted the version. Neither the host nor the coordinator knows of the commit."""
    w = make()
    w.batch(filled(1))
    committed_unheard(w, 2)
    anew = w.host(0, incarnation="b")
    w.hosts.append(anew)
    w.reads[0] = HostReads(anew, wait_seconds=HANG)
    assert w.one(3) == (2, 2)
    assert w.scan() == (2, filled(2))


@pytest.mark.parametrize("has_coordinator_restarted", [False, True])
def test_host_restarted_within_a_batch_does_not_stay_behind_spark(make, has_coordinator_restarted):
    """Its predecessor had accepted changes. The host itself accepts none, so it is not notified of the commit."""
    w = make(hosts=2)
    w.batch(filled(1))
    of_predecessor = [owner.host_id for owner in w.reads[0].locate("op", None).owners].index("h0")
    key = KEYS[partitions_of(KEYS, 2).index(of_predecessor)]
    w.write(filled(2), partitions=[of_predecessor])
    w.hosts[0].close()
    if has_coordinator_restarted:
        w.port.c = w.c = w.world.coordinator(0)
        w.hosts[1].heartbeat()
        w.register(w.run)
    w.hosts[0] = w.host(0, incarnation="b")
    w.reads[0] = HostReads(w.hosts[0], wait_seconds=HANG)
    assert w.one(key) == (1, 1), "loaded before anything else of the batch is known"
    assert w.reads[0].locate("op", None).owners[1 - of_predecessor].host_id == "h1"
    w.write(filled(2), partitions=[1 - of_predecessor])
    w.world.commit_spark(w.version)
    assert w.one(key) == (2, 2)


def test_host_that_gives_its_last_partition_away_without_waiting_is_not_behind_spark(make):
    """It takes no part in the next batch, so it is not notified of the commit."""
    w = make(n=1)
    w.batch(filled(1))
    w.hosts.append(w.host(1))
    w.c.place_session("s", (), ["h0"])
    assert w.c.rebalance() == {w.run: 0}, "the owner does not look at Spark's log yet"
    committed_unheard(w, 2)
    assert w.one(3) == (2, 2)
    w.hosts[0].heartbeat()
    w.hosts[0].heartbeat()
    assert w.c.rebalance() == {w.run: 1}
    assert w.one(3) == (2, 2)
    committed_unheard(w, 3)
    with pytest.raises(NotOwnerError, match="belongs to host h1"):
        w.one(3)


def test_a_version_that_spark_has_not_committed_is_not_seen(make):
    w = make()
    w.batch(filled(1))
    w.write(filled(2))
    assert w.one(3) == (1, 1)
    assert w.scan() == (1, filled(1))
    w.complete(tell=False)
    assert w.one(3) == (2, 2)


def looked(w: HostWorld) -> list[str]:
    """Return a list that records each later read of Spark's commit log."""
    paths: list[str] = []
    w.world.exists_hook = lambda path: paths.append(path) if path.startswith("commits/") else None
    return paths


class Silence:
    """A port to an unreachable coordinator."""

    def __getattr__(self, name: str) -> Any:
        def call(*_: Any, **__: Any) -> Any:
            raise HostUnavailableError("the cable is cut")

        return call


def test_host_without_a_lease_answers_until_spark_continues_without_it(make):
    """Its network is cut: it receives no message, and other hosts own its partitions."""
    w = make()
    w.batch(filled(1))
    paths = looked(w)
    w.port.c = Silence()
    assert w.one(3) == (1, 1)
    assert paths == [], "its lease still runs"
    w.ahead += HostOrders(known=True).lease_seconds
    assert w.one(3) == (1, 1)
    assert w.lookup([3]) == (1, [1])
    assert set(paths) == {"commits/1"}
    w.world.commit_spark(1)  # with changes that other hosts have taken
    for read in READS.values():
        with pytest.raises(HostUnavailableError, match="cable is cut"):
            read(w)


def test_host_that_is_cut_off_for_long_finds_later_commits_of_spark(make):
    """Spark removes old records, so that of the first batch which the host has missed may be gone."""
    w = make()
    w.batch(filled(1))
    w.port.c = Silence()
    w.ahead += HostOrders(known=True).lease_seconds
    for batch in (1, 2, 3):
        w.world.commit_spark(batch)
    for batch in (0, 1):
        (w.world.root / "ck" / "commits" / str(batch)).unlink(missing_ok=True)
    for read in READS.values():
        with pytest.raises(HostUnavailableError, match="cable is cut"):
            read(w)


def test_commit_log_is_read_only_while_a_commit_may_be_missing(make):
    w = make()
    w.batch(filled(1))
    paths = looked(w)
    w.lookup(KEYS)
    assert paths == [], "nothing is prepared"
    w.ahead += GRANT_SECONDS  # since the host has registered
    w.write(filled(2), partitions=[0])
    owner = w.hosts[0]
    assert owner.open(w.task(1)).redirect is None
    w.lookup(KEYS)
    assert paths == [], "a task of the batch is under way here"
    owner.register()
    w.lookup(KEYS)
    assert paths == ["commits/1"], "another host may have been given the partition"
    w.write(filled(2), partitions=[1])
    w.lookup(KEYS)
    assert paths == ["commits/1"] * 2
    w.complete(tell=False)
    w.lookup(KEYS)
    del paths[:]
    w.lookup(KEYS)
    w.one(3)
    assert paths == [], "the version is known to be completed"


def test_host_declared_dead_is_not_behind_spark(make):
    """A task of the batch has opened a partition at it, and another host has made the changes."""
    w = make(hosts=2, n=4)
    w.batch(filled(1))
    lost, other = w.hosts
    here, late = [p for p in range(4) if w.instance(p) is not None]
    w.ahead += GRANT_SECONDS
    w.write(filled(2), partitions=[p for p in range(4) if p != late])
    assert lost.open(w.task(late)).redirect is None
    for _ in range(2):  # only the other one sends heartbeats
        w.ahead += 6
        w.world.now += 6
        other.heartbeat()
        w.c.expire()
    task = w.task(late)
    assert other.open(task).redirect is None
    other.commit(task, changes_of(filled(2), late, 4), {})
    w.world.commit_spark(w.version)
    key = next(k for k, p in zip(KEYS, partitions_of(KEYS, 4), strict=True) if p == here)
    with pytest.raises(NotOwnerError, match="locate it again"):
        w.one(key)


@pytest.mark.parametrize("heartbeats", [1, 2, 3])
def test_host_declared_dead_and_registered_again_is_not_behind_spark(make, heartbeats):
    """Other hosts have made a version since, and the coordinator does not know yet that Spark has committed it."""
    w = make(hosts=2, n=4)
    w.batch(filled(1))
    lost, other = w.hosts
    here = next(p for p in range(4) if w.instance(p) is not None)
    for _ in range(2):  # only the other one sends heartbeats
        w.ahead += 6
        w.world.now += 6
        other.heartbeat()
        w.c.expire()
    w.hosts.remove(lost)
    w.write(filled(2))
    w.world.commit_spark(w.version)
    for _ in range(heartbeats):
        lost.heartbeat()
    key = next(k for k, p in zip(KEYS, partitions_of(KEYS, 4), strict=True) if p == here)
    with pytest.raises(NotOwnerError, match="locate it again"):
        w.one(key)  # by the reads of the host that was lost
    lost.close()


def test_reregistered_host_is_current_once_it_takes_part_in_a_version(make):
    w = make()
    w.batch(filled(1))
    paths = looked(w)
    w.hosts[0].register()
    assert w.one(3) == (1, 1)
    assert paths == ["commits/1"], "another host may have made the next version"
    w.batch(filled(2))
    del paths[:]
    assert w.one(3) == (2, 2)
    assert paths == []


def test_a_part_in_a_version_that_was_sent_before_a_host_registered_again_makes_it_sure_of_nothing(make):
    w = make()
    w.batch(filled(1))
    host, taken = w.hosts[0], w.c.acknowledge_many

    def forgotten_meanwhile(*message: Any) -> Any:
        answer = taken(*message)
        host.register()
        return answer

    w.port.acknowledge_many = forgotten_meanwhile
    w.batch(filled(2))
    paths = looked(w)
    assert w.one(3) == (2, 2)
    assert paths == ["commits/2"], "another host may have made the next version"


def test_ended_query_gets_no_new_version(make):
    w = make()
    w.batch(filled(1))
    w.hosts[0].cache.note_ended([w.run])
    w.hosts[0].register()
    paths = looked(w)
    assert w.one(3) == (1, 1)
    assert paths == []


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("is_first", [False, True])
def test_a_host_that_a_duplicate_attempt_has_opened_is_not_behind_spark(make, n, is_first):
    """The first attempt has committed at a host that is lost since, and the second one never commits."""
    w = make(hosts=2, n=n)
    if not is_first:
        w.batch(filled(1))
    owners = [owner.host_id for owner in w.reads[0].locate("op", None).owners]
    lost, other = (w.hosts[int(h)] for h in ("01" if owners[0] == "h0" else "10"))
    w.ahead += GRANT_SECONDS
    w.write(filled(2), partitions=[0])
    for _ in range(2):  # only the other one sends heartbeats
        w.ahead += 6
        w.world.now += 6
        other.heartbeat()
        w.c.expire()
    w.hosts.remove(lost)
    w.ahead += GRANT_SECONDS
    assert other.open(w.task(0)).redirect is None
    assert other.cache.instance(w.run, "op", 0) is not None
    w.write(filled(2), partitions=range(1, n))
    w.world.commit_spark(w.version)
    w.reads[0] = HostReads(other, wait_seconds=HANG)
    key = next(k for k, p in zip(KEYS, partitions_of(KEYS, n), strict=True) if p == 0)
    assert w.one(key) == (w.version + 1, 2)
    lost.close()


def test_one_read_of_the_commit_log_serves_all_waiters(make):
    w = make()
    w.batch(filled(1))
    w.write(filled(2))
    entered, gate, paths = threading.Event(), threading.Event(), []

    def hold(path: str) -> None:
        paths.append(path)
        entered.set()
        assert gate.wait(HANG)

    w.world.exists_hook = hold
    with ThreadPoolExecutor(9) as threads:
        first = threads.submit(w.one, 3)
        assert entered.wait(HANG)
        others = [threads.submit(w.one, 3) for _ in range(8)]
        prepared = w.hosts[0].prepared._prepared[w.run]
        eventually(lambda: len(prepared.changed._waiters) == 9)
        gate.set()
        assert {f.result(HANG) for f in [first, *others]} == {(1, 1)}
    assert len(paths) == 2, "those who came during the first look need a second one, all together"


def test_storage_that_hangs_costs_one_thread_and_an_error_until_it_is_back(make):
    w = make(wait_seconds=0.05)
    w.batch(filled(1))
    w.write(filled(2))
    gate, paths = threading.Event(), []

    def hang(path: str) -> None:
        paths.append(path)
        assert gate.wait(HANG)

    w.world.exists_hook = hang
    for _ in range(3):
        with pytest.raises(HostUnavailableError, match=r"whether Spark has committed batch 1 of query name"):
            w.one(3)
    assert len(paths) == 1
    # If the read of the commit log already hangs, a new reader is refused at once, however long it may wait.
    w.reads[0]._reader.wait_seconds = HANG
    prepared = w.hosts[0].prepared._prepared[w.run]
    with pytest.raises(HostUnavailableError, match="no answer within"):
        w.one(3)
    w.world.commit_spark(w.version)
    gate.set()
    eventually(lambda: not prepared.is_looking)
    assert w.one(3) == (2, 2)


def test_an_error_of_storage_is_an_error_and_the_next_reader_looks_again(make):
    w = make()
    w.batch(filled(1))
    committed_unheard(w, 2)

    def fail(path: str) -> None:
        raise OSError("no route to storage")

    w.world.exists_hook = fail
    with pytest.raises(HostUnavailableError, match="no route to storage"):
        w.lookup([3])
    w.world.exists_hook = None
    assert w.one(3) == (2, 2)


def test_reads_of_the_commit_log_are_paced(make, monkeypatch):
    monkeypatch.setattr(prepared_versions, "PREPARED_LOOK_SECONDS", HANG)
    monkeypatch.setattr(prepared_versions, "QUICK_SECONDS", 0.0)
    w = make()
    w.batch(filled(1))
    w.write(filled(2))
    assert w.one(3) == (1, 1)
    w.reads[0]._reader.wait_seconds = 0.05
    with pytest.raises(HostUnavailableError):
        w.one(3)
    w.complete()
    w.reads[0]._reader.wait_seconds = HANG
    assert w.one(3, COMPLETED) == (2, 2), "a host that was notified does not read storage"


def looking_threads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list of the versions for which a thread begins to look."""
    begin, versions = PreparedVersions._begin_look, []

    def begun(self: PreparedVersions, prepared: Any, now: float) -> None:
        versions.append(prepared.version)
        begin(self, prepared, now)

    monkeypatch.setattr(PreparedVersions, "_begin_look", begun)
    return versions


def test_readers_look_at_a_quick_disk_themselves(make, monkeypatch):
    monkeypatch.setattr(prepared_versions, "QUICK_SECONDS", HANG)
    w = make()
    w.batch(filled(1))
    versions = looking_threads(monkeypatch)
    w.write(filled(2))
    assert [w.one(3) for _ in range(5)] == [(1, 1)] * 5
    assert versions == [2], "the first look finds out that the disk is quick"
    w.world.commit_spark(w.version)
    w.version += 1
    assert w.one(3) == (2, 2)
    assert versions == [2, 2], "a thread asks the coordinator"
    w.write(filled(3))
    assert w.lookup([3]) == (2, [2])
    w.hosts[0].register()
    assert versions == [2, 2], "the next version is of the same disk"
    assert w.one(3) == (2, 2)
    assert versions == [2, 2, 3], "others may have made versions since"


def test_threads_look_at_slow_storage(make, monkeypatch):
    monkeypatch.setattr(prepared_versions, "QUICK_SECONDS", 0.0)
    w = make()
    w.batch(filled(1))
    versions = looking_threads(monkeypatch)
    w.write(filled(2))
    assert [w.one(3) for _ in range(3)] == [(1, 1)] * 3
    assert versions == [2] * 3


def test_a_quick_disk_that_begins_to_hang_holds_few_readers(make, monkeypatch):
    monkeypatch.setattr(prepared_versions, "QUICK_SECONDS", 0.02)
    w = make(wait_seconds=0.05)
    w.batch(filled(1))
    w.write(filled(2))
    w.one(3)
    gate, num_looks = threading.Event(), 0

    def hang(path: str) -> None:
        nonlocal num_looks
        num_looks += 1
        assert gate.wait(HANG)

    w.world.exists_hook = hang
    with ThreadPoolExecutor(MAX_OWN_LOOKS) as threads:
        held = [threads.submit(w.one, 3) for _ in range(MAX_OWN_LOOKS)]
        eventually(lambda: num_looks == MAX_OWN_LOOKS)
        for _ in range(3):
            with pytest.raises(HostUnavailableError, match="whether Spark has committed batch 1 of query name"):
                w.one(3)
        assert num_looks == MAX_OWN_LOOKS + 1, "one thread looks for all others"
        w.world.commit_spark(w.version)
        gate.set()
        assert {one.result(HANG) for one in held} <= {(1, 1), (2, 2)}
    eventually(lambda: not w.hosts[0].prepared._prepared[w.run].is_looking)
    assert w.one(3) == (2, 2)


def test_an_error_of_a_quick_disk_is_an_error(make, monkeypatch):
    monkeypatch.setattr(prepared_versions, "QUICK_SECONDS", HANG)
    w = make()
    w.batch(filled(1))
    w.write(filled(2))
    w.one(3)

    def fail(path: str) -> None:
        raise OSError("the disk is gone")

    w.world.exists_hook = fail
    with pytest.raises(HostUnavailableError, match="the disk is gone"):
        w.one(3)
    w.world.exists_hook = None
    assert w.one(3) == (1, 1)


def test_after_a_slow_look_a_thread_looks(make, monkeypatch):
    monkeypatch.setattr(prepared_versions, "QUICK_SECONDS", 0.02)
    w = make()
    w.batch(filled(1))
    w.write(filled(2))
    w.one(3)
    versions = looking_threads(monkeypatch)
    w.world.exists_hook = lambda path: time.sleep(0.03)
    assert w.one(3) == (1, 1)
    assert versions == []
    w.world.exists_hook = None
    assert w.one(3) == (1, 1)
    assert versions == [2]


def test_a_host_that_stands_still_before_its_own_look_is_not_behind_spark(make, monkeypatch):
    """During the pause its lease ends, others make many versions, and Spark removes the record that it looks for."""
    monkeypatch.setattr(prepared_versions, "QUICK_SECONDS", HANG)
    w = make()
    w.batch(filled(1))
    w.write(filled(2))
    assert w.one(3) == (1, 1)

    def stand_still(path: str) -> None:
        w.world.exists_hook = None
        w.port.c = Silence()
        w.ahead += HostOrders(known=True).lease_seconds
        for batch in (1, 2, 3):
            w.world.commit_spark(batch)
        for batch in (0, 1):
            (w.world.root / "ck" / "commits" / str(batch)).unlink(missing_ok=True)

    w.world.exists_hook = stand_still
    with pytest.raises(HostUnavailableError, match="cable is cut"):
        w.one(3)


@pytest.mark.parametrize("quick_seconds", [0.0, HANG])
def test_a_reader_beside_a_load_is_not_behind_spark(make, monkeypatch, quick_seconds):
    """The load takes the next version for prepared, and the message that the last one is committed is late."""
    monkeypatch.setattr(prepared_versions, "QUICK_SECONDS", quick_seconds)
    w = make(hosts=2)
    w.batch(filled(1))
    w.write(filled(2))
    key = next(k for k in KEYS if w.instance(partitions_of([k], w.n)[0], 0) is not None)
    (partition,) = partitions_of([key], w.n)
    assert w.one(key) == (1, 1)
    w.complete(tell=False)
    w.world.plan_spark(w.version)
    opened(w.hosts[1], w.task(1 - partition))
    answers, settle = [], PreparedVersions.settle

    def beside(self: PreparedVersions, *asked: Any) -> None:
        monkeypatch.setattr(PreparedVersions, "settle", settle)
        answers.append(w.one(key))
        settle(self, *asked)

    monkeypatch.setattr(PreparedVersions, "settle", beside)
    w.hosts[0].reads.load(w.run, "op", partition, again=True)
    assert answers == [(2, 2)]


@pytest.mark.parametrize("quick_seconds", [0.0, HANG])
def test_a_look_that_finds_nothing_counts_only_from_the_version_before(make, monkeypatch, quick_seconds):
    """A host takes part in a version, and the message that the one before is committed is late."""
    monkeypatch.setattr(prepared_versions, "QUICK_SECONDS", quick_seconds)
    w = make()
    w.batch(filled(1))
    w.write(filled(2))
    assert w.one(3) == (1, 1)
    w.complete(tell=False)
    host = w.hosts[0]
    host.prepared.accepted(host.cache.registrations[w.run], w.version + 1)
    assert w.one(3) == (2, 2)
