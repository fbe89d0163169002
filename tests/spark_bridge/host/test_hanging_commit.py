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


class HangingCommit:
    """The commit of the second batch, in a thread; it hangs from the constructor until ``end``."""

    def __init__(self, stream: Stream) -> None:
        writes = threading.Event()
        self._stream = stream
        self._goes_on = threading.Event()
        self.errors: list[Exception] = []

        def hang(path: str) -> None:
            if path.endswith(".changelog"):
                writes.set()
                assert self._goes_on.wait(HANG)

        stream.world.put_hook = hang
        self._thread = threading.Thread(target=self._commit)
        self._thread.start()
        assert writes.wait(PATIENCE)

    def _commit(self) -> None:
        try:
            self._stream.begin(1, {1: 1})
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.errors.append(error)

    def end(self) -> None:
        self._goes_on.set()
        self._thread.join(PATIENCE)


def test_heartbeat_does_not_wait_for_a_commit_of_an_ended_query(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = HangingCommit(stream)
    stream.c.deactivate_instances("run1")
    host = stream.hosts[0]
    monkeypatch.setattr(registration, "CARRY_OUT_SECONDS", 0.01)
    for _ in range(3):
        beating = threading.Thread(target=host.heartbeat)
        beating.start()
        beating.join(PATIENCE)
        assert not beating.is_alive(), "the heartbeat waits for the commit"
    commit.end()
    assert [type(e).__name__ for e in commit.errors] == ["RetiredRunError"]
    monkeypatch.setattr(registration, "CARRY_OUT_SECONDS", PATIENCE)
    for thread in list(host._orders._threads.values()):
        thread.join(PATIENCE)
    host.heartbeat()
    assert host.cache.instances == {} and host.cache.registrations == {}


def test_maintenance_does_not_wait_for_a_commit_to_a_partition_that_has_moved(stream: Stream) -> None:
    """The host was cut off from the coordinator for a while. Its other queries need the maintenance."""
    commit, host = HangingCommit(stream), stream.hosts[0]
    stream.world.now += 20
    stream.c.expire()
    stream.add_host(1)
    assert stream.c.open_for_read("run1", "op", 0).owner.host_id == "h1"
    stream.c.register_host(host.info, host.cache.report())
    maintaining = threading.Thread(target=host.maintenance.do_maintenance)
    maintaining.start()
    maintaining.join(PATIENCE)
    is_done = not maintaining.is_alive()
    commit.end()
    assert is_done, "the maintenance waits for the commit"
    for thread in list(host.maintenance._orders._threads.values()):
        thread.join(PATIENCE)
    assert host.cache.instances == {}
