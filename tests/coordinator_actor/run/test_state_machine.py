"""The state machine of a run, without storage: only a written manifest makes a change count.

A failed write undoes the change.
"""

from __future__ import annotations

import msgspec
import pytest

from backends.exceptions import StorageError
from backends.formats.manifest import Manifest
from backends.formats.manifest_chain import Layout
from backends.storage.locations import FileRef
from coordinator_actor.checkpoints.pending_checkpoint import CheckpointIDCounter
from coordinator_actor.exceptions import (
    BatchHeldError,
    InvalidRequestError,
    LineageError,
    RetiredRunError,
    StaleBatchError,
    StaleOwnerError,
)
from coordinator_actor.messages import Acknowledge, Acknowledged, HostInfo
from coordinator_actor.run.holds import SavepointHold
from coordinator_actor.run.state_machine import RunMachine, WriteManifest
from coordinator_actor.run.versions import QueryVersions

OWNER = HostInfo("h0", "a", "grpc://127.0.0.1:1", "node", "s")
FAILURE = StorageError("disk full")


def changes(
    partition: int, attempt: str, version: int = 1, stage: int | None = 1, base: str | None = None
) -> Acknowledge:
    file = FileRef(f"operators/op/2/{partition}/default/{version}-{attempt}.changelog", 1, "digest")
    return Acknowledge("run", "op", partition, version, attempt, "h0", "a", file, base, 0.5, stage)


def due(write: WriteManifest | None) -> WriteManifest:
    assert write is not None
    return write


def written(machine: RunMachine, write: WriteManifest) -> Manifest:
    machine.manifest_written(write, write.manifest)
    return write.manifest


def attempts(manifest: Manifest) -> list[str]:
    return [entry.attempt for _, entry in manifest.operators["op"].partitions.items()]


@pytest.fixture
def machine() -> RunMachine:
    """A run of two partitions whose first batch is open."""
    made = RunMachine("run", QueryVersions({"op": Layout("op", 2, "rocksdb")}, 1024), CheckpointIDCounter())
    made.schema_ids = {"op": "schema"}
    made.open_batch(0, 10.0)
    return made


@pytest.fixture
def prepared(machine: RunMachine) -> RunMachine:
    written(machine, due(machine.acknowledge([changes(0, "a"), changes(1, "b")], 11.0)))
    return machine


def test_the_last_acknowledgement_needs_a_manifest(machine: RunMachine) -> None:
    assert machine.acknowledge([changes(0, "a")], 11.0) is None and machine.named_by(1) is None
    write = due(machine.acknowledge([changes(1, "b")], 12.0))
    assert machine.named_by(1) is None and machine.versions.chain == {}, "nothing counts before it is written"
    manifest = written(machine, write)
    assert (manifest.version, manifest.created_ms, attempts(manifest)) == (1, 12_000, ["a", "b"])
    assert machine.named_by(1) == manifest.id


def test_a_failed_write_undoes_the_acknowledgement(machine: RunMachine) -> None:
    machine.acknowledge([changes(0, "a")], 11.0)
    machine.write_failed(due(machine.acknowledge([changes(0, "refused"), changes(1, "refused")], 12.0)), FAILURE, 12.5)
    assert [e.attempt for e in machine.acknowledged(1).values()] == ["a"] and machine.is_uncertain
    manifest = written(machine, due(machine.acknowledge([changes(1, "b")], 13.0)))
    assert attempts(manifest) == ["a", "b"] and not machine.is_uncertain


def test_a_retried_task_needs_a_manifest_and_a_repeated_plan_one_for_all(prepared: RunMachine) -> None:
    assert attempts(written(prepared, due(prepared.acknowledge([changes(0, "again")], 12.0)))) == ["again", "b"]
    assert prepared.acknowledge([changes(0, "second", stage=2)], 13.0) is None and prepared.named_by(1) is None
    write = due(prepared.acknowledge([changes(1, "second", stage=2)], 14.0))
    prepared.write_failed(write, FAILURE, 14.5)
    assert prepared.named_by(1) is None, "the first repeated change still waits for a manifest"
    again = due(prepared.acknowledge([changes(1, "third", stage=2)], 15.0))
    assert attempts(written(prepared, again)) == ["second", "third"] and prepared.named_by(1) == again.manifest.id


def test_a_version_completes_only_with_the_changes_that_count(prepared: RunMachine) -> None:
    assert not prepared.must_recover(1) and prepared.settle(1, 12.0) is None
    prepared.acknowledge([changes(0, "second", stage=2)], 13.0)
    prepared.write_failed(due(prepared.settle(1, 14.0)), FAILURE, 14.0)
    assert attempts(written(prepared, due(prepared.settle(1, 15.0)))) == ["second", "b"]
    prepared.complete(1, 16.0)
    assert prepared.versions.completed == 1 and prepared.prepared is None and prepared.acknowledged(1) == {}


