"""Traces of a real cluster, by OTLP to a collector: one a batch over driver, tasks, hosts, coordinator and storage."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from backends import spans as trace_ids
from backends.spans import Trace
from tests.collector import CollectedSpan, Collector
from tests.patience import PATIENCE

PROGRAM = Path(__file__).with_name("traced_program.py")
ROOT = Path(__file__).parents[3]

pytestmark = [
    pytest.mark.ray,
    pytest.mark.spark,
    pytest.mark.thorough,  # otherwise: task/test_traces.py, session/test_batch_traces.py, backends/test_spans.py
]


class Traces:
    """Everything that a program has sent: ``said`` is what the program has printed."""

    def __init__(self, spans: list[CollectedSpan], said: dict[str, Any]) -> None:
        self.said = said
        self.by_trace: dict[str, list[CollectedSpan]] = defaultdict(list)
        for span in spans:
            self.by_trace[span.trace].append(span)
        self._by_id = {span.id: span for span in spans}

    def of(self, trace: Trace) -> list[CollectedSpan]:
        return self.by_trace[f"{trace.ids[0]:032x}"]

    def root(self, trace: Trace) -> CollectedSpan:
        (found,) = [s for s in self.of(trace) if not s.parent]
        assert found.id == f"{trace.ids[1]:016x}"
        return found

    def path(self, span: CollectedSpan) -> str:
        """The names from the root down, with the roles in between where the process changes."""
        names = [span.name]
        while span.parent:
            span = self._by_id[span.parent]
            names.insert(0, span.name)
        return " > ".join(names)

    def paths(self, trace: Trace) -> set[str]:
        return {self.path(span) for span in self.of(trace)}

    def roles(self, trace: Trace) -> set[str]:
        return {span["role"] for span in self.of(trace)}

    def named(self, trace: Trace, name: str) -> list[CollectedSpan]:
        return [span for span in self.of(trace) if span.name == name]


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Traces:
    root = tmp_path_factory.mktemp("traced")
    with Collector() as collector:
        ours = {"STATESTORE_TRACING": collector.address, "OTEL_BSP_SCHEDULE_DELAY": "100"}
        done = subprocess.run(
            [sys.executable, "-m", "tests.spark_bridge.streams.traced_program", str(root)],
            cwd=ROOT,
            env={**os.environ, "PYSPARK_PYTHON": sys.executable, **ours},
            capture_output=True,
            text=True,
            timeout=5 * PATIENCE,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-5000:]
        return Traces(collector.spans(), json.loads(done.stdout.splitlines()[-1]))


def test_one_trace_a_batch(traces: Traces) -> None:
    first, second = traces.said["first"], traces.said["second"]
    for run_id, version, partitions in ((first, 1, 2), (first, 2, 2), (first, 3, 2), (second, 4, 3), (second, 5, 3)):
        trace = trace_ids.batch(run_id, version)
        root = traces.root(trace)
        assert (root.name, root["role"], root["run_id"], root["version"]) == ("batch", "driver", run_id, version)
        assert (root["rows"], root["query_name"], root.failure) == (100, "traced", "")
        assert traces.roles(trace) == {"driver", "task", "host", "coordinator"}
        commit = "batch > task > task.commit > host.commit"
        assert {
            "batch > spark.addBatch",
            "batch > driver.committed",
            "batch > task > task.read > host.read",
            f"{commit} > host.changelog > storage.put",
            f"{commit} > host.acknowledge",
            "batch > coordinator.open_batch",
            "batch > coordinator.acknowledge > coordinator.manifest > storage.put",
            "batch > host.apply",
        } <= traces.paths(trace)
        # The coordinator is killed behind version 2, with the spans that it has not sent yet.
        assert version == 2 or "batch > coordinator.complete" in traces.paths(trace)
        tasks = traces.named(trace, "task")
        assert sorted(t["partition"] for t in tasks) == list(range(partitions))
        assert all(root.began <= t.began and t.ended <= root.ended for t in tasks)


def test_the_start_of_a_run_and_a_coordinator_that_comes_back(traces: Traces) -> None:
    trace = trace_ids.run(traces.said["first"])
    assert (traces.root(trace).name, traces.root(trace)["role"]) == ("run", "driver")
    assert "run > coordinator.register > coordinator.claim > storage.put" in traces.paths(trace)
    assert [c["was_known"] for c in traces.named(trace, "coordinator.claim")] == [False, True]


def test_a_savepoint(traces: Traces) -> None:
    savepoint_id = int(traces.said["savepoint"].rpartition("-")[2])
    trace = trace_ids.savepoint(traces.said["first"], savepoint_id)
    assert traces.root(trace).name == "savepoint"
    assert {
        "savepoint > savepoint.trigger > storage.put",
        "savepoint > savepoint.spark_files > storage.put",
        "savepoint > host.export > storage.put",
        "savepoint > savepoint.metadata > storage.put",
    } <= traces.paths(trace)
    assert sorted(s["partition"] for s in traces.named(trace, "host.export")) == [0, 1]


def test_a_restored_savepoint(traces: Traces) -> None:
    (restored,) = [s for spans in traces.by_trace.values() for s in spans if s.name == "savepoint.restore"]
    below = {traces.path(s) for s in traces.by_trace[restored.trace]}
    assert "savepoint.restore > savepoint.restore_partition > storage.put" in below
    assert restored["role"] == "driver"


def test_other_partitions(traces: Traces) -> None:
    (claim,) = traces.named(trace_ids.run(traces.said["second"]), "coordinator.claim")
    assert claim["rescaled"] is True
    trace = trace_ids.batch(traces.said["second"], 4)
    loads = traces.named(trace, "host.load")
    # Hosts load before tasks ask, and may have begun with a partition when its task does.
    assert {load["partition"] for load in loads} == {0, 1, 2} and all(load["rescaled"] for load in loads)
    assert any(
        path.endswith(("host.open > host.load > storage.get", "host.warm_up > host.load > storage.get"))
        for path in traces.paths(trace)
    )


def test_a_partition_that_moves(traces: Traces) -> None:
    trace = trace_ids.batch(traces.said["second"], 5)
    (warm,) = traces.named(trace, "host.warm_up")
    assert "batch > host.warm_up > host.load" in traces.paths(trace)
    assert sum(s["moved"] for s in traces.named(trace, "coordinator.assign")) == 1
    assert warm.ended <= min(t.began for t in traces.named(trace, "task"))


def test_nothing_of_the_users_is_in_a_span(traces: Traces) -> None:
    """Attributes are of these names, and of types that hold no rows."""
    kinds = {type(value) for spans in traces.by_trace.values() for s in spans for value in s.attributes.values()}
    names = {name for spans in traces.by_trace.values() for s in spans for name in s.attributes}
    assert kinds <= {str, int, float, bool}
    assert {n for n in names if not n.startswith("statestore.")} <= {"error.type"}
