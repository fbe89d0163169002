"""The requests of a load to object storage: which wait for which, and which the loads of a host share."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from backends.conf import StateStoreConf
from backends.formats.manifest import ChangelogRef, Lineage, SnapshotRef
from backends.partition import loading
from backends.partition.loading import ChangelogReads
from backends.partition.partition_state import PartitionState, open_partition, store_snapshots
from backends.storage.checkpoint_storage import CheckpointStorage
from backends.storage.object_files import ALONE, SharedObjects
from backends.storage.requests import RequestCounts
from tests.backends.partition.partition_steps import commit
from tests.critical_path import CriticalPath

PARTITIONS = 6
SNAPSHOT, LAST = 3, 6


class Stored:
    """Partitions with a snapshot of version 3, all in one object, and separate changelogs to version 6."""

    def __init__(self, name: str, root: Path) -> None:
        self.counts = RequestCounts()
        self.storage = CheckpointStorage.open(f"memory://{name}/ck", requests=self.counts)
        self.root = root
        self.conf = StateStoreConf(deltas_per_snapshot=SNAPSHOT)
        states = [self.opened("first", p) for p in range(PARTITIONS)]
        logs: list[list[ChangelogRef]] = [[] for _ in states]
        snapshots: list[SnapshotRef] = []
        for version in range(1, LAST + 1):
            for p, state in enumerate(states):
                _, ref = commit(state, {b"k": b"%d of %d" % (version, p), b"v%d" % version: b""})
                logs[p].append(ChangelogRef(version, ref))
            if version == SNAPSHOT:
                prepared = [(state.snapshots, state.snapshots.prepare(None, 1 << 20)) for state in states]
                snapshots = [made.ref for made in store_snapshots(prepared)]
        for state in states:
            state.close()
        self.lineages = [Lineage(LAST, tuple(logs[p]), (snapshots[p],)) for p in range(PARTITIONS)]

    def opened(self, host: str, partition: int) -> PartitionState:
        return open_partition(
            self.root / host / str(partition), self.storage, f"operators/op/{PARTITIONS}/{partition}/default", self.conf
        )

    def load(self, host: str, partition: int) -> None:
        state = self.opened(host, partition)
        state.load(self.lineages[partition])
        assert state.reads.get_one(b"k") == b"%d of %d" % (LAST, partition) and state.version == LAST
        state.close()

    def gets(self) -> int:
        return self.counts.read()["get"]


def test_a_load_waits_for_two_requests_the_descriptor_and_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = Stored("two-requests", tmp_path)
    path = CriticalPath(monkeypatch)
    stored.load("second", 0)
    assert path.longest == 2


def test_large_changelogs_are_not_kept_in_memory_while_a_snapshot_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = Stored("large-changelogs", tmp_path)
    rest = stored.lineages[0].changelogs[SNAPSHOT:]
    for nbytes, ahead in (rest[0].file.size - 1, 0), (rest[0].file.size, 1), (1 << 20, len(rest)):
        monkeypatch.setattr(loading, "AHEAD_BYTES", nbytes)
        with ChangelogReads(stored.storage, rest, 4) as reads:
            assert len(reads._under_way) == ahead
            assert [ref for ref, _ in reads] == list(rest)


def test_concurrent_loads_read_each_object_once(tmp_path: Path) -> None:
    stored = Stored("read-once", tmp_path)
    shared = stored.storage.shared = SharedObjects(lambda nbytes, drop: object())
    before = stored.gets()
    with ExitStack() as loads:
        for _ in range(ALONE + 1):
            loads.enter_context(shared.loading())
        for p in range(PARTITIONS):
            stored.load("second", p)
    assert stored.gets() - before == 1 + PARTITIONS * (LAST - SNAPSHOT)
