"""The order in which the loads of a process fetch large files of one bucket."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest

from backends.conf import StateStoreConf
from backends.exceptions import LoadEndedError
from backends.formats.manifest import ChangelogRef, Lineage
from backends.load_watch import LoadWatch
from backends.partition.partition_state import open_partition
from backends.storage.checkpoint_storage import CheckpointStorage
from backends.storage.requests import BucketTraffic, FetchTurns
from tests.backends.partition.partition_steps import commit
from tests.patience import HANG, PATIENCE


def eventually(is_true: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE
    while not is_true():
        assert time.monotonic() < until
        time.sleep(0.001)


class Fetches:
    """Threads that each fetch one file; the turns of one file at once are held by the test first."""

    def __init__(self) -> None:
        self.turns = FetchTurns(1)
        self.order: list[str] = []
        self.held = self.turns.turn(LoadWatch("the test"))
        self.held.__enter__()

    def let_go(self) -> None:
        self.held.__exit__(None, None, None)

    def begin(self, name: str, watch: LoadWatch) -> Future[None]:
        result: Future[None] = Future()

        def fetch() -> None:
            try:
                with self.turns.turn(watch):
                    self.order.append(name)
                result.set_result(None)
            except LoadEndedError as error:
                result.set_exception(error)

        before = len(self.turns._waiting)
        threading.Thread(target=fetch, daemon=True).start()
        eventually(lambda: len(self.turns._waiting) == before + 1)
        return result


def ahead() -> bool:
    return True


def test_loads_fetch_in_their_order_and_loads_ahead_of_a_task_come_last() -> None:
    fetches = Fetches()
    warm_up, first, second = LoadWatch("warm-up", is_ahead=ahead), LoadWatch("first"), LoadWatch("second")
    begun = [
        fetches.begin(name, watch)
        for name, watch in (("second", second), ("warm-up", warm_up), ("first", first), ("first again", first))
    ]
    fetches.let_go()
    for result in begun:
        result.result(HANG)
    assert fetches.order == ["first", "first again", "second", "warm-up"]


def test_a_load_ahead_comes_first_once_a_task_waits_for_it() -> None:
    fetches, is_ahead = Fetches(), [True]
    warm_up, task = LoadWatch("warm-up", is_ahead=lambda: is_ahead[0]), LoadWatch("task")
    begun = [fetches.begin("warm-up", warm_up), fetches.begin("task", task)]
    is_ahead[0] = False
    fetches.let_go()
    for result in begun:
        result.result(HANG)
    assert fetches.order == ["warm-up", "task"]


def test_waiting_for_a_turn_is_progress_while_others_fetch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backends.storage.requests.FETCH_TURN_SECONDS", 0.01)
    turns = FetchTurns(2)
    load = LoadWatch("behind", is_ahead=ahead)
    held = [turns.turn(LoadWatch("first")) for _ in range(2)]
    for turn in held:
        turn.__enter__()
    begun = threading.Thread(target=lambda: turns.turn(load).__enter__(), daemon=True)
    begun.start()
    eventually(lambda: len(turns._waiting) == 1)
    assert load.progress().steps == 0
    # The next file of the first load takes the place that is free: the load behind waits, and has seen an end.
    with turns._changed:
        turns._ended += 1
    eventually(lambda: load.progress().steps > 0)
    held[0].__exit__(None, None, None)
    begun.join(HANG)
    assert not begun.is_alive()


def test_a_load_that_is_ended_gives_its_place_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backends.storage.requests.FETCH_TURN_SECONDS", 0.01)
    fetches = Fetches()
    abandoned, other = LoadWatch("abandoned"), LoadWatch("other")
    result, behind = fetches.begin("abandoned", abandoned), fetches.begin("other", other)
    abandoned.end("the test says so")
    with fetches.turns._changed:
        fetches.turns._ended += 1
    with pytest.raises(LoadEndedError, match="the test says so"):
        result.result(HANG)
    fetches.let_go()
    behind.result(HANG)
    assert fetches.order == ["other"]


@pytest.mark.parametrize("threads", [1, 4])
def test_loads_of_one_bucket_share_the_turns(tmp_path: Path, threads: int) -> None:
    """Two loads at once fetch no more files than there are turns, and both become whole."""
    buckets = BucketTraffic()
    conf = StateStoreConf(
        provider="file", fsync=False, compression="none", file_snapshot_part_bytes=8 << 10, load_threads=threads
    )
    storage = CheckpointStorage.open(f"memory://turns{threads}/ck", buckets=buckets)
    lineages: list[Lineage] = []
    for p in range(2):
        state = open_partition(tmp_path / f"first{p}", storage, f"operators/op/2/{p}/default", conf)
        log = ChangelogRef(*commit(state, {b"%d" % i: bytes(1000) for i in range(400)}))
        lineages.append(Lineage(1, (log,), (state.snapshots.store(None),)))
        state.destroy()
    turns = storage._traffic.turns  # type: ignore[union-attr]
    turns._free = 2
    at_once: list[int] = []
    read_to_file: Callable[..., None] = storage.read_to_file

    def watched(*args: object) -> None:
        at_once.append(2 - turns._free)
        read_to_file(*args)

    storage.read_to_file = watched  # type: ignore[method-assign]
    states = [open_partition(tmp_path / f"again{p}", storage, f"operators/op/2/{p}/default", conf) for p in range(2)]
    loads = [threading.Thread(target=state.load, args=(lineages[p],)) for p, state in enumerate(states)]
    for load in loads:
        load.start()
    for load in loads:
        load.join(HANG)
    assert [state.version for state in states] == [1, 1]
    assert min(at_once) >= 1 and max(at_once) <= 2 and turns._free == 2 and not turns._waiting
    for state in states:
        state.destroy()
