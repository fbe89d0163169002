"""Spans reach a collector by OTLP over HTTP, and a collector that is gone or slow delays no caller."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.collector import Collector

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys, time
from backends import spans
from backends import spans as trace_ids
from backends.tracing import set_up
set_up(sys.argv[1], {"role": "host"})
began = time.perf_counter()
for version in range(int(sys.argv[2])):
    with spans.span("host.commit", trace_ids.batch("run", version)):
        pass
print(time.perf_counter() - began)
"""


def run(setting: str, count: int, **variables: str) -> float:
    """Return how many seconds ``count`` spans took, in a separate process."""
    given = {**os.environ, "OTEL_EXPORTER_OTLP_TIMEOUT": "1", **variables}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, setting, str(count)],
        cwd=ROOT,
        env=given,
        capture_output=True,
        text=True,
        check=True,
    )
    return float(json.loads(done.stdout))


@pytest.mark.parametrize("form", ["address", "variables"])
def test_spans_reach_a_collector(form: str) -> None:
    with Collector() as collector:
        if form == "address":
            run(f"{collector.address}/", 10)
        else:
            run("otlp", 10, OTEL_EXPORTER_OTLP_ENDPOINT=collector.address, OTEL_SERVICE_NAME="mine")
        found = collector.spans()
    assert found[0].name == "host.commit"
    assert found[0].attributes == {
        "statestore.role": "host",
        "statestore.run_id": "run",
        "statestore.version": found[0].attributes["statestore.version"],
    }
    assert {s.service for s in found} == {"ray-statestore" if form == "address" else "mine"}
    assert len(found) == 10


def test_a_collector_that_is_gone_fails_and_delays_no_caller() -> None:
    """Of more spans than the queue of the SDK holds; to wait for one request per span would take hours."""
    assert run("http://127.0.0.1:1", 5000) < 30
