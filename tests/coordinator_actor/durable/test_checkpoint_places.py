"""A state that is not in its checkpoint belongs to one checkpoint: copies are refused, moves and forks are commands."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from backends.encoding.sorted_pairs import SortedPairs
from backends.exceptions import MissingFileError, StorageError
from backends.formats.changelog import read_changelog
from backends.formats.manifest import Manifest
from backends.storage.checkpoint_storage import CheckpointStorage
from coordinator_actor.coordinator import Coordinator
from coordinator_actor.durable.manifests import ManifestLog
from coordinator_actor.durable.moved_checkpoints import BoundCheckpoint, fork_checkpoint, move_checkpoint
from coordinator_actor.exceptions import CheckpointPlaceError
from coordinator_actor.forgetting import ForgetRequest, forget_in_storage
from coordinator_actor.messages import QueryRegistration
from coordinator_actor.reading.stored_versions import find_state
from coordinator_actor.rewriting import ForgottenKeys
from spark_bridge.cli.main import app
from tests.command_line import CliRunner
from tests.coordinator_actor.coordinator_world import World


class NobodysKeys:
    """``ForgottenKeys`` that no row belongs to: all files are exchanged, and all rows stay."""

    num_keys = 1

    def partitions(self, num_partitions: int) -> frozenset[int]:
        return frozenset(range(num_partitions))

    def without(self, family: str, pairs: SortedPairs) -> SortedPairs:
        return pairs


class Elsewhere(World):
    """A checkpoint ``ck`` that has come to version 2, and its state below ``base``."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.base = str(root / "base")
        self.running = "ck"
        self.write_id(root / "ck", "q")

    @staticmethod
    def write_id(checkpoint: Path, query_id: str) -> None:
        checkpoint.mkdir()
        (checkpoint / "metadata").write_text(json.dumps({"id": query_id}))
        (checkpoint / ".metadata.crc").write_bytes(b"crc of " + query_id.encode())

    def start(self, c: Coordinator, run: str, checkpoint: str = "ck", **changes: Any) -> str | None:
        """Start the query of a checkpoint as the driver does, and return why it is refused."""
        return c.register_query(self.of(run, checkpoint, **changes)).refusal

    def of(self, run: str, checkpoint: str, **changes: Any) -> QueryRegistration:
        query_id = json.loads((self.root / checkpoint / "metadata").read_text())["id"]
        given = {"checkpoint_location": str(self.root / checkpoint), "state_location": f"{self.base}/{query_id}"}
        return self.registration(run, query_id=query_id, **{**given, **changes})

    def batch(self, c: Coordinator, run: str, number: int, checkpoint: str = "ck") -> None:
        self.plan(number, checkpoint)
        self.running = checkpoint
        if number % 2:
            self.run_grouped_batch(c, number, run=run)
        else:
            self.run_batch(c, number, run=run)

    def commit_spark(self, batch: int) -> None:
        path = self.root / self.running / "commits" / str(batch)
        path.parent.mkdir(exist_ok=True)
        path.write_text("v1\n{}")

    def plan(self, number: int, checkpoint: str = "ck") -> None:
        path = self.root / checkpoint / "offsets" / str(number)
        path.parent.mkdir(exist_ok=True)
        path.write_text("v1\n{}\n{}")

    def files(self, *directories: str) -> dict[str, bytes]:
        found = [p for d in directories for p in sorted((self.root / d).rglob("*")) if p.is_file()]
        return {str(p.relative_to(self.root)): p.read_bytes() for p in found}

    def copy(self, source: str = "ck", target: str = "copy") -> str:
        shutil.copytree(self.root / source, self.root / target)
        return str(self.root / target)


@pytest.fixture
def world(tmp_path: Path) -> Elsewhere:
    made = Elsewhere(tmp_path)
    c = made.coordinator()
    assert made.start(c, "run1") is None
    made.batch(c, "run1", 0)
    made.batch(c, "run1", 1)
    return made


