"""Steps of a query whose snapshots come and whose files go."""

from __future__ import annotations

import uuid

from backends.formats.local_state import LocalState
from backends.formats.manifest import SnapshotRef, seal
from backends.formats.snapshot import SnapshotDescriptor, SnapshotFile
from backends.storage.locations import FileRef
from coordinator_actor.coordinator import Coordinator
from coordinator_actor.messages import SnapshotUploaded
from coordinator_actor.run.holds import UPLOAD
from tests.coordinator_actor.coordinator_world import World, run_of

KEEP = 3


def begin(world: World, run: str = "run1", c: Coordinator | None = None, *, seconds: int = 0) -> Coordinator:
    c = c or world.coordinator()
    registration = world.registration(
        run, min_versions_to_retain=KEEP, maintenance_interval=10.0, min_seconds_to_retain=seconds
    )
    answer = c.register_query(registration)
    assert answer.refusal is None, answer.refusal
    return c


def plan_spark(world: World, batch: int) -> None:
    path = world.root / "ck" / "offsets" / str(batch)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("v1\n{}\n")


def run_batches(world: World, c: Coordinator, first: int, last: int, run: str = "run1") -> None:
    for batch in range(first, last + 1):
        plan_spark(world, batch)
        world.run_batch(c, batch, run=run)
        c.batch_committed(run, batch)


def upload(
    world: World, c: Coordinator, partition: int, run: str = "run1", *, head: str | None = None, counts: bool = True
) -> SnapshotRef:
    """Take a snapshot of the completed version, as a host does; it shares a file with the one before it."""
    version = run_of(c, run).versions.completed
    lineage = c.lineage(run, "op", partition, version, UPLOAD)
    storage = world.storage(str(world.root / "ck/statestore"), {})
    directory = f"operators/op/2/{partition}/default"
    reused = lineage.snapshots[-1] if lineage.snapshots else None
    data = storage.put_new(f"{directory}/{version}-{uuid.uuid4().hex}.sst", b"x")
    files = [SnapshotFile("new.sst", file=data)]
    if reused is not None:
        old = next(
            iter(
                run_of(c, run).versions.descriptors[reused.file.path].paths
                if reused.file.path in run_of(c, run).versions.descriptors
                else ()
            ),
            None,
        )
        if old:
            files.append(SnapshotFile("old.sst", file=FileRef(old, 1, data.digest)))
    path = f"{directory}/{version}-{uuid.uuid4().hex}.snapshot"
    state = LocalState(version, lineage.head, 1)
    ref = storage.put_new(path, seal(SnapshotDescriptor(path, "rocksdb", state, tuple(files))))
    assert lineage.head is not None
    made = SnapshotRef(version, head or lineage.head, ref)
    owner = world.open_owner(c, partition, run)
    message = SnapshotUploaded(run, "op", partition, owner.host_id, owner.incarnation, made, reused)
    assert c.snapshot_uploaded(message) is counts
    return made


def names(world: World, partition: int, kind: str) -> list[int]:
    files = (world.root / f"ck/statestore/operators/op/2/{partition}/default").glob(f"*.{kind}")
    return sorted(int(f.name.partition("-")[0]) for f in files)


def maintain(world: World, c: Coordinator) -> None:
    world.now += 10
    for i in range(2):
        c.heartbeat_host(f"h{i}", "a")
    c.maintain()
