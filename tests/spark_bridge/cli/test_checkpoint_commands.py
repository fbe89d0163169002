"""The commands that read a checkpoint, without Ray and Spark: their output, also as JSON, and their exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import Result

from coordinator_actor.run.history import WRITE_SECONDS
from spark_bridge.cli.main import app
from spark_bridge.operators.deduplicate import DeduplicateLogic
from spark_bridge.state_data.frames import state_table
from spark_bridge.state_format.layouts import deduplicate_schema
from tests.command_line import CliRunner
from tests.coordinator_actor.savepoints.savepoint_streams import Stream
from tests.spark_bridge.state_flows import Flow, Query

Make = Callable[..., Stream]


def run(*args: str, code: int = 0, text: str | None = None) -> Result:
    result = CliRunner().invoke(app, list(args), input=text)
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
    dear = as_json("checkpoints", "--prices", "put=5", "--checkpoint", location(s))
    assert all(
        c["storage"]["put"] >= 1 and c["dollars"] >= c["storage"]["put"] * 0.005 > a["dollars"] > 0
        for a, c in zip(found, dear, strict=True)
    )
    shown = run("checkpoints", "--requests", "--prices", "put=5", "--checkpoint", location(s)).stdout
    assert "Requests to storage of q" in shown and "at the prices put=5," in shown


def test_status_queries_and_partitions(stream: Make) -> None:
    s = stream(batches=3)
    s.world.now += WRITE_SECONDS
    s.c.maintain()
    (query,) = as_json("queries", "--checkpoint", location(s))
    assert (query["query_id"], query["completed_version"]) == ("q", 3)
    assert as_json("status", "--checkpoint", location(s))["faults"] == []
    (operator,) = as_json("partitions", "--operator", "op", "--checkpoint", location(s))
    assert [p["partition"] for p in operator["partitions"]] == [0, 1]
    said = run("status", "--checkpoint", location(s)).stdout
    assert "Nothing is wrong" in said and "'statestore verify' reads the files" in said


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
        (("checkpoints", "--prices", "puts=1"), "'puts=1' is not a price: give put=, get=,"),
        (("partitions", "--operator", "nope"), "has no operator 'nope'; it has op"),
    ],
)
def test_what_is_asked_wrongly_is_exit_code_2(stream: Make, args: tuple[str, ...], message: str) -> None:
    result = run(*args, "--checkpoint", location(stream()), code=2)
    assert message in result.stderr and not result.stdout


def test_no_state_is_exit_code_2(stream: Make) -> None:
    assert "query.json" in run("status", "--checkpoint", location(stream()) + "x", code=2).stderr


def test_files_command_shows_what_references_each_file(stream: Make) -> None:
    s = stream(batches=3)
    found = as_json("files", location(s))
    assert {f["kind"] for f in found} == {"changelog", "epoch", "manifest", "record", "schema"}
    assert all(f["kept_by"] for f in found)
    assert len(as_json("files", location(s), "--version", "1")) < len(found)
    text = run("files", location(s)).stdout
    assert "version 3" in text and "0 files, 0 B, are kept by nothing." in text
    assert "cannot be read: there are the versions 0 to 3" in run("files", location(s), "--version", "9", code=2).stderr


def test_verify_finds_nothing_in_a_sound_state(stream: Make) -> None:
    s = stream(batches=3)
    found = as_json("verify", location(s), "--rows")
    assert (found["is_sound"], found["files"], found["rows"]) == (True, 6, len(s.at[3]))
    assert "Read 6 files of version 3" in run("verify", location(s)).stdout


def test_verify_names_the_damage(stream: Make) -> None:
    s = stream(batches=3)
    file = next((s.world.root / "ck/statestore/operators/op/2/1").rglob("2-*.changelog"))
    file.write_bytes(file.read_bytes()[:-1])
    found = as_json("verify", location(s), code=1)
    assert not found["is_sound"] and found["lost"] == ["op/1"]
    assert [d["path"].rpartition("/")[2] for d in found["damages"]] == [file.name]
    text = run("verify", location(s), code=1).stdout
    assert file.name in text and "Version 3 cannot be loaded: op/1." in text


def test_verify_names_a_damaged_manifest(stream: Make) -> None:
    s = stream(batches=3)
    file = sorted((s.world.root / "ck/statestore/manifests").iterdir())[1]
    file.write_bytes(file.read_bytes().replace(b"run1", b"ruin"))
    found = as_json("verify", location(s), code=1)
    assert [file.name in damage["what"] for damage in found["damages"]] == [True] and not found["is_sound"]
    assert run("verify", location(s) + "x", code=2).stderr


@pytest.mark.parametrize(
    "args",
    [
        ("status",),
        ("queries",),
        ("checkpoints",),
        ("partitions",),
        ("top", "--once"),
        ("get", "op", "1"),
        ("scan", "op"),
        ("sql", "select * from op"),
        ("watch", "op", "--from-version", "1"),
        ("diff", "op", "1", "2"),
        ("ui", "--port", "0"),
    ],
    ids=lambda args: args[0],
)
def test_each_command_names_a_damaged_manifest_without_which_nothing_is_known(
    stream: Make, args: tuple[str, ...]
) -> None:
    s = stream(batches=3)
    file = sorted((s.world.root / "ck/statestore/manifests").iterdir())[-1]
    file.write_bytes(file.read_bytes().replace(b"run1", b"ruin"))
    result = run(*args, "--checkpoint", location(s), code=2)
    assert file.name in result.stderr.replace("\n", "") and not result.stdout
    assert file.name in run("files", location(s), code=2).stderr.replace("\n", "")


def test_a_line_of_a_keys_file_is_one_key_whatever_characters_it_has(tmp_path: Path) -> None:
    """A key may have characters that Unicode counts as ends of lines. Its parts may be keys of others, which stay."""
    keys, odd = pa.schema([("user", pa.string())]), "a\u2028b\x1cc"
    schema = deduplicate_schema(keys, ("user",), None)
    query = Query(tmp_path, schema, "deduplicate")
    rows = pa.record_batch([pa.array([odd, "a", "b", "c", "d"])], schema=keys)
    query.process(DeduplicateLogic(schema, ("user",), ()), ["user"], rows)
    query.stop()
    gone = tmp_path / "gone.txt"
    gone.write_bytes(f"\ufeffd\r\n{odd}\r\n".encode())  # as editors on Windows write it
    report = as_json("forget", "op", "--keys-file", str(gone), "--yes", "--checkpoint", query.location)
    assert sorted(state_table(query.location, "op")["user"].to_pylist()) == ["a", "b", "c"]
    assert (report["keys"], report["rows"]) == (2, 2)


def test_keys_are_forgotten_and_recorded_in_the_audit_log(tmp_path: Path) -> None:
    flow = Flow(tmp_path)
    flow.batch({(user, 0): lambda of: of.total.update((1, "x")) for user in ("a", "b", "c", "d")})
    flow.stop()
    where, gone = ("--checkpoint", flow.location), tmp_path / "gone.txt"
    gone.write_text('b,0\n{"user": "c", "shard": 0}\n')
    assert "Aborted" in run("forget", "op", "a,0", *where, code=1).output
    assert as_json("audit", flow.location) == []
    report = as_json("forget", "op", '["a", 0]', "--keys-file", str(gone), "--reference", "no 7", "--yes", *where)
    assert (report["keys"], report["version"], report["rows"]) == (3, 1, 3)
    assert state_table(flow.location, "op", "total")["user"].to_pylist() == ["d"]
    done = as_json("audit", flow.location)[-1]
    assert (done["what"], done["status"], done["reference"]) == ("forget_keys", "done", "no 7")
    assert "no 7" in run("audit", flow.location).stdout
    assert "give --yes" in run("forget", "op", "--keys-file", "-", *where, code=2).output
    assert "Done: no version" in run("forget", "op", "--keys-file", "-", "--yes", *where, text="d,0\n").stdout
    assert state_table(flow.location, "op", "total").num_rows == 0
    assert "give a KEY, or --keys-file" in run("forget", "op", "--yes", *where, code=2).output
    assert "give --query NAME" in run("forget", "op", "a,0", "--yes", code=2).output
    assert "'x' is no int32" in run("forget", "op", '["a", "x"]', "--yes", *where, code=2).output
