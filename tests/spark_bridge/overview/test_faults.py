"""Each fault is found when it is there, says what to do, and is not found in a healthy system."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from coordinator_actor.durable.records import StepTime
from spark_bridge.overview.faults import faults_of
from spark_bridge.overview.model import (
    Checkpoint,
    CoordinatorInfo,
    GivenUp,
    HostOverview,
    LocationTrouble,
    LoopFailures,
    LostDriver,
    Operator,
    Overview,
    Partition,
    Query,
)

PARTITIONS = tuple(Partition("op", p, 30, "h0", 20_000, 1, 28, 2) for p in range(5))
QUERY = Query(
    "q",
    "r",
    "clicks",
    "running",
    "/ck",
    "/ck/statestore",
    1,
    30,
    30,
    1,
    (Operator("op", 5, keys=100_000, skew=1.0, partitions=PARTITIONS),),
    tuple(Checkpoint(v, v, 1, "r", completed_ms=v * 10_000, retried=0) for v in range(1, 31)),
    batch_ms=50_000,
)
HOST = HostOverview(
    "h0", "grpc://192.0.2.1:5", heartbeat_ms=900, partitions=5, memory={"host_memory": 100, "cache": 99}
)
HEALTHY = Overview("cluster", 0, CoordinatorInfo("c", "statestore"), (QUERY,), (HOST,))


def kinds(overview: Overview) -> list[str]:
    return [fault.kind for fault in faults_of(overview)]


def query(**changes: Any) -> Overview:
    return replace(HEALTHY, queries=(replace(QUERY, **changes),))


def partitions(p: int, **changes: Any) -> Overview:
    changed = tuple(structs.replace(one, **changes) if one.partition == p else one for one in PARTITIONS)
    skew = max(one.keys or 0 for one in changed) / 20_000
    return query(operators=(replace(QUERY.operators[0], partitions=changed, skew=skew),))


def copies(first: tuple[int, ...], others: tuple[int, ...]) -> Overview:
    """The lags of the standby copies of the first partition, and of all others; a well one has a copy 1 behind."""
    lags = {PARTITIONS[0].partition: first, PARTITIONS[1].partition: others}
    changed = tuple(structs.replace(p, copy_lags=lags.get(p.partition, (1,))) for p in PARTITIONS)
    return query(operators=(replace(QUERY.operators[0], partitions=changed),), standby_replicas=1)


def checkpoint(**changes: Any) -> Overview:
    return query(checkpoints=(*QUERY.checkpoints[:-1], structs.replace(QUERY.checkpoints[-1], **changes)))


def host(**changes: Any) -> Overview:
    return replace(HEALTHY, hosts=(replace(HOST, **changes),))


def coordinator(**changes: Any) -> Overview:
    return replace(HEALTHY, coordinator=CoordinatorInfo("c", "statestore", **changes))


FAILING = LoopFailures("host h0", "send heartbeats", 9_000, 3, "OSError: no", "Look at it.")
FAILS = LocationTrouble("/ck/statestore", 4, "put: no room is left", 2_000)


def timed(slowest: float, usual: float = 200.0, step: str = "merge_ms") -> Overview:
    """Partition 3 takes longer than the others."""
    times = tuple(structs.replace(p, commit_ms={step: slowest if p.partition == 3 else usual}) for p in PARTITIONS)
    return query(operators=(replace(QUERY.operators[0], partitions=times),))


def stored_in(changelog_ms: float, duration_ms: int, n: int = 5, manifest_ms: int = 0) -> Overview:
    """In the last n checkpoints the slowest changelog and the manifest take so long."""
    steps, phases = {"changelog_ms": StepTime(9_000.0, changelog_ms)}, {"manifest": manifest_ms}
    last = tuple(
        structs.replace(c, steps=steps, phases=phases, duration_ms=duration_ms) for c in QUERY.checkpoints[-n:]
    )
    return query(checkpoints=(*QUERY.checkpoints[:-n], *last))


def test_a_healthy_system_has_no_fault() -> None:
    assert kinds(HEALTHY) == []


@pytest.mark.parametrize(
    ("overview", "kind", "severity"),
    [
        (replace(HEALTHY, hosts=()), "no-hosts", "error"),
        (host(heartbeat_ms=6_000), "host-silent", "error"),
        (replace(HEALTHY, coordinator=CoordinatorInfo("c", "s", problems=("It is so.",))), "placement", "warning"),
        (host(answered=False), "host-not-answering", "warning"),
        (host(heartbeat_ms=None), "host-unknown", "warning"),
        (host(memory={"host_memory": 100, "cache": 99, "rows": 2}), "host-memory", "warning"),
        (host(answered=False, heartbeat_ms=None, actor_state="ALIVE"), "host-lost", "error"),
        (host(answered=False, heartbeat_ms=None, actor_state="RESTARTING"), "host-starting", "warning"),
        (host(answered=False, heartbeat_ms=None, actor_state=None), "host-lost", "warning"),
        (host(restarts=1, up_ms=30_000), "process-restarted", "warning"),
        (coordinator(restarts=3, up_ms=30_000), "process-restarted", "warning"),
        (coordinator(lost=(LostDriver("orders", "r3", "s3://b/ck", -90_000),)), "driver-lost", "error"),
        (host(storage_trouble=(FAILS,)), "storage-fails", "error"),
        (host(storage_trouble=(replace(FAILS, is_over=True),)), "storage-fails", "warning"),
        (
            coordinator(storage_trouble=(LocationTrouble("/ck", waiting=1, waiting_ms=12_000),)),
            "storage-hangs",
            "warning",
        ),
        (
            coordinator(storage_trouble=(LocationTrouble("/ck", waiting=1, waiting_ms=31_000),)),
            "storage-hangs",
            "error",
        ),
        (host(failing_loops=(FAILING,)), "background-loop-fails", "warning"),
        (coordinator(failing_loops=(replace(FAILING, remedy=""),)), "background-loop-fails", "warning"),
        (query(lag_ms=9_000), "follower-late", "error"),
        (query(lag_ms=61_000, is_mirror=True), "mirror-late", "warning"),
        (query(driver_ms=10_001), "driver-silent", "error"),
        (query(batch_ms=61_000), "checkpoint-late", "error"),
        (query(status="replaced", replaced_by="r2"), "run-replaced", "warning"),
        (query(status="ended", ended_ms=-60_000, failure="ValueError: no."), "query-failed", "error"),
        (query(prepared_version=29), "version-missing", "error"),
        (query(given_up=(GivenUp(31, -599_000, "failed: it is full"),)), "failed-checkpoints", "warning"),
        (checkpoint(retried=3), "retried-tasks", "warning"),
        (partitions(3, keys=120_000), "skew", "warning"),
        (partitions(3, snapshot_lag=51), "snapshots-lag", "warning"),
        (copies((1,), ()), "no-standby", "warning"),
        (copies((1,), (21,)), "standby-lag", "warning"),
        (partitions(3, owner=None), "not-loaded", "warning"),
        (timed(1_600.0), "slow-partition", "warning"),
        (stored_in(1_200.0, 2_000), "slow-storage", "warning"),
        (stored_in(2_000.0, 4_100, manifest_ms=2_000), "slow-storage", "warning"),
    ],
)
def test_fault_is_found_with_its_remedy(overview: Overview, kind: str, severity: str) -> None:
    (fault,) = faults_of(overview)
    assert (fault.kind, fault.severity) == (kind, severity)
    assert fault.subject and fault.what.endswith(".") and fault.remedy.endswith(".")


@pytest.mark.parametrize(
    ("changes", "said", "remedy"),
    [
        ({"pending_partitions": 3}, "3 partitions", "statestore partitions"),
        ({"prepared_version": QUERY.completed_version + 1}, "the sink", "writes to"),
        ({}, "the source", "reads from"),
    ],
)
def test_late_batch_names_the_step_it_waits_for(changes: dict[str, int], said: str, remedy: str) -> None:
    (fault,) = faults_of(query(**{"batch_ms": 90_000, "pending_partitions": 0, **changes}))
    assert said in fault.what and remedy in fault.remedy


@pytest.mark.parametrize(
    "overview",
    [
        query(batch_ms=59_000),
        copies((1,), (20,)),
        query(driver_ms=10_000),
        query(driver_ms=90_000, status="ended"),
        query(given_up=(GivenUp(31, -600_000, "failed: it is full"),)),
        query(given_up=(GivenUp(31, -1_000, "stopped: the query has ended"),), status="ended"),
        replace(stored_in(1_200.0, 2_000), queries=(replace(stored_in(1_200.0, 2_000).queries[0], status="ended"),)),
        replace(timed(1_600.0), queries=(replace(timed(1_600.0).queries[0], status="ended"),)),
        query(status="ended", ended_ms=0),
        query(batch_ms=None),  # a quiet stream
        query(batch_ms=90_000, checkpoints=QUERY.checkpoints[:2]),  # nothing is usual yet
        query(status="stored", batch_ms=61_000),
        partitions(3, keys=90_000),
        partitions(3, snapshot_lag=50),
        host(heartbeat_ms=5_000),
        host(failing_loops=(replace(FAILING, failures=1),)),
        host(restarts=1, up_ms=601_000),
        host(restarts=0, up_ms=1_000),
        host(storage_trouble=(replace(FAILS, failures=2),)),
        host(storage_trouble=(LocationTrouble("/ck", waiting=9, waiting_ms=9_000),)),
        timed(900.0),
        timed(1_600.0, usual=400.0),
        timed(1_600.0, step="input_wait"),
        stored_in(900.0, 1_000),
        stored_in(1_200.0, 3_000),
        stored_in(1_200.0, 9_000, manifest_ms=2_000),
        stored_in(1_200.0, 2_000, n=2),
    ],
)
def test_harmless_conditions_are_not_faults(overview: Overview) -> None:
    assert kinds(overview) == []


def test_same_storage_fault_in_all_processes_is_one_fault_of_the_query() -> None:
    hosts = tuple(replace(HOST, host_id=f"h{i}", storage_trouble=(replace(FAILS, failed_ms=9_000),)) for i in range(4))
    both = coordinator(storage_trouble=(replace(FAILS, failures=1, error="head: no", waiting=2, waiting_ms=7_000),))
    (fault,) = faults_of(replace(both, hosts=hosts))
    assert fault.subject == "query clicks"
    assert fault.what == (
        "Requests to /ck/statestore fail or get no answer. 17 requests failed within the last minute, the last 2.0 s "
        "ago: head: no. 2 requests without an answer so far, the longest for 7.0 s. Those who ask: the coordinator, "
        "h0, h1 and 2 more."
    )
    (elsewhere,) = faults_of(host(storage_trouble=(replace(FAILS, location="s3://b/savepoints"),)))
    assert elsewhere.subject == "storage s3://b/savepoints"


def test_storage_that_one_process_reaches_again_is_not_stalled() -> None:
    hosts = (replace(HOST, storage_trouble=(FAILS, replace(FAILS, is_over=True))),)
    assert [f.severity for f in faults_of(replace(HEALTHY, hosts=hosts))] == ["warning"]


def test_slow_storage_is_reported_within_a_few_batches() -> None:
    quick, slow = stored_in(10.0, 1_000, n=20).queries[0].checkpoints, stored_in(2_000.0, 2_100, n=3).queries[0]
    assert kinds(replace(HEALTHY, queries=(replace(slow, checkpoints=(*quick[:-3], *slow.checkpoints[-3:])),))) == [
        "slow-storage"
    ]


def test_few_keys_are_not_skewed() -> None:
    few = tuple(structs.replace(one, keys=9_000 if one.partition == 3 else 1) for one in PARTITIONS)
    assert kinds(query(operators=(replace(QUERY.operators[0], partitions=few, skew=9_000.0),))) == []


def test_slow_stream_is_late_relative_to_its_usual_duration() -> None:
    slow = tuple(structs.replace(c, completed_ms=c.version * 60_000) for c in QUERY.checkpoints)
    assert kinds(query(checkpoints=slow, batch_ms=170_000)) == []
    assert kinds(query(checkpoints=slow, batch_ms=190_000)) == ["checkpoint-late"]


def test_errors_come_first_and_only_recent_retries_count() -> None:
    both = replace(checkpoint(retried=1), hosts=(replace(HOST, heartbeat_ms=6_000),))
    assert kinds(both) == ["host-silent", "retried-tasks"]
    old = (structs.replace(QUERY.checkpoints[0], retried=1), *QUERY.checkpoints[1:])
    assert kinds(query(checkpoints=old)) == []
