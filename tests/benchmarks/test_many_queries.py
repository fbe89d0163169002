"""The load of many queries on one coordinator: its limits, its plot, and a short run on a real actor."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from many_queries import EMPTY, broken_limits
from suite.model import Spread
from suite.report import lines

from tests.benchmarks.measurements import texts

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "many_queries.py"


def found(**changes: Any) -> dict[str, Any]:
    messages = {"open_batch": {"p99": 900.0}, EMPTY: {"p99": 50.0}, **changes.pop("messages_ms", {})}
    return {"cores": 0.5, "memory_mib": {"half": 200.0, "last": 210.0}, "messages_ms": messages, **changes}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"cores": 1.1}, "1.1 cores"),
        ({"memory_mib": {"half": 200.0, "last": 260.0}}, "memory grows: 200.0 MiB at the half, 260.0"),
        ({"messages_ms": {"locate": {"p99": 1051.0}}}, "locate: p99 1051.0 ms"),
        ({"messages_ms": {"locate": {"p99": 1051.0}, EMPTY: {"p99": 60.0}}}, None),  # the machine was as slow itself
    ],
)
def test_limits(changes: dict[str, Any], words: str | None) -> None:
    broken = broken_limits(found(**changes))
    assert (broken == []) if words is None else (len(broken) == 1 and words in broken[0])


def test_time_is_a_linear_axis_from_zero() -> None:
    points = [(seconds, Spread(1.0, 1.0, 1.0)) for seconds in (100.0, 200.0, 300.0)]
    drawn = lines("title", "ms", "seconds", {"one": points}, is_time=True)
    assert {"0", "100", "200", "300", "ms", "seconds", "one"} <= set(texts(drawn))


@pytest.mark.ray
@pytest.mark.thorough  # otherwise: the coordinator's own tests, and the comparison of make bench-smoke
def test_a_short_run_keeps_the_limits() -> None:
    size = ["--queries", "5", "--partitions", "100", "--hosts", "10", "--seconds", "30", "--interval", "1"]
    done = subprocess.run([sys.executable, PROGRAM, *size, "--no-write"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "5 queries, 100 partitions, 10 hosts" in done.stdout