def test_a_copied_checkpoint_is_refused_and_the_original_continues(world: Elsewhere) -> None:
    c = world.coordinator()
    assert world.start(c, "run2") is None
    copy, before = world.copy(), world.files("base")
    refusal = world.start(c, "run3", "copy")
    assert refusal is not None
    for words in (f"belongs to the checkpoint at {world.root}/ck", f"checkpoint move {copy}", f"fork {copy}"):
        assert words in refusal
    assert f"--state-location {world.base}\n" in refusal
    assert world.files("base") == before
    world.batch(c, "run2", 2)  # it was not retired
    assert world.start(world.coordinator(), "run4", "copy") is not None, "on another cluster"


def test_a_state_without_its_checkpoints_location_resumes_and_records_it(world: Elsewhere) -> None:
    shutil.rmtree(world.root / "base/q/checkpoints")  # as an older version has left it
    world.copy()
    assert world.start(world.coordinator(), "run2") is None
    assert world.start(world.coordinator(), "run3", "copy") is not None


def test_the_same_place_by_another_name_is_the_same(world: Elsewhere) -> None:
    (world.root / "link").symlink_to(world.root / "ck")
    assert world.start(world.coordinator(), "run2", "link") is None
    there = f"file://{world.root}/ck/"
    assert world.start(world.coordinator(), "run3", checkpoint_location=there) is None


def test_a_checkpoint_that_contains_its_state_may_be_anywhere(world: Elsewhere) -> None:
    shutil.copytree(world.root / "base/q", world.root / "ck/statestore")
    copy = world.copy()
    assert world.start(world.coordinator(), "run2", "copy", state_location=f"{copy}/statestore") is None


def test_of_two_that_start_first_at_once_one_has_the_state(tmp_path: Path) -> None:
    world = Elsewhere(tmp_path)
    world.copy()
    refusals: list[str | None] = []

    def other(path: str) -> None:
        if path.startswith("checkpoints/"):
            world.put_hook = None
            refusals.append(world.start(world.coordinator(), "run2", "copy"))

    world.put_hook = other
    refusals.append(world.start(world.coordinator(), "run1"))
    assert refusals[0] is None and refusals[1] is not None and "copy" in refusals[1]


def test_a_moved_checkpoint_resumes_at_its_new_place(world: Elsewhere) -> None:
    moved = world.copy(target="moved")
    with pytest.raises(CheckpointPlaceError, match=r"/ck still has metadata, offsets, commits, so that .* is a copy"):
        move_checkpoint(moved, world.base)
    shutil.rmtree(world.root / "ck")
    (world.root / "moved/offsets/1").unlink()
    with pytest.raises(CheckpointPlaceError, match=r"moved has no offsets/1, and the state .* version 2"):
        move_checkpoint(moved, world.base)
    world.plan(1, "moved")
    assert world.start(world.coordinator(), "run2", "moved") is not None
    assert move_checkpoint(moved, world.base).is_new
    assert not move_checkpoint(moved, world.base).is_new
    assert world.start(world.coordinator(), "run3", "moved") is None
    world.copy("moved", "ck")
    assert world.start(world.coordinator(), "run4") is not None, "the old place has it no more"


def test_a_fork_resumes_with_its_own_state(world: Elsewhere) -> None:
    copy, before = world.copy(), world.files("ck", "base")
    forked = fork_checkpoint(copy, world.base)
    assert forked.is_new and json.loads((world.root / "copy/metadata").read_text()) == {"id": forked.query_id}
    assert not (world.root / "copy/.metadata.crc").exists(), "it would be that of the old content"
    assert {p: b for p, b in world.files("ck", "base").items() if not p.startswith(f"base/{forked.query_id}")} == before
    assert fork_checkpoint(copy, world.base) == BoundCheckpoint(copy, forked.state_location, forked.query_id, False)
    c = world.coordinator()
    assert world.start(c, "run2") is None and world.start(c, "run3", "copy") is None
    world.batch(c, "run3", 2, "copy")
    world.batch(c, "run2", 2)
    assert c.batch_committed("run3", 2) and c.batch_committed("run2", 2)


