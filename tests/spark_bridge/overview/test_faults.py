"""Each fault is found when it is there, says what to do, and is not found in a healthy system."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from spark_bridge.overview.faults import faults_of
from spark_bridge.overview.model import Checkpoint, CoordinatorInfo, Host, Operator, Overview, Partition, Query, Step

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
HOST = Host("h0", "grpc://192.0.2.1:5", heartbeat_ms=900, partitions=5, memory={"host_memory": 100, "cache": 99})
HEALTHY = Overview("cluster", 0, CoordinatorInfo("c", "statestore"), (QUERY,), (HOST,))


def kinds(overview: Overview) -> list[str]:
    return [fault.kind for fault in faults_of(overview)]


def query(**changes: Any) -> Overview:
    return replace(HEALTHY, queries=(replace(QUERY, **changes),))


def partitions(p: int, **changes: Any) -> Overview:
    changed = tuple(replace(one, **changes) if one.partition == p else one for one in PARTITIONS)
    skew = max(one.keys or 0 for one in changed) / 20_000
    return query(operators=(replace(QUERY.operators[0], partitions=changed, skew=skew),))


def checkpoint(**changes: Any) -> Overview:
    return query(checkpoints=(*QUERY.checkpoints[:-1], replace(QUERY.checkpoints[-1], **changes)))


def host(**changes: Any) -> Overview:
    return replace(HEALTHY, hosts=(replace(HOST, **changes),))


def timed(slowest: float, usual: float = 200.0, step: str = "merge_ms") -> Overview:
    """Partition 3 takes longer than the others."""
    times = tuple(replace(p, commit_ms={step: slowest if p.partition == 3 else usual}) for p in PARTITIONS)
    return query(operators=(replace(QUERY.operators[0], partitions=times),))


def stored_in(changelog_ms: float, duration_ms: int, n: int = 5) -> Overview:
    """In the last n checkpoints the slowest changelog takes so long."""
    steps = {"changelog_ms": Step(9_000.0, changelog_ms)}
    last = tuple(replace(c, steps=steps, duration_ms=duration_ms) for c in QUERY.checkpoints[-n:])
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
        (query(batch_ms=61_000), "checkpoint-late", "error"),
        (query(status="replaced", replaced_by="r2"), "run-replaced", "warning"),
        (query(prepared_version=29), "version-missing", "error"),
        (query(counts={"failed": 2}), "failed-checkpoints", "warning"),
        (checkpoint(retried=3), "retried-tasks", "warning"),
        (partitions(3, keys=120_000), "skew", "warning"),
        (partitions(3, snapshot_lag=51), "snapshots-lag", "warning"),
        (partitions(3, owner=None), "not-loaded", "warning"),
        (timed(1_600.0), "slow-partition", "warning"),
        (stored_in(1_200.0, 2_000), "slow-storage", "warning"),
    ],
)
def test_a_fault_is_found_and_says_what_to_do(overview: Overview, kind: str, severity: str) -> None:
    (fault,) = faults_of(overview)
    assert (fault.kind, fault.severity) == (kind, severity)
    assert fault.subject and fault.what.endswith(".") and fault.remedy.endswith(".")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"pending_partitions": 3}, "3 partitions"),
        ({"prepared_version": QUERY.completed_version + 1}, "the sink"),
        ({}, "the source"),
    ],
)
def test_a_late_batch_says_what_it_waits_for(changes: dict[str, int], said: str) -> None:
    (fault,) = faults_of(query(**{"batch_ms": 90_000, "pending_partitions": 0, **changes}))
    assert said in fault.what


@pytest.mark.parametrize(
    "overview",
    [
        query(batch_ms=59_000),
        query(batch_ms=None),  # a quiet stream
        query(batch_ms=90_000, checkpoints=QUERY.checkpoints[:2]),  # nothing is usual yet
        query(status="stored", batch_ms=61_000),
        partitions(3, keys=90_000),
        partitions(3, snapshot_lag=50),
        host(heartbeat_ms=5_000),
        timed(900.0),
        timed(1_600.0, usual=400.0),
        timed(1_600.0, step="input_wait"),
        stored_in(900.0, 1_000),
        stored_in(1_200.0, 3_000),
        stored_in(1_200.0, 2_000, n=2),
    ],
)
def test_what_is_no_fault(overview: Overview) -> None:
    assert kinds(overview) == []


def test_few_keys_are_not_skewed() -> None:
    few = tuple(replace(one, keys=9_000 if one.partition == 3 else 1) for one in PARTITIONS)
    assert kinds(query(operators=(replace(QUERY.operators[0], partitions=few, skew=9_000.0),))) == []


def test_a_slow_stream_is_late_by_its_own_measure() -> None:
    slow = tuple(replace(c, completed_ms=c.version * 60_000) for c in QUERY.checkpoints)
    assert kinds(query(checkpoints=slow, batch_ms=170_000)) == []
    assert kinds(query(checkpoints=slow, batch_ms=190_000)) == ["checkpoint-late"]


def test_errors_come_first_and_only_recent_retries_count() -> None:
    both = replace(checkpoint(retried=1), hosts=(replace(HOST, heartbeat_ms=6_000),))
    assert kinds(both) == ["host-silent", "retried-tasks"]
    old = (replace(QUERY.checkpoints[0], retried=1), *QUERY.checkpoints[1:])
    assert kinds(query(checkpoints=old)) == []
