"""Restored checkpoint locations, whole or not, as the coordinator sees them."""

from __future__ import annotations

import json
import re
import shutil
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from backends.formats import snapshot
from backends.formats.manifest import unseal
from backends.storage.checkpoint_storage import CheckpointStorage
from backends.storage.locations import FileRef
from coordinator_actor.coordinator import Coordinator
from coordinator_actor.durable.manifests import QueryFile
from coordinator_actor.exceptions import SavepointError
from coordinator_actor.messages import HostInfo, HostReport, OperatorSpec, QueryRegistration
from coordinator_actor.savepoints.restore import RestoredSavepoint, restore_into_checkpoint
from tests.coordinator_actor.savepoints.savepoint_makers import BATCH, INTS, G, Savepoint, restore, small, storage, tree
from tests.effort import effort


@pytest.fixture
def made(tmp_path: Path) -> Savepoint:
    return small(tmp_path)


def registration(target: Path, query_id: str, **changes: Any) -> QueryRegistration:
    given = QueryRegistration(
        query_id=query_id,
        run_id="run1",
        name=None,
        session_id="s",
        checkpoint_location=str(target),
        state_location=str(target / "statestore"),
        operators=(OperatorSpec("op", 4, INTS.to_json()), OperatorSpec("none", 4, INTS.to_json())),
        key_groups=G,
    )
    return msgspec.structs.replace(given, **changes)


SPECS = (OperatorSpec("op", 2, INTS.to_json()), OperatorSpec("none", 2, INTS.to_json()))


def coordinator() -> Coordinator:
    made = Coordinator(lambda: 1000.0, storage)
    made.register_host(HostInfo("h0", "a", "grpc://127.0.0.1:1", "node", "s"), HostReport())
    return made


def test_the_coordinator_resumes_from_a_restored_checkpoint(made: Savepoint, tmp_path: Path) -> None:
    target = tmp_path / "new"
    restored = restore(made, target, num_partitions={"op": 2})
    assert (restored.version, restored.batch_id) == (BATCH + 1, BATCH)
    assert json.loads((target / "metadata").read_text()) == {"id": restored.query_id}
    assert uuid.UUID(restored.query_id)
    for path in ("offsets/3", "offsets/4", "commits/3", "commits/4", "sources/0/0", "sources/0/9.compact"):
        assert (target / path).read_bytes() == (tmp_path / "old" / path).read_bytes()
    assert {f for f in tree(target) if not f.startswith("statestore/")} == {"metadata"} | tree(made.path / "spark")
    query = unseal((target / "statestore/query.json").read_bytes(), QueryFile, "query.json")
    assert query == QueryFile(restored.query_id, G)
    specs = (OperatorSpec("op", 2, INTS.to_json()), OperatorSpec("none", 4, INTS.to_json()))
    answer = coordinator().register_query(registration(target, restored.query_id, operators=specs))
    assert (answer.refusal, answer.completed_version, answer.epoch) == (None, BATCH + 1, 2)
    refused = coordinator().register_query(registration(target, "other", operators=specs, run_id="run2"))
    assert refused.refusal is not None and "belongs to query" in refused.refusal


def test_state_alone_is_version_0_of_a_new_query(made: Savepoint, tmp_path: Path) -> None:
    target = tmp_path / "new"
    restored = restore(made, target, state_only=True)
    assert (restored.version, restored.batch_id) == (0, None)
    assert {f for f in tree(target) if not f.startswith("statestore/")} == {"metadata"}
    c = coordinator()
    answer = c.register_query(registration(target, restored.query_id))
    assert (answer.refusal, answer.completed_version) == (None, 0)
    wrong = registration(target, restored.query_id, run_id="run2", key_groups=2 * G)
    refusal = coordinator().register_query(wrong).refusal
    assert refusal is not None and f"has {G} key groups" in refusal
    for p in range(4):
        lineage = c.lineage("run1", "op", p, 0)
        (ref,) = lineage.snapshots
        descriptor = snapshot.read_descriptor(storage(target / "statestore"), ref)
        assert (ref.version, ref.head, descriptor.state.head) == (0, lineage.head, lineage.head)
        assert c.open_for_read("run1", "op", p).head == lineage.head


class Failing(CheckpointStorage):
    """Fails from the n-th write of all on, whatever storage it is of."""

    left = 0
    paths: list[str] = []

    def _count(self, path: str) -> None:
        if Failing.left == 0:
            raise OSError("dead")
        Failing.left -= 1
        Failing.paths.append(path)

    def put_new(self, path: str, data: bytes) -> FileRef:
        self._count(path)
        return super().put_new(path, data)

    def put_file(self, path: str, source: Path) -> FileRef:
        self._count(path)
        return super().put_file(path, source)


class Dying(Failing):
    """Removes nothing either after that write, as a process that is dead."""

    def delete(self, path: str) -> None:
        if not Failing.left:
            raise OSError("dead")
        super().delete(path)

    def delete_all(self, paths: Iterable[str]) -> None:
        for path in paths:
            self.delete(path)


