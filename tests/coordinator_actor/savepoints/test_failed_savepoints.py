"""A savepoint that cannot be made fails with the reason, and nothing else does."""

from __future__ import annotations

import re
from functools import partial

import pytest

from coordinator_actor.exceptions import InvalidRequestError, UnknownQueryError
from coordinator_actor.messages import SavepointStatus
from coordinator_actor.savepoints.savepoint_format import read_stored_savepoints
from spark_bridge.host.exports import pin_scans
from tests.coordinator_actor.coordinator_world import run_of
from tests.coordinator_actor.savepoints.savepoint_failures import (
    WHY,
    decline,
    spark_files_are_gone,
    storage_fails,
    take_too_long,
)


@pytest.mark.parametrize("happen", list(WHY), ids=lambda f: f.__name__)
def test_it_fails_with_the_reason(stream, happen):
    s = stream()
    s.trigger()
    happen(s)
    kind, words = WHY[happen]
    error, message = s.reason()
    assert error == kind
    assert re.search(words, message), message
    assert read_stored_savepoints(str(s.world.root / "sp")) == []
    s.c.expire()
    assert all(run.versions._pinned == {} for run in s.c.registries.runs.current()), "its version need not be kept"


@pytest.mark.parametrize("happen", [decline, spark_files_are_gone, take_too_long, storage_fails])
def test_the_stream_and_the_next_savepoint_succeed_after_one_that_failed(stream, happen):
    s = stream()
    s.trigger()
    happen(s)
    s.reason()
    s.world.put_hook = None
    for host in s.hosts.values():
        host.exports._pin = partial(pin_scans, host.cache)
    s.batch(2)
    s.trigger("again")
    assert s.savepoint_rows(s.finish("again")) == s.at[3]
    s.c.expire()
    assert run_of(s.c, "run1").versions._pinned == {}


def test_one_that_is_not_late_yet_is_not_given_up(stream):
    s = stream()
    s.trigger()
    s.world.now += 9.0
    s.c.expire()
    assert s.is_pending()


def test_a_savepoint_needs_a_completed_batch(stream):
    s = stream(0)
    for stop in (False, True):
        with pytest.raises(InvalidRequestError, match="No batch of query q is committed yet"):
            s.trigger(stop=stop)
    s.begin(0, {1: 1})
    with pytest.raises(InvalidRequestError, match="committed yet"):
        s.trigger()
    s.commit(0)
    s.at[1] = {1: 1}
    s.trigger("r2")
    assert s.savepoint_rows(s.finish("r2")) == {1: 1}
    assert s.status() == SavepointStatus(known=False)


def test_a_savepoint_must_name_a_running_query(stream):
    s = stream()
    with pytest.raises(UnknownQueryError, match=r"'nobody'.*name \(q, run run1\)"):
        s.c.trigger_savepoint("r1", "nobody")
    elsewhere = str(s.world.root / "other")
    other = s.world.registration("run9", query_id="q9", state_location=elsewhere, checkpoint_location=elsewhere)
    assert s.c.register_query(other).refusal is None
    with pytest.raises(UnknownQueryError, match=r"Several.*'name'.*q9"):
        s.trigger()
    for i, name in enumerate(("q", "run1")):
        s.c.trigger_savepoint(f"x{i}", name, str(s.world.root / "sp"))
        assert s.savepoint_rows(s.finish(f"x{i}")) == s.at[2]


def test_a_recent_commit_of_spark_is_trusted(stream):
    """The progress event may not have come yet: the savepoint is of what Spark's files say."""
    s = stream()
    s.begin(2, {5: 55})
    s.world.commit_spark(2)
    s.at[3] = {**s.at[2], 5: 55}
    s.trigger()
    assert s.savepoint_rows(s.finish()) == s.at[3]


def test_a_copied_checkpoint_leaves_the_savepoints_of_the_original_alone(stream, tmp_path):
    """A copy of a checkpoint, such as a backup that is put back, has the same query id, and counts as the original."""
    base = str(tmp_path / "savepoints")
    original, copy = stream(2), stream(0)
    original.trigger("r1", base)
    path = original.finish("r1")
    for batch in range(2):
        copy.batch(batch, {batch: 7})
    copy.trigger("r1", base)
    copy.copy_spark_files()
    copy.heartbeat()
    error, message = copy.reason()
    assert error == "SavepointDeclinedError" and f"{path} is a finished savepoint already" in message
    assert original.savepoint_rows(path) == original.at[2]
    copy.trigger("again", base)
    assert copy.savepoint_rows(copy.finish("again")) == copy.at[2]
