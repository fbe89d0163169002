"""A load that fails midway: the next attempt does not fetch or apply the same files again."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from backends.conf import StateStoreConf
from backends.exceptions import LoadEndedError, StorageError
from backends.formats.manifest import ChangelogRef, Lineage, SnapshotRef
from backends.load_watch import LOG_SECONDS, LoadProgress, LoadWatch
from backends.partition.partition_state import PartitionState, open_partition
from backends.storage.checkpoint_storage import CheckpointStorage
from backends.storage.locations import FileRef
from tests.backends.partition.partition_steps import commit
from tests.patience import HANG, PATIENCE

DIRECTORY = "operators/op/1/0/default"


class Files:
    """The storage of one partition, which counts what is read whole and calls ``before`` with each path first."""

    def __init__(self, root: Path) -> None:
        self.storage = CheckpointStorage.open(str(root), fsync=False)
        self.read: Counter[str] = Counter()
        self.before: Callable[[str], None] = lambda path: None
        read, read_to_file = self.storage.read, self.storage.read_to_file

        def counted(ref: FileRef) -> bytes:
            self.before(ref.path)
            data = read(ref)
            self.read[ref.path] += 1
            return data

        def counted_to_file(ref: FileRef, target: Path) -> None:
            self.before(ref.path)
            read_to_file(ref, target)
            self.read[ref.path] += 1

        self.storage.read = counted  # type: ignore[method-assign]
        self.storage.read_to_file = counted_to_file  # type: ignore[method-assign]

    def fail_from(self, n: int, is_meant: Callable[[str], bool]) -> None:
        """Let the n-th file of those that are meant, and all of them behind it, fail."""
        seen: list[str] = []

        def before(path: str) -> None:
            if is_meant(path):
                seen.append(path)
                if len(seen) >= n:
                    raise StorageError(f"{path}: throttled")

        self.before = before


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path / "durable")


@pytest.fixture(params=["rocksdb", "file"])
def conf(request: pytest.FixtureRequest) -> StateStoreConf:
    return StateStoreConf(
        provider=request.param, fsync=False, load_threads=1, compression="none", file_snapshot_part_bytes=128 << 10
    )


def written(files: Files, conf: StateStoreConf, local: Path, *, with_snapshot: bool) -> Lineage:
    """Versions 1 to 8 of a partition, with a snapshot of version 4 of several files."""
    random = Random(18)  # not to be compressed
    state = open_partition(local, files.storage, DIRECTORY, conf)
    chain: list[ChangelogRef] = []
    snapshots: list[SnapshotRef] = []
    for version in range(1, 9):
        pairs = {b"%d-%d" % (version, i): random.randbytes(30_000) for i in range(10)}
        chain.append(ChangelogRef(*commit(state, pairs, **{f"f{version}": pairs})))
        if with_snapshot and version == 4:
            snapshots.append(state.snapshots.store(None))
    state.destroy()
    return Lineage(8, tuple(chain), tuple(snapshots))


def is_part(path: str) -> bool:
    """Whether this is a file of a snapshot, apart from its descriptor."""
    return not path.endswith((".changelog", ".snapshot"))


def opened(files: Files, conf: StateStoreConf, local: Path) -> PartitionState:
    return open_partition(local, files.storage, DIRECTORY, conf)


def rows(state: PartitionState) -> int:
    return sum(batch.num_rows for batch in state.reads.scan())


def test_files_of_a_snapshot_are_fetched_once(files: Files, conf: StateStoreConf, tmp_path: Path) -> None:
    lineage = written(files, conf, tmp_path / "a", with_snapshot=True)
    state = opened(files, conf, tmp_path / "b")
    files.fail_from(3, is_part)
    with pytest.raises(StorageError, match="throttled"):
        state.load(lineage)
    fetched = {path for path in files.read if is_part(path)}
    assert len(fetched) == 2
    files.before = lambda path: None
    state.load(lineage)
    assert (state.version, rows(state)) == (8, 80)
    parts = {path: n for path, n in files.read.items() if is_part(path)}
    assert len(parts) > 3 and set(parts.values()) == {1}, parts
    state.destroy()
    assert not (tmp_path / "b").exists()


def test_changelogs_are_applied_once(files: Files, conf: StateStoreConf, tmp_path: Path) -> None:
    lineage = written(files, conf, tmp_path / "a", with_snapshot=True)
    state = opened(files, conf, tmp_path / "b")
    files.fail_from(3, lambda path: path.endswith(".changelog"))
    with pytest.raises(StorageError, match="throttled"):
        state.load(lineage)
    assert (state.version, rows(state)) == (6, 60)
    before = Counter(files.read)
    files.before = lambda path: None
    state.load(lineage)
    assert (state.version, rows(state)) == (8, 80)
    assert sorted(path for path in files.read - before) == sorted(c.file.path for c in lineage.changelogs[-2:])
    state.destroy()


def test_an_ended_load_is_resumed(files: Files, conf: StateStoreConf, tmp_path: Path) -> None:
    lineage = written(files, conf, tmp_path / "a", with_snapshot=False)
    state = opened(files, conf, tmp_path / "b")
    watch = LoadWatch("version 8", is_abandoned=lambda: state.version < 8 and watch.progress().files == 3)
    with pytest.raises(
        LoadEndedError, match=r"of version 8 was ended: no caller waits .* 3 of 8 files, 1\.\d of 4\.\d MiB"
    ):
        state.load(lineage, watch)
    assert (state.version, rows(state)) == (3, 30)
    state.load(lineage)
    assert (state.version, rows(state)) == (8, 80)
    state.destroy()


def test_progress_shows_the_part_of_a_file_that_is_there(
    files: Files, conf: StateStoreConf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lineage = written(files, conf, tmp_path / "a", with_snapshot=True)
    state = opened(files, conf, tmp_path / "b")
    half, goes_on = threading.Event(), threading.Event()
    pieces = files.storage._files.pieces

    def slow(path: str, start: int) -> Any:
        for chunk in pieces(path, start):
            yield chunk[: len(chunk) // 2]
            half.set()
            assert goes_on.wait(HANG)
            yield chunk[len(chunk) // 2 :]

    monkeypatch.setattr(files.storage._files, "pieces", slow)
    watch = LoadWatch()
    loader = threading.Thread(target=lambda: state.load(lineage, watch))
    loader.start()
    assert half.wait(PATIENCE)
    assert wait_for(lambda: watch.progress().nbytes > 0)  # a buffer may hold it back for a moment
    seen = watch.progress()
    assert seen.files == 0 and 0 < seen.nbytes < seen.of_bytes and seen.of_files > 3
    goes_on.set()
    loader.join(PATIENCE)
    done = watch.progress()
    assert (done.files, done.nbytes) == (done.of_files, done.of_bytes) and seen.is_behind(done)
    state.destroy()


def test_a_load_of_long_is_logged_with_its_progress(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    watch = LoadWatch("version 3 of x", clock=lambda: now)
    watch.expect(4, 4 << 20)
    with caplog.at_level(logging.INFO):
        watch.step(1, 1 << 20)
        assert not caplog.messages
        now = LOG_SECONDS
        watch.step(1, 1 << 20)
        watch.step()
        now = 2 * LOG_SECONDS
        watch.step()
    assert caplog.messages == [
        "Loading version 3 of x since 10 s: 2 of 4 files, 2.0 of 4.0 MiB (2 steps)",
        "Loading version 3 of x since 20 s: 2 of 4 files, 2.0 of 4.0 MiB (4 steps)",
    ]


def test_progress_counts_finished_work() -> None:
    none, first = LoadProgress(), LoadProgress("a", 0, 5, 0, 100, 0)
    assert not none.is_behind(first)  # it has begun, and done nothing
    assert first.is_behind(replaced(first, nbytes=1)) and first.is_behind(replaced(first, steps=1))
    assert not first.is_behind(replaced(first, of_files=9))
    assert replaced(first, files=4).is_behind(replaced(first, load="b", files=1))
    assert not replaced(first, files=4).is_behind(replaced(first, load="b"))


def wait_for(is_true: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + PATIENCE
    while not is_true() and time.monotonic() < deadline:
        time.sleep(0.01)
    return is_true()


def replaced(progress: LoadProgress, **changes: Any) -> LoadProgress:
    return msgspec.structs.replace(progress, **changes)
