"""The budget of a process: who makes room for whom, and how long bytes count."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest

from backends import StateStoreConf, host_memory
from backends.exceptions import HostMemoryBusyError, HostMemoryError, InvalidStateStoreArgument
from backends.host_memory import (
    BEFORE_IMAGES,
    CHANGELOGS,
    DATABASES,
    DELTAS,
    LAST_READS,
    REQUESTS,
    SCANS,
    STAGED,
    BoundedDict,
    HostMemory,
)
from tests.patience import PATIENCE

MIB = 1 << 20
CONF = StateStoreConf(host_memory=64 * MIB)
WORKING = 56 * MIB
"""Without RocksDB's block cache and write buffers."""
SPARED = 16 * MIB


class Kept:
    """Holders of memory that can be spared, by name."""

    def __init__(self, memory):
        self.memory = memory
        self.claims = {}

    def keep(self, name, nbytes, kind=LAST_READS):
        claim = self.memory.spare(kind, nbytes, lambda: self.claims.pop(name, None))
        if claim is not None:
            self.claims[name] = claim
        return claim is not None


class Rows:
    """Eight row caches of 1 MiB each, which stay empty once they were emptied."""

    def __init__(self, memory):
        self.claims = {}
        for number in range(8):
            self.claims[number] = memory.claim_rows(MIB, lambda number=number: self.claims.pop(number))

    @property
    def used(self):
        return len(self.claims) * MIB


def test_bytes_count_as_long_as_anything_refers_to_their_claim():
    memory = HostMemory(CONF)
    claim = memory.claim(STAGED, 5000, "A commit")
    also = [claim]
    memory.move(claim, DELTAS)
    assert (memory.held()[STAGED], memory.held()[DELTAS]) == (0, 5000)
    memory.resize(claim, 7000)
    del claim
    assert memory.held()[DELTAS] == 7000
    also.clear()
    assert set(memory.held().values()) == {0}


def test_the_oldest_that_can_be_spared_makes_room_whoever_holds_it():
    memory = HostMemory(CONF)
    first, second = Kept(memory), Kept(memory)
    assert first.keep("a", 6 * MIB) and second.keep("b", 6 * MIB, BEFORE_IMAGES) and first.keep("c", 4 * MIB)
    assert second.keep("d", 1 * MIB)
    assert list(first.claims) == ["c"] and list(second.claims) == ["b", "d"]
    assert not second.keep("too large", SPARED + 1)
    assert list(first.claims) == ["c"] and list(second.claims) == ["b", "d"]
    assert memory.held()[LAST_READS] + memory.held()[BEFORE_IMAGES] == 11 * MIB


def test_what_is_needed_takes_spared_memory_first_then_that_of_rows_and_then_none():
    memory = HostMemory(CONF)
    rows, kept = Rows(memory), Kept(memory)
    kept.keep("a", 10 * MIB)
    kept.keep("b", 6 * MIB)
    commits = [memory.claim(STAGED, 32 * MIB, "A commit")]
    assert list(kept.claims) == ["a", "b"] and rows.used == 8 * MIB
    commits.append(memory.claim(DELTAS, 10 * MIB, "A commit"))
    assert list(kept.claims) == ["b"] and rows.used == 8 * MIB
    commits.append(memory.claim(SCANS, 10 * MIB, "A scan"))
    assert not kept.claims and rows.used == 4 * MIB
    assert sum(memory.held().values()) <= WORKING
    assert not kept.keep("c", 1)
    with pytest.raises(HostMemoryError, match=r"The commit of X needs 5,242,880 bytes, and 4,194,304 of host_memory"):
        memory.claim(STAGED, 5 * MIB, "The commit of X")
    assert memory.held()[STAGED] == 32 * MIB
    commits.clear()
    assert kept.keep("c", SPARED)


def test_a_scan_that_holds_more_later_takes_the_memory_of_others():
    memory = HostMemory(CONF)
    kept = Kept(memory)
    kept.keep("a", 12 * MIB)
    scan = memory.note(SCANS, 0)
    memory.resize(scan, 40 * MIB)
    assert not kept.claims


def test_claims_may_end_while_the_budget_is_at_work():
    """The garbage collector may end any claim at any allocation, also at one that is made with the lock."""
    memory = HostMemory(CONF)

    class Cycle:
        pass

    usual = gc.get_threshold()
    gc.disable()
    try:
        for _ in range(100):
            cycle = Cycle()
            cycle.self, cycle.claim = cycle, memory.claim(DELTAS, 10, "A commit")
        del cycle
        gc.set_threshold(1, 1, 1)
        gc.enable()
        made = [memory.claim(STAGED, 1, "A commit") for _ in range(100)]
    finally:
        gc.enable()
        gc.set_threshold(*usual)
    gc.collect()
    assert memory.held()[DELTAS] == 0 and memory.held()[STAGED] == len(made)


