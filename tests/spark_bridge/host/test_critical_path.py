"""How many requests to storage a batch waits for, one after the other: the changes and the manifest."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from backends.conf import StateStoreConf
from backends.storage.checkpoint_storage import CheckpointStorage
from coordinator_actor.coordinator import Coordinator
from coordinator_actor.coordinator_conf import CoordinatorConf
from coordinator_actor.messages import HostInfo, OperatorSpec, QueryRegistration
from spark_bridge.host.host import Host
from tests.coordinator_actor.coordinator_world import SCHEMA
from tests.critical_path import CriticalPath
from tests.spark_bridge.host.host_steps import ch, task

TIMES = b'v1\n{"batchWatermarkMs":1,"batchTimestampMs":2,"conf":{}}\n{}'


def open_storage(location: str, options: Mapping[str, str]) -> CheckpointStorage:
    return CheckpointStorage.open(location, options)


class Query:
    """A query on storage in memory, which is taken for an object store."""

    def __init__(self, name: str, local: Path, *, uses_time: bool) -> None:
        location = f"memory://{name}/ck"
        self.spark = open_storage(location, {})
        self.coordinator = Coordinator(lambda: 1000.0, open_storage, CoordinatorConf(report_timeout=0.0))
        info = HostInfo("h0", "a", "grpc://10.0.0.1:1", "node", "s")
        conf = StateStoreConf(provider="file", host_memory=1 << 30)
        self.host = Host(info, self.coordinator, local, conf=conf, open_storage=open_storage)
        self.host.register()
        spec = OperatorSpec("op", 1, SCHEMA, backend="file", uses_time=uses_time)
        self.coordinator.register_query(
            QueryRegistration("q", "run1", "name", "s", location, f"{location}/statestore", (spec,))
        )

    def plan(self, batch: int) -> None:
        self.spark.put_new(f"offsets/{batch}", TIMES)

    def run(self, batch: int) -> None:
        identity = task(batch)
        assert self.host.open(identity).is_open
        self.host.commit(identity, ch(b"v%d" % batch), {})

    def commit(self, batch: int, *, is_told: bool = True) -> None:
        self.spark.put_new(f"commits/{batch}", b"v1\n{}")
        if is_told:
            self.coordinator.batch_committed("run1", batch, by_driver=True)
            self.host.heartbeat()


@pytest.mark.parametrize(
    ("uses_time", "is_told", "longest"), [(False, True, 2), (False, False, 3), (True, True, 3), (True, False, 3)]
)
def test_a_batch_waits_for_its_changes_and_its_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uses_time: bool, is_told: bool, longest: int
) -> None:
    query = Query(f"path-{uses_time}-{is_told}", tmp_path, uses_time=uses_time)
    for batch in (0, 1):
        query.plan(batch)
        query.run(batch)
        query.commit(batch, is_told=is_told or batch == 0)
    query.plan(2)
    path = CriticalPath(monkeypatch)
    query.run(2)
    assert path.longest == longest


def test_only_affected_readers_wait_for_the_commit_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    query = Query("unlocked", tmp_path, uses_time=True)
    held: list[Any] = []
    for name in ("exists", "get"):
        original: Any = getattr(CheckpointStorage, name)

        def asked(storage: Any, path: str, original: Any = original) -> Any:
            run = query.coordinator.registries.runs.find("run1")
            if path.startswith(("commits/", "offsets/")) and run is not None:
                held.append(run.lock._is_owned())  # type: ignore[attr-defined]
            return original(storage, path)

        monkeypatch.setattr(CheckpointStorage, name, asked)
    for batch in range(3):
        query.plan(batch)
        query.run(batch)
        query.commit(batch, is_told=batch == 0)
    assert held and not any(held)
