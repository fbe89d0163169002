"""When a commit hangs in the storage of a query, the host still sends heartbeats, also if that query ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from spark_bridge.host import registration
from tests.coordinator_actor.savepoints.savepoint_streams import Stream
from tests.patience import HANG, PATIENCE


@pytest.fixture
def stream(tmp_path: Path) -> Iterator[Stream]:
    made = Stream(tmp_path, n=1, hosts=1)
    made.batch(0)
    yield made
    made.close()


def test_heartbeat_does_not_wait_for_a_commit_of_an_ended_query(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes, goes_on = threading.Event(), threading.Event()

    def hang(path: str) -> None:
        if path.endswith(".changelog"):
            writes.set()
            assert goes_on.wait(HANG)

    stream.world.put_hook = hang
    errors: list[Exception] = []

    def commit() -> None:
        try:
            stream.begin(1, {1: 1})
        except Exception as error:  # noqa: BLE001 - its run is over
            errors.append(error)

    committing = threading.Thread(target=commit)
    committing.start()
    assert writes.wait(PATIENCE)
    stream.c.deactivate_instances("run1")
    host = stream.hosts[0]
    monkeypatch.setattr(registration, "CARRY_OUT_SECONDS", 0.01)
    for _ in range(3):
        beating = threading.Thread(target=host.heartbeat)
        beating.start()
        beating.join(PATIENCE)
        assert not beating.is_alive(), "the heartbeat waits for the commit"
    goes_on.set()
    committing.join(PATIENCE)
    assert [type(e).__name__ for e in errors] == ["RetiredRunError"]
    monkeypatch.setattr(registration, "CARRY_OUT_SECONDS", PATIENCE)
    for thread in list(host._orders._threads.values()):
        thread.join(PATIENCE)
    host.heartbeat()
    assert host.cache.instances == {} and host.cache.registrations == {}
