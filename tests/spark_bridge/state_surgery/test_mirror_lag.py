"""How old the state of a mirror may be, and which batches of Spark follow each other; without Spark."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from backends.encoding.operator_schema import OperatorSchema, evolved
from backends.exceptions import IncompatibleSchemaError, InvalidStateStoreArgument
from backends.storage.checkpoint_storage import CheckpointStorage
from coordinator_actor.messages import MIRROR
from spark_bridge.state_surgery.mirror import MirrorColumn, MirroredState, MirrorLag, SparkBatch, _states, last_planned
from spark_bridge.state_surgery.spark_state import SparkOperator, check_state_of_spark

NOW = 1_800_000_000


class Checkpoint:
    """The logs of a query; each commit has a time."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.storage = CheckpointStorage.open(str(root))

    def commit(self, number: int, at: float, plan: str = "plan") -> SparkBatch:
        for directory, text in (("offsets", plan), ("commits", "v1")):
            path = self.root / directory / str(number)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            os.utime(path, (at, at))
        batch = SparkBatch.at(self.storage, number)
        assert batch is not None
        return batch

    def remove(self, *numbers: int) -> None:
        for number in numbers:
            (self.root / "commits" / str(number)).unlink()
            (self.root / "offsets" / str(number)).unlink()


@pytest.fixture
def native(tmp_path: Path) -> Checkpoint:
    return Checkpoint(tmp_path / "native")


@pytest.fixture
def own(tmp_path: Path) -> Checkpoint:
    return Checkpoint(tmp_path / "own")


def test_operator_keeps_its_state_of_spark() -> None:
    def schema(variable: str) -> OperatorSchema:
        columns = (MirrorColumn("k", "key.b0", pa.int64()),), (MirrorColumn("n", "value.b0", pa.int64()),)
        return MirroredState("seen", SparkOperator(1, "transformWithStateInPandasExec"), variable, *columns).schema

    assert evolved(schema("a"), schema("a"), MIRROR) == schema("a")
    with pytest.raises(IncompatibleSchemaError, match="mirrors cannot change from '1/a' to '1/b'"):
        evolved(schema("a"), schema("b"), MIRROR)


class Clock:
    now = float(NOW)

    def __call__(self) -> float:
        return self.now


def lag_of(native: Checkpoint, own: Checkpoint, planned: tuple[int, SparkBatch] | None) -> tuple[MirrorLag, Clock]:
    clock = Clock()
    return MirrorLag(native.storage, own.storage, planned, clock), clock


def test_a_mirror_of_no_state_is_refused() -> None:
    query: Any = SimpleNamespace(operators=[SparkOperator(0, "dedupe")], storage=SimpleNamespace(location="native"))
    with pytest.raises(InvalidStateStoreArgument, match=r"operators= is empty.*states of native are 0: name them"):
        _states(query, {})


def test_state_that_the_session_cannot_find_is_refused_with_the_setting(native: Checkpoint) -> None:
    """Spark's reader takes the format of its session, and does not look at that of the checkpoint."""
    native.storage.put_new("metadata", b"{}")
    native.commit(0, NOW)
    settings: dict[str, str] = {}
    spark: Any = SimpleNamespace(version="4.2.0", conf=settings)
    check_state_of_spark("mirror", spark, native.storage, "")
    ids = native.root / "commits" / "1"
    ids.write_text('v2\n{"nextBatchWatermarkMs":0,"stateUniqueIds":{"0":[["0cb52b8e"]]}}')
    with pytest.raises(InvalidStateStoreArgument, match=r'checkpointFormatVersion", "2"\), and call mirror again'):
        check_state_of_spark("mirror", spark, native.storage, "")
    settings["spark.sql.streaming.stateStore.checkpointFormatVersion"] = "2"
    check_state_of_spark("mirror", spark, native.storage, "")


def test_lag_counts_from_the_first_batch_that_is_not_shown(native: Checkpoint, own: Checkpoint) -> None:
    first = native.commit(3, NOW - 100, "a")
    lag, clock = lag_of(native, own, None)
    lag.look()
    assert lag.seconds() is None, "nothing is shown yet"
    lag.planned(0, first)
    lag.look()
    assert lag.seconds() is None, "the mirror has not committed its batch"
    own.commit(0, NOW)
    lag.look()
    assert lag.seconds() == 0
    clock.now += 5
    assert lag.seconds() == 5, "no look has followed"
    native.commit(4, NOW + 2, "b")
    native.commit(5, NOW + 4, "c")
    lag.look()
    assert lag.seconds() == 3
    lag.planned(1, native.commit(5, NOW + 4, "c"))
    lag.look()
    assert lag.seconds() == 3, "the mirror has not committed its batch"
    own.commit(1, clock.now)
    lag.look()
    assert lag.seconds() == 0


def test_lag_grows_after_a_rollback_and_when_batches_are_gone(native: Checkpoint, own: Checkpoint) -> None:
    native.commit(8, NOW - 50, "a")
    tenth = native.commit(10, NOW - 30, "c")
    own.commit(4, NOW - 29)
    lag, clock = lag_of(native, own, (4, tenth))
    assert lag.seconds() == 29, "until the first look, the time of the mirror's own commit counts"
    lag.look()
    assert lag.seconds() == 0
    native.remove(10)
    clock.now += 7
    lag.look()
    assert lag.seconds() == 7, "rolled back"
    native.commit(10, NOW + 6, "c")
    lag.look()
    assert lag.seconds() == 7, "the same plan ran again, and was committed at another time"

    ninth = native.commit(9, NOW - 86_400, "x")
    own.commit(5, NOW - 86_399)
    lag, clock = lag_of(native, own, (5, ninth))
    native.remove(10)
    native.commit(500, NOW - 10, "y")  # the oldest that Spark has kept
    lag.look()
    assert lag.seconds() == 86_399


def test_checkpoints_of_other_queries_are_refused(native: Checkpoint, own: Checkpoint, tmp_path: Path) -> None:
    native.commit(0, NOW)
    assert last_planned(own.storage, native.storage) is None
    for plan in ("v1\n{}\n17", 'v1\n{}\n{"logOffset":0}', "v1"):
        own.commit(0, NOW, plan)
        with pytest.raises(InvalidStateStoreArgument, match="not the checkpoint of a mirror"):
            last_planned(own.storage, native.storage)
    for location in (native.root, native.root / "mirror"):
        with pytest.raises(InvalidStateStoreArgument, match="not the checkpoint of a mirror"):
            last_planned(CheckpointStorage.open(str(location)), native.storage)
    end = json.dumps({"batch": 7, "digest": "d"})
    for plan in (f"v1\n{{}}\n{end}", f"v2\n{{}}\n0:{end}"):
        own.commit(0, NOW, plan)
        assert last_planned(own.storage, native.storage) == (0, SparkBatch(7, "d"))
