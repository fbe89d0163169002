"""Group commit: which changelogs go to storage together, and what their tasks hear; without Ray."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from backends.conf import StateStoreConf
from backends.exceptions import DamagedFileError, InvalidStateStoreArgument, StorageError
from backends.formats.changelog import ChangelogMeta, read_index
from backends.formats.manifest import Lineage
from backends.host_memory import CHANGELOGS, host_memory
from backends.load_watch import LoadWatch
from backends.partition.partition_state import PartitionState
from backends.storage.checkpoint_storage import CheckpointStorage
from backends.storage.locations import FileRef
from spark_bridge.host import commits as group_commit
from spark_bridge.host.commits import GroupCommits, TasksAtWork
from spark_bridge.transport.protocol import GetCommand
from tests.coordinator_actor.coordinator_world import World, run_of
from tests.patience import PATIENCE
from tests.spark_bridge.host.host_steps import Threads, ch, make_host, plan_spark, reg, task, wait_until

FOR_EVER = PATIENCE
"""A linger that only a test which fails waits for."""
SOON = 0.01
CONF = StateStoreConf(host_memory=(2 << 30) + 1)
"""Another limit than that of other tests: budgets are shared by all of a process that have the same one."""


class Gated(CheckpointStorage):
    """Storage whose writes wait until the test lets them go; ``paths`` have come."""

    paths: list[str]
    gate: threading.Semaphore
    failure: BaseException | None

    def put_new(self, path: str, data: bytes) -> FileRef:
        self.paths.append(path)
        assert self.gate.acquire(timeout=PATIENCE)
        if self.failure is not None:
            raise self.failure
        return super().put_new(path, data)


class Committing:
    """One host's commit groups over storage, and tasks in separate threads."""

    def __init__(self, location: Path, linger: float, *, writes: int = 1000) -> None:
        storage = Gated.open(str(location), fsync=False)
        assert isinstance(storage, Gated)
        self.storage = storage
        self.storage.paths, self.storage.failure, self.storage.gate = [], None, threading.Semaphore(writes)
        self.memory = host_memory(CONF)
        self.groups = GroupCommits(linger, self.memory)

    def is_remote(self) -> None:
        """Take the storage for an object store."""
        self.storage.is_local = False

    def open(self, *partitions: int, version: int = 1, run: str = "run1") -> None:
        for p in partitions:
            self.groups.opened(run, version, "op", p)

    def commit(self, p: int, data: bytes = b"data", version: int = 1, run: str = "run1") -> Future[FileRef]:
        return Threads.submit(
            self.groups.write_changelog, self.storage, meta(p, version, run), f"{run}/{version}-{p}", data
        )

    def wait_for_members(self, n: int, run: str = "run1") -> None:
        """Until so many are in the group that still takes members."""

        def num_members() -> int:
            batch = self.groups._batches.get(run)
            return 0 if batch is None or batch.group is None else len(batch.group.members)

        wait_until(lambda: num_members() == n, f"there are not {n} members")

    def wait_for_writes(self, n: int) -> None:
        wait_until(lambda: len(self.storage.paths) == n, f"there are not {n} writes: {self.storage.paths}")


