"""The commands that look at a checkpoint, with neither Ray nor Spark: what they print, as JSON too, and exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from coordinator_actor.query.checkpoint_history import WRITE_SECONDS
from spark_bridge.cli.main import app
from tests.coordinator_actor.savepoints.savepoint_streams import Stream

Make = Callable[..., Stream]


def run(*args: str, code: int = 0) -> Result:
    result = CliRunner().invoke(app, list(args))
    assert result.exit_code == code, (result.output, result.exception)
    return result


def as_json(*args: str, code: int = 0) -> Any:
    return json.loads(run(*args, "--json", code=code).stdout)


def location(s: Stream) -> str:
    return str(s.world.root / "ck")


def test_checkpoints_of_a_stopped_query(stream: Make) -> None:
    s = stream(batches=3)
    s.c.deactivate_instances("run1")
    found = as_json("checkpoints", "--checkpoint", location(s))
    assert [c["version"] for c in found] == [1, 2, 3]
    assert all(c["phases"].keys() == {"tasks", "acknowledge", "manifest", "commit"} for c in found)
    assert [c["version"] for c in as_json("checkpoints", "q", "--last", "1", "--checkpoint", location(s))] == [3]
    assert "Checkpoints of q" in run("checkpoints", "--checkpoint", location(s)).stdout


def test_status_queries_and_partitions(stream: Make) -> None:
    s = stream(batches=3)
    s.world.now += WRITE_SECONDS
    s.c.maintain()
    (query,) = as_json("queries", "--checkpoint", location(s))
    assert (query["query_id"], query["completed_version"]) == ("q", 3)
    assert as_json("status", "--checkpoint", location(s))["faults"] == []
    (operator,) = as_json("partitions", "--operator", "op", "--checkpoint", location(s))
    assert [p["partition"] for p in operator["partitions"]] == [0, 1]
    assert "Nothing is wrong" in run("status", "--checkpoint", location(s)).stdout


def test_an_error_among_the_faults_is_exit_code_1(stream: Make) -> None:
    s = stream(batches=1)
    s.world.plan_spark(5)
    s.world.commit_spark(5)
    found = as_json("status", "--checkpoint", location(s), code=1)
    assert [fault["kind"] for fault in found["faults"]] == ["version-missing"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("checkpoints", "other"), "No single query is named 'other'"),
        (("partitions", "--operator", "nope"), "has no operator 'nope'; it has op"),
    ],
)
def test_what_is_asked_wrongly_is_exit_code_2(stream: Make, args: tuple[str, ...], message: str) -> None:
    result = run(*args, "--checkpoint", location(stream()), code=2)
    assert message in result.stderr and not result.stdout


def test_no_state_is_exit_code_2(stream: Make) -> None:
    assert "query.json" in run("status", "--checkpoint", location(stream()) + "x", code=2).stderr
