"""A load on a full disk: what other loads have left goes first, then its own, and the error says what to do."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from backends.exceptions import LocalDiskFullError, StorageError
from backends.storage.checkpoint_storage import CheckpointStorage
from tests.coordinator_actor.coordinator_world import World
from tests.spark_bridge.host.host_steps import make_host, plan_spark, reg, run_task, task

BATCHES = 4


class Disk(World):
    """Storage whose partitions cannot be read (``broken``), or cannot be copied for lack of disk space (``full``)."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.broken: set[int] = set()
        self.full = False

    def storage(self, location: str, options: Any) -> CheckpointStorage:
        storage = super().storage(location, options)
        read = storage.read

        def checked(ref: Any) -> bytes:
            if ref.path.endswith(f"{BATCHES}.changelog") or f"/{BATCHES}-" in ref.path:
                if self.full:
                    raise OSError(errno.ENOSPC, "No space left on device")
                if any(f"/3/{p}/" in ref.path for p in self.broken):
                    raise StorageError(f"{ref.path}: throttled")
            return read(ref)

        storage.read = checked  # type: ignore[method-assign]
        return storage


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Disk]:
    made = Disk(tmp_path)
    yield made


def loading_host(world: Disk, tmp_path: Path) -> Any:
    """A host that has nothing of a query of three partitions."""
    c = world.coordinator(0)
    first = make_host(world, c, 0, tmp_path)
    assert c.register_query(reg(world, n=3)).refusal is None
    for batch in range(BATCHES):
        plan_spark(world, batch)
        for p in range(3):
            run_task([first], batch, p, value=b"%d" % batch)
        world.commit_spark(batch)
    plan_spark(world, BATCHES)
    return make_host(world, c, 0, tmp_path, "b")


def load(host: Any, p: int) -> Any:
    return host.loader.load(host.grants.for_task(task(BATCHES, p)), "op", p)


def kept(host: Any) -> set[int]:
    return {key[2] for key in host.cache._kept}


def test_leftovers_of_other_loads_are_removed_to_make_room(world: Disk, tmp_path: Path) -> None:
    host = loading_host(world, tmp_path)
    world.broken = {0, 1}
    for p in (0, 1):
        with pytest.raises(StorageError, match="throttled"):
            load(host, p)
    assert kept(host) == {0, 1}
    world.full = True
    destroyed = []
    for instance in list(host.cache._kept.values()):
        destroy = instance.state.destroy

        def freed(destroy: Any = destroy, p: int = instance.partition) -> None:
            destroy()
            destroyed.append(p)
            world.full = len(destroyed) < 2

        instance.state.destroy = freed
    assert load(host, 2).state.version == BATCHES
    assert sorted(destroyed) == [0, 1] and not kept(host)
    host.close()


def test_load_without_room_leaves_nothing_and_names_the_remedy(world: Disk, tmp_path: Path) -> None:
    host = loading_host(world, tmp_path)
    world.full = True
    with pytest.raises(LocalDiskFullError) as raised:
        load(host, 2)
    said = str(raised.value)
    assert said.startswith(f"The disk of {tmp_path}/local0b/") and "MiB are free" in said, said
    assert "Make room there, or keep local copies on a larger disk" in said and "--temp-dir" in said
    assert not kept(host) and not host.cache.all()
    assert not list(tmp_path.glob("local0b/q/run1/**/LOCK"))
    world.full = False
    assert load(host, 2).state.version == BATCHES
    host.close()
