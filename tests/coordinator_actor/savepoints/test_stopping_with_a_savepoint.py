"""A query stops with a savepoint: its next batch waits until the query has ended, or the savepoint has failed."""

from __future__ import annotations

from functools import partial

import pytest

from backends.exceptions import StorageError
from coordinator_actor.exceptions import InvalidRequestError
from coordinator_actor.messages import SavepointStatus
from coordinator_actor.savepoints.savepoint_format import read_stored_savepoint
from spark_bridge.host import exports
from tests.coordinator_actor.savepoints.savepoint_failures import (
    decline,
    open_fails_as_held,
    spark_files_are_gone,
    storage_fails,
    take_too_long,
)


def test_stopping_holds_the_next_batch_until_the_query_has_ended(stream):
    s = stream()
    s.trigger(stop=True)
    assert open_fails_as_held(s, 2)
    assert s.savepoint_rows(s.finish()) == s.at[2]
    assert open_fails_as_held(s, 2), "no sink sees a batch behind it"
    s.c.driver_heartbeat("run1")
    s.c.expire()
    assert open_fails_as_held(s, 2)
    s.c.deactivate_instances("run1")
    assert s.status().path is not None


def test_hosts_sleep_for_the_sake_of_batches_and_only_then(stream, monkeypatch):
    monkeypatch.setattr(exports, "pause", lambda took, computed: 1.0)  # others want the core
    s, slept = stream(), []
    for host in s.hosts.values():
        host.exports._sleep = slept.append
    s.trigger("beside", stop=False)
    s.finish("beside")
    assert slept
    slept.clear()
    s.trigger(stop=True)
    s.finish()
    assert slept == [], "no batch continues until the query is stopped"


def test_a_batch_that_has_begun_is_in_it(stream):
    s = stream()
    s.begin(2, {3: 33}, range(1))
    s.trigger(stop=True)
    assert s.background == [], "nothing is copied before Spark has committed it"
    s.heartbeat()
    s.begin(2, {3: 33, 1: None}, range(1, 2))  # its tasks are not held
    assert not open_fails_as_held(s, 2)
    s.commit(2)
    assert open_fails_as_held(s, 3)
    path = s.finish()
    assert read_stored_savepoint(path).metadata.batch_id == 2
    after = s.savepoint_rows(path)
    first = {k for k in after if after[k] == 33}
    assert first == {3} and after.get(1) in (None, s.at[2].get(1))


@pytest.mark.parametrize("happen", [decline, spark_files_are_gone, take_too_long, storage_fails])
def test_a_query_continues_if_the_savepoint_to_stop_with_fails(stream, happen):
    s = stream()
    s.trigger(stop=True)
    assert open_fails_as_held(s, 2)
    happen(s)
    s.reason()
    s.world.put_hook = None
    for host in s.hosts.values():
        host.exports._pin = partial(exports.pin_scans, host.cache)
    s.c.expire()  # what the coordinator does once a second
    s.batch(2)
    s.trigger("again", stop=True)
    assert open_fails_as_held(s, 3)
    assert s.savepoint_rows(s.finish("again")) == s.at[3]


def test_a_savepoint_that_cannot_even_be_begun_holds_nothing(stream):
    s = stream()

    def fail(path: str) -> None:
        raise StorageError("disk full")

    s.world.put_hook = fail
    s.trigger(stop=True)
    error, message = s.reason()
    assert error == "SavepointFailedError" and "disk full" in message
    s.world.put_hook = None
    s.batch(2)
    assert s.rows() == s.at[3]


def test_only_one_can_stop_a_query(stream):
    s = stream()
    s.trigger(stop=True)
    with pytest.raises(InvalidRequestError, match="already being stopped with a savepoint"):
        s.trigger("r2", stop=True)
    assert s.trigger(stop=True).known
    s.trigger("r3")
    assert s.savepoint_rows(s.finish()) == s.savepoint_rows(s.finish("r3")) == s.at[2]
    assert open_fails_as_held(s, 2), "the other one does not let it go"


def test_one_that_does_not_stop_holds_nothing(stream):
    s = stream()
    s.trigger()
    assert not open_fails_as_held(s, 2)


def test_the_batch_is_held_by_a_restarted_coordinator_too_as_long_as_the_driver_is_stopping(stream):
    s = stream()
    s.trigger(stop=True)
    s.restart_coordinator()
    assert open_fails_as_held(s, 2)
    assert s.c.driver_heartbeat("run1", is_stopping=True)
    assert open_fails_as_held(s, 2)
    assert s.status() == SavepointStatus(known=False)
    s.trigger(stop=True)  # the driver asks again
    assert s.savepoint_rows(s.finish()) == s.at[2]
    assert s.c.driver_heartbeat("run1")
    assert open_fails_as_held(s, 2), "the new one holds it"


def test_a_driver_that_no_longer_wants_to_stop_has_a_restarted_coordinator_let_go(stream):
    s = stream()
    s.trigger(stop=True)
    s.restart_coordinator()
    assert s.c.driver_heartbeat("run1")
    s.batch(2)
    assert s.rows() == s.at[3]


def test_a_stop_that_failed_long_ago_does_not_make_a_later_one_old(stream):
    """Sinks have seen the batches since."""
    s = stream()
    s.trigger(stop=True)
    decline(s)
    s.reason()
    for host in s.hosts.values():
        host.exports._pin = partial(exports.pin_scans, host.cache)
    s.c.expire()
    s.batches(2, 5)
    s.restart_coordinator()
    s.trigger("again", stop=True)
    assert s.savepoint_rows(s.finish("again")) == s.at[5]


def test_nor_does_it_leave_out_the_batch_that_was_let_go_then(stream):
    s = stream()
    s.trigger(stop=True)
    decline(s)
    s.reason()
    for host in s.hosts.values():
        host.exports._pin = partial(exports.pin_scans, host.cache)
    s.c.expire()
    s.begin(2, {3: 33}, range(1))  # its tasks run, and the sink may have seen some of it
    s.restart_coordinator()
    s.trigger("again", stop=True)
    assert s.background == [], "it waits for that batch"
    assert not open_fails_as_held(s, 2)


def test_a_batch_that_spark_has_planned_is_in_it(stream):
    """Its tasks may be about to open: they are not held, and the savepoint waits for them."""
    s = stream()
    (s.world.root / "ck/offsets/2").write_text("v1\n{}")
    s.trigger(stop=True)
    assert s.background == []
    s.batch(2)
    assert open_fails_as_held(s, 3)
    assert s.savepoint_rows(s.finish()) == s.at[3]