def test_rocksdb_gets_its_shares_or_what_it_is_given():
    conf = StateStoreConf(host_memory=160 * MIB)
    assert (conf.row_cache_bytes, conf.block_cache_bytes, conf.write_buffer_bytes) == (20 * MIB, 10 * MIB, 10 * MIB)
    conf = StateStoreConf(host_memory=160 * MIB, rocksdb_row_cache_bytes=0, rocksdb_block_cache_bytes=MIB)
    assert (conf.row_cache_bytes, conf.block_cache_bytes) == (0, MIB)
    with pytest.raises(InvalidStateStoreArgument, match=r"host_memory=167,772,160 must be more than.*188,743,680"):
        StateStoreConf(host_memory=160 * MIB, rocksdb_row_cache_bytes=160 * MIB)


def test_what_is_spared_is_not_kept_where_only_itself_could_make_room():
    """Noted bytes cannot be dropped: they leave no room, however much other entries could spare."""
    memory = HostMemory(CONF)
    kept = Kept(memory)
    noted = memory.note(BEFORE_IMAGES, SPARED + MIB)
    assert [kept.keep(i, MIB) for i in range(20)] == [False] * 20
    assert memory.held()[LAST_READS] == 0
    del noted
    assert kept.keep("again", MIB) and memory.held()[LAST_READS] == MIB


def test_the_holder_of_a_dropped_entry_can_tell():
    memory = HostMemory(CONF)
    claim = memory.spare(LAST_READS, 10 * MIB, lambda: None)
    assert not claim.is_dropped
    memory.spare(BEFORE_IMAGES, 10 * MIB, lambda: None)
    assert claim.is_dropped


def test_what_passes_pushes_out_what_can_be_spared_and_refuses_nothing():
    memory = HostMemory(CONF)
    rows, kept = Rows(memory), Kept(memory)
    kept.keep("a", 10 * MIB)
    requests = memory.note(REQUESTS, 40 * MIB)
    changelog = memory.note(CHANGELOGS, 14 * MIB)
    assert not kept.claims and rows.used == 2 * MIB
    assert memory.claim(STAGED, 50 * MIB, "A commit").nbytes == 50 * MIB
    del requests, changelog
    assert kept.keep("b", 10 * MIB)


def test_a_refusal_says_who_has_the_memory_and_what_helps_the_batch():
    memory = HostMemory(CONF)
    held = [memory.note(DATABASES, 20 * MIB), memory.claim(STAGED, 30 * MIB, "A commit")]
    with pytest.raises(
        HostMemoryError,
        match=r"^X needs 7,340,032 bytes, and 6,291,456 of host_memory=67,108,864 are free: 31,457,280 are held by "
        r"other commits and scans, 20,971,520 by the open RocksDB databases, 8,388,608 are RocksDB's block cache and "
        r"write buffers\. Set StateStoreConf\(host_memory=\.\.\.\) higher, or have more hosts.*run again with the same",
    ):
        memory.claim(STAGED, 7 * MIB, "X")
    higher = HostMemory(replace(CONF, host_memory=CONF.host_memory + 2 * MIB))
    again = [higher.note(DATABASES, 20 * MIB), higher.claim(STAGED, 30 * MIB, "A commit")]
    assert higher.claim(STAGED, 7 * MIB, "X").nbytes == 7 * MIB
    del held, again


class Commits:
    """Commits that wait for their turn or are in, each in a separate thread."""

    def __init__(self, memory: HostMemory) -> None:
        self.memory = memory
        self.entered: list[str] = []
        self.changed = threading.Condition()
        self.ends: dict[str, threading.Event] = {}
        self.threads: list[threading.Thread] = []

    def begin(self, name: str, nbytes: int, run: str = "run") -> None:
        """Return when the commit is in, or waits."""
        self.ends[name] = threading.Event()
        waiting = self.memory.num_waiting

        def work() -> None:
            with self.memory.admitted(run, nbytes, name, PATIENCE):
                with self.changed:
                    self.entered.append(name)
                    self.changed.notify_all()
                assert self.ends[name].wait(PATIENCE)

        self.threads.append(threading.Thread(target=work, daemon=True))
        self.threads[-1].start()
        with self.changed:
            # A waiting commit is seen only by polling: the budget has no notification.
            while name not in self.entered and self.memory.num_waiting == waiting:
                self.changed.wait(0.001)

    def end(self, name: str, entering: int = 0) -> None:
        """Let a commit end; return when so many others have come in."""
        with self.changed:
            expected = len(self.entered) + entering
            self.ends[name].set()
            assert self.changed.wait_for(lambda: len(self.entered) >= expected, PATIENCE)

    def close(self) -> None:
        for end in self.ends.values():
            end.set()
        for thread in self.threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()


@pytest.fixture
def commits() -> Iterator[Commits]:
    made = Commits(HostMemory(CONF))
    yield made
    made.close()
    assert not made.memory.num_waiting


