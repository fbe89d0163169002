"""A host with a long load rejects reads of the loading partition with the reason, and answers all other reads during
the load.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from backends.formats.manifest import Lineage
from backends.partition.loading import Loading
from spark_bridge.exceptions import HostUnavailableError
from spark_bridge.host import running_loads as host_loads
from spark_bridge.host.running_loads import Loads
from spark_bridge.queryable.protocol import At, LookupRequest, ScanRequest
from spark_bridge.queryable.reads.key_reads import KeyWindowIndex
from tests.patience import HANG, PATIENCE
from tests.spark_bridge.queryable.host_world import HostWorld, partitions_of, stored

KEYS = range(40)
OF = [[k for k, p in zip(KEYS, partitions_of(KEYS, 2), strict=True) if p == of] for of in (0, 1)]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[HostWorld]:
    made = HostWorld(tmp_path, wait_seconds=HANG)
    for value in range(1, 7):
        made.batch(dict.fromkeys(KEYS, value))
    yield made
    made.close()


@contextmanager
def running(work: Callable[[], object], over: threading.Event) -> Iterator[threading.Thread]:
    """Work in another thread that lasts until ``over``."""
    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield thread
    finally:
        over.set()
        thread.join(PATIENCE)
        assert not thread.is_alive()


def in_time(ask: Callable[[], Any], seconds: float = PATIENCE) -> Any:
    """Return the answer or raise the error of a call, and time out if there is none."""
    answers: list[Any] = []

    def run() -> None:
        try:
            answers.append(ask())
        except Exception as error:  # noqa: BLE001 - the test looks at it
            answers.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert answers, f"no answer within {seconds} s"
    return answers[0]


@contextmanager
def loading_anew(state: Any) -> Iterator[None]:
    """Another version is being loaded into a partition, from storage that hangs."""
    begun, over = threading.Event(), threading.Event()
    run = Loading.run

    def hang(loading: Any, lineage: Lineage) -> None:
        if loading._engine is not state._engine:
            return run(loading, lineage)
        begun.set()
        over.wait(HANG)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loading, "run", hang)
        with running(lambda: state.load(Lineage(99)), over):
            assert begun.wait(PATIENCE)
            yield


def test_long_load_is_awaited_briefly_and_by_few_readers(world: HostWorld) -> None:
    world.hosts[0].cache.unload(world.instance(0))
    lock = world.hosts[0].cache.loading_lock(next(key for key in world.hosts[0].cache._loading_locks if key[2] == 0))
    with lock, pytest.MonkeyPatch.context() as patch:
        patch.setattr(world.reads[0]._reader, "wait_seconds", 0.5)
        begun = time.monotonic()
        answers: list[Any] = []
        threads = [
            threading.Thread(target=lambda: answers.append(in_time(lambda: world.lookup(OF[0])))) for _ in range(40)
        ]
        for thread in threads:
            thread.start()
        assert in_time(lambda: world.lookup(OF[1])) == (6, [6] * len(OF[1]))
        while len(answers) < len(threads) - host_loads.MAX_WAITING_REQUESTS:
            time.sleep(0.01)
            assert time.monotonic() - begun < PATIENCE
        for thread in threads:
            thread.join()
        assert len(answers) == len(threads)
        assert {type(a) for a in answers} == {HostUnavailableError}, answers
        assert "Partition 0 of operator 'op'" in str(answers[0])
    assert world.lookup(OF[0]) == (6, [6] * len(OF[0]))


def test_reads_do_not_wait_for_another_version_to_be_loaded(world: HostWorld) -> None:
    world.reads[0]._reader.wait_seconds = 0.1
    with loading_anew(world.instance(0).state):
        for at in (At(), At("latest"), At("version", 5)):
            for ask in (
                lambda at=at: world.one(OF[0][0], at),
                lambda at=at: world.lookup(OF[0], at),
                lambda at=at: world.reads[0].scan(ScanRequest(world.run, "op", at=at)),
            ):
                assert isinstance(in_time(ask), HostUnavailableError)
            assert in_time(lambda at=at: world.lookup(OF[1], at))[1] == [5 if at.version else 6] * len(OF[1])
    assert world.lookup(OF[0]) == (6, [6] * len(OF[0]))


def test_describe_does_not_wait_for_a_load(world: HostWorld) -> None:
    host = world.hosts[0]
    with loading_anew(world.instance(0).state):
        described = in_time(host.describe)
        assert [i["partition"] for i in described["instances"]] == [1], "the size of the other one is not known now"
        assert [p["partition"] for p in in_time(lambda: host.reads.partitions(world.run, "op"))] == [1]
        assert in_time(host.cache.report) is not None
        assert in_time(host.heartbeat) is None
    assert [i["version"] for i in host.describe()["instances"]] == [6, 6]
    unloading = world.instance(0)
    unloading.state.close()
    assert [i["partition"] for i in host.describe()["instances"]] == [1]


def test_old_versions_are_loaded_in_the_background(world: HostWorld) -> None:
    host, reader = world.hosts[0], world.reads[0]._reader
    over, load, loaded = threading.Event(), host.loader.load_copy, list[Any]()
    host.loader.load_copy = lambda *a: (over.wait(HANG), loaded.append((a[0].partition, a[1].version)), load(*a))[-1]
    lookup = LookupRequest(world.run, "op", At("version", 1))
    reader.wait_seconds = 0.1
    for _ in range(2):
        error = in_time(lambda: world.reads[0].lookup(lookup, stored(OF[0])))
        assert isinstance(error, HostUnavailableError) and "Version 1 of partition 0" in str(error)
    over.set()
    reader.wait_seconds = 10.0
    assert world.lookup(KEYS, lookup.at) == (1, [1] * len(KEYS))
    assert loaded == [(0, 1), (1, 1)], "each once"
    over.clear()
    reader.wait_seconds = 0.1
    assert isinstance(in_time(lambda: world.lookup(OF[0], At("version", 2))), HostUnavailableError)
    host.cache.drop_copies(world.run)
    over.set()
    in_time(host.loads.copies.shutdown)
    assert loaded[2:] == [(0, 2)]
    assert not any(world.hosts[0].files.copies.glob("*")), "an unused copy is removed"


def test_load_and_its_errors_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_loads, "MAX_WAITING_REQUESTS", 5)
    loads = Loads()
    over, calls, waiting = threading.Event(), list[int](), list[int]()
    wait = host_loads.wait

    def counted(*args: Any) -> Any:
        waiting.append(1)
        return wait(*args)

    monkeypatch.setattr(host_loads, "wait", counted)

    def load() -> int:
        calls.append(1)
        over.wait(HANG)
        if len(calls) == 2:
            raise ValueError("broken")
        return 7

    found: list[int] = []
    threads = [
        threading.Thread(target=lambda: found.append(loads.read_result("a", load, "It", HANG))) for _ in range(5)
    ]
    for thread in threads:
        thread.start()
    # Each has taken its place and waits for the same load: one that had only taken its place might begin another.
    deadline = time.monotonic() + PATIENCE
    while len(waiting) < len(threads):
        time.sleep(0.001)
        assert time.monotonic() < deadline
    begun = time.monotonic()
    with pytest.raises(HostUnavailableError, match="It is being loaded"):
        loads.read_result("b", load, "It", HANG)
    assert time.monotonic() - begun < PATIENCE, "as many wait as may"
    over.set()
    for thread in threads:
        thread.join()
    assert (found, calls) == ([7] * 5, [1])
    with pytest.raises(ValueError, match="broken"):
        loads.read_result("a", load, "It", 20.0)
    assert loads.read_result("a", load, "It", 20.0) == 7


def test_windows_of_another_version_are_not_taken_for_those_asked_for() -> None:
    """Between the look whether they are known and their reading, another thread puts others in their place."""
    index = KeyWindowIndex(pa.schema([("window", pa.int64()), ("k", pa.string())]), 0)
    ours, theirs = frozenset({b"ours"}), frozenset({b"theirs"})
    threads: list[threading.Thread] = []

    def replace() -> None:
        with index._lock:
            index._windows, index._heads = theirs, {"head1": None}

    class Heads(dict[Any, None]):
        def __contains__(self, head: object) -> bool:
            is_there = super().__contains__(head)
            threads.append(threading.Thread(target=replace))
            threads[-1].start()
            threads[-1].join(0.2)
            return is_there

    index._windows, index._heads = ours, Heads({"head1": None, "head2": None})
    view: Any = type("View", (), {"head": "head2", "version": 2})
    assert index.windows(view) == ours
    threads[0].join()
    assert index._windows == theirs
