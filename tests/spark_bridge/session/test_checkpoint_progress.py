"""The progress that listeners receive for a checkpoint, derived from its record."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from backends.storage.requests import Prices
from coordinator_actor.durable.records import CheckpointRecord, as_plain
from spark_bridge.session import progress as operator_progress
from spark_bridge.session.listener import StateStoreQueryListener
from spark_bridge.session.progress import CheckpointProgress, progress_of_record
from spark_bridge.session.settings import Shutdown

USED = {"put": 20, "get": 10, "sent_bytes": 3000, "received_bytes": 70}
RECORD = CheckpointRecord(9, 8, 1, "run", begun_ms=1000, prepared_ms=1250, delta_bytes=2000, requests=30, storage=USED)


def test_a_record_becomes_the_progress_of_its_batch() -> None:
    made = progress_of_record(as_plain(RECORD), Prices(put=0.1))
    requests = {"put": 20, "get": 10, "head": 0, "list": 0, "delete": 0}
    assert made == CheckpointProgress(7, 250, 2000, requests, 3000, 70, pytest.approx(0.002004))
    assert '"batch_id":7,"duration_ms":250' in made.json


class Operators:
    """Receives the progress of operators only."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def on_state_operator_progress(self, run_id: str, progress: Sequence[Any]) -> None:
        self.told.append((run_id, *progress))


class Both(Operators):
    """Receives the progress of checkpoints as well."""

    def on_checkpoint_progress(self, run_id: str, progress: CheckpointProgress) -> None:
        self.told.append((run_id, progress))


@pytest.fixture
def listening() -> Iterator[list[Any]]:
    added: list[Any] = []
    yield added
    for listener in added:
        operator_progress.remove_state_operator_listener(listener)


def test_checkpoint_is_requested_only_for_a_listener(listening: list[Any]) -> None:
    checkpoint = progress_of_record(as_plain(RECORD), Prices())
    asked: list[int] = []

    def newest() -> CheckpointProgress:
        asked.append(1)
        return checkpoint

    for listener in (Operators(), Both(), Both()):
        listening.append(listener)
        operator_progress.add_state_operator_listener(listener)
        operator_progress.tell_listeners("run", (), newest)
    operators, first, second = (listener.told for listener in listening)
    assert operators == [("run",)] * 3 and asked == [1, 1]
    assert first == [("run",), ("run", checkpoint)] * 2 and second == [("run",), ("run", checkpoint)]
    operator_progress.tell_listeners("run", (), lambda: None)
    assert first[-1] == ("run",), "a checkpoint does not exist yet"


def test_unknown_checkpoint_does_not_keep_the_operators_from_listeners(listening: list[Any]) -> None:
    def unknown() -> CheckpointProgress:
        raise RuntimeError("Ray is gone")

    listening += [Both(), Operators()]
    for listener in listening:
        operator_progress.add_state_operator_listener(listener)
    operator_progress.tell_listeners("run", (), unknown)
    assert [listener.told for listener in listening] == [[("run",)]] * 2


@pytest.mark.parametrize(
    ("failing", "what"), [("complete", "end"), ("metrics", "metrics"), ("traces", "spans"), ("listeners", "progress")]
)
def test_a_report_that_fails_unexpectedly_keeps_spark_from_no_other_report(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, failing: str, what: str
) -> None:
    caplog.set_level(logging.INFO)
    made: list[str] = []

    def reported(name: str) -> Callable[..., None]:
        def report(*_: Any) -> None:
            made.append(name)
            if name == failing:
                raise RuntimeError("Ray is gone")

        return report

    listener: Any = object.__new__(StateStoreQueryListener)
    listener._lock, listener._stopping = threading.Lock(), threading.Event()
    listener._registrations = {"run": None}
    listener._cluster = SimpleNamespace(batch_committed=reported("complete"), shutdown=Shutdown())
    listener._metrics, listener._traces = (SimpleNamespace(batch=reported(name)) for name in ("metrics", "traces"))
    listener._tell_listeners = reported("listeners")
    monkeypatch.setattr("spark_bridge.session.listener.has_listeners", lambda: True)
    listener.batch_committed("run", 3, lambda: "{}")
    assert made == ["complete", "metrics", "traces", *(["listeners"] if failing != "complete" else [])]
    assert caplog.messages == [f"The {what} of batch 3 of run run could not be reported: Ray is gone"]