def test_an_original_that_advances_is_not_forked(world: Elsewhere) -> None:
    copy, c = world.copy(), world.coordinator()
    assert world.start(c, "run2") is None

    def another_batch(step: str) -> None:
        if "manifests" in step:
            world.batch(c, "run2", 2)

    with pytest.raises(CheckpointPlaceError, match="advances while its state is copied"):
        fork_checkpoint(copy, world.base, progress=another_batch)
    assert json.loads((world.root / "copy/metadata").read_text()) == {"id": "q"}
    assert fork_checkpoint(copy, world.base).is_new


def test_a_copy_that_is_not_complete_or_too_old_is_not_forked(world: Elsewhere) -> None:
    copy = world.copy()
    (world.root / "copy/offsets/1").unlink()
    with pytest.raises(CheckpointPlaceError, match=r"has commits/1 and no offsets/1.*not copied completely"):
        fork_checkpoint(copy, world.base)
    for name in ("offsets/0", "commits/0", "commits/1"):
        (world.root / "copy" / name).unlink()
    with pytest.raises(
        CheckpointPlaceError, match=r"begins with batch 0.*versions 1 to 2 are kept: the copy is too old"
    ):
        fork_checkpoint(copy, world.base)
    assert [p.name for p in (world.root / "base").iterdir()] == ["q"]