@pytest.mark.parametrize("state_only", [False, True])
def test_a_restore_that_died_is_refused_wherever_it_died(made: Savepoint, tmp_path: Path, state_only: bool) -> None:
    def run(target: Path, left: int) -> RestoredSavepoint:
        Failing.left, Failing.paths = left, []
        return restore_into_checkpoint(
            str(made.path),
            str(target),
            num_partitions=2,
            backend="file",
            state_only=state_only,
            threads=1,
            open_storage=lambda p, o: Dying.open(p, o, fsync=False),
        )

    run(tmp_path / "whole", 1000)
    paths = list(Failing.paths)
    assert paths[0] == "query.json" and paths[-1] == "metadata"
    spark = [p for p in paths if p.partition("/")[0] in ("sources", "offsets", "commits", "metadata")]
    assert paths[-len(spark) :] == spark and paths[-len(spark) - 1].startswith("manifests/")
    for left in sorted({0, 1, *range(2, len(paths), effort(3, 1)), len(paths) - 1}):
        target = tmp_path / f"died-{left}"
        with pytest.raises(OSError, match="dead"):
            run(target, left)
        if left == 0:
            assert not target.exists() or not tree(target)
            continue
        # As Spark does then: it gives the query an id, because the metadata file is missing.
        answer = coordinator().register_query(registration(target, "made by Spark"))
        assert answer.refusal is not None and "belongs to query" in answer.refusal, paths[left]
        with pytest.raises(SavepointError, match="Choose another, or remove it if it was left by a call that failed"):
            run(target, 1000)
        shutil.rmtree(target)
        again = registration(target, run(target, 1000).query_id, operators=SPECS)
        assert coordinator().register_query(again).refusal is None, paths[left]


def test_the_remains_of_a_failed_restore_are_removed_where_the_state_is_elsewhere(
    made: Savepoint, tmp_path: Path
) -> None:
    target, base = tmp_path / "new", str(tmp_path / "base")
    restore_into_checkpoint(str(made.path), str(tmp_path / "whole"), state_location=f"{base}-2", open_storage=storage)
    writes = len(tree(tmp_path / "whole")) + len(tree(tmp_path / "base-2"))
    for left in range(1, writes):
        Failing.left, Failing.paths = left, []
        with pytest.raises(OSError, match="dead"):
            restore_into_checkpoint(
                str(made.path), str(target), state_location=base, threads=1, open_storage=Dying.open
            )
        with pytest.raises(SavepointError, match="Choose another, or remove it") as refused:
            restore(made, target, state_location=base)
        in_the_way = re.search(r"in (\S+) there is (.+) already\. Choose", str(refused.value))
        assert in_the_way is not None
        for name in in_the_way[2].split(", "):
            held = Path(in_the_way[1]) / name
            shutil.rmtree(held) if held.is_dir() else held.unlink()
        restored = restore(made, target, state_location=base)
        there = registration(target, restored.query_id, state_location=f"{base}/{restored.query_id}")
        assert coordinator().register_query(there).refusal is None
        shutil.rmtree(target)


@pytest.mark.parametrize("base", [None, "base"])
def test_a_restore_that_fails_leaves_nothing(made: Savepoint, tmp_path: Path, base: str | None) -> None:
    where = {"state_location": None if base is None else str(tmp_path / base), "num_partitions": 2, "threads": 1}
    Failing.left, Failing.paths = 1000, []
    restore_into_checkpoint(str(made.path), str(tmp_path / "whole"), **where, open_storage=Failing.open)
    held, paths = tree(tmp_path), list(Failing.paths)

    def progress(step: str) -> None:
        if "removing" in step:
            raise BrokenPipeError("stdout is closed")

    for left in range(len(paths)):
        Failing.left, Failing.paths = left, []
        with pytest.raises(OSError, match="dead"):
            restore_into_checkpoint(
                str(made.path), str(tmp_path / "new"), **where, progress=progress, open_storage=Failing.open
            )
        assert tree(tmp_path) == held, f"after a failure to write {paths[left]}"


def test_state_can_be_kept_elsewhere(made: Savepoint, tmp_path: Path) -> None:
    restored = restore(made, tmp_path / "new", state_location=str(tmp_path / "base"), new_query_id=lambda: "q1")
    assert restored.query_id == "q1" and not (tmp_path / "new/statestore").exists()
    moved = registration(tmp_path / "new", "q1", state_location=str(tmp_path / "base/q1"))
    assert coordinator().register_query(moved).refusal is None


def test_a_query_cannot_go_back_below_the_restored_version(made: Savepoint, tmp_path: Path) -> None:
    target = tmp_path / "new"
    restored = restore(made, target)
    for directory in ("offsets", "commits"):
        (target / directory / str(BATCH)).unlink()
    refusal = coordinator().register_query(registration(target, restored.query_id)).refusal
    assert refusal is not None and f"versions {BATCH + 1} to {BATCH + 1} are kept" in refusal
