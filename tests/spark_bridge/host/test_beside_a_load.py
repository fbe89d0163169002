"""A load of a partition takes long: completed versions, reads, snapshots and maintenance do not wait for the load."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from backends.formats.manifest import Lineage
from backends.partition.loading import Loading
from coordinator_actor.messages import Completed, HostOrders, SavepointOrder
from spark_bridge.exceptions import HostUnavailableError
from spark_bridge.host import partition_loader as partition_loading
from spark_bridge.host.running_loads import Loads
from tests.patience import HANG, PATIENCE
from tests.spark_bridge.queryable.host_world import HostWorld


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., HostWorld]]:
    made: list[HostWorld] = []

    def build(**conf: Any) -> HostWorld:
        made.append(HostWorld(tmp_path, **conf))
        for value in (1, 2):
            made[-1].batch(dict.fromkeys(range(8), value))
        return made[-1]

    yield build
    for one in made:
        one.close()


class HangingLoad:
    """Loads of a partition hang from ``begun`` until the end of the block."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._patch = pytest.MonkeyPatch()
        self._over = threading.Event()
        self.begun = threading.Event()

    def __enter__(self) -> HangingLoad:
        run = Loading.run

        def hang(loading: Loading, lineage: Lineage) -> None:
            if loading._context.directory == self._directory:
                self.begun.set()
                assert self._over.wait(HANG)
            run(loading, lineage)

        self._patch.setattr(Loading, "run", hang)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._patch.undo()


def is_done_in_time(work: Callable[[], object]) -> bool:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    return not thread.is_alive()


@pytest.mark.parametrize("how", ["completed", "maintenance"])
def test_a_partition_that_is_another_hosts_waits_for_its_load_before_it_goes(make: Any, how: str) -> None:
    """The load has begun when the host has already seen that what it holds is of no use."""
    w = make()
    host, instance = w.hosts[0], w.instance(0)
    other = Completed(w.run, w.version + 1, {"op": {1: "of another host"}})
    if how == "completed":
        work = lambda: host.loader.complete(other)  # noqa: E731
    else:
        w.port.verify_instances = lambda *_: {w.run: {"op": [1]}}
        work = host.maintenance.do_maintenance
    with host.cache.loading_lock(instance.key):
        assert is_done_in_time(work), "the order waits for the load"
        assert w.instance(0) is instance, "the instance that loads stays"
    work()
    assert w.instance(0) is None


def test_read_waits_bounded_for_a_tasks_load_and_gets_its_progress(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    w = make()
    host = w.hosts[0]
    key, directory = w.instance(0).key, w.instance(0).state._context.directory
    host.cache.unload(w.instance(0))
    assert 0 < partition_loading.SHARED_LOAD_SECONDS < 60, "less than a client waits"
    monkeypatch.setattr(partition_loading, "SHARED_LOAD_SECONDS", 0.01)
    w.world.plan_spark(w.version)
    with HangingLoad(directory) as load:
        task = threading.Thread(target=host.open, args=(w.task(0),))
        task.start()
        assert load.begun.wait(PATIENCE)
        answers: list[Exception] = []

        def read() -> None:
            try:
                host.reads.load(w.run, "op", 0)
            except HostUnavailableError as error:
                answers.append(error)

        assert is_done_in_time(read)
    assert str(answers[0]).startswith("Partition 0 of operator 'op' is being loaded: 0 of "), answers
    task.join(PATIENCE)
    with host.cache.loading_lock(key):
        pass  # the load is over
    assert w.lookup(range(8)) == (2, [2] * 8)


def test_no_snapshot_is_taken_of_a_partition_that_is_being_loaded(make: Any) -> None:
    w = make(deltas_per_snapshot=1, maintenance_threads=1)
    host, state = w.hosts[0], w.instance(0).state
    lineage = w.c.lineage(w.run, "op", 0, 1, "test")
    with HangingLoad(state._context.directory) as load:
        loading = threading.Thread(target=state.load, args=(lineage,))
        loading.start()
        assert load.begun.wait(PATIENCE)
        for upload in host.maintenance.do_maintenance():
            upload.result(PATIENCE)
        assert (w.instance(0).snapshot_version, w.instance(1).snapshot_version) == (0, 2)
    loading.join(PATIENCE)
    for upload in host.maintenance.do_maintenance():
        upload.result(PATIENCE)
    assert w.instance(0).snapshot_version == 1


def test_the_heartbeat_with_an_order_of_a_savepoint_does_not_wait_for_a_load(make: Any, tmp_path: Path) -> None:
    """A loaded partition lacks the changes of the last version, and is brought to it from storage."""
    w = make(wait_seconds=0.01)
    host, state = w.hosts[0], w.instance(0).state
    w.write(dict.fromkeys(range(8), 3))
    w.complete(tell=False)
    ((meta, _, _),) = state.attempts.pending()
    state.attempts.discard(3, meta.attempt)
    host.completed.note(w.c.completed(w.run, "h0"))
    order = SavepointOrder(w.c.registries.runs.find(w.run).registration, 5, 2, str(tmp_path / "savepoint"), {"op": [0]})
    w.port.heartbeat_host = lambda *_: HostOrders(known=True, savepoints=(order,), pending={w.run: (5,)})
    with HangingLoad(state._context.directory) as load:
        with pytest.raises(HostUnavailableError):
            w.lookup(range(8))
        assert load.begun.wait(PATIENCE) and w.instance(0).state is state
        assert is_done_in_time(host.heartbeat)


def test_files_of_a_run_that_comes_back_while_it_is_unloaded_stay(make: Any) -> None:
    """An order to unload comes late: a task of the run opens a partition before the files of the run are removed."""
    w = make(backend="rocksdb")
    host = w.hosts[0]
    host.cache.unload(w.instance(1))
    w.world.plan_spark(w.version)
    opened: list[Any] = []

    def come_back(run_id: str | None) -> None:
        if not opened:
            opened.append(host.open(w.task(1)))

    host.cache.on_run_ended(come_back)
    host.cache.unload_run(w.run)
    assert opened[0].is_open and w.instance(0) is None
    w.instance(1).state.write_out()
    assert list(w.instance(1).state._local.engine.glob("MANIFEST-*")), "the database has lost its files"
    assert w.lookup(range(8)) == (2, [2] * 8)


def test_a_load_ahead_fetches_like_the_others_once_a_task_waits_for_it() -> None:
    loads, over = Loads(), threading.Event()
    lease: Any = SimpleNamespace(renew=lambda: None)
    with loads.watching("a partition", "a copy", lease, lambda: False, is_ahead=True) as ahead:
        with loads.watching("another", "a load", lease, lambda: False) as waited_for:
            assert ahead.is_ahead and not waited_for.is_ahead
        load = loads.start("a partition", lambda _: over.wait(HANG), None)
        assert not ahead.is_ahead
        over.set()
        load.result.result(HANG)
        assert ahead.is_ahead


@pytest.mark.parametrize("for_task", [True, False])
def test_a_load_that_got_no_thread_is_begun_again(monkeypatch: pytest.MonkeyPatch, for_task: bool) -> None:
    loads = Loads()

    def load() -> bool:
        if for_task:
            return loads.wait_for_task("a partition", ("run",), lambda _: None, "a task", PATIENCE)
        return loads.read_result("a partition", lambda: True, "a partition", PATIENCE)

    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError):
            load()
    assert load()