def meta(p: int, version: int = 1, run: str = "run1") -> ChangelogMeta:
    return ChangelogMeta(run, "op", p, 8, version, f"try{p}", None)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have writes taken for as long as any linger, so that the linger alone decides; also on this local disk."""
    monkeypatch.setattr(group_commit, "FIRST_WRITE_SECONDS", FOR_EVER)
    monkeypatch.setattr(group_commit, "LOCAL_SECONDS", FOR_EVER)
    monkeypatch.setattr(group_commit, "LOCAL_MEMBERS", 2)
    monkeypatch.setattr(group_commit, "NEWEST_WRITE_SHARE", 0.0)


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Callable[..., Committing]]:
    hosts: list[Committing] = []

    def make(linger: float, **given: Any) -> Committing:
        hosts.append(Committing(tmp_path / "ck", linger, **given))
        return hosts[-1]

    yield make
    for host in hosts:
        host.storage.gate.release(1000)


def results(futures: list[Future[FileRef]]) -> list[FileRef]:
    return [future.result(PATIENCE) for future in futures]


def test_all_that_have_opened_the_batch_go_together_at_once(made: Callable[..., Committing]) -> None:
    host = made(FOR_EVER)
    host.open(0, 1, 2)
    refs = results([host.commit(p, b"data of %d" % p) for p in range(3)])
    (path,) = host.storage.paths
    assert path.startswith("groups/1-") and {ref.within for ref in refs} == {path}
    assert [host.storage.read(ref) for ref in refs] == [b"data of 0", b"data of 1", b"data of 2"]
    assert [ref.path for ref in refs] == ["run1/1-0", "run1/1-1", "run1/1-2"]
    index = read_index(host.storage, path, dict(host.storage.list())[path])
    assert sorted((m.partition, ref) for m, ref in index) == list(enumerate(refs))
    assert host.memory.held()[CHANGELOGS] == 0


def test_single_commit_is_written_to_its_own_file_at_once(made: Callable[..., Committing]) -> None:
    host = made(FOR_EVER)
    host.open(0)
    (ref,) = results([host.commit(0)])
    assert ref.within is None and host.storage.paths == ["run1/1-0"]


def test_group_waits_for_a_missing_task_up_to_the_linger(made: Callable[..., Committing]) -> None:
    host = made(SOON)
    host.open(0, 1)
    assert results([host.commit(0)])[0].within is None
    assert results([host.commit(1)])[0].within is None
    assert host.storage.paths == ["run1/1-0", "run1/1-1"]


def test_a_group_is_stored_while_another_one_still_is(made: Callable[..., Committing]) -> None:
    host = made(FOR_EVER, writes=0)
    host.open(0, 1)
    first = [host.commit(p) for p in (0, 1)]
    host.wait_for_writes(1)
    host.open(2, 3)
    second = [host.commit(p) for p in (2, 3)]
    host.wait_for_writes(2)
    assert not any(future.done() for future in (*first, *second))
    host.storage.gate.release(2)
    assert len({ref.within for ref in results(first)}) == len({ref.within for ref in results(second)}) == 1


def test_replies_wait_until_the_group_is_stored(made: Callable[..., Committing]) -> None:
    host = made(FOR_EVER, writes=0)
    host.open(0, 1)
    commits = [host.commit(p) for p in (0, 1)]
    host.wait_for_writes(1)
    assert not any(future.done() for future in commits) and host.storage.list() == []
    host.storage.gate.release()
    results(commits)


def test_failed_write_fails_every_member(made: Callable[..., Committing]) -> None:
    host = made(FOR_EVER)
    host.storage.failure = StorageError("throttled")
    host.open(0, 1, 2)
    for commit in [host.commit(p) for p in range(3)]:
        with pytest.raises(StorageError, match="throttled"):
            commit.result(PATIENCE)
    host.storage.failure = None
    host.open(0, 1, 2)
    assert len({ref.within for ref in results([host.commit(p) for p in range(3)])}) == 1


def test_large_changelog_is_written_alone_and_blocks_no_other(
    made: Callable[..., Committing], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_commit, "LARGE_BYTES", 100)
    host = made(FOR_EVER)
    host.open(0, 1, 2)
    small = [host.commit(p) for p in (0, 1)]
    host.wait_for_members(2)
    assert results([host.commit(2, b"x" * 100)])[0].within is None
    assert len({ref.within for ref in results(small)} - {None}) == 1


def test_a_group_that_has_become_large_waits_for_no_more(
    made: Callable[..., Committing], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_commit, "COMMIT_GROUP_BYTES", 100)
    host = made(FOR_EVER)
    host.open(0, 1, 2)
    refs = results([host.commit(p, b"x" * 50) for p in (0, 1)])
    assert len({ref.within for ref in refs} - {None}) == 1


def test_without_a_linger_each_goes_alone(made: Callable[..., Committing]) -> None:
    host = made(0.0)
    host.open(0, 1)
    assert [ref.within for ref in results([host.commit(p) for p in (0, 1)])] == [None, None]


def test_a_batch_does_not_wait_for_the_tasks_of_an_earlier_one_or_of_another_run(
    made: Callable[..., Committing],
) -> None:
    host = made(FOR_EVER)
    host.open(0, 1, 2, 3)
    host.open(8, 9, run="run2")
    host.open(0, 1, version=2)
    late = host.commit(2)
    new = [host.commit(p, version=2) for p in (0, 1)]
    assert results([late])[0].within is None
    groups = {ref.within for ref in results(new)}
    assert len(groups) == 1 and str(groups).startswith("{'groups/2-")
    host.open(3)  # of the batch that is over
    host.open(0, version=2)
    assert results([host.commit(0, version=2)])[0].within is None


def test_reopened_task_is_awaited_again(made: Callable[..., Committing]) -> None:
    host = made(FOR_EVER)
    host.open(0, 1)
    first = host.commit(0)
    host.wait_for_members(1)
    host.open(0)
    again = host.commit(0, b"again")
    host.wait_for_members(2)
    other = host.commit(1)
    refs = results([first, again, other])
    assert len({ref.within for ref in refs}) == 1 and host.storage.read(refs[1]) == b"again"


@pytest.mark.parametrize("is_remote", [True, False])
def test_task_that_missed_two_waits_is_not_awaited_until_it_comes(
    made: Callable[..., Committing], is_remote: bool
) -> None:
    """As a partition that is being loaded for minutes, or whose task has died."""
    host = made(SOON)
    host.storage.is_local = not is_remote
    host.open(0, 1, 8, 9)
    for p in range(2, 5):
        host.open(p)
        results([host.commit(p)])
    host.groups._linger = FOR_EVER
    host.open(8)  # a task asks again while its partition is being loaded
    host.open(5, 6)
    (path,) = {ref.within for ref in results([host.commit(p) for p in (5, 6)])}
    assert path is not None, "the one is waited for, as always"
    first = host.commit(9)
    host.wait_for_members(1)
    (path,) = {ref.within for ref in results([first, *map(host.commit, (0, 1, 8))])}
    assert path is not None


def test_in_the_next_batch_all_are_waited_for(made: Callable[..., Committing]) -> None:
    host = made(SOON)
    host.open(1)
    for p in range(2, 2 + group_commit.MISSED_WAITS):
        host.open(p)
        results([host.commit(p)])
    host.groups._linger = FOR_EVER
    host.open(0, 1, version=2)
    assert len({ref.within for ref in results([host.commit(p, version=2) for p in (0, 1)])} - {None}) == 1


def begun(made: Callable[..., Committing], linger: float) -> Committing:
    """Tasks 0 to 2 were at work at once in the first batch."""
    host = made(linger)
    host.is_remote()
    host.open(0, 1, 2)
    results([host.commit(p) for p in range(3)])
    return host


def test_object_storage_group_waits_for_as_many_tasks_as_ran_in_the_last_batch(
    made: Callable[..., Committing],
) -> None:
    host = begun(made, FOR_EVER)
    commits = []
    for p in (2, 0, 1):
        host.open(p, version=2)
        commits.append(host.commit(p, version=2))
    assert len({ref.within for ref in results(commits)} - {None}) == 1
    host.open(0, version=3)
    first = host.commit(0, version=3)
    host.wait_for_members(1)
    host.open(1, 2, version=3)
    second = [host.commit(p, version=3) for p in (1, 2)]
    assert len({ref.within for ref in results([first, *second])} - {None}) == 1


def test_no_wait_for_tasks_without_a_slot(made: Callable[..., Committing]) -> None:
    host = made(FOR_EVER)
    host.is_remote()
    for version in (1, 2):
        for p in range(4):
            host.open(p, version=version)
            assert results([host.commit(p, version=version)])[0].within is None


def test_local_disk_group_does_not_wait_for_unstarted_tasks(made: Callable[..., Committing]) -> None:
    host = begun(made, FOR_EVER)
    host.storage.is_local = True
    host.open(0, version=2)
    assert results([host.commit(0, version=2)])[0].within is None


def test_local_disk_group_of_few_does_not_wait(
    made: Callable[..., Committing], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_commit, "LOCAL_MEMBERS", 4)
    host = made(FOR_EVER)
    host.open(0, 1, 2)
    assert results([host.commit(0)])[0].within is None, "two others are about to commit: three in all"
    host.open(3, 4)
    (path,) = {ref.within for ref in results([host.commit(p) for p in (1, 2, 3, 4)])}
    assert path is not None
    host.is_remote()
    host.open(0, 1, run="run2")
    (path,) = {ref.within for ref in results([host.commit(p, run="run2") for p in (0, 1)])}
    assert path is not None


def test_fruitless_waits_become_rare() -> None:
    known = TasksAtWork()
    known.opened("op", 0)
    known.opened("op", 1)
    expected = []
    for _ in range(group_commit.VAIN_WAITS + group_commit.RETRY_BATCHES):
        known = known.next_batch()
        known.opened("op", 0)
        expected.append(known.expects_more())
        if expected[-1]:
            known.waited(in_vain=True)
        known.opened("op", 1)
    waits = [i for i, expects in enumerate(expected) if expects]
    assert waits == [*range(group_commit.VAIN_WAITS), waits[-1]] and waits[-1] >= group_commit.RETRY_BATCHES
    known = known.next_batch()
    known.opened("op", 0)
    known.waited(in_vain=False)
    assert known.expects_more(), "one has arrived"


def test_wait_is_bounded_by_recent_write_times(
    made: Callable[..., Committing], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_commit, "FIRST_WRITE_SECONDS", SOON)
    monkeypatch.setattr(group_commit, "NEWEST_WRITE_SHARE", 1.0)
    host = made(FOR_EVER)
    host.open(0, 1)
    assert results([host.commit(0)])[0].within is None, "the first write is taken for a short one"
    assert host.groups._batches["run1"].write_seconds < FOR_EVER / 2


class TimesOut(threading.Condition):
    """Waits that are bounded end, as if their time were up, when ``groups`` has a group of so many members."""

    def __init__(self, groups: GroupCommits, *members: int) -> None:
        super().__init__()
        self.groups, self.members = groups, list(members)

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        if timeout is None:
            return super().wait_for(predicate)
        wanted = self.members.pop(0)

        def are_there() -> bool:
            group = self.groups._batches["run1"].group
            return group is not None and len(group.members) >= wanted

        while not (predicate() or are_there()):
            self.wait(SOON)
        return predicate()


def test_object_storage_group_keeps_waiting_while_tasks_arrive(made: Callable[..., Committing]) -> None:
    host = made(FOR_EVER)
    host.is_remote()
    host.groups._changed = TimesOut(host.groups, 2, 3)
    host.open(0, 1, 2, 3)
    first = host.commit(0)
    host.wait_for_members(1)
    second = host.commit(1)  # the time is up, but one has arrived by now
    wait_until(lambda: host.groups._changed.members == [3], "the group does not wait on")  # type: ignore[attr-defined]
    host.commit(2)
    wait_until(lambda: not host.groups._changed.members, "the group does not wait on")  # type: ignore[attr-defined]
    third = host.commit(3)
    assert len({ref.within for ref in results([first, second, third])} - {None}) == 1


def test_object_storage_group_stops_waiting_without_arrivals(made: Callable[..., Committing]) -> None:
    host = made(FOR_EVER)
    host.is_remote()
    host.groups._changed = TimesOut(host.groups, 1)
    host.open(0, 1)
    assert results([host.commit(0)])[0].within is None
    assert not host.groups._changed.members  # type: ignore[attr-defined]


def test_object_storage_group_waits_even_if_writes_are_fast(
    made: Callable[..., Committing], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_commit, "FIRST_WRITE_SECONDS", 0.0)
    monkeypatch.setattr(group_commit, "OBJECT_SECONDS", FOR_EVER)
    host = made(FOR_EVER)
    host.is_remote()
    host.open(0, 1)
    assert len({ref.within for ref in results([host.commit(p) for p in (0, 1)])} - {None}) == 1


def test_ended_run_releases_waiters_and_is_forgotten(made: Callable[..., Committing]) -> None:
    host = made(SOON)
    host.open(0, 1)
    commit = host.commit(0)
    host.groups.forget("run1")
    assert results([commit])[0].within is None
    assert results([host.commit(1)])[0].within is None and not host.groups._batches
    host.open(0)
    host.groups.forget(None)
    assert not host.groups._batches


@pytest.mark.parametrize("wrong", [-0.1, 2, True, "10ms"])
def test_a_wrong_linger_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidStateStoreArgument, match=r"commit_linger=.* must be a number of seconds from 0 to 1"):
        StateStoreConf(commit_linger=wrong)


# -- with a host and a coordinator ---------------------------------------------------------------

PARTITIONS = 4


class Query:
    """A query of some partitions on one host. All tasks of a batch have opened it when the first one commits."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.world = World(root)
        self.start("run1", "a")

    def start(self, run: str, incarnation: str) -> None:
        """Start with a new coordinator and a new host, which has nothing on its disk."""
        self.coordinator = self.world.coordinator(0)
        self.host = make_host(self.world, self.coordinator, 0, self.root, incarnation, commit_linger=1.0)
        assert self.coordinator.register_query(reg(self.world, run, PARTITIONS)).refusal is None

    def batch(self, batch: int, run: str = "run1") -> None:
        plan_spark(self.world, batch)
        tasks = [task(batch, p, run) for p in range(PARTITIONS)]
        for one in tasks:
            while self.host.open(one).loading is not None:
                pass  # the host has waited a moment before it answered
        commits = [Threads.submit(self.host.commit, one, ch(b"%d of %d" % (batch, one.partition)), {}) for one in tasks]
        for commit in commits:
            commit.result(PATIENCE)
        self.world.commit_spark(batch)
        self.coordinator.batch_committed(run, batch)
        self.host.heartbeat()

    def stored(self, pattern: str) -> list[str]:
        return sorted(path.name.partition("-")[0] for path in (self.root / "ck/statestore").glob(pattern))

    def assert_holds(self, batch: int, run: str) -> None:
        """The partitions, loaded from storage, hold what the tasks of a batch have written."""
        for p in range(PARTITIONS):
            given = task(batch + 1, p, run)
            while self.host.open(given).loading is not None:
                pass
            read = self.host.reads.get_many(GetCommand(run, "op", p, batch + 1), pa.array([b"k"], pa.binary()))
            assert read.to_pylist() == [b"%d of %d" % (batch, p)]


