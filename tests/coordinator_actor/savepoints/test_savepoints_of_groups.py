"""Savepoints and new layouts of a state whose changelogs are partly in shared objects and partly in single files."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from backends.encoding.key_groups import partition_of
from backends.encoding.sorted_pairs import SortedPairs
from backends.formats.changelog import Changes
from spark_bridge.host import commits as group_commit
from spark_bridge.transport.protocol import TaskIdentity
from tests.coordinator_actor.coordinator_world import run_of
from tests.coordinator_actor.savepoints.savepoint_streams import G, Stream, stored
from tests.patience import PATIENCE
from tests.spark_bridge.host.host_steps import Threads

PARTITIONS = 4


class Mixed(Stream):
    """A stream on one host that stores every second batch in one object."""

    def begin(self, batch: int, rows: dict[int, int | None], partitions: Iterator[int] | range | None = None) -> None:
        if batch % 2:
            super().begin(batch, rows, partitions)
            return
        super().begin(batch, rows, range(0))  # what Spark writes
        pairs = stored(rows)
        held = list(zip(pairs.keys.to_pylist(), pairs.values.to_pylist(), strict=True))
        (host,) = self.hosts.values()
        tasks = [
            TaskIdentity(self.registration.run_id, "op", p, batch, uuid.uuid4().hex[:6], uuid.uuid4().hex)
            for p in range(self.n)
        ]
        for task in tasks:
            while host.open(task).loading is not None:
                pass  # the host has waited a moment before it answered
        commits = []
        for task in tasks:
            own = {k: v for k, v in held if partition_of(int.from_bytes(k[:2], "big"), G, self.n) == task.partition}
            changes = Changes({"default": SortedPairs.from_dict(own)})
            commits.append(Threads.submit(host.commit, task, changes, {}))
        for commit in commits:
            commit.result(PATIENCE)

    def group(self, version: int) -> Path:
        """Return the object that has the changelogs of a version."""
        (file,) = (self.world.root / "ck/statestore/groups").glob(f"{version}-*")
        return file


@pytest.fixture
def mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mixed]:
    for name in "FIRST_WRITE_SECONDS", "LOCAL_SECONDS":
        monkeypatch.setattr(group_commit, name, PATIENCE)
    made = Mixed(tmp_path, n=PARTITIONS, hosts=1)
    made.batches(0, 5)
    assert {p.name.partition("-")[0] for p in (tmp_path / "ck/statestore/groups").iterdir()} == {"1", "3", "5"}
    yield made
    made.close()


def test_a_host_that_holds_nothing_makes_it_of_objects_and_files(mixed: Mixed) -> None:
    mixed.trigger()
    mixed.copy_spark_files()
    mixed.kill(0)
    mixed.add_host(0, "b")
    mixed.batch(5)  # version 5 is read back behind it
    mixed.heartbeat_until(lambda: not mixed.is_pending())
    assert mixed.savepoint_rows(mixed.finish()) == mixed.at[5]


def test_a_damaged_part_fails_it_by_name_and_the_other_partitions_are_served(mixed: Mixed) -> None:
    entries = run_of(mixed.c, "run1").versions.chain[3].operators["op"].partitions
    spoilt = entries[2].changelog
    group = mixed.group(3)
    data = bytearray(group.read_bytes())
    data[spoilt.offset + spoilt.size // 2] ^= 1
    group.write_bytes(data)
    mixed.trigger()
    mixed.copy_spark_files()
    mixed.kill(0)
    mixed.add_host(0, "b")
    mixed.heartbeat_until(lambda: not mixed.is_pending())
    error, message = mixed.reason()
    assert error == "SavepointDeclinedError"
    assert re.search(f"op/2.*{group.name}.* is damaged", message), message
    host = mixed.hosts[0]
    for p in {*range(PARTITIONS)} - {2}:
        task = TaskIdentity("run1", "op", p, 5, "again", uuid.uuid4().hex)
        while host.open(task).loading is not None:
            pass


def test_an_object_whose_index_is_cut_loses_nothing(mixed: Mixed) -> None:
    entries = run_of(mixed.c, "run1").versions.chain[3].operators["op"].partitions
    parts_end = max(entries[p].changelog.offset + entries[p].changelog.size for p in range(PARTITIONS))
    group = mixed.group(3)
    group.write_bytes(group.read_bytes()[:parts_end])
    mixed.trigger()
    mixed.copy_spark_files()
    mixed.kill(0)
    mixed.add_host(0, "b")
    mixed.heartbeat_until(lambda: not mixed.is_pending())
    assert mixed.savepoint_rows(mixed.finish()) == mixed.at[5]


@pytest.mark.parametrize("backend", ["rocksdb", "file"])
def test_other_partitions_take_over_from_objects_and_files(mixed: Mixed, backend: str) -> None:
    mixed.close()
    again = Stream(mixed.world.root, n=3, hosts=1, backend=backend, at=mixed.at, run_id="run2")
    again.batch(5)
    assert again.rows() == again.at[6]
    again.close()
