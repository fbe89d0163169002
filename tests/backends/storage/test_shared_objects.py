"""Loads that need parts of the same object at about the same time have it read once, for all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from backends.conf import StateStoreConf
from backends.exceptions import DamagedFileError, StorageError
from backends.host_memory import LAST_READS, STAGED, HostMemory
from backends.storage import object_files
from backends.storage.checkpoint_storage import CheckpointStorage
from backends.storage.locations import FileRef, digest
from backends.storage.object_files import ALONE, SharedObjects
from backends.storage.requests import RequestCounts
from tests.patience import PATIENCE

DATA = bytes(range(250))
PARTS = [FileRef(f"part-{i}", 10, digest(DATA[i : i + 10]), "groups/1-a.changelogs", i) for i in range(0, 250, 10)]


def room(nbytes: int, drop: Callable[[], None]) -> object:
    """Have room for everything."""
    return object()


def opened(name: str, shared: SharedObjects, data: bytes = DATA) -> tuple[CheckpointStorage, RequestCounts]:
    counts = RequestCounts()
    storage = CheckpointStorage.open(f"memory://{name}/ck", requests=counts)
    storage.put_new("groups/1-a.changelogs", data)
    storage.shared = shared
    return storage, counts


def test_the_parts_of_many_readers_take_a_request_more_than_those_of_a_few() -> None:
    storage, counts = opened("many-readers", SharedObjects(room))
    with ThreadPoolExecutor(len(PARTS)) as pool:
        assert b"".join(pool.map(storage.read, PARTS)) == DATA
    assert counts.read()["get"] == ALONE + 1


def test_a_load_that_is_alone_reads_only_its_parts() -> None:
    storage, counts = opened("alone", SharedObjects(room))
    before = counts.read()["get"]
    assert storage.read(PARTS[3]) == DATA[30:40]
    assert list(storage.read_together(PARTS[4:20]).values()) == [DATA[i : i + 10] for i in range(40, 200, 10)]
    assert counts.read()["get"] - before == 2
    assert storage.shared is not None and not storage.shared._held


def test_parts_that_are_read_together_are_shared_as_well() -> None:
    storage, counts = opened("together", SharedObjects(room))
    for _ in range(5):
        assert len(storage.read_together(PARTS[:3])) == 3
    assert counts.read()["get"] == ALONE + 1


def test_parts_after_the_beginning_are_read_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_files, "OBJECT_BYTES", 100)
    storage, counts = opened("behind", SharedObjects(room))
    for _ in range(4):
        assert storage.read(PARTS[-1]) == DATA[-10:]
    assert counts.read()["get"] == 4 and storage.shared is not None and not storage.shared._held
    for _ in range(4):
        assert storage.read_together(PARTS[9:11]) == {PARTS[i].path: DATA[10 * i : 10 * i + 10] for i in (9, 10)}


def test_damage_fails_only_the_readers_of_that_part() -> None:
    storage, _ = opened("damaged", SharedObjects(room), DATA[:55] + b"?" + DATA[56:])
    for i in (0, 1, 2, 3, 4, 6):
        assert storage.read(PARTS[i]) == DATA[10 * i : 10 * i + 10]
    with pytest.raises(DamagedFileError, match="from byte 50 on part-50"):
        storage.read(PARTS[5])
    assert list(storage.read_together(PARTS[4:7])) == [PARTS[4].path, PARTS[6].path]


def test_a_reader_that_fails_blocks_no_other_and_the_next_one_tries_again() -> None:
    shared, fails = SharedObjects(room), threading.Event()
    reading = threading.Event()

    def read(nbytes: int) -> bytes:
        reading.set()
        assert fails.wait(PATIENCE)
        raise StorageError("does not answer")

    for _ in range(ALONE):
        assert shared.part("o", 0, 10, read) is None
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(shared.part, "o", 0, 10, read) for _ in range(3)]
        assert reading.wait(PATIENCE)
        fails.set()
        assert [w.result(PATIENCE) for w in waiting] == [None, None, None]
    assert shared.part("o", 0, 10, lambda n: DATA) == DATA[:10]


def read_all(shared: SharedObjects, name: str, read: Callable[[int], bytes]) -> bytes | None:
    return [shared.part(name, 0, 10, read) for _ in range(ALONE + 1)][-1]


def test_kept_objects_are_bounded_in_bytes_and_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_files, "MAX_SHARED_BYTES", 1000)
    shared = SharedObjects(room)
    for i in range(200):
        assert read_all(shared, f"o{i}", lambda n: DATA) == DATA[:10]
    assert list(shared._held) == [f"o{i}" for i in range(196, 200)]
    assert len(shared._asked) <= object_files.MAX_OBJECTS
    monkeypatch.setattr(object_files, "MAX_OBJECTS", 3)
    read_all(shared, "o", lambda n: DATA)
    assert len(shared._held) == 3


def test_kept_objects_count_in_the_memory_of_the_host_and_make_room_for_others() -> None:
    memory = HostMemory(StateStoreConf(host_memory=16 << 20))
    shared = SharedObjects(partial(memory.spare, LAST_READS))
    storage, counts = opened("counted", shared)
    for _ in range(ALONE + 1):
        assert storage.read(PARTS[0]) == DATA[:10]
    assert memory.held()[LAST_READS] == len(DATA) and len(shared._held) == 1
    needed = memory.note(STAGED, 16 << 20)
    assert memory.held()[LAST_READS] == 0 and not shared._held and not shared._claims
    before = counts.read()["get"]
    assert storage.read(PARTS[0]) == DATA[:10], "without room it is read for those who wait, and not kept"
    assert counts.read()["get"] == before + 1 and not shared._held and not shared._claims
    del needed
    assert storage.read(PARTS[0]) == DATA[:10] and memory.held()[LAST_READS] == len(DATA)