@pytest.fixture
def query(tmp_path: Path) -> Query:
    return Query(tmp_path)


def test_a_batch_of_a_host_is_one_object_from_which_each_partition_is_loaded(query: Query) -> None:
    for batch in range(3):
        query.batch(batch)
    assert query.stored("groups/*") == ["1", "2", "3"] and query.stored("operators/**/*.changelog") == []
    plan_spark(query.world, 3)
    query.start("run2", "b")
    query.assert_holds(2, "run2")


def test_a_version_that_no_manifest_names_is_put_together_from_the_index(query: Query) -> None:
    for batch in range(2):
        query.batch(batch)
    newest = max((query.root / "ck/statestore/manifests").iterdir())
    newest.unlink()
    plan_spark(query.world, 2)
    query.start("run2", "b")
    entries = run_of(query.coordinator, "run2").versions.chain[2].operators["op"].partitions
    assert {entries[p].changelog.within is not None for p in range(PARTITIONS)} == {True}
    query.assert_holds(1, "run2")


def test_a_partition_that_is_loaded_waits_for_one_that_still_is_being_loaded(
    query: Query, monkeypatch: pytest.MonkeyPatch
) -> None:
    query.batch(0)
    plan_spark(query.world, 1)
    query.start("run2", "b")
    query.host.group_commits._linger = FOR_EVER
    may_load = threading.Event()
    load = PartitionState.load

    def gated(state: PartitionState, lineage: Lineage, watch: LoadWatch | None = None) -> None:
        if "/0/" not in lineage.changelogs[0].file.path:
            assert may_load.wait(PATIENCE)
        load(state, lineage, watch)

    monkeypatch.setattr(PartitionState, "load", gated)

    def run(p: int) -> None:
        one = task(1, p, "run2")
        while query.host.open(one).loading is not None:
            pass
        query.host.commit(one, ch(b"1"), {})

    others = [Threads.submit(run, p) for p in range(1, PARTITIONS)]
    wait_until(lambda: len(query.host.loads.describe()) == PARTITIONS - 1, "the others are not being loaded")
    first = Threads.submit(run, 0)
    groups = query.host.group_commits

    def has_member() -> bool:
        batch = groups._batches.get("run2")
        return batch is not None and batch.group is not None and len(batch.group.members) == 1

    wait_until(has_member, "the first one does not wait for the others")
    may_load.set()
    for done in (first, *others):
        done.result(PATIENCE)
    assert query.stored("groups/2-*") == ["2"] and query.stored("operators/**/*.changelog") == []


