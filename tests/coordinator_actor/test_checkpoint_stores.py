"""Where completed checkpoints and savepoints are kept: one suite for all stores, then what each has of its own.

Counterparts of Flink 1.0's CompletedCheckpointStoreTest: testExceptionOnNoRetainedCheckpoints, testAddAndGetLatestCheckpoint,
testAddCheckpointMoreThanMaxRetained, testEmptyState, testGetAllCheckpoints, testDiscardAllCheckpoints (memory only: files
outlive their coordinator, as those of Flink's ZooKeeper store do, testRecover).
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from backends.exceptions import DamagedFileError, FileExistsInStorageError, MissingFileError, StorageError
from backends.formats.sealed import seal
from backends.storage.checkpoint_storage import CheckpointStorage
from coordinator_actor.checkpoints.checkpoint_coordinator import CheckpointCoordinator
from coordinator_actor.checkpoints.checkpoints import (
    AcknowledgeCheckpoint,
    CompletedCheckpoint,
    CompletedCheckpointStore,
    DeclineCheckpoint,
    FileCheckpointStore,
    FileSavepointStore,
    MemoryCheckpointStore,
    NoCheckpointStore,
    PendingCheckpoint,
    StoredCheckpoint,
    Tasks,
)
from coordinator_actor.exceptions import InvalidRequestError

Make = Callable[[int], CompletedCheckpointStore]


class State(msgspec.Struct, frozen=True):
    path: str
    size: int


@pytest.fixture(params=["local", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> CheckpointStorage:
    where = str(tmp_path / "state") if request.param == "local" else f"memory://{uuid.uuid4().hex}/state"
    return CheckpointStorage.open(where, fsync=False)


@pytest.fixture(params=["in memory", "on storage"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    if request.param == "in memory":
        return MemoryCheckpointStore
    storage = CheckpointStorage.open(str(tmp_path / "state"), fsync=False)
    return lambda retained: FileCheckpointStore(storage, max_retained=retained)


def checkpoint(i: int, **more: Any) -> CompletedCheckpoint:
    return CompletedCheckpoint(
        **{
            "id": i,
            "timestamp": 100.25 + i,
            "duration": 1.5,
            "states": {("op", 0): f"{i}/0", ("op", 1): {"files": [i, None]}, ("other", 0): i},
            "size": 10 * i,
            "job_id": "job",
            "parallelism": {"op": 2, "other": 3},
            "properties": {"version": i},
            **more,
        }
    )


# ---- every store of completed checkpoints


def test_an_empty_store(make: Make) -> None:
    store = make(1)
    assert store.latest() is None and store.all() == [] and store.num_retained == 0
    store.recover()
    assert store.latest() is None and store.num_retained == 0


def test_at_least_one_checkpoint_is_kept(make: Make) -> None:
    with pytest.raises(InvalidRequestError, match="max_retained is 0"):
        make(0)


def test_the_latest_is_the_one_with_the_highest_id(make: Make) -> None:
    store = make(4)
    for added, (latest, held) in {3: (3, 1), 4: (4, 2), 1: (4, 3)}.items():
        store.add(checkpoint(added))
        assert store.latest() == checkpoint(latest) and store.num_retained == held
    assert store.all() == [checkpoint(1), checkpoint(3), checkpoint(4)]


def test_no_more_are_kept_than_wanted(make: Make) -> None:
    store = make(2)
    for i in range(5):
        store.add(checkpoint(i))
        assert [c.id for c in store.all()] == list(range(max(0, i - 1), i + 1))
    store.add(checkpoint(1))
    assert [c.id for c in store.all()] == [3, 4]


def test_many_threads_add(make: Make) -> None:
    store = make(3)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: store.add(checkpoint(i)), range(30)))
    assert store.all() == [checkpoint(27), checkpoint(28), checkpoint(29)]
    store.recover()
    assert [c.id for c in store.all()] == [27, 28, 29]


# ---- in memory


def test_memory_lets_go_through_a_callback(caplog: pytest.LogCaptureFixture) -> None:
    gone: list[int] = []
    store = MemoryCheckpointStore(2, lambda c: gone.append(c.id))
    for i in (1, 2, 3, 4):
        store.add(checkpoint(i))
    assert gone == [1, 2]
    store.shutdown()
    assert gone == [1, 2, 3, 4] and store.latest() is None and store.num_retained == 0

    def fail(completed: CompletedCheckpoint) -> None:
        gone.append(-completed.id)
        raise OSError("cannot")

    store = MemoryCheckpointStore(2, fail)
    for i in (1, 2, 3):
        store.add(checkpoint(i))
    store.shutdown()
    assert gone[4:] == [-1, -2, -3] and len([r for r in caplog.records if r.exc_info]) == 3


def test_nothing_is_kept_where_nothing_is_to_be_kept() -> None:
    store: CompletedCheckpointStore = NoCheckpointStore()
    store.recover()
    store.add(checkpoint(1))
    store.shutdown()
    assert store.latest() is None and store.all() == [] and store.num_retained == 0


# ---- on storage


def test_files_are_found_again(storage: CheckpointStorage) -> None:
    store = FileCheckpointStore(storage, max_retained=2)
    for i in (1, 2, 3):
        store.add(checkpoint(i))
    store.shutdown()
    assert [path for path, _ in storage.list()] == [f"checkpoints/{i:020d}.json" for i in (2, 3)]
    again = FileCheckpointStore(storage, max_retained=2)
    assert again.latest() is None
    again.recover()
    assert again.all() == [checkpoint(2), checkpoint(3)] and again.latest() == checkpoint(3)
    again.add(checkpoint(4))
    assert [path for path, _ in storage.list()] == [f"checkpoints/{i:020d}.json" for i in (3, 4)]


def test_fewer_may_be_kept_after_a_restart(storage: CheckpointStorage) -> None:
    store = FileCheckpointStore(storage, max_retained=5)
    for i in range(5):
        store.add(checkpoint(i))
    again = FileCheckpointStore(storage, max_retained=2)
    again.recover()
    assert [c.id for c in again.all()] == [3, 4]
    again.add(checkpoint(5))
    assert [path[-6:] for path, _ in storage.list()] == ["4.json", "5.json"]


def test_states_come_back_as_their_type(storage: CheckpointStorage) -> None:
    states: dict[tuple[str, int], Any] = {("op", 0): State("a/b", 3), ("op", 1): State("c", 2**53 + 1)}
    FileCheckpointStore(storage, state_type=State).add(checkpoint(1, states=states))
    again = FileCheckpointStore(storage, state_type=State)
    again.recover()
    assert again.all()[0].states == states
    plain = FileCheckpointStore(storage)
    plain.recover()
    assert plain.all()[0].states[("op", 0)] == {"path": "a/b", "size": 3}
    other = FileCheckpointStore(storage, state_type=int)
    with pytest.raises(DamagedFileError, match=r"01\.json has a state that is no"):
        other.recover()
    data = FileSavepointStore(storage, "sp", state_type=bytes)
    assert data.load(data.store(checkpoint(1, states={("op", 0): b"\x00\xff"}))).states == {("op", 0): b"\x00\xff"}


@pytest.mark.parametrize("where", ["state", "property"])
def test_what_cannot_be_written_is_refused(storage: CheckpointStorage, where: str) -> None:
    bad = {"states": {("op", 0): object()}} if where == "state" else {"properties": {"x": object()}}
    store = FileCheckpointStore(storage)
    with pytest.raises(InvalidRequestError, match="Checkpoint 1 has a state or property that cannot be written"):
        store.add(checkpoint(1, **bad))
    assert storage.list() == [] and store.latest() is None


def test_damaged_files_are_named_and_nothing_is_taken(storage: CheckpointStorage) -> None:
    store = FileCheckpointStore(storage, max_retained=9)
    for i in range(6):
        store.add(checkpoint(i))
    good = storage.get("checkpoints/00000000000000000001.json")
    damage = {
        1: good[:-1],
        2: good.replace(b'"size":10', b'"size":11'),
        3: b"",
        4: good,  # whole, but another checkpoint
        5: seal(State("not a checkpoint", 1)),
    }
    for i, data in damage.items():
        path = f"checkpoints/{i:020d}.json"
        storage.delete(path)
        storage.put_new(path, data)
    again = FileCheckpointStore(storage, max_retained=9)
    with pytest.raises(DamagedFileError) as raised:
        again.recover()
    message = str(raised.value)
    assert all(f"{storage.location}/checkpoints/{i:020d}.json" in message for i in damage)
    assert f"{0:020d}" not in message and message.startswith("5 completed checkpoints")
    assert again.all() == [] and again.num_retained == 0
    for i in damage:
        storage.delete(f"checkpoints/{i:020d}.json")
    again.recover()
    assert again.all() == [checkpoint(0)]


def test_other_files_are_left_alone(storage: CheckpointStorage) -> None:
    for name in ("README.md", "checkpoints/notes.json", "checkpoints/deeper/00000000000000000009.json", "1.json"):
        storage.put_new(name, b"not ours")
    store = FileCheckpointStore(storage)
    store.recover()
    for i in (1, 2):
        store.add(checkpoint(i))
    store.recover()
    assert store.all() == [checkpoint(2)] and len(storage.list()) == 5


def test_an_id_is_written_once_but_for_the_same_checkpoint(storage: CheckpointStorage) -> None:
    ours, theirs = FileCheckpointStore(storage, state_type=State), FileCheckpointStore(storage, state_type=State)
    states = {("op", 0): State("a", 1)}
    ours.add(checkpoint(1, states=states))
    theirs.add(checkpoint(1, states=states, duration=9.0))  # the answer to the first attempt was lost
    assert theirs.num_retained == 1
    for other in (
        {"states": {("op", 0): State("b", 1)}},
        {"job_id": "x"},
        {"timestamp": 1.0},
        {"parallelism": {"op": 7}},
    ):
        fresh = FileCheckpointStore(storage, state_type=State)
        with pytest.raises(FileExistsInStorageError, match="00001"):
            fresh.add(checkpoint(1, **{"states": states, **other}))
        assert fresh.latest() is None


def test_a_file_that_cannot_be_removed_is_removed_later(
    storage: CheckpointStorage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = FileCheckpointStore(storage)
    store.add(checkpoint(1))

    def fail(path: str) -> None:
        raise StorageError("throttled")

    with monkeypatch.context() as patch:
        patch.setattr(storage, "delete", fail)
        store.add(checkpoint(2))
    assert store.all() == [checkpoint(2)] and len(storage.list()) == 2
    assert [r.exc_info is not None for r in caplog.records] == [True]
    store.add(checkpoint(3))
    assert [path[-6:] for path, _ in storage.list()] == ["3.json"]
    with monkeypatch.context() as patch:
        removed: list[str] = []
        patch.setattr(storage, "delete", removed.append)
        store.add(checkpoint(4))
    assert [path[-6:] for path in removed] == ["3.json"], "and only once"


def test_a_failed_write_is_no_checkpoint(storage: CheckpointStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileCheckpointStore(storage)
    store.add(checkpoint(1))
    with monkeypatch.context() as patch:
        patch.setattr(storage, "put_new", lambda path, data: (_ for _ in ()).throw(StorageError("full")))
        with pytest.raises(StorageError, match="full"):
            store.add(checkpoint(2))
    assert store.all() == [checkpoint(1)] and len(storage.list()) == 1


def test_a_coordinator_goes_on_after_a_restart(storage: CheckpointStorage) -> None:
    tasks = [("op", 0), ("op", 1)]

    def begin() -> CheckpointCoordinator:
        store = FileCheckpointStore(storage, state_type=State, max_retained=2)
        return CheckpointCoordinator("job", tasks, completed_store=store, timeout=None)

    first = begin()
    for n in range(3):
        pending = first.start_checkpoint(n)
        for task in tasks:
            first.receive_acknowledge_message(
                AcknowledgeCheckpoint("job", task, pending.id, State(f"{task[1]}", n), size=4)
            )
    first.shutdown()
    again = begin()
    restored: dict[Any, Any] = {}
    found = again.restore_latest_checkpointed_state(restored.__setitem__, all_or_nothing_state=True)
    assert found is not None and (found.id, found.size, found.timestamp) == (3, 8, 2)
    assert restored == {("op", 0): State("0", 2), ("op", 1): State("1", 2)}
    assert again.get_number_of_retained_successful_checkpoints() == 2 and again.start_checkpoint().id == 4


# ---- savepoints


def test_savepoints_are_stored_loaded_listed_and_disposed_of(storage: CheckpointStorage) -> None:
    store = FileSavepointStore(storage, "savepoints/q1")
    one, same, two = store.store(checkpoint(1)), store.store(checkpoint(1)), store.store(checkpoint(2))
    assert len({one, same, two}) == 3 and one.startswith(f"{storage.location}/savepoints/q1/savepoint-1-")
    assert FileSavepointStore(storage, "savepoints/q1").load(two) == checkpoint(2)
    assert store.load(one) == store.load(same) == checkpoint(1)
    assert sorted(store.all()) == sorted((one, same, two)) and FileSavepointStore(storage).all() == []
    store.dispose(one)
    store.dispose(one)
    with pytest.raises(MissingFileError, match="savepoint-1"):
        store.load(one)
    assert sorted(store.all()) == sorted((same, two))


def test_a_savepoint_elsewhere_is_refused(storage: CheckpointStorage) -> None:
    store = FileSavepointStore(storage, "sp")
    other = FileSavepointStore(storage).store(checkpoint(1))
    kept = FileCheckpointStore(storage, "sp")
    kept.add(checkpoint(1))
    for path in (
        other,
        f"{storage.location}/sp/{1:020d}.json",
        "s3://b/sp/savepoint-1-x.json",
        "savepoint-1-x.json",
        "",
    ):
        for call in (store.load, store.dispose):
            with pytest.raises(InvalidRequestError, match=r"is no savepoint in .*/sp"):
                call(path)
    assert len(storage.list()) == 2


def test_a_damaged_savepoint_is_named(storage: CheckpointStorage) -> None:
    store = FileSavepointStore(storage)
    path = store.store(checkpoint(1))
    name = path.removeprefix(f"{storage.location}/")
    data = storage.get(name)
    storage.delete(name)
    storage.put_new(name, data[:40] + b"X" + data[41:])
    with pytest.raises(DamagedFileError, match=name):
        store.load(path)


# ---- what is stored


def test_a_stored_checkpoint_is_one_line_of_json_that_anybody_can_read(storage: CheckpointStorage) -> None:
    FileCheckpointStore(storage).add(checkpoint(1))
    content = storage.get("checkpoints/00000000000000000001.json").split(b"\n")[0]
    record = msgspec.json.decode(content)
    assert record["states"] == [["op", 0, "1/0"], ["op", 1, {"files": [1, None]}], ["other", 0, 1]]
    assert record["format_version"] == 1 and record["parallelism"] == {"op": 2, "other": 3}
    assert msgspec.json.decode(content, type=StoredCheckpoint).timestamp == 101.25


def test_partition_counts_are_taken_from_the_states_where_they_are_not_recorded() -> None:
    assert checkpoint(1).operators() == {"op": 2, "other": 3}
    assert checkpoint(1, parallelism={}).operators() == {"op": 2, "other": 1}
    assert checkpoint(1, states={}, parallelism={}).operators() == {}


def test_messages_travel_as_json() -> None:
    message = AcknowledgeCheckpoint("job", ("op", 3), 7, {"path": "x"}, 12, 0.5)
    assert msgspec.json.decode(msgspec.json.encode(message), type=AcknowledgeCheckpoint) == message
    refusal = DeclineCheckpoint("job", ("op", 3), 7, "why")
    assert msgspec.json.decode(msgspec.json.encode(refusal), type=DeclineCheckpoint) == refusal


def test_a_pending_checkpoint_by_itself() -> None:
    pending = PendingCheckpoint("job", 1, 50.0, Tasks([("op", p) for p in range(10)]), started=10.0)
    with pytest.raises(InvalidRequestError, match=r"10 of 10 tasks have not acknowledged it: op/0, .*, \.\.\."):
        pending.to_completed(11)
    missing = pending.not_yet_acknowledged
    missing.clear()
    assert pending.num_not_yet_acknowledged == 10, "what is handed out is a copy"
    for p in range(10):
        assert pending.acknowledge(("op", p), p or None, size=2**62, duration=p, at=20 + p)
    assert not pending.acknowledge(("op", 5), "x", at=99, replace=False)
    assert repr(pending) == "PendingCheckpoint(id=1, acknowledged=10/10)"
    completed = pending.to_completed(9)
    assert completed.duration == 0 and completed.size == 10 * 2**62, "clocks go back; sums go beyond 64 bits"
    assert completed.states == {("op", p): p for p in range(1, 10)}
    figures = pending.figures()
    assert (figures.first, figures.last) == (20, 29) and math.isclose(float(figures.durations.sum()), 45)
    pending.completed = completed
    with pytest.raises(InvalidRequestError, match="is over"):
        pending.acknowledge(("op", 1), "x", at=30)