def test_a_manifest_in_doubt_is_written_again_before_its_version_completes(machine: RunMachine) -> None:
    machine.acknowledge([changes(0, "a")], 11.0)
    machine.write_failed(due(machine.acknowledge([changes(1, "b")], 12.0)), FAILURE, 12.0)
    first = written(machine, due(machine.acknowledge([changes(1, "b")], 13.0)))
    machine.write_failed(due(machine.acknowledge([changes(1, "c")], 14.0)), FAILURE, 14.0)
    second = written(machine, due(machine.settle(1, 15.0)))
    assert second.id > first.id and attempts(second) == ["a", "b"] and second.created_ms == first.created_ms
    assert machine.settle(1, 16.0) is None


def test_no_plan_waits_once_the_run_is_being_replaced(prepared: RunMachine) -> None:
    assert prepared.wait_no_more(12.0) is None
    assert attempts(written(prepared, due(prepared.acknowledge([changes(0, "x", stage=2)], 13.0)))) == ["x", "b"]


def test_the_end_of_a_run_cancels_what_is_acknowledged(prepared: RunMachine) -> None:
    prepared.complete(1, 12.0)
    prepared.open_batch(1, 13.0)
    count = prepared.checkpoints.acknowledge

    def ends(*message: object) -> object:
        prepared.checkpoints.cancel_all("the query has ended")
        return count(*message)  # type: ignore[arg-type]

    prepared.checkpoints.acknowledge = ends  # type: ignore[method-assign, assignment]
    with pytest.raises(RetiredRunError, match="was cancelled"):
        prepared.acknowledge([changes(0, "late", 2), changes(1, "late", 2)], 14.0)


def test_an_acknowledgement_is_checked_and_a_lost_answer_is_given_again(prepared: RunMachine) -> None:
    check = prepared.check_acknowledgement
    assert check(changes(0, "a"), OWNER) == Acknowledged(1, prepared.named_by(1))
    assert check(changes(0, "other"), OWNER) is None
    with pytest.raises(StaleOwnerError):
        check(changes(0, "a"), HostInfo("h1", "a", "grpc://127.0.0.1:2", "node", "s"))
    with pytest.raises(StaleBatchError):
        check(changes(0, "a", version=2), OWNER)
    with pytest.raises(LineageError):
        check(changes(0, "a", base="another"), OWNER)


def test_a_held_batch_waits_and_an_earlier_one_is_too_late(prepared: RunMachine) -> None:
    prepared.savepoint_hold = SavepointHold(1)
    prepared.require_not_held(0, 12.0)
    with pytest.raises(BatchHeldError):
        prepared.require_not_held(1, 12.0)
    prepared.note_opened(3)
    with pytest.raises(StaleBatchError):
        prepared.require_newest(2)
    assert prepared.may_be_committed(3) and not prepared.may_be_committed(2)


def test_a_repeat_that_the_end_of_the_run_cancels_changes_nothing(prepared: RunMachine) -> None:
    count = prepared.checkpoints.acknowledge

    def ends(*message: object) -> object:
        prepared.checkpoints.cancel_all("the query has ended")
        return count(*message)  # type: ignore[arg-type]

    prepared.checkpoints.acknowledge = ends  # type: ignore[method-assign, assignment]
    with pytest.raises(InvalidRequestError, match="the run has ended"):
        prepared.acknowledge([changes(0, "late")], 12.0)
    assert prepared.acknowledged(1)[("op", 0)].attempt == "a"


@pytest.mark.parametrize("is_prepared", [False, True])
def test_changes_that_no_manifest_can_name_leave_the_state_as_it_was(machine: RunMachine, *, is_prepared: bool) -> None:
    machine.acknowledge([changes(0, "a")], 11.0)
    if is_prepared:
        written(machine, due(machine.acknowledge([changes(1, "b")], 12.0)))
    wrong = msgspec.structs.replace(changes(1, "c"), file=FileRef("elsewhere", 1, "digest"))
    with pytest.raises(ValueError, match="elsewhere is not in"):
        machine.acknowledge([wrong], 13.0)
    with pytest.raises(InvalidRequestError, match="op/2 is not a partition of run"):
        machine.acknowledge([changes(2, "d")], 13.0)
    assert [e.attempt for e in machine.acknowledged(1).values()] == (["a", "b"] if is_prepared else ["a"])
    assert attempts(written(machine, due(machine.acknowledge([changes(1, "d")], 14.0)))) == ["a", "d"]
    assert not machine.checkpoints.get_pending_checkpoints()