def test_a_copy_that_begins_below_the_oldest_version_that_can_be_read_is_not_forked(
    world: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Manifests of lower versions are kept as well, as long as an older snapshot leads to the oldest version."""
    copy, chain = world.copy(), ManifestLog.chain
    for name in ("offsets/1", "commits/1"):
        (world.root / "copy" / name).unlink()

    def with_retention(self: ManifestLog) -> dict[int, Manifest]:
        kept = chain(self)
        return {**kept, 2: msgspec.structs.replace(kept[2], oldest=2)}

    monkeypatch.setattr(ManifestLog, "chain", with_retention)
    with pytest.raises(CheckpointPlaceError, match=r"begins with batch 1.*versions 2 to 2 are kept"):
        fork_checkpoint(copy, world.base)


def test_a_fork_has_all_changelogs_those_in_groups_too(world: Elsewhere) -> None:
    forked = fork_checkpoint(world.copy(), world.base)
    log = ManifestLog(CheckpointStorage.open(forked.state_location), "test")
    log.refresh()
    files = [e.changelog for m in log.chain().values() for o in m.operators.values() for e in o.partitions.values()]
    assert [file.within is None for file in files] == [False, False, True, True]
    for file in files:
        meta, _ = read_changelog(log.storage.read(file))
        assert f"/{meta.partition}/default/{meta.version}-" in file.path


def test_a_run_is_refused_after_files_were_exchanged_without_its_coordinator(world: Elsewhere) -> None:
    """Changelogs of its batch may be gone by then whose tasks Spark does not run again."""
    forget_in_storage(
        find_state(str(world.root / "ck"), world.base),
        ForgetRequest("op", lambda schema, groups: cast(ForgottenKeys, NobodysKeys())),
    )
    c = world.coordinator()
    refusal = world.start(c, "run1")
    assert refusal is not None and "forget_keys" in refusal and refusal.endswith("Start the query again.")
    assert world.start(c, "run2") is None
    world.batch(c, "run2", 2)
    assert c.batch_committed("run2", 2)


def test_a_fork_has_the_files_that_were_exchanged(world: Elsewhere) -> None:
    forget_in_storage(
        find_state(str(world.root / "ck"), world.base),
        ForgetRequest("op", lambda schema, groups: cast(ForgottenKeys, NobodysKeys())),
    )
    forked = fork_checkpoint(world.copy(), world.base)
    log = ManifestLog(CheckpointStorage.open(forked.state_location), "test")
    log.refresh()
    files = [e.changelog for m in log.chain().values() for o in m.operators.values() for e in o.partitions.values()]
    assert len({read_changelog(log.storage.read(file))[0].version for file in files}) == 2
    c = world.coordinator()
    assert world.start(c, "run3", "copy") is None
    world.batch(c, "run3", 2, "copy")
    assert c.batch_committed("run3", 2)


def test_the_state_of_an_earlier_fork_is_not_taken_for_the_originals(world: Elsewhere) -> None:
    forked = fork_checkpoint(world.copy(), world.base)
    assert world.start(world.coordinator(), "run2", "copy") is None
    shutil.rmtree(world.root / "copy")
    world.copy()
    with pytest.raises(CheckpointPlaceError, match=f"has run on an earlier fork at .*/copy, .*{forked.query_id}"):
        fork_checkpoint(str(world.root / "copy"), world.base)


@pytest.mark.parametrize("command", [move_checkpoint, fork_checkpoint])
def test_without_a_state_there_nothing_is_done(world: Elsewhere, command: Callable[..., Any]) -> None:
    with pytest.raises(MissingFileError, match=r"q/query.json does not exist: there is no state of .* below .*nowhere"):
        command(str(world.root / "ck"), str(world.root / "nowhere"))
    Elsewhere.write_id(world.root / "other", "q2")
    shutil.copytree(world.root / "base/q", world.root / "base/q2")
    with pytest.raises(CheckpointPlaceError, match=r"belongs to query q, and .* belongs to query q2"):
        command(str(world.root / "other"), world.base)


def test_a_fork_that_dies_at_any_step_changes_no_original_and_can_be_repeated(world: Elsewhere) -> None:
    copy, before = world.copy(), world.files("ck", "base/q")
    deaths, files = 0, [p for p in before if p.startswith("base/q/")]
    for _ in range(2 * len(files)):
        try:
            forked = fork_checkpoint(copy, world.base, open_storage=DyingStorage().open)
            break
        except StorageError:
            deaths += 1
            assert world.files("ck", "base/q") == before
            assert world.start(world.coordinator(), f"copy{deaths}", "copy") is not None, "half a fork does not start"
    # As many files as the original's state has, then the checksum of Spark's metadata and that file; the last is no
    # death.
    assert deaths == len(files) + 1
    assert forked.is_new
    assert world.start(world.coordinator(), "last", "copy") is None


class DyingStorage:
    """Storage that fails at the second file that it is to change."""

    def __init__(self) -> None:
        self.changed = 0
        self._lock = threading.Lock()

    def open(self, location: str, options: Mapping[str, str]) -> CheckpointStorage:
        storage = CheckpointStorage.open(location, fsync=False)
        for name in ("put_new", "replace", "delete"):
            setattr(storage, name, partial(self._change, storage, getattr(storage, name)))
        return storage

    def _change(self, storage: CheckpointStorage, change: Callable[..., Any], path: str, *data: bytes) -> Any:
        with self._lock:
            is_change = storage.exists(path) is (len(data) == 0) or change.__name__ == "replace"
            if is_change and self.changed:
                raise StorageError("the process dies here")
            self.changed += is_change
            return change(path, *data)


def test_the_commands(world: Elsewhere) -> None:
    def run(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["checkpoint", *arguments, "--state-location", world.base])
        return result.exit_code, result.output

    copy = world.copy()
    code, said = run("move", copy)
    assert code == 2 and "still has metadata" in said
    code, said = run("fork", copy)
    assert code == 0 and "has its own state, at" in said and "copying" in said
    assert world.start(world.coordinator(), "run2", "copy") is None
    shutil.move(world.root / "ck", world.root / "moved")
    assert run("move", str(world.root / "moved"))[0] == 0
    assert world.start(world.coordinator(), "run3", "moved") is None


@pytest.mark.parametrize("verb", ["move", "fork"])
def test_the_command_that_a_refusal_prints_lets_the_checkpoint_resume(world: Elsewhere, verb: str) -> None:
    copy = "its copy"  # a name that a shell must be given in quotes
    if verb == "move":
        shutil.move(world.root / "ck", world.root / copy)
    else:
        world.copy(target=copy)
    options = {"aws_secret_access_key": "hunter2", "aws_region": "eu-central-1"}
    refusal = world.start(world.coordinator(), "run2", copy, storage_options=options)
    printed = re.search(rf"^  statestore (checkpoint {verb} .+)$", refusal or "", re.MULTILINE)
    assert printed is not None and refusal is not None and "hunter2" not in refusal, refusal
    assert "Replace '...' with the values of your program" in refusal
    command = printed[1]
    for name, value in options.items():
        assert command.count(f"--storage-option {name}=...") == 1
        command = command.replace(f"{name}=...", f"{name}={value}")
    result = CliRunner().invoke(app, shlex.split(command))
    assert result.exit_code == 0, result.output
    c = world.coordinator()
    assert world.start(c, "run3", copy) is None
    world.batch(c, "run3", 2, copy)
    assert c.batch_committed("run3", 2)


def test_a_checkpoint_that_was_left_at_its_old_place_is_removed_or_its_copy_is_forked(world: Elsewhere) -> None:
    copy = world.copy()
    with pytest.raises(CheckpointPlaceError, match=r"Stop the query and remove that directory, or give the copy") as at:
        move_checkpoint(copy, world.base, {"aws_region": "eu-central-1"})
    left = re.match(r"(\S+) still has", str(at.value))
    printed = re.search(r"^  statestore (checkpoint fork .+) --storage-option aws_region=...$", str(at.value), re.M)
    assert left is not None and printed is not None
    second = world.copy(target="second")
    result = CliRunner().invoke(app, shlex.split(printed[1].replace(copy, second)))
    assert result.exit_code == 0, result.output
    shutil.rmtree(left[1])
    assert move_checkpoint(copy, world.base).is_new
    c = world.coordinator()
    assert world.start(c, "run2", "copy") is None and world.start(c, "run3", "second") is None


def test_a_copy_that_is_not_complete_is_copied_again(world: Elsewhere) -> None:
    copy = world.copy()
    (world.root / "copy/offsets/1").unlink()
    with pytest.raises(CheckpointPlaceError, match=r"Copy the checkpoint again"):
        fork_checkpoint(copy, world.base)
    shutil.rmtree(copy)
    assert world.copy() == copy and fork_checkpoint(copy, world.base).is_new
    assert world.start(world.coordinator(), "run2", "copy") is None


@pytest.mark.parametrize("removes", [True, False])
def test_a_state_of_an_earlier_fork_is_removed_or_the_checkpoint_copied_to_another_place(
    world: Elsewhere, removes: bool
) -> None:
    fork_checkpoint(world.copy(), world.base)
    assert world.start(world.coordinator(), "run2", "copy") is None
    shutil.rmtree(world.root / "copy")
    copy = world.copy()
    with pytest.raises(CheckpointPlaceError) as refused:
        fork_checkpoint(copy, world.base)
    state = re.search(r"with the state at (\S+)\. If that state is no longer needed, remove it", str(refused.value))
    assert state is not None
    if removes:
        shutil.rmtree(state[1])
    else:
        shutil.rmtree(copy)
        copy = world.copy(target="another")
    assert fork_checkpoint(copy, world.base).is_new
    assert world.start(world.coordinator(), "run3", Path(copy).name) is None


def test_the_directory_that_a_missing_state_asks_for_is_that_of_the_session(world: Elsewhere) -> None:
    moved = str(world.root / "moved")
    shutil.move(world.root / "ck", moved)
    with pytest.raises(MissingFileError, match=r"Give the directory of spark\.statestore\.location"):
        move_checkpoint(moved, str(world.root / "nowhere"))
    assert move_checkpoint(moved, world.base).is_new


def test_a_state_that_is_moved_out_of_its_checkpoint_resumes(tmp_path: Path) -> None:
    """A session with ``spark.statestore.location`` asks for this where the state is in the checkpoint."""
    world = Elsewhere(tmp_path)
    inside = {"state_location": f"{tmp_path}/ck/statestore"}
    c = world.coordinator()
    assert world.start(c, "run1", **inside) is None
    world.batch(c, "run1", 0)
    Path(world.base).mkdir()
    shutil.move(inside["state_location"], f"{world.base}/q")
    c = world.coordinator()
    assert world.start(c, "run2") is None
    world.batch(c, "run2", 1)
    assert c.batch_committed("run2", 1)
