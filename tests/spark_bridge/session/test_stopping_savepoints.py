"""Why a query cannot be stopped with a savepoint is said, and what to do; without Spark."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from coordinator_actor.exceptions import SavepointFailedError
from spark_bridge.session import savepoints
from spark_bridge.session.savepoints import trigger_savepoint


def query(run: str, query_id: str = "q1", name: str | None = "clicks") -> Any:
    return SimpleNamespace(id=query_id, runId=run, name=name)


def refused(asked: Any, *active: Any) -> str:
    with pytest.MonkeyPatch.context() as session:
        session.setattr(savepoints, "current_cluster", lambda: None)
        session.setattr(savepoints, "current_spark", lambda: SimpleNamespace(streams=SimpleNamespace(active=active)))
        with pytest.raises(SavepointFailedError) as raised:
            trigger_savepoint(asked, stop=True)
    return str(raised.value)


def test_a_query_object_that_a_restart_has_replaced_names_the_run_that_replaced_it() -> None:
    said = refused(query("run1"), query("run2"), query("run9", "q9", "orders"))
    assert "Run run1 of query 'clicks' has ended, and run run2 of this process has replaced it" in said
    assert "trigger_savepoint('clicks', stop=True)" in said
    assert "trigger_savepoint('q1', stop=True)" in refused(query("run1", name=None), query("run2", name=None))


def test_query_that_ended_here_is_reported_as_ended() -> None:
    said = refused(query("run1"))
    assert "has ended, and no other run of it is in this process" in said and "start the query again" in said


def test_unknown_name_error_lists_the_known_names() -> None:
    said = refused("click", query("run1"), query("run2", "q2", None))
    assert "No query 'click' runs in this process" in said and "'clicks', 'q2'" in said
    assert "there run: none" in refused("click")
