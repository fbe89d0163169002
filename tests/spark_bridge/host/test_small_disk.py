"""A host whose local disk is smaller than its state: partitions take turns, and nothing is lost."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest

from backends.exceptions import LocalDiskFullError
from backends.formats.changelog import Changes
from coordinator_actor.coordinator import Coordinator
from coordinator_actor.messages import OperatorSpec
from spark_bridge.host.local_disk import bytes_below
from tests.coordinator_actor.coordinator_world import SCHEMA, World
from tests.patience import HANG
from tests.spark_bridge.host.host_steps import make_host, task
from tests.spark_bridge.host.task_threads import Threads

MIB = 1 << 20
PARTITIONS = 4
KEYS, VALUE_BYTES = 60, 20_000
"""Of each partition: 1.2 MB, which do not compress."""


class Stream:
    """A stream over a host with a small disk, and a model of its state."""

    def __init__(self, root: Path, local: Path, backend: str, seed: int, **conf: Any) -> None:
        self.world = World(root)
        self.local = local
        self.conf = {"rocksdb_compression": "none", "compression": "none", "deltas_per_snapshot": 2, "rocksdb_memtable_bytes": MIB // 4, **conf}
        self.random = Random(seed)
        self.coordinator: Coordinator = self.world.coordinator(0)
        self.registration = self.world.registration(
            "run1", PARTITIONS, operators=(OperatorSpec("op", PARTITIONS, SCHEMA, backend=backend),)
        )
        self.host = self.started("a")
        assert self.coordinator.register_query(self.registration).refusal is None
        self.batch = 0
        self.model: list[dict[bytes, bytes]] = [{} for _ in range(PARTITIONS)]
        self.reads = 0

    def started(self, incarnation: str) -> Any:
        return make_host(self.world, self.coordinator, 0, self.local, incarnation, **self.conf)

    def run_batch(self, partitions: list[int], changes: int, at_once: int = 1) -> None:
        """Run the tasks of a batch, so many at once, and complete it."""
        self.world.plan_spark(self.batch)
        for first in range(0, len(partitions), at_once):
            begun = [(p, self.task(p, changes)) for p in partitions[first : first + at_once]]
            for _, future in begun:
                future.result(HANG)
        self.world.commit_spark(self.batch)
        self.coordinator.batch_committed("run1", self.batch)
        self.host.heartbeat()
        self.batch += 1

    def task(self, p: int, changes: int) -> Future[None]:
        keys = sorted(self.random.sample([b"%03d" % i for i in range(KEYS)], changes))
        values = [self.random.randbytes(VALUE_BYTES) if self.random.random() < 0.9 else None for _ in keys]
        before = dict(self.model[p])
        for key, value in zip(keys, values, strict=True):
            if value is None:
                self.model[p].pop(key, None)
            else:
                self.model[p][key] = value
        return Threads.submit(self._run_task, p, self.batch, keys, values, before)

    def _run_task(
        self, p: int, batch: int, keys: list[bytes], values: list[bytes | None], before: dict[bytes, bytes]
    ) -> None:
        of = task(batch, p)
        while self.host.open(of).loading is not None:
            pass  # the host has waited a moment before it answered
        read = self.host.reads.get_many("run1", "op", p, batch, pa.array(keys, pa.binary()))
        assert read.to_pylist() == [before.get(key) for key in keys]
        self.host.commit(of, Changes.of(pa.array(keys, pa.binary()), pa.array(values, pa.binary())), {})

    def check_read(self, p: int) -> None:
        """Read a partition at the completed version, as a query does."""
        reads = self.host.reads.load("run1", "op", p).state.reads
        pairs = {
            k: v
            for batch in reads.scan()
            for k, v in zip(batch.column("key").to_pylist(), batch.column("value").to_pylist(), strict=True)
        }
        assert pairs == self.model[p]
        self.reads += 1

    def snapshots(self) -> None:
        for begun in self.host.maintenance.do_maintenance():
            begun.result(HANG)

    def disk(self) -> dict[str, Any]:
        described: dict[str, Any] = self.host.describe()["disk"]
        return described


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    directory = tmp_path / "small"
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(directory)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system takes a right that this user has not got")
    yield directory
    subprocess.run(["umount", "--lazy", str(directory)], check=True)


def random_work(stream: Stream, batches: int) -> None:
    everything = list(range(PARTITIONS))
    stream.run_batch(everything, KEYS)
    for _ in range(batches):
        stream.random.shuffle(everything)
        stream.run_batch(everything, stream.random.randrange(1, KEYS // 4), stream.random.choice([1, 2, PARTITIONS]))
        if stream.random.random() < 0.5:
            stream.check_read(stream.random.randrange(PARTITIONS))
        if stream.random.random() < 0.6:
            stream.snapshots()
    for p in range(PARTITIONS):
        stream.check_read(p)


@pytest.mark.parametrize("backend", ["rocksdb", "file"])
@pytest.mark.parametrize("seed", range(2))
def test_random_work_on_a_small_file_system_equals_the_model(
    tmp_path: Path, tmpfs: Path, backend: str, seed: int
) -> None:
    stream = Stream(tmp_path, tmpfs, backend, seed)
    random_work(stream, 12)
    print(stream.disk(), bytes_below(tmpfs))
    if backend == "rocksdb":
        assert stream.disk()["evictions"] > 0 and stream.disk()["reread_bytes"] > 0
    stream.host.close()
