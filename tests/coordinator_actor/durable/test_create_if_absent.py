"""No state is kept where files are overwritten, and a storage that can be trusted is tried out once.

Storage that overwrites what it was asked to create only if it is absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from backends import FileStateStoreProvider, StateStoreConf, StateStoreId
from backends.exceptions import StorageError, UnsupportedLocationError
from backends.storage.checkpoint_storage import CREATE_PROBE, CheckpointStorage, CreateIfAbsentProofs
from coordinator_actor.coordinator import Coordinator
from coordinator_actor.messages import HostReport
from tests.coordinator_actor.coordinator_world import World


def overwriting(location: str, options: Mapping[str, str]) -> CheckpointStorage:
    """Open a directory that does so, as if it were in an object store."""
    storage = CheckpointStorage.open(location, options, fsync=False)
    storage.is_local = False
    put_new = storage.put_new

    def put(path: str, data: bytes) -> Any:
        (Path(storage.location.removeprefix("file://")) / path).unlink(missing_ok=True)
        return put_new(path, data)

    storage.put_new = put  # type: ignore[method-assign]
    return storage


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_query_on_storage_that_overwrites_is_refused_before_anything_is_written(world: World) -> None:
    c = Coordinator(lambda: world.now, overwriting)
    c.register_host(world.host(0), HostReport())
    registration = world.registration()
    for _ in range(2):
        refusal = c.register_query(registration).refusal
        assert refusal is not None
        assert f"{registration.state_location} overwrites files" in refusal and "If-None-Match" in refusal
    assert [p.name for p in Path(registration.state_location).iterdir()] == [CREATE_PROBE]
    assert c.describe()["queries"] == []
    elsewhere = msgspec.structs.replace(registration, state_location=str(world.root / "disk/q"))
    assert world.coordinator().register_query(elsewhere).refusal is None, "on a store that honors the condition"


def test_a_location_is_tried_out_once(world: World) -> None:
    written: list[str] = []
    world.put_hook = written.append
    world.is_local = False
    c = world.coordinator()
    for run in ("run1", "run2", "run3"):
        assert c.register_query(world.registration(run)).refusal is None
    assert written.count(CREATE_PROBE) == 2
    # One that starts later finds the file.
    assert world.coordinator().register_query(world.registration("run4")).refusal is None
    assert written.count(CREATE_PROBE) == 3


def test_a_failed_trial_does_not_count_as_proof(world: World) -> None:
    proofs, fails = CreateIfAbsentProofs(), True

    def fail(path: str) -> None:
        if fails:
            raise StorageError("connection reset")

    world.put_hook = fail
    world.is_local = False
    location = world.registration().state_location
    with pytest.raises(StorageError, match="connection reset"):
        proofs.require(world.storage(location, {}))
    fails = False
    with pytest.raises(UnsupportedLocationError, match="overwrites"):
        proofs.require(overwriting(location, {}))
    proofs.require(world.storage(location, {}))


def test_a_store_used_alone_refuses_such_storage_too(tmp_path: Path) -> None:
    location = str(tmp_path / "state")
    conf = StateStoreConf(fsync=False)
    with FileStateStoreProvider(StateStoreId(location, "op", 0), conf) as provider:
        provider._manifests._storage = overwriting(location, {})
        store = provider.get_store(0)
        store.put(b"k", b"v")
        with pytest.raises(UnsupportedLocationError, match="overwrites files"):
            store.commit()
        assert provider.latest_version() == 0
