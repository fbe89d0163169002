"""A host's part in savepoints, without Ray: its exports, its pauses, and its reports."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from backends.encoding.key_groups import key_groups, partition_of
from backends.encoding.keys import encode_keys
from backends.encoding.schema import StateSchema
from backends.encoding.sorted_pairs import SortedPairs
from backends.encoding.values import encode_values
from backends.exceptions import MissingFileError, StoreClosedError
from backends.storage.checkpoint_storage import CheckpointStorage
from coordinator_actor.messages import HostInfo, OperatorSpec, QueryRegistration, SavepointExported, SavepointOrder
from coordinator_actor.savepoints import export as savepoint_export
from spark_bridge.exceptions import HostUnavailableError
from spark_bridge.host.exports import SHARE_OF_A_CORE, SavepointExports
from tests.patience import HANG, PATIENCE

G, N = 16, 2
WAIT = PATIENCE
"""Seconds; only a test that fails waits so long."""
SCHEMA = StateSchema(pa.schema([("k", pa.int64())]), pa.schema([("n", pa.int64())]))


def registration(run: str = "run1") -> QueryRegistration:
    spec = OperatorSpec("op", N, SCHEMA.to_json())
    return QueryRegistration(f"q-{run}", run, None, "s", "/ck", "/ck/statestore", (spec,), key_groups=G)


def rows(p: int, n: int = 40, size: int = 10, value: int = 1) -> Iterator[pa.RecordBatch]:
    keys = pa.record_batch([pa.array(range(n), pa.int64())], names=["k"])
    values = pa.record_batch([pa.array([value] * n, pa.int64())], names=["n"])
    groups = key_groups(keys, G)
    pairs = SortedPairs.last_wins(encode_keys(keys, groups), encode_values(values))
    own = [i for i, k in enumerate(pairs.keys.to_pylist()) if partition_of(int.from_bytes(k[:2], "big"), G, N) == p]
    for at in range(0, len(own), size):
        taken = pa.array(own[at : at + size])
        yield pa.RecordBatch.from_arrays([pairs.keys.take(taken), pairs.values.take(taken)], names=["key", "value"])


class Exporting:
    """The exports of one host and their surroundings."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.holds_partitions = False
        self.pinned: list[int] = []
        self.scanned: list[tuple[str, int, int]] = []
        self.closed: list[int] = []
        self.sent: list[SavepointExported] = []
        self.slept: list[float] = []
        self.scan_error: BaseException | None = None
        self.send_error: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.at_gate = threading.Event()
        self.changed = threading.Condition()
        self.exports = SavepointExports(
            HostInfo("h0", "a", "grpc://127.0.0.1:1", "node", "s"),
            self._pin,
            self._read_back,
            self._send,
            lambda order: CheckpointStorage.open(order.location, fsync=False),
            root / "scratch",
            self.slept.append,
        )

    def _pin(self, order: SavepointOrder, operator: str, partition: int) -> Any:
        if not self.holds_partitions:
            return None

        def when_let() -> Iterator[pa.RecordBatch]:
            assert self.gate.wait(HANG)
            yield from rows(partition)

        self.pinned.append(partition)
        return {"default": when_let()}

    @contextmanager
    def _read_back(self, order: SavepointOrder, operator: str, partition: int, is_given_up: Any) -> Iterator[Any]:
        with self.changed:
            self.scanned.append((order.run_id, order.checkpoint_id, partition))
        self.at_gate.set()
        assert self.gate.wait(HANG)
        if self.scan_error is not None:
            raise self.scan_error
        try:
            yield {"default": rows(partition)}
        finally:
            self.closed.append(partition)

    def _send(self, message: SavepointExported) -> None:
        error = self.send_error
        with self.changed:
            self.sent.append(message)
            self.changed.notify_all()
        if error is not None:
            raise error

    def order(self, *partitions: int, run: str = "run1", checkpoint: int = 5, is_held: bool = False) -> SavepointOrder:
        location = str(self.root / f"savepoint-{run}-{checkpoint}")
        return SavepointOrder(registration(run), checkpoint, 3, location, {"op": list(partitions)}, is_held)

    def take(self, *partitions: int, **kwargs: Any) -> None:
        self.exports.begin_exports(self.order(*partitions, **kwargs))

    def wait_sent(self, n: int) -> list[SavepointExported]:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.sent) >= n, WAIT), self.sent
        self.idle()
        assert len(self.sent) == n, self.sent
        return self.sent

    def idle(self) -> None:
        """All that was begun is done."""
        self.exports._pool.submit(lambda: None).result(WAIT)


@pytest.fixture
def host(tmp_path):
    made = Exporting(tmp_path)
    yield made
    made.gate.set()
    made.exports.close()


