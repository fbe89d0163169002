"""A damaged manifest that is older than the newest: what does not need it is shown, and the damage is named."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import Result

from backends.exceptions import DamagedFileError, VersionNotFoundError
from coordinator_actor.reading.stored_files import UNKNOWN
from coordinator_actor.reading.stored_versions import StateVersions, find_state, spans
from spark_bridge.cli.main import app
from spark_bridge.cli.output import DAMAGED
from spark_bridge.overview.from_storage import overview_of_checkpoint
from spark_bridge.state_data.checkpoint_client import CheckpointClient
from spark_bridge.state_surgery.rewrite_state import rewrite_state
from tests.command_line import CliRunner
from tests.coordinator_actor.savepoints.savepoint_streams import Stream
from tests.spark_bridge.state_surgery.surgery_steps import OwnWorkers

NEWEST = 7


@pytest.fixture
def s(tmp_path: Path) -> Iterator[Stream]:
    """Seven versions, with snapshots of the third one and the fifth."""
    made = Stream(tmp_path, hosts=1)
    (tmp_path / "ck" / "metadata").write_text('{"id":"q"}')
    for first, end in ((0, 3), (3, 5), (5, NEWEST)):
        made.batches(first, end)
        made.heartbeat()
        if end < NEWEST:
            made.hosts[0].maintenance.upload_snapshots(list(made.hosts[0].cache.all()))
    yield made
    made.close()


def where(s: Stream) -> str:
    return str(s.world.root / "ck")


def manifest_of(s: Stream, version: int) -> Path:
    """The manifest that counts for a version."""
    log = StateVersions.look(find_state(where(s)))
    (path,) = (
        path
        for path in (s.world.root / "ck/statestore/manifests").iterdir()
        if b'"id":%d,' % log.chain[version].id in path.read_bytes()
    )
    return path


def damage(s: Stream, version: int) -> Path:
    path = manifest_of(s, version)
    path.write_bytes(path.read_bytes().replace(b"run1", b"ruin"))
    return path


def run(*args: str, code: int) -> Result:
    result = CliRunner().invoke(app, list(args))
    assert result.exit_code == code, (result.output, result.exception)
    return result


def flat(text: str) -> str:
    return text.replace("\n", "")


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (("queries",), DAMAGED),
        (("checkpoints",), DAMAGED),
        (("partitions",), DAMAGED),
        (("get", "op", "29"), DAMAGED),
        (("get", "op", "999"), 1),
        (("scan", "op"), DAMAGED),
        (("scan", "op", "--version", "5"), DAMAGED),
        (("sql", "select * from op"), DAMAGED),
        (("diff", "op", "7", "7"), DAMAGED),
        (("diff", "op", "5", "7"), 1),
        (("watch", "op", "--from-version", "5", "--changes", "1"), DAMAGED),
    ],
    ids=str,
)
def test_intact_versions_are_shown_and_the_damage_is_named(s: Stream, args: tuple[str, ...], code: int) -> None:
    sound = run(*args, "--checkpoint", where(s), code=0 if code == DAMAGED else code)
    file = damage(s, 2)
    result = run(*args, "--checkpoint", where(s), code=code)
    assert file.name in flat(result.stderr) and "Restore it from a copy" in result.stderr
    if args[0] in ("get", "scan", "sql", "diff", "watch"):
        assert result.stdout == sound.stdout
    else:
        assert result.stdout


def test_status_lists_the_damage_with_its_remedy(s: Stream) -> None:
    file = damage(s, 2)
    found = json.loads(run("status", "--json", "--checkpoint", where(s), code=1).stdout)
    (fault,) = found["faults"]
    assert (fault["kind"], fault["severity"]) == ("damaged-manifest", "error")
    assert file.name in fault["what"] and "The versions 0 to 1 and 3 to 7 of the state can be read" in fault["what"]
    assert "statestore verify" in fault["remedy"] and "rewrite_state" in fault["remedy"]
    assert "Put the file back" in run("status", "--checkpoint", where(s), code=1).stdout
    assert "Put the file back" in run("top", "--once", "--checkpoint", where(s), code=1).stdout


def test_each_version_is_read_correctly_or_rejected_with_the_damage(s: Stream) -> None:
    everything = set(range(NEWEST + 1))
    # With a manifest goes its version, and those behind it up to the next snapshot.
    for damaged, gone in ((1, {0, 1, 2}), (2, {2}), (3, {3, 4}), (4, {4}), (5, {5, 6, 7}), (6, {6, 7})):
        whole = everything - gone
        file = manifest_of(s, damaged)
        sound = file.read_bytes()
        damage(s, damaged)
        client = CheckpointClient.open(where(s), damaged=lambda what: None)
        for version in range(NEWEST + 1):
            if version in whole:
                rows = client.scan("op", version=version)
                found = {row["k"]: row["n"] for batch in rows for row in batch.to_pylist()}
                assert found == s.at[version], (damaged, version)
            else:
                with pytest.raises(Exception, match=file.name):
                    client.get("op", 29, version=version)
        (query,) = overview_of_checkpoint(where(s)).queries
        assert query.oldest_version == min(whole) and query.readable == tuple(spans(sorted(whole)))
        assert query.completed_version == NEWEST and len(query.damages) == 1
        if NEWEST in gone:
            newest = run("scan", "op", "--checkpoint", where(s), code=2)
            assert f"there are the versions 0 to {damaged - 1}" in flat(newest.stderr) and not newest.stdout
            run("scan", "op", "--version", str(damaged - 1), "--checkpoint", where(s), code=DAMAGED)
        file.write_bytes(sound)
    assert overview_of_checkpoint(where(s)).queries[0].damages == ()


def test_nothing_is_read_by_an_older_manifest_where_the_newest_is_damaged(s: Stream) -> None:
    """If a user went back and a run rewrote versions, an older manifest would show the rows before the rewrite."""
    damage(s, NEWEST)
    for look in (overview_of_checkpoint, lambda at: StateVersions.look(find_state(at), passes_over_damage=True)):
        with pytest.raises(DamagedFileError, match="is damaged"):
            look(where(s))


def test_missing_manifest_is_reported_like_a_damaged_one(s: Stream) -> None:
    file = manifest_of(s, 2)
    file.unlink()
    assert "does not exist, but version 3" in run("scan", "op", "--checkpoint", where(s), code=DAMAGED).stderr


def test_verify_continues_and_names_both_kinds_of_damage(s: Stream) -> None:
    file = damage(s, 2)

    def verified(*args: str, code: int = 1) -> Any:
        return json.loads(run("verify", where(s), "--json", *args, code=code).stdout)

    found = verified()
    assert [file.name in d["path"] for d in found["damages"]] == [True] and not found["is_sound"] and not found["lost"]
    assert found["version"] == NEWEST and found["files"] > 4
    assert "Other versions or the query's start need the damaged files" in run("verify", where(s), code=1).stdout
    changelog = next((s.world.root / "ck/statestore/operators/op/2/1").rglob("6-*.changelog"))
    changelog.write_bytes(changelog.read_bytes()[:-1])
    found = verified()
    assert [d["path"].rpartition("/")[2] for d in found["damages"]] == [file.name, changelog.name]
    assert found["lost"] == ["op/1"]
    assert [d["path"].rpartition("/")[2] for d in verified("--version", "2")["damages"]] == [file.name]


def test_files_of_a_damaged_manifest_are_not_reported_as_unreferenced(s: Stream) -> None:
    before = {f["path"]: f["kept_by"] for f in json.loads(run("files", where(s), "--json", code=0).stdout)}
    file = damage(s, 2)
    result = run("files", where(s), "--json", code=DAMAGED)
    after = {f["path"]: f["kept_by"] for f in json.loads(result.stdout)}
    assert file.name in flat(result.stderr)
    assert before.keys() == after.keys() and all(after[path] for path, by in before.items() if by)
    assert [UNKNOWN] in after.values() and "verify" in after[f"manifests/{file.name}"][0]


def test_coordinator_uses_all_manifests_or_fails(s: Stream) -> None:
    file = damage(s, 2)
    s.c = s.coordinator()
    with pytest.raises(DamagedFileError, match=file.name):
        s.c.register_query(s.registration)


def test_a_damaged_manifest_that_no_version_needs_is_named_and_hides_nothing(s: Stream) -> None:
    """The coordinator that begins next reads the manifest, too."""
    before = {v: manifest_of(s, v) for v in range(1, NEWEST + 1)}
    s.c = s.coordinator()
    assert s.c.register_query(s.registration).refusal is None
    (replaced,) = (path for v, path in before.items() if manifest_of(s, v) != path)
    replaced.write_bytes(b"rubbish" * 40)
    (query,) = overview_of_checkpoint(where(s)).queries
    assert query.oldest_version == 0 and replaced.name in query.damages[0]


def test_changes_of_an_unknown_version_are_missing_from_no_answer(s: Stream) -> None:
    file = damage(s, 2)
    for args in (("watch", "op", "--from-version", "1", "--changes", "99"), ("watch", "op", "--from-version", "2")):
        assert file.name in flat(run(*args, "--checkpoint", where(s), code=2).stderr), args
    # Both versions are whole, and a diff reads them.
    assert "added" in run("diff", "op", "1", "3", "--summary", "--checkpoint", where(s), code=1).stdout
    versions = StateVersions.look(find_state(where(s)), passes_over_damage=True)
    assert versions.reading_of_changes("op", 3, 6).version == 6
    with pytest.raises(VersionNotFoundError, match=file.name):
        versions.reading_of_changes("op", 1, 3)


def test_remedies_of_a_damaged_manifest_let_a_query_start(s: Stream, tmp_path: Path) -> None:
    file, sound = manifest_of(s, 2), manifest_of(s, 2).read_bytes()
    damage(s, 2)
    (fault,) = json.loads(run("status", "--json", "--checkpoint", where(s), code=1).stdout)["faults"]
    assert (
        fault["remedy"].startswith("Put the file back from a copy") and "rewrite_state(version=...)" in fault["remedy"]
    )
    with pytest.raises(DamagedFileError, match=file.name):
        s.coordinator().register_query(s.registration)
    readable = re.search(r"The versions 0 to 1 and 3 to (\d+) of the state can be read", fault["what"])
    assert readable is not None
    version, new = int(readable[1]), str(tmp_path / "new")
    report = rewrite_state(where(s), "op", lambda batch: batch, new, version=version, workers=OwnWorkers())
    again = msgspec.structs.replace(
        s.registration, query_id=report.query_id, checkpoint_location=new, state_location=f"{new}/statestore"
    )
    answer = s.coordinator().register_query(again)
    assert (answer.refusal, answer.completed_version) == (None, version)
    rows = CheckpointClient.open(new).scan("op").to_pylist()
    assert {row["k"]: row["n"] for row in rows} == s.at[version]
    file.write_bytes(sound)
    assert s.coordinator().register_query(s.registration).refusal is None