def test_commits_wait_until_those_before_them_leave_room_and_keep_their_order(commits: Commits):
    for name in "abcd":
        commits.begin(name, 9 * MIB)  # three times as much at the peak: two have room
    assert commits.entered == ["a", "b"] and commits.memory.num_waiting == 2
    commits.begin("small", MIB)
    assert commits.memory.num_waiting == 3
    commits.end("a", entering=1)
    assert commits.entered == ["a", "b", "c"]
    commits.end("c", entering=1)
    commits.end("b", entering=1)
    assert commits.entered == ["a", "b", "c", "d", "small"]


def test_a_commit_runs_alone_where_needed_memory_leaves_no_room(commits: Commits):
    deltas = commits.memory.claim(DELTAS, 50 * MIB, "A commit")
    commits.begin("a", 3 * MIB)
    commits.begin("b", 1 * MIB)
    assert commits.entered == ["a"]
    commits.end("a", entering=1)
    assert commits.entered == ["a", "b"]
    del deltas


def test_one_commit_of_each_run_never_waits_for_another_run(commits: Commits):
    """The storage of the first run hangs."""
    for name in "abc":
        commits.begin(name, 9 * MIB)
    commits.begin("other", 18 * MIB, "other run")
    assert commits.entered == ["a", "b", "other"]
    commits.begin("other, second", MIB, "other run")
    assert commits.memory.num_waiting == 2
    commits.end("other", entering=1)
    assert commits.entered == ["a", "b", "other", "other, second"]


def test_a_commit_that_could_never_be_kept_is_refused_before_it_is_received(commits: Commits):
    with (
        pytest.raises(HostMemoryError, match=r"^X needs 60,817,408 bytes, and 58,720,256 of host_memory=67,108,864"),
        commits.memory.admitted("run", 29 * MIB, "X", PATIENCE),
    ):
        pass


def test_a_commit_whose_turn_does_not_come_says_so(commits: Commits, monkeypatch: pytest.MonkeyPatch):
    commits.begin("a", 18 * MIB)
    with (
        pytest.raises(HostMemoryBusyError, match=r"^X needs 6,291,456 bytes for a moment, and has waited 0.01 s"),
        commits.memory.admitted("run", 2 * MIB, "X", 0.01),
    ):
        pass
    commits.begin("b", 18 * MIB)
    monkeypatch.setattr(host_memory, "MAX_WAITING", 1)
    with (
        pytest.raises(HostMemoryBusyError, match=r"^X must wait, and 1 commits of run run wait already"),
        commits.memory.admitted("run", 0, "X", PATIENCE),
    ):
        pass
    commits.end("a", entering=1)


def test_a_commit_that_fails_leaves_its_room(commits: Commits):
    with pytest.raises(ZeroDivisionError), commits.memory.admitted("run", 18 * MIB, "X", PATIENCE):
        raise ZeroDivisionError
    with ExitStack() as inside:
        for _ in range(2):
            inside.enter_context(commits.memory.admitted("run", 9 * MIB, "X", 0))


def test_the_oldest_entries_are_forgotten():
    bounded = BoundedDict(2)
    for key in "abc":
        bounded[key] = key.upper()
    assert bounded == {"b": "B", "c": "C"}


def test_setting_again_keeps_the_place_of_an_entry():
    bounded = BoundedDict(2)
    bounded["a"], bounded["b"] = 1, 2
    bounded["a"] = 3
    assert bounded["b"] == 2
    assert list(bounded.items()) == [("a", 3), ("b", 2)]
    bounded["c"] = 4
    assert list(bounded.items()) == [("b", 2), ("c", 4)]


def test_setdefault_is_bounded_too():
    bounded = BoundedDict(1)
    assert bounded.setdefault("a", 1) == 1
    assert bounded.setdefault("a", 2) == 1
    assert bounded.setdefault("b", 3) == 3
    assert bounded == {"b": 3}


class Interrupting(str):
    """A key: the thread that evicts it is interrupted once by another one, which sets an entry as well."""

    then: Callable[[], None] = staticmethod(lambda: None)

    def __hash__(self) -> int:
        then, self.then = self.then, lambda: None
        then()
        return super().__hash__()


def test_two_threads_may_evict_at_once():
    """As in hosts, which note the first moment of rolling aggregates for each version in threads of requests."""
    bounded, oldest = BoundedDict(2), Interrupting("a")
    bounded[oldest], bounded["b"] = 1, 2

    def evict_too() -> None:
        bounded["d"] = 4

    class Armed(str):
        """A key whose entry is new when the other thread comes."""

        def __hash__(self) -> int:
            oldest.then = evict_too
            return super().__hash__()

    bounded[Armed("c")] = 3
    assert len(bounded) == 2 and "a" not in bounded and bounded["d"] == 4


def test_a_limit_below_one_is_refused():
    with pytest.raises(ValueError, match="limit=0"):
        BoundedDict(0)
