"""Causes of failed savepoints, and the messages then; and a query whose next batch is held."""

from __future__ import annotations

import uuid
from typing import Any

from backends.exceptions import StorageError
from coordinator_actor.exceptions import BatchHeldError
from spark_bridge.transport.protocol import TaskIdentity
from tests.coordinator_actor.savepoints.savepoint_streams import G, Stream


def decline(s: Stream) -> None:
    def scan(*_: Any) -> Any:
        raise ValueError("row 7 is odd")

    s.copy_spark_files()
    s.hosts[1].exports._pin = scan
    s.heartbeat()


def spark_files_are_gone(s: Stream) -> None:
    (s.world.root / "ck/offsets/1").rename(s.world.root / "removed")
    s.copy_spark_files()
    (s.world.root / "removed").rename(s.world.root / "ck/offsets/1")


def take_too_long(s: Stream) -> None:
    for _ in range(4):
        s.world.now += 7.6
        for host in s.hosts.values():
            s.c.heartbeat_host(host.info.host_id, "a")
        s.c.driver_heartbeat("run1")
        s.c.expire()


def end(s: Stream) -> None:
    s.c.deactivate_instances("run1")


def be_replaced(s: Stream) -> None:
    s.c.register_query(s.world.registration("run2", 2, operators=(s.spec,), key_groups=G))


def lose_the_driver(s: Stream) -> None:
    # Longer than any savepoint may take here, but without a look at the leases since.
    s.world.now += 61
    s.c.expire()


def lose_the_session(s: Stream) -> None:
    s.c.unregister_session("s")


def storage_fails(s: Stream) -> None:
    s.copy_spark_files()

    def fail(path: str) -> None:
        if "operators" not in path:
            raise StorageError("disk full")

    s.world.put_hook = fail
    s.heartbeat()


WHY = {
    decline: ("SavepointDeclinedError", r"Savepoint 3 of run1 .*declined by op/\d: ValueError: row 7 is odd"),
    spark_files_are_gone: ("SavepointDeclinedError", r"Savepoint 3 .*Spark's own files.*offsets/1.* does not exist"),
    take_too_long: ("SavepointExpiredError", r"Savepoint 3 of run1"),
    end: ("CheckpointCoordinatorShutdownError", r"Savepoint 3 of run1"),
    be_replaced: ("CheckpointCoordinatorShutdownError", r"Savepoint 3 of run1"),
    lose_the_driver: ("CheckpointCoordinatorShutdownError", r"Savepoint 3 of run1"),
    lose_the_session: ("CheckpointCoordinatorShutdownError", r"Savepoint 3 of run1"),
    storage_fails: ("SavepointFailedError", r"Savepoint 3 of run1 .*disk full"),
}


def open_fails_as_held(s: Stream, batch: int) -> bool:
    try:
        s.hosts[0].open(TaskIdentity("run1", "op", 0, batch, uuid.uuid4().hex, uuid.uuid4().hex))
    except BatchHeldError as error:
        assert f"Batch {batch} " in str(error)
        return True
    return False
