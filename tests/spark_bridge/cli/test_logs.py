"""``statestore logs`` selects the events of a query and orders them."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import ray
import ray.util.state

from spark_bridge.cli.logs import LogFile, events_about, is_log_of, log_files, names_asked, names_of
from spark_bridge.exceptions import EnvironmentProblemError
from spark_bridge.overview.model import CoordinatorInfo, LostDriver, Overview, Query

QUERY = Query("q-1", "r-1", "clicks", "running", "/ck", "/ck/statestore", 1, 1, 1, 0)
COORDINATOR = [
    "what was printed before the first event",
    "2026-01-01 10:00:01,000 INFO coordinator_actor.x: Registered run r-1",
    "2026-01-01 10:00:03,000 WARNING coordinator_actor.x: Run r-12 is another one",
    "2026-01-01 10:00:05,000 ERROR coordinator_actor.x: Storing failed",
    "Traceback (most recent call last):",
    "OSError: /ck/statestore/manifests: disk full",
]
HOST = [
    '{"time": "2026-01-01T10:00:02.000+00:00", "level": "WARNING", "message": "Run r-1 is slow"}',
    "2026-01-01 10:00:04,000 INFO spark_bridge.x: doubleclicks is no query of that name",
    "2026-01-01 10:00:06,000 INFO spark_bridge.x: Query clicks goes on",
]


def failing() -> Iterator[str]:
    raise RuntimeError("the node is gone")


def test_events_about_a_query_by_time() -> None:
    missing: list[str] = []
    files = [
        LogFile("host 1", lambda: HOST),
        LogFile("coordinator", lambda: COORDINATOR),
        LogFile("host 2", failing),
    ]
    found = events_about(files, names_of(QUERY), missing)
    assert [(e.source, e.time[17:19], e.level) for e in found] == [
        ("coordinator", "01", "INFO"),
        ("host 1", "02", "WARNING"),
        ("coordinator", "05", "ERROR"),
        ("host 1", "06", "INFO"),
    ]
    assert found[2].text.count("\n") == 2, "a traceback belongs to its event"
    assert missing == ["The log of the host 2 cannot be read: the node is gone"]


def test_all_events() -> None:
    assert len(events_about([LogFile("coordinator", lambda: COORDINATOR)], (), [])) == 3


def test_lost_and_unknown_queries_are_searched_in_the_logs() -> None:
    lost = LostDriver("clicks", "r-1", "/ck", 1, "q-1", "/ck/statestore")
    overview = Overview("cluster", 1, CoordinatorInfo("c", "n", lost=(lost,)))
    for asked in (None, "clicks", "q-1", "r-1"):
        names, unknown = names_asked(overview, asked)
        assert set(names) == set(names_of(QUERY)) and not unknown
    names, unknown = names_asked(overview, "r-12")
    found = events_about([LogFile("coordinator", lambda: COORDINATOR)], names, [])
    assert [e.text for e in found] == COORDINATOR[2:3] and "There is no query" in unknown
    two = Overview("cluster", 1, CoordinatorInfo("c", "n", lost=(lost, LostDriver("orders", "r-2", "/ck2", 1))))
    assert names_asked(two, "orders")[0] == ("r-2", "orders", "/ck2")
    with pytest.raises(LookupError, match="no query"):
        names_asked(two, None)


def test_log_of_an_earlier_actor_process_is_found_by_its_first_lines() -> None:
    actor = "StateStoreHost(statestore/host-a1-0 on 192.0.2.2, tasks at port 43019, queries at port 33545)"
    begin = [":job_id:01000000", ":actor_name:StateStoreHost", f":actor_name:{actor.replace('43019', '40679')}"]
    assert is_log_of(actor, begin)
    assert not is_log_of(actor.replace("host-a1-0", "host-a1-01"), begin)
    assert not is_log_of(actor.replace("statestore/", "other/"), begin) and not is_log_of(actor, begin[:2])


@pytest.mark.parametrize("nodes", [["b1", "a1"], ["b1"], []])
def test_logs_of_another_cluster_of_the_machine_are_not_read(nodes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="192.0.2.1:6379"))
    monkeypatch.setattr(ray, "nodes", lambda: [{"NodeID": "a1"}, {"NodeID": "a2"}])
    monkeypatch.setattr(
        ray.util.state, "list_nodes", lambda address, limit: [SimpleNamespace(node_id=n) for n in nodes]
    )
    for name in ("list_actors", "list_jobs"):
        monkeypatch.setattr(ray.util.state, name, lambda *args, **options: [])
    if "a1" in nodes:
        log_files("statestore", "coordinator", 10)
        return
    with pytest.raises(EnvironmentProblemError, match=r"192\.0\.2\.1:6379 names is that of another Ray cluster"):
        log_files("statestore", "coordinator", 10)