def test_every_partition_of_an_order_is_exported_and_reported(host):
    host.take(0, 1)
    first, second = host.wait_sent(2)
    assert (first.run_id, first.checkpoint_id, first.operator, first.partition) == ("run1", 5, "op", 0)
    assert (first.host_id, first.incarnation, first.failure, second.partition) == ("h0", "a", None, 1)
    assert host.closed == [0, 1]
    found = []
    for message, groups in ((first, (0, 7)), (second, (8, 15))):
        (file,) = message.files.values()
        assert list(message.files) == ["default"] and (file.first_group, file.last_group) == groups
        table = pq.read_table(host.root / "savepoint-run1-5" / file.path)
        assert table.num_rows == file.rows and message.duration >= 0
        found += table.column("k").to_pylist()
    assert sorted(found) == list(range(40))
    assert not [p for p in (host.root / "scratch").rglob("*") if p.is_file()]


def exported_by(monkeypatch: pytest.MonkeyPatch, host: Exporting, step: tuple[float, float]) -> int:
    """Export a partition by clocks that show for each batch how long it took and how much of that was work."""
    clock, processor = [0.0], [0.0]
    add = savepoint_export._Writer.write_pairs
    steps: list[int] = []

    def timed(self: Any, batch: pa.RecordBatch) -> None:
        steps.append(len(batch))
        clock[0] += step[0]
        processor[0] += step[1]
        add(self, batch)

    monkeypatch.setattr(savepoint_export._Writer, "write_pairs", timed)
    monkeypatch.setattr(savepoint_export.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(savepoint_export.time, "thread_time", lambda: processor[0])
    host.take(0)
    host.wait_sent(1)
    assert len(steps) >= 2
    return len(steps)


def test_export_takes_a_small_share_of_a_contended_core(host, monkeypatch):
    steps = exported_by(monkeypatch, host, (4.0, 1.5))
    assert host.slept == [pytest.approx(6.0)] * steps
    assert 1.5 / (4.0 + host.slept[0]) == pytest.approx(SHARE_OF_A_CORE) == 0.15


def test_time_without_a_core_counts_as_sleep(host, monkeypatch):
    exported_by(monkeypatch, host, (10.0, 1.0))
    assert host.slept == []


def test_export_does_not_sleep_on_an_idle_core(host, monkeypatch):
    exported_by(monkeypatch, host, (1.0, 0.95))
    assert host.slept == []


def test_export_does_not_sleep_while_the_query_waits(host):
    host.take(0, is_held=True)
    (message,) = host.wait_sent(1)
    assert message.files["default"].rows > 10, "more than one batch"
    assert host.slept == []


def test_all_partitions_of_an_order_are_pinned_when_it_comes(host):
    host.holds_partitions = True
    host.gate.clear()
    host.take(0, 1)
    host.take(0, 1)
    assert host.pinned == [0, 1] and host.sent == []
    host.gate.set()
    assert all(m.files["default"].rows > 10 for m in host.wait_sent(2))
    assert host.scanned == [], "nothing is read back from storage"
    assert host.pinned == [0, 1]


def test_failed_pin_is_retried_by_its_export(host, monkeypatch):
    tries = []

    def held(order: SavepointOrder, operator: str, partition: int) -> Any:
        tries.append(partition)
        raise OSError(5, "the disk is gone")

    monkeypatch.setattr(host.exports, "_pin", held)
    host.take(0)
    (message,) = host.wait_sent(1)
    assert message.failure == "OSError: [Errno 5] the disk is gone"
    assert tries == [0, 0]


def test_repeated_order_does_not_start_a_second_export(host):
    host.gate.clear()
    host.take(0)
    assert host.at_gate.wait(WAIT)
    for _ in range(3):
        host.take(0)
    assert host.sent == []
    host.gate.set()
    host.wait_sent(1)
    assert host.scanned == [("run1", 5, 0)]


@pytest.mark.parametrize("how", ["answer lost", "not sent"])
def test_repeated_order_is_reported_again_without_an_export(host, how):
    if how == "not sent":
        host.send_error = HostUnavailableError("the coordinator is being restarted")
    host.take(0)
    host.wait_sent(1)
    host.send_error = None
    host.take(0)
    first, second = host.wait_sent(2)
    assert first == second and first.files and first.failure is None
    assert host.scanned == [("run1", 5, 0)]


def test_a_later_savepoint_is_another_export(host):
    host.take(0)
    host.take(0, checkpoint=6)
    assert [m.checkpoint_id for m in host.wait_sent(2)] == [5, 6]
    assert host.scanned == [("run1", 5, 0), ("run1", 6, 0)]


def test_two_queries_may_have_the_same_checkpoint_id(host):
    """Each query counts for itself, and programs that are alike have operators of the same name."""
    host.take(0)
    host.wait_sent(1)
    host.take(0, run="run2")
    assert [m.run_id for m in host.wait_sent(2)] == ["run1", "run2"]
    assert host.scanned == [("run1", 5, 0), ("run2", 5, 0)]
    assert (host.root / "savepoint-run2-5" / host.sent[1].files["default"].path).exists()


@pytest.mark.parametrize("when", ["before the scan", "during the scan"])
def test_a_partition_that_is_unloaded_is_not_declined_and_is_exported_when_it_is_ordered_again(host, when, monkeypatch):
    batches = list(rows(0))

    @contextmanager
    def cut_off(order: SavepointOrder, operator: str, partition: int, is_given_up: Any) -> Iterator[Any]:
        if when == "before the scan":
            raise StoreClosedError("unloaded")

        def some() -> Iterator[pa.RecordBatch]:
            yield batches[0]
            raise StoreClosedError("unloaded")

        try:
            yield {"default": some()}
        finally:
            host.closed.append(partition)

    monkeypatch.setattr(host.exports, "_read_back", cut_off)
    host.take(0)
    host.idle()
    assert host.sent == [] and host.closed == ([0] if when == "during the scan" else [])
    monkeypatch.undo()
    host.take(0)
    (message,) = host.wait_sent(1)
    assert message.failure is None and message.files["default"].rows == sum(map(len, batches)) > 10


@pytest.mark.parametrize("error", [MissingFileError("file 7 is gone"), ValueError("no such type"), OSError(28, "full")])
def test_failed_export_declines_with_its_reason_repeatedly(host, error):
    host.scan_error = error
    host.take(0, 1)
    first, second = host.wait_sent(2)
    assert first.failure == f"{type(error).__name__}: {error}" and first.files == {}
    assert (first.partition, second.partition) == (0, 1)
    host.scan_error = None
    host.take(0)
    assert host.wait_sent(3)[2] == first and len(host.scanned) == 2


def test_failed_export_closes_its_partition(host, monkeypatch):
    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("spark_bridge.host.exports.export_partition", fail)
    host.take(0)
    (message,) = host.wait_sent(1)
    assert message.failure == "OSError: disk full" and host.closed == [0]


def test_only_exports_of_dropped_savepoints_are_forgotten(host):
    host.take(0)
    host.take(0, checkpoint=6)
    host.take(1, run="run2", checkpoint=5)
    host.wait_sent(3)
    host.exports.give_up_others({"run1": [6], "run2": [5]})
    assert {(k[0], k[1]) for k in host.exports._states} == {("run1", 6), ("run2", 5)}
    host.take(1, run="run2", checkpoint=5)
    host.wait_sent(4)
    assert host.scanned == [("run1", 5, 0), ("run1", 6, 0), ("run2", 5, 1)], "it is reported again, not exported again"
    host.exports.give_up_others({})
    assert host.exports._states == {}


def test_unwanted_export_is_cancelled(host):
    host.gate.clear()
    host.take(0, 1)
    assert host.at_gate.wait(WAIT)
    host.exports.give_up_others({"run1": [5]})
    host.exports.give_up_others({"run1": [6]})
    host.gate.set()
    host.idle()
    assert host.sent == [] and host.exports._states == {}
    assert not list((host.root / "savepoint-run1-5").rglob("*.parquet"))


def test_closing_host_cancels_its_exports(host):
    host.gate.clear()
    host.take(0, 1)
    assert host.at_gate.wait(WAIT)
    host.exports.close()
    host.gate.set()
    host.exports._pool.shutdown(wait=True)
    assert host.sent == [] and host.scanned == [("run1", 5, 0)]
    assert not (host.root / "savepoint-run1-5").exists() or not list(
        (host.root / "savepoint-run1-5").rglob("*.parquet")
    )


def test_orders_are_taken_without_waiting_for_exports(host):
    host.gate.clear()
    started = threading.Thread(target=lambda: host.take(0, 1))
    started.start()
    started.join(WAIT)
    assert not started.is_alive() and host.sent == []


def test_message_has_the_duration_of_the_export(host, monkeypatch):
    ticks = iter((100.0, 103.5))
    monkeypatch.setattr("spark_bridge.host.exports.time", _Clock(lambda: next(ticks)))
    host.take(0)
    assert host.wait_sent(1)[0].duration == 3.5
    assert msgspec.json.decode(msgspec.json.encode(host.sent[0]), type=SavepointExported) == host.sent[0]


class _Clock:
    def __init__(self, monotonic: Any) -> None:
        self.monotonic = monotonic
        self.sleep = time.sleep
