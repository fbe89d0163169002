"""Each command against a running stream, against the checkpoint of the stopped one, and against a damaged one.

A copied checkpoint in real Spark is refused until it is forked; then it is an independent query.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import ray

from coordinator_actor.durable.moved_checkpoints import fork_checkpoint
from spark_bridge import QueryableStateClient, aggregate, read_state
from spark_bridge import functions as S
from spark_bridge.cli.main import app
from spark_bridge.exceptions import QueryTimeoutError
from spark_bridge.session.current import current_cluster
from spark_bridge.state_surgery import forget_keys
from tests.command_line import CliRunner
from tests.spark_bridge.conftest import Stream, settle, wait_until
from tests.spark_bridge.own_head import free_ports

pytestmark = pytest.mark.spark
UNDAMAGED = ("statestore", "audit", "epochs", "folds", "history", "manifests", "rewritten", "savepoints", "schemas")
"""What says where state is; all other directories have the state itself."""


def statestore(*args: str, code: int | None = 0) -> Any:
    """Run a command in this process, which is in the cluster and stays there; return what its JSON says."""
    with patch.object(ray, "init"), patch.object(ray, "shutdown"):
        result = CliRunner().invoke(app, [*args, "--json"])
    assert code is None or result.exit_code == code, (args, result.output, result.exception)
    lines = result.stdout.splitlines()
    return json.loads(result.stdout) if args[0] not in ("watch", "logs") else [json.loads(line) for line in lines]


def test_commands_on_a_running_stream_its_checkpoint_and_a_damaged_one(stream: Stream) -> None:
    stream.add([(1, 1.0), (2, 2.0)])
    totals = aggregate(stream.read(), by="k", operator="cli_totals", num_partitions=2, n=S.count(), total=S.sum("v"))
    query = (
        totals.writeStream.queryName("cli")
        .outputMode("append")
        .option("checkpointLocation", stream.checkpoint)
        .format("noop")
        .start()
    )
    settle(query)
    # The query runs on that checkpoint: its coordinator exchanges the files, and the next batch is not fenced off.
    there = ("--checkpoint", stream.checkpoint, "--address", "auto", "--yes")
    with patch.object(forget_keys, "_coordinator", lambda: None):  # as in a process without a session
        assert statestore("forget", "cli_totals", "99", *there)["keys"] == 1
    stream.add([(1, 3.0), (3, 4.0)])
    settle(query)
    wait_until(lambda: statestore("get", "cli_totals", "k=1")["value"] == {"n": 2, "total": 4.0})

    def answers(*where: str) -> list[Any]:
        """What must be the same of a running stream and of a checkpoint."""
        rows = statestore("scan", "cli_totals", "--where", "n > 1", *where)["rows"]
        sums = statestore("sql", "select sum(n) as n from cli_totals", *where)["rows"]
        changed = statestore("watch", "cli_totals", "1", "--from-version", "1", "--changes", "1", *where)
        differing = statestore("diff", "cli_totals", "1", "2", *where, code=1)
        old = statestore("get", "cli_totals", "1", "--version", "1", *where)["value"]
        kinds = sorted((row["k"], row["change_type"], row["after"]["n"]) for row in differing["rows"])
        return [rows, sums, changed[0]["after"], kinds, old]

    def looks(*where: str) -> list[Any]:
        """Return the output of the overview commands, which are the same for a running stream and a checkpoint."""
        named = () if where else ("cli",)
        stat = next(
            q for q in statestore("status", *where, code=None)["queries"] if q["state_location"].endswith(state)
        )
        listed = next(q for q in statestore("queries", *where) if q["state_location"].endswith(state))
        (operator,) = statestore("partitions", *named, *where)
        top = statestore("top", *where, code=None)["queries"]
        files = {f["kind"] for f in statestore("files", stream.checkpoint)}
        return [
            (stat["completed_version"], listed["completed_version"], [o["name"] for o in stat["operators"]]),
            [c["version"] for c in statestore("checkpoints", *named, *where)],
            [(p["partition"], p["version"]) for p in operator["partitions"]],
            max(q["version"] for q in top if q["query"] in ("cli", stat["query_id"])),
            files >= {"manifest", "schema"},
            statestore("verify", stream.checkpoint)["is_sound"],
        ]

    state = f"{stream.checkpoint}/statestore"
    of_cluster = answers()
    look = looks()
    assert look == [(2, 2, ["cli_totals"]), [1, 2], [(0, 2), (1, 2)], 2, True, True]
    hosts = statestore("hosts")
    assert any(h["answered"] and h["partitions"] for h in hosts)
    token = current_cluster().token
    refused = QueryableStateClient.connect(address=f"127.0.0.1:{free_ports(1)[0]}", token=token, timeout=1.0)
    with refused, pytest.raises(QueryTimeoutError, match="`statestore hosts`"):
        refused.get("cli_totals", 1)
    with QueryableStateClient.connect(address=hosts[0]["query_address"], token=token) as client:
        assert client.get("cli_totals", 1) == {"n": 2, "total": 4.0}
    assert of_cluster == [
        [{"k": 1, "n": 2, "total": 4.0}],
        [{"n": "4"}],
        {"n": 2, "total": 4.0},
        [(1, "changed", 2), (3, "added", 1)],
        {"n": 1, "total": 1.0},
    ]
    top = next(q for q in statestore("top", code=None)["queries"] if q["query"] == "cli")
    assert top["version"] == 2 and top["keys"] == 3
    checks = {c["name"]: c for c in statestore("doctor", "--checkpoint", stream.checkpoint, code=None)["checks"]}
    assert {checks[name]["status"] for name in ("nodes", "coordinator", "ports", "create-if-absent")} == {"ok"}
    # The session of the tests has no dashboard, by whose state API logs are read. Ray would ask one of another cluster.
    nowhere = patch.dict(os.environ, {"RAY_API_SERVER_ADDRESS": "http://127.0.0.1:9"})
    with patch.object(ray, "init"), patch.object(ray, "shutdown"), nowhere:
        result = CliRunner().invoke(app, ["logs", "cli"])
    assert result.exit_code == 2 and "It needs Ray's dashboard" in result.stderr
    query.stop()

    of_checkpoint = answers("--checkpoint", stream.checkpoint)
    assert of_checkpoint == of_cluster
    assert looks("--checkpoint", stream.checkpoint) == look
    stored = [p for p in Path(stream.checkpoint, "statestore").rglob("*.*") if p.parent.name not in UNDAMAGED]
    assert stored
    for file in stored:
        file.write_bytes(bytes(file.stat().st_size))
    for command in (
        ["get", "cli_totals", "1"],
        ["scan", "cli_totals"],
        ["diff", "cli_totals", "1", "2"],
        ["sql", "select * from cli_totals"],
        ["watch", "cli_totals", "--from-version", "1"],
    ):
        result = CliRunner().invoke(app, [*command, "--checkpoint", stream.checkpoint])
        assert result.exit_code == 2 and any(file.name in result.stderr for file in stored), command
    damaged = statestore("verify", stream.checkpoint, code=1)
    assert not damaged["is_sound"] and damaged["damages"]
    # What says where state is, is whole, and so is what is made of it.
    assert statestore("status", "--checkpoint", stream.checkpoint)["queries"][0]["completed_version"] == 2
    assert len(statestore("checkpoints", "--checkpoint", stream.checkpoint)) == 2


@pytest.mark.spark42
@pytest.mark.thorough
def test_fork_and_original_both_continue(make_stream: Callable[..., Stream], spark: Any, tmp_path: Path) -> None:
    stream, base, copy = make_stream(), str(tmp_path / "base"), str(tmp_path / "copy")
    totals = aggregate(stream.read(), by="k", operator="totals", num_partitions=2, n=S.count())

    def run(checkpoint: str) -> str:
        query = totals.writeStream.format("noop").option("checkpointLocation", checkpoint).start()
        try:
            query.processAllAvailable()
            return str(query.id)
        finally:
            query.stop()

    def count(checkpoint: str) -> int:
        return int(read_state(spark, checkpoint, "totals", state_location=base).collect()[0]["n"])

    spark.conf.set("spark.statestore.location", base)
    try:
        stream.add([(1, 1.0)])
        original = run(stream.checkpoint)
        shutil.copytree(stream.checkpoint, copy)
        stream.add([(1, 1.0)])  # the refusal comes from a task, and without rows there is none
        with pytest.raises(Exception, match="statestore checkpoint fork"):
            run(copy)
        forked = fork_checkpoint(copy, base)
        assert run(copy) == forked.query_id
        assert (count(copy), count(stream.checkpoint)) == (2, 1)
        assert run(stream.checkpoint) == original
        assert (count(copy), count(stream.checkpoint)) == (2, 2)
    finally:
        spark.conf.unset("spark.statestore.location")
