"""The end of a run: in a healthy world all queries must make progress, and then all kept state is checked."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from backends.conf import StateStoreConf
from backends.formats.changelog import GROUPS_DIRECTORY
from backends.formats.manifest import partition_directory, version_in
from backends.partition.partition_state import open_partition
from coordinator_actor.coordinator import Coordinator
from coordinator_actor.durable.fencing import FENCE
from coordinator_actor.durable.spark_commits import METADATA
from coordinator_actor.messages import HostInfo, HostReport
from coordinator_actor.reading.stored_files import opened_partition
from coordinator_actor.reading.stored_versions import StatePlace, StateVersions
from tests.simulation import model
from tests.simulation.driver import ANSWERED_ON, Query
from tests.simulation.model import Stream
from tests.simulation.scheduler import Violation

if TYPE_CHECKING:
    from tests.simulation.world import World

BATCHES_AFTER = 10
TURNED_BACK = 10.0
"""Clocks may have been turned back so many seconds in all."""
PATIENCE = 400.0
"""Virtual seconds within which a healthy world must have done ``BATCHES_AFTER`` batches."""


def finish(world: World) -> None:
    """End all faults, wait until every query makes progress, stop the queries and check all that is kept."""
    s = world.scheduler
    deadline = s.now + PATIENCE
    for stream, goal in [(stream, stream.batches + BATCHES_AFTER) for stream in world.streams]:
        while stream.batches < goal:
            if s.now > deadline:
                raise Violation(
                    f"In {PATIENCE:.0f} s without faults only {BATCHES_AFTER - goal + stream.batches} of "
                    f"{BATCHES_AFTER} batches of {stream.name} were done."
                )
            s.sleep(1.0)
    s.sleep(5.0)
    session = world.sessions[-1]
    pace = world.pace, world.slowness
    for outsider in world.outsiders:
        # It may have to wait for the lease of a load. Steps cost, virtual seconds do not.
        world.pace, world.slowness = 60.0, 4.0
        outsider.finish()
    world.pace, world.slowness = pace
    # A coordinator that was restarted removes nothing before loads of its predecessor's time are surely over.
    patience = s.now + world.constants.busy_seconds + PATIENCE
    for stream in world.streams:
        while (litter := _litter(world, stream)) is not None:
            # What is waited for is that time passes: steps cost, virtual seconds do not.
            world.pace, world.slowness = 60.0, 4.0
            if s.now > patience:
                raise Violation(f"After {world.constants.busy_seconds + PATIENCE:.0f} s without faults: {litter}")
            for outsider in world.outsiders:
                outsider.go_on()
            s.sleep(5.0)
    patience = s.now + PATIENCE
    while session.leaving:
        world.pace, world.slowness = 60.0, 4.0
        if s.now > patience:
            raise Violation(f"{[slot.host_id for slot in session.leaving]} still own partitions.")
        s.sleep(1.0)
    world.is_over = True
    session.is_wanted = False
    s.sleep(60.0 + ANSWERED_ON)  # a query ends behind its batch, and may be answered on
    for slot in session.hosts:
        assert slot.process is not None
        host = slot.process.memory["host"]
        for replaced in slot.replaced:
            if replaced.is_alive:
                raise Violation(f"{replaced.name} still runs, though {slot.process.name} has taken its place.")
        if host.cache.instances:
            raise Violation(f"{slot.host_id} still holds {sorted(host.cache.instances)} after the query has ended.")
    for stream in world.streams:
        verifier = s.spawn(s.process("verifier"), lambda stream=stream: _verify(world, stream), "verify")  # type: ignore[misc]
        s.join(verifier)
    world.after_maintenance()
    s.stop()


def _litter(world: World, stream: Stream) -> str | None:
    """Return what is left of a query though it is not kept; None if that is within bounds."""
    head = stream.model.head()
    assert head is not None
    files = world.disk.all_files(stream.state)
    since_ms = head.created_ms - (stream.keep_seconds + world.constants.maintenance_interval) * 1000
    recent = sum(m.created_ms >= since_ms for m in stream.model.manifests.values()) if stream.keep_seconds else 0
    if head.version - head.oldest > 4 * stream.keep + 8 + recent:
        return f"Version {head.version} still keeps version {head.oldest}."
    num_manifests = sum(p.startswith("manifests/") and data != FENCE for p, data in files.items())
    # Snapshots share their .sst files with later ones.
    logs = [p for p in files if p.startswith(("operators/", f"{GROUPS_DIRECTORY}/")) and not p.endswith(".sst")]
    old = [p for p in logs if version_in(p) < head.oldest - 4 * stream.keep]
    returned = [p for p in old if stream.model.has_forgotten_rows(files[p])]
    if returned:
        return f"Files of versions long not kept have rows of forgotten keys: {returned[:5]}."
    most_manifests = 6 * stream.keep + 40 + recent
    if len(old) > 3 * stream.num_partitions * len(stream.model.operators) or num_manifests > most_manifests:
        return f"{num_manifests} manifests, and {len(old)} files of versions long not kept: {old[:5]}."
    return None


def _verify(world: World, stream: Stream) -> None:
    """Open every version of a query that is kept, from storage alone."""
    s = world.scheduler
    process = s.current.process
    coordinator = Coordinator(world.clock_of(process), world.disk.open)
    session = world.sessions[-1]
    coordinator.register_host(HostInfo("v", "v", "grpc://v", "node", session.session_id), HostReport())
    stream.layout_of_run["verify"] = (stream.num_partitions, stream.backend)
    registration = Query(session, stream, "verify").registration
    answer = coordinator.register_query(registration)
    if answer.refusal is not None:
        raise Violation(f"The query cannot be started again: {answer.refusal}")
    run = coordinator.registries.runs.by_id["verify"]
    commits = world.disk.directory(stream.checkpoint, "commits")
    last = max(int(p.split("/")[1]) for p in commits)
    if run.versions.completed != last + 1:
        raise Violation(
            f"Spark has committed batch {last}, and version {run.versions.completed} is the last completed."
        )
    token = world.disk.directory(stream.checkpoint, "offsets")[f"offsets/{last}"].decode()
    plan = stream.model.plans[token]
    _verify_seconds(stream, run)
    for version in range(run.versions.completed, max(run.versions.oldest, 1) - 1, -1):
        for operator in stream.model.operators:
            for partition in range(stream.num_partitions):
                _verify_one(world, stream, run, plan, version, operator, partition)
        assert plan is not None
        plan = plan.parent  # type: ignore[assignment]


def _verify_seconds(stream: Stream, run: Any) -> None:
    """Check that the versions of the last ``keep_seconds`` are kept, by clocks that may have been turned back a bit.

    They are if a kept version was completed before. It is the oldest one, unless a coordinator's clock was ahead.
    """
    chain, oldest = run.versions.chain, run.versions.oldest
    head = stream.model.head()
    if not stream.keep_seconds or not oldest or oldest + 1 not in chain:
        return
    followers = [manifest for version, manifest in chain.items() if version - 1 in chain]
    completed_ms = min(manifest.parent_completed_ms or manifest.created_ms for manifest in followers)
    if completed_ms > head.created_ms - (stream.keep_seconds - TURNED_BACK) * 1000:
        raise Violation(
            f"Version {oldest} is the oldest one kept, at {head.created_ms} ms: none is of before {completed_ms} ms."
        )


def _verify_one(
    world: World, stream: Stream, run: Any, plan: model.Plan, version: int, operator: str, partition: int
) -> None:
    n = stream.num_partitions
    conf = StateStoreConf(provider=stream.backend, compression="none")
    layout = partition_directory(operator, n, partition)
    local = world.root / "verify" / f"{stream.name}-{version}-{operator}-{partition}"
    state = open_partition(local, world.disk.open(stream.state), layout, conf)  # type: ignore[arg-type]
    state.load(run.versions.lineage(operator, partition, version))
    keys = [k for k in model.KEYS if model.partition_of(k, n) == partition]
    contents = state.reads.get_many(model.to_array(keys)).to_pylist()
    stream.model.check_attempts(run.versions.chain[version].id, operator, keys, contents)
    values = [model.value_in(c) for c in contents]
    expected = [plan.values.get((operator, k)) for k in keys]
    if values != expected:
        raise Violation(f"Version {version} of {operator}/{partition} holds {values}, and should hold {expected}.")
    state.destroy()


def check_restored(world: World, stream: Stream, location: str, version: int, state: str | None = None) -> None:
    """A checkpoint that was made of another's version has that version's content; ``state``: where it is elsewhere."""
    state = state or f"{location}/statestore"
    place, open_storage = StatePlace(location, state), world.disk.copy(location, state).open
    versions = StateVersions.look(place, open_storage=open_storage)  # type: ignore[arg-type]
    plans = [plan for plan in stream.model.committed if plan.batch == version - 1]
    offsets = world.disk.directory(location, "offsets").get(f"offsets/{version - 1}")
    if offsets is not None and not world.has_gone_back:
        # The state and Spark's offsets are those of one batch.
        plans = [plan for plan in plans if plan.token == offsets.decode()]
    found: dict[tuple[str, bytes], bytes | None] = {}
    for operator in stream.model.operators:
        for piece in versions.reading(operator, version).pieces:
            n = versions.entry(operator, version).num_partitions
            keys = [k for k in model.KEYS if model.partition_of(k, n) == piece.partition]
            with opened_partition(place, piece, open_storage=open_storage) as opened:  # type: ignore[arg-type]
                contents = opened.reads.get_many(model.to_array(keys)).to_pylist()
                found.update({(operator, k): model.value_in(c) for k, c in zip(keys, contents, strict=True)})
    if not any(all(plan.may_be(key, value, 0.0) for key, value in found.items()) for plan in plans):
        raise Violation(f"Version {version} was saved as {found}, which it never was.")


def refusal_of_start(world: World, stream: Stream, location: str) -> str | None:
    """Return why a query is refused that starts from a new checkpoint; None if it starts.

    Without ``metadata`` Spark gives the query a new id.
    """
    disk = world.disk.copy(location, f"{location}/statestore")
    metadata = disk.directory(location, METADATA).get(METADATA)
    query_id = "an id of Spark's own" if metadata is None else json.loads(metadata)["id"]
    disk.directory(location, METADATA)[METADATA] = json.dumps({"id": query_id}).encode()
    session = world.sessions[-1]
    open_storage: Any = disk.open
    coordinator = Coordinator(lambda: world.scheduler.now, open_storage)
    coordinator.register_host(HostInfo("v", "v", "grpc://v", "node", session.session_id), HostReport())
    run_id = f"run of {location}"
    stream.layout_of_run[run_id] = (stream.num_partitions, stream.backend)
    asked = Query(session, stream, run_id).registration
    del stream.layout_of_run[run_id]
    answer = coordinator.register_query(
        replace(asked, query_id=query_id, checkpoint_location=location, state_location=f"{location}/statestore")
    )
    return answer.refusal


def check_kept(world: World, stream: Stream) -> None:
    """Read all kept versions as a reader of storage does, from a copy of the storage as it is now."""
    now, held = world.scheduler.now, stream.model
    disk = world.disk.copy(stream.checkpoint, stream.state)
    chain = held.chain()
    expected = {
        version: (made.id, held.plan_of_manifest[made.id], dict(held.plan_of_manifest[made.id].values))
        for version, made in chain.items()
    }
    place = StatePlace(stream.checkpoint, stream.state)
    open_storage: Any = disk.open
    versions = StateVersions.look(place, open_storage=open_storage)
    for version in [v for v in versions.readable if v]:
        manifest_id, plan, values = expected[version]
        for operator in stream.model.operators:
            for piece in versions.reading(operator, version).pieces:
                n = versions.entry(operator, version).num_partitions
                keys = [k for k in model.KEYS if model.partition_of(k, n) == piece.partition]
                with opened_partition(place, piece, open_storage=open_storage) as state:
                    contents = state.reads.get_many(model.to_array(keys)).to_pylist()
                if (found := [model.value_in(c) for c in contents]) != [values.get((operator, k)) for k in keys]:
                    raise Violation(
                        f"At {now:.1f} s, version {version} of {operator}/{piece.partition} ({plan.token}) is stored "
                        f"as {found}, and is {[values.get((operator, k)) for k in keys]}."
                    )
                held.check_attempts(manifest_id, operator, keys, contents)