def test_a_damaged_part_of_a_group_spoils_no_other_partition(query: Query) -> None:
    query.batch(0)
    entries = run_of(query.coordinator, "run1").versions.chain[1].operators["op"].partitions
    spoilt = entries[2].changelog
    (group,) = (query.root / "ck/statestore/groups").iterdir()
    data = bytearray(group.read_bytes())
    data[spoilt.offset + spoilt.size // 2] ^= 1
    group.write_bytes(data)
    plan_spark(query.world, 1)
    query.start("run2", "b")
    for p in (0, 1, 3):
        while query.host.open(task(1, p, "run2")).loading is not None:
            pass
    with pytest.raises(DamagedFileError, match=f"{group.name}.* is damaged"):
        while query.host.open(task(1, 2, "run2")).loading is not None:
            pass


def test_members_do_not_wait_for_a_first_member_whose_wait_has_failed(
    made: Callable[..., Committing], monkeypatch: pytest.MonkeyPatch
) -> None:
    host = made(FOR_EVER)
    host.open(1, 2, 3)
    let_go, wait = threading.Event(), GroupCommits._wait

    def failing(self: GroupCommits, batch: Any, group: Any, *, is_local: bool) -> None:
        self._changed.wait_for(let_go.is_set, PATIENCE)
        raise MemoryError("no room for the first member")

    monkeypatch.setattr(GroupCommits, "_wait", failing)
    commits = [host.commit(1)]
    host.wait_for_members(1)
    commits.append(host.commit(2))
    host.wait_for_members(2)
    with host.groups._changed:
        let_go.set()
        host.groups._changed.notify_all()
    for commit in commits:
        with pytest.raises(MemoryError, match="no room"):
            commit.result(PATIENCE)
    monkeypatch.setattr(GroupCommits, "_wait", wait)
    assert host.storage.paths == []
    host.commit(3).result(PATIENCE)  # alone: it waits for no other task
    assert len(host.storage.paths) == 1


def test_no_wait_once_as_many_tasks_came_as_in_the_last_batch() -> None:
    tasks = TasksAtWork()
    for partition in (0, 1, 2):
        tasks.opened("op", partition)
    tasks = tasks.next_batch()
    tasks.opened("op", 0)
    assert tasks.expects_more()
    tasks.opened("op", 1)
    tasks.opened("op", 2)
    tasks.answered("op", 0)
    assert not tasks.expects_more(), "the last tasks are running, fewer than ran at once, and no more will come"
