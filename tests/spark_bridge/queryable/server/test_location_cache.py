"""The location cache of a proxy: which request fetches a location, when it refreshes, and errors of unknown queries."""

from __future__ import annotations

import threading
import time

import pytest

from coordinator_actor.exceptions import RetiredRunError
from spark_bridge.exceptions import HostUnavailableError, QueryEndedError, UnknownOperatorError
from spark_bridge.queryable.server import proxy
from spark_bridge.queryable.server.proxy import LocationCache
from tests.spark_bridge.queryable.memory_reads import eventually
from tests.spark_bridge.queryable.routing.router_world import Source, oracle_of


def test_oracle_in_use_is_refreshed_in_the_background() -> None:
    now = [100.0]
    source = Source()
    source.running["q1"] = oracle_of("r1", "ip:1")
    oracles = LocationCache(source, lambda: now[0])
    try:
        first = oracles.location("r1", "op")
        assert (first.owners[0].query_address, source.fetched) == ("ip:1", 1)
        now[0] += 1.9
        assert oracles.location("r1", "op") is first and source.fetched == 1
        source.running["q1"] = oracle_of("r1", "ip:2")
        now[0] += 0.2
        assert oracles.location("r1", "op") is first, "no request waits for the refresh"
        eventually(lambda: oracles.location("r1", "op").owners[0].query_address == "ip:2")
        assert source.fetched == 2
        now[0] += 50
        time.sleep(0.15)
        assert source.fetched == 2, "an unused location is not refreshed"
        same = oracles.location("r1", "op")
        eventually(lambda: source.fetched == 3)
        time.sleep(0.02)
        assert oracles.location("r1", "op") is same
    finally:
        oracles.stop()


def test_restarted_oracles_are_refreshed() -> None:
    now = [100.0]
    source = Source()
    source.running["q1"] = oracle_of("r1")
    oracles = LocationCache(source, lambda: now[0])
    try:
        oracles.location("r1", "op")
        oracles.start()
        oracles.stop()
        oracles.start()
        now[0] += 2.1
        oracles.location("r1", "op")
        eventually(lambda: source.fetched == 2)
    finally:
        oracles.stop()


def test_concurrent_users_of_a_stale_oracle_fetch_it_once() -> None:
    now = [100.0]
    source = Source()
    source.running["q1"] = oracle_of("r1")
    source.pause = 0.05
    oracles = LocationCache(source, lambda: now[0])
    oracles.location("r1", "op")
    now[0] += 0.11
    threads = [threading.Thread(target=oracles.refresh, args=("r1",)) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert source.fetched == 2
    oracles.refresh("unknown run")
    assert source.fetched == 2


def test_unknown_query_gives_the_coordinators_error() -> None:
    now = [100.0]
    source = Source()
    source.running["q1"] = oracle_of("r1")
    oracles = LocationCache(source, lambda: now[0])
    assert oracles.location("r1", "op", with_schema=True).operator.schema == "schema"
    # It does not answer, and then does not know the query: the cached location stays in use.
    for source.away in (True, False):
        del source.running["q1"]
        now[0] += 1
        oracles.refresh("r1")
        assert oracles.location("r1", "op").run_id == "r1"
        assert oracles.get("q1") == oracle_of("r1")
        source.running["q1"] = oracle_of("r1")
    # It says that the query has ended.
    del source.running["q1"]
    source.ended = {"q1", "r1"}
    now[0] += 1
    oracles.refresh("r1")
    assert oracles.get("q1") is None
    fetched = source.fetched
    for _ in range(5):
        with pytest.raises(QueryEndedError, match="q1 has ended"):
            oracles.location("r1", "op")
    assert source.fetched == fetched, "it is not asked every time"
    # It runs again.
    source.running["q1"] = oracle_of("r2")
    now[0] += 1
    with pytest.raises(RetiredRunError, match="replaced by run r2"):
        oracles.location("r1", "op")
    assert oracles.location("r2", "op").run_id == "r2"
    # Nothing is cached, and the coordinator does not answer.
    fresh = LocationCache(source, lambda: now[0])
    source.away = True
    with pytest.raises(HostUnavailableError, match="away"):
        fresh.location("r2", "op")


def test_locations_of_an_oracle_that_was_given_need_no_coordinator() -> None:
    source = Source()
    source.away = True
    oracles = LocationCache(source)
    oracles.update("q1", oracle_of("r1", "ip:9"))
    location = oracles.location("r1", "op")
    assert (location.owners[1].query_address, location.operator.num_partitions, source.fetched) == ("ip:9", 2, 0)
    with pytest.raises(UnknownOperatorError, match="'op'"):
        oracles.location("r1", "other")


def test_coordinator_is_told_of_a_host_that_takes_no_connection() -> None:
    now, unreachable = [100.0], ["ip:9"]
    source = Source()
    source.running["q1"] = oracle_of("r1", "ip:9")
    oracles = LocationCache(source, lambda: now[0], lambda: unreachable.pop() if unreachable else "")
    oracles.update("q1", source.running["q1"])
    for _ in range(3):
        oracles.refresh("r1")
        now[0] += 1
    assert (source.suspected, source.fetched) == (["ip:9"], 3)


def test_oracles_of_queries_that_nobody_asks_for_again_are_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy, "MAX_CACHED_RUNS", 4)
    source = Source()
    oracles = LocationCache(source)
    for n in range(20):
        source.running = {f"q{n}": oracle_of(f"r{n}", job=f"q{n}")}
        assert oracles.location(f"r{n}", "op", with_schema=True).run_id == f"r{n}"
    known = [n for n in range(20) if oracles.get(f"q{n}") is not None]
    assert known == [16, 17, 18, 19]
    tables = {name: len(table) for name, table in vars(oracles).items() if isinstance(table, dict)}
    assert max(tables.values()) <= 4, tables
    # One that was evicted is fetched again.
    source.running = {f"q{n}": oracle_of(f"r{n}", job=f"q{n}") for n in range(20)}
    assert oracles.location("r0", "op", with_schema=True).run_id == "r0"
