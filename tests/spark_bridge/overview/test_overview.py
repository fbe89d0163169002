"""The overview says the same from the cluster and from the checkpoint, and keeps what outlives the cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from msgspec import structs

from backends.background_loop import FailingLoop
from backends.exceptions import MissingFileError
from coordinator_actor.durable.spark_commits import SparkLogs
from coordinator_actor.messages import BatchTimes, InputPace
from coordinator_actor.run.history import WRITE_SECONDS
from spark_bridge.host.instances import in_columns
from spark_bridge.overview.from_cluster import KnownCheckpoints, overview_of_cluster
from spark_bridge.overview.from_storage import overview_of_checkpoint
from spark_bridge.overview.model import (
    OVERVIEW_FORMAT_VERSION,
    Checkpoint,
    GivenUp,
    LocationTrouble,
    Overview,
    to_plain,
)
from tests.coordinator_actor.coordinator_world import run_of
from tests.coordinator_actor.savepoints.savepoint_streams import Stream

Make = Callable[..., Stream]


def of_cluster(s: Stream, missing: tuple[int, ...] = ()) -> Overview:
    coordinator = {**s.c.describe(), "namespace": "statestore", "node_ip": "192.0.2.1", "pid": 11}
    hosts = [in_columns(host.describe()) for i, host in s.hosts.items() if i not in missing]
    stats = {q["run_id"]: s.c.checkpoint_stats(q["run_id"]) for q in coordinator["queries"]}
    return overview_of_cluster(coordinator, hosts, stats, now_ms=int(s.world.now * 1000))


def of_storage(s: Stream) -> Overview:
    return overview_of_checkpoint(str(s.world.root / "ck"), open_storage=s.world.storage, now_ms=0)


def write_history(s: Stream) -> None:
    s.world.now += WRITE_SECONDS
    s.c.maintain()


def test_cluster_and_checkpoint_agree(stream: Make) -> None:
    s = stream(batches=3, n=3)
    write_history(s)
    s.heartbeat()
    running, stored = of_cluster(s).query("name"), of_storage(s).query(None)
    assert running.query_id == stored.query_id == "q"
    for name in ("run_id", "epoch", "completed_version", "prepared_version", "oldest_version", "state_location"):
        assert getattr(running, name) == getattr(stored, name), name
    assert running.checkpoints == stored.checkpoints
    assert [c.version for c in stored.checkpoints] == [1, 2, 3]
    (mine,), (theirs,) = running.operators, stored.operators
    assert (mine.name, mine.num_partitions, mine.backend) == (theirs.name, theirs.num_partitions, theirs.backend)
    assert [p.version for p in mine.partitions] == [p.version for p in theirs.partitions] == [3, 3, 3]
    # What only hosts know.
    assert mine.keys == len(s.at[3]) and theirs.keys is None
    assert {p.owner for p in mine.partitions} <= {"h0", "h1"} and all(p.owner is None for p in theirs.partitions)
    # What only storage knows.
    sizes = [m.operators["op"].partitions.stored.size for m in s.log().manifests.values()]
    assert [p.changelog_bytes for p in theirs.partitions] == [sum(column) for column in zip(*sizes, strict=True)]


def test_overview_is_built_incrementally_from_new_and_changed_records(stream: Make) -> None:
    s = stream(batches=3)
    known = KnownCheckpoints()
    sent: list[int] = []

    def look(oldest: int = 1, answers: bool = True) -> tuple[Checkpoint, ...]:
        coordinator = {**s.c.describe(), "namespace": "statestore"}
        coordinator["queries"][0]["oldest_version"] = oldest
        stats = {"run1": s.c.checkpoint_stats("run1", known.mark("run1"))} if answers else {}
        whole = {"run1": s.c.checkpoint_stats("run1")}
        sent[:] = [record["version"] for of_run in stats.values() for record in of_run["history"]]
        made = overview_of_cluster(coordinator, [], stats, known=known, now_ms=0).query(None).checkpoints
        if answers:
            assert made == overview_of_cluster(coordinator, [], whole, now_ms=0).query(None).checkpoints
        return made

    first = look()
    assert sent == [1, 2, 3] and [c.version for c in first] == [1, 2, 3]
    assert look() is first and sent == []
    s.batches(3, 4)
    second = look()
    assert sent == [4] and [c.version for c in second] == [1, 2, 3, 4]
    assert all(a is b for a, b in zip(first, second, strict=False))
    assert look(answers=False) is second, "of a coordinator that is slow the last answer is shown"
    third = look(oldest=2)
    assert sent == [] and [c.is_kept for c in third] == [False, True, True, True] and third[1:] == second[1:]
    run = run_of(s.c)
    run.history.measured(run.versions.chain[3], 17)
    fourth = look()
    assert sent == [3] and [c.full_bytes for c in fourth] == [None, None, 17, None] and fourth[3] is second[3]
    write_history(s)
    s.restart_coordinator()
    s.c.maintain()
    assert len(look()) == 4 and sent == [1, 2, 3, 4], "marks of another coordinator stand for nothing"
    s.batches(4, 5)
    assert [c.version for c in look()] == [1, 2, 3, 4, 5] and set(known._of_runs) == {"run1"}
    s.batches(5, 6)
    coordinator, stats = s.c.describe(), s.c.checkpoint_stats("run1", known.mark("run1"))
    (query,) = coordinator["queries"]
    left = known.of(query, {**stats, "history_first": third[2].id})
    assert [c.version for c in left] == [3, 4, 5, 6], "a history that is full forgets its oldest"
    overview_of_cluster({**s.c.describe(), "namespace": "n", "queries": []}, [], known=known, now_ms=0)
    assert known._of_runs == {}


def test_overview_of_a_checkpoint_needs_no_cluster(stream: Make) -> None:
    s = stream(batches=3)
    s.c.deactivate_instances("run1")
    assert [(c.version, c.status, c.is_kept) for c in of_storage(s).query(None).checkpoints] == [
        (v, "completed", True) for v in (1, 2, 3)
    ]
    assert all(c.duration_ms is not None for c in of_storage(s).query(None).checkpoints)


def test_versions_without_history_come_from_their_manifests(stream: Make) -> None:
    s = stream(batches=2)  # the coordinator is killed before it has written the history
    s.begin(2, {1: 5})
    found = of_storage(s).query(None).checkpoints
    assert [(c.version, c.status, c.duration_ms) for c in found] == [
        (1, "completed", None),
        (2, "completed", None),
        (3, "prepared", None),
    ]
    assert all(c.delta_bytes and c.partitions == 2 and c.prepared_ms for c in found)


def test_rewritten_manifest_is_not_a_second_checkpoint(stream: Make) -> None:
    s = stream(batches=2)
    write_history(s)
    s.restart_coordinator()  # it writes the newest manifest again, under its epoch
    assert [c.version for c in of_storage(s).query(None).checkpoints] == [1, 2]


def test_snapshots_and_the_changelogs_after_them(stream: Make) -> None:
    s = stream(batches=3, hosts=1)
    host = s.hosts[0]
    s.heartbeat()
    for instance in host.cache.all():
        host.maintenance.upload_snapshots([instance])
    s.batches(3, 5)
    s.heartbeat()
    for found in (of_cluster(s), of_storage(s)):
        assert [(p.snapshot_version, p.snapshot_lag) for p in found.query(None).operators[0].partitions] == [(3, 2)] * 2
    last_two = [m.operators["op"].partitions.stored.size for m in s.log().chain().values() if m.version > 3]
    assert [p.changelog_bytes for p in of_storage(s).query(None).operators[0].partitions] == [
        sum(column) for column in zip(*last_two, strict=True)
    ]


def test_hosts_with_and_without_an_answer(stream: Make) -> None:
    s = stream(hosts=2)
    hosts = {host.host_id: host for host in of_cluster(s, missing=(1,)).hosts}
    assert hosts["h0"].answered and hosts["h0"].counters["commits"] > 0 and hosts["h0"].memory["host_memory"] > 0
    assert not hosts["h1"].answered and hosts["h1"].address == "grpc://127.0.0.1:1"


def test_host_that_the_coordinator_gave_up_is_listed_from_ray(stream: Make) -> None:
    s = stream(hosts=1)
    coordinator = {**s.c.describe(), "namespace": "statestore"}
    (host,) = (in_columns(h.describe()) for h in s.hosts.values())
    known = {"state": "ALIVE", "pid": 17, "restarts": 2, "node_ip": "192.0.2.7", "node_id": "n7"}
    silent = [{"host_id": "h7", **known}, {"host_id": "h8"}]
    lost, ended = (h for h in overview_of_cluster(coordinator, [host], silent=silent, now_ms=0).hosts if not h.answered)
    if lost.host_id != "h7":
        lost, ended = ended, lost
    assert (lost.machine, lost.node_id, lost.pid, lost.restarts) == ("192.0.2.7", "n7", 17, 2)
    assert (lost.actor_state, lost.heartbeat_ms) == ("ALIVE", None)
    assert (ended.host_id, ended.machine, ended.actor_state, ended.pid) == ("h8", "", None, None)
    (held,) = (h for h in overview_of_cluster(coordinator, [], silent=[{**known, "host_id": "h0"}], now_ms=0).hosts)
    assert (held.address, held.pid, held.actor_state) == (
        host["address"],
        17,
        "ALIVE",
    ) and held.heartbeat_ms is not None


def test_a_partition_that_two_hosts_hold_counts_once(stream: Make) -> None:
    s = stream(hosts=1)
    coordinator = {**s.c.describe(), "namespace": "statestore"}
    s.heartbeat()
    (host,) = (h.describe() for h in s.hosts.values())
    old = {**host, "host_id": "old", "instances": [{**i, "version": i["version"] - 1} for i in host["instances"]]}
    for order in ([host, old], [old, host]):
        (operator,) = overview_of_cluster(coordinator, [in_columns(h) for h in order], now_ms=0).query(None).operators
        assert {p.owner for p in operator.partitions} == {"h0"}
        assert operator.keys == len(s.at[2])


def test_the_skew_is_known_when_the_median_partition_is_empty(stream: Make) -> None:
    s = stream(hosts=1, n=3)
    coordinator = {**s.c.describe(), "namespace": "statestore"}
    s.heartbeat()
    (host,) = (h.describe() for h in s.hosts.values())
    for sizes, skew in (((0, 0, 20_000), 20_000.0), ((10, 4, 20), 2.0), ((0, 0, 0), None)):
        held = [{**i, "keys": sizes[i["partition"]]} for i in host["instances"]]
        columns = in_columns({**host, "instances": held})
        (operator,) = overview_of_cluster(coordinator, [columns], now_ms=0).query(None).operators
        assert operator.skew == skew


def test_no_coordinator_is_an_empty_overview() -> None:
    assert overview_of_cluster(None, (), now_ms=1) == Overview("cluster", 1)


def test_overview_survives_a_json_round_trip(stream: Make) -> None:
    from backends.decoders import convert

    s = stream()
    for found in (of_cluster(s), of_storage(s)):
        plain: Any = msgspec.json.encode(to_plain(found))
        assert b'"format_version":%d' % OVERVIEW_FORMAT_VERSION in plain
        assert convert(to_plain(found), Overview) == found


def test_overview_has_figures_of_processes_and_abandoned_work(stream: Make) -> None:
    s = stream(hosts=1)
    (host,) = (in_columns(h.describe()) for h in s.hosts.values())
    host["storage_trouble"] = [
        {
            "location": "/ck",
            "failures": 3,
            "error": "put: no",
            "failed_seconds": 1.5,
            "answered_since": True,
            "waiting": 1,
            "waiting_seconds": 7.0,
        }
    ]
    assert host["restarts"] == 0 and host["up_seconds"] >= 0
    coordinator = {**s.c.describe(), "namespace": "statestore", "restarts": 2, "up_seconds": 9.0}
    failed = {"id": 3, "trigger_timestamp": 12.5, "reason": "failed: it is full"}
    found = overview_of_cluster(coordinator, [host], {"run1": {"checkpoints": {"failures": [failed]}}}, now_ms=0)
    assert found.hosts[0].storage_trouble == (LocationTrouble("/ck", 3, "put: no", 1_500, True, 1, 7_000),)
    assert found.coordinator is not None
    assert (found.coordinator.restarts, found.coordinator.up_ms) == (2, 9_000)
    assert found.query(None).given_up == (GivenUp(3, 12_500, "failed: it is full"),)


def test_query_that_ended_mid_batch_has_no_current_batch(stream: Make) -> None:
    s = stream(batches=2)
    s.c.driver_heartbeat("run1", is_at_work=True)
    assert of_cluster(s).query(None).batch_ms is not None
    s.c.serve_ended(s.registration, "ValueError: no")
    coordinator = {**s.c.describe(), "namespace": "statestore"}
    coordinator["queries"][0]["pending_partitions"] = 2  # its tasks were ended in the midst
    found = overview_of_cluster(coordinator, [], now_ms=0).query(None)
    assert (found.status, found.pending_partitions, found.batch_ms) == ("ended", 0, None)
    assert found.failure == "ValueError: no" and found.ended_ms is not None


def test_query_with_a_lost_driver_is_reported_until_it_runs_again(stream: Make) -> None:
    s = stream(batches=2)

    def lost() -> list[tuple[str, str, int]]:
        coordinator = of_cluster(s).coordinator
        assert coordinator is not None
        return [(one.query, one.run_id, one.lost_ms) for one in coordinator.lost]

    heard = int(s.world.now * 1000)
    s.world.now += 30
    s.c.expire()
    assert lost() == [] and of_cluster(s).query(None).driver_ms == 30_000
    assert "driver-silent" in {fault.kind for fault in of_cluster(s).faults}
    s.c.driver_heartbeat("run1")
    assert of_cluster(s).query(None).driver_ms == 0
    heard += 30_000
    s.world.now += 61
    s.c.expire()
    assert of_cluster(s).queries == () and lost() == [("name", "run1", heard)], "since when, not when it was given up"
    (fault,) = (fault for fault in of_cluster(s).faults if fault.kind == "driver-lost")
    assert "no heartbeat for 1 min 1 s, and was given up" in fault.what
    assert s.c.register_query(structs.replace(s.registration, run_id="run2")).refusal is None
    assert lost() == []
    s.c.serve_ended(structs.replace(s.registration, run_id="run2"))
    s.world.now += 61
    s.c.expire()
    assert of_cluster(s).queries == () and lost() == [], "its query had ended before"


def test_savepoints_are_listed(stream: Make) -> None:
    s = stream()
    s.trigger()
    s.finish()
    (savepoint,) = of_storage(s).query(None).savepoints
    assert savepoint.version == 2 and savepoint.location.startswith(str(s.world.root / "sp"))


def test_query_is_selected_by_name_or_id(stream: Make) -> None:
    found = of_cluster(stream())
    for name in (None, "name", "q", "run1"):
        assert found.query(name).query_id == "q"
    with pytest.raises(LookupError, match=r"No single query is named 'other'; there are: name \(q\)"):
        found.query("other")
    earlier = replace(found.queries[0], run_id="run0", status="replaced")
    assert replace(found, queries=(earlier, *found.queries)).query("name").run_id == "run1"
    assert replace(found, queries=(earlier, *found.queries)).query("run0").run_id == "run0"
    two = replace(found, queries=(*found.queries, replace(found.queries[0], query_id="q2", name="second")))
    with pytest.raises(LookupError, match="A query must be named; there are: name"):
        two.query(None)
    with pytest.raises(LookupError, match="There is no query"):
        replace(found, queries=()).query(None)


def test_missing_state_is_reported(stream: Make) -> None:
    with pytest.raises(MissingFileError):
        overview_of_checkpoint(str(stream().world.root / "nothing"))


def test_both_know_the_state_variables_and_which_versions_have_which_schema(stream: Make) -> None:
    s = stream(batches=3)
    for found in (of_cluster(s), of_storage(s)):
        (operator,) = found.query(None).operators
        (variable,) = operator.variables
        assert (variable.name, variable.kind, variable.key, variable.value) == (
            "default",
            "rows",
            {"k": "int64"},
            {"n": "int64"},
        )
        (used,) = operator.schemas
        assert (used.schema_id, used.first_version, used.last_version) == (operator.schema_id, 1, 3)
        assert used.variables == operator.variables
    assert to_plain(operator)["schemas"][0]["variables"][0]["name"] == "default"


def test_the_watermark_of_storage_and_of_a_coordinator_that_reads_it(stream: Make) -> None:
    s = stream(batches=2)
    assert of_storage(s).query(None).watermark_ms is None  # the file is not as Spark writes it
    times = '{"batchWatermarkMs":7000,"batchTimestampMs":1000000}'
    for batch in range(2):
        (s.world.root / "ck" / "offsets" / str(batch)).write_text(f"v1\n{times}\n0")
    found = of_storage(s).query(None)
    assert (found.watermark_ms, found.batch_time_ms) == (7_000, 1_000_000)
    coordinator = {**s.c.describe(), "namespace": "statestore"}
    assert coordinator["queries"][0]["batch_times"] is None
    coordinator["queries"][0]["batch_times"] = {"watermark_ms": 7_000, "timestamp_ms": 1_000_000}
    found = overview_of_cluster(coordinator, [], now_ms=0).query(None)
    assert (found.watermark_ms, found.batch_time_ms) == (7_000, 1_000_000)


def test_a_partition_knows_the_rows_of_its_last_batch_and_a_host_its_cache(stream: Make) -> None:
    s = stream(hosts=1)
    (described,) = (h.describe() for h in s.hosts.values())
    last = described["instances"][0]["last_commit"]["version"]
    described["instances"][0]["commits"][last]["num_rows"] = 17
    described["instances"][0]["last_commit"].update(input_wait=500.0, merge_ms=3.0)
    described["row_cache"] = {"asked": 8, "hits": 6}
    coordinator = {**s.c.describe(), "namespace": "statestore"}
    made = overview_of_cluster(coordinator, [in_columns(described)], now_ms=0)
    partition = made.query(None).operators[0].partitions[described["instances"][0]["partition"]]
    assert partition.rows == 17 and partition.work_ms is not None
    assert partition.work_ms == sum(ms for name, ms in partition.commit_ms.items()) - 500.0
    assert made.hosts[0].cache_hits == 0.75 and replace(made.hosts[0], row_cache={}).cache_hits is None


def test_failing_loops_of_coordinator_hosts_and_drivers_are_reported(stream: Make) -> None:
    s = stream(hosts=1)
    (host,) = (in_columns(h.describe()) for h in s.hosts.values())
    loop = FailingLoop("do the work", 90.0, 3, "KeyError: 'a'", "Look.")
    host["failing_loops"] = [msgspec.to_builtins(loop)]
    s.c.report_failing_loops("session", "process 7", [structs.replace(loop, what="follow")])

    def told() -> list[tuple[str, str]]:
        coordinator = {**s.c.describe(), "namespace": "n", "failing_loops": [msgspec.to_builtins(loop)]}
        found = overview_of_cluster(coordinator, [host], now_ms=100_000)
        faults = [fault for fault in found.faults if fault.kind == "background-loop-fails"]
        assert all("for 10.0 s" in fault.what and "KeyError: 'a'" in fault.what for fault in faults)
        return [(fault.subject, fault.what.partition(" to ")[2].partition(".")[0]) for fault in faults]

    of_host = (f"host {host['host_id']}", "do the work")
    assert told() == [("coordinator", "do the work"), ("driver process 7", "follow"), of_host]
    s.c.report_failing_loops("session", "process 7", [])
    assert told() == [("coordinator", "do the work"), of_host]
    s.c.report_failing_loops("session", "process 7", [loop])
    s.world.now += 31
    assert told() == [("coordinator", "do the work"), of_host], "the driver says nothing any more"


def test_the_pace_of_the_input_comes_with_the_drivers_heartbeat(stream: Make) -> None:
    s = stream()
    assert of_cluster(s).query(None).input is None
    s.c.driver_heartbeat("run1", pace=InputPace(50.0, 80.0, 15))
    assert of_cluster(s).query(None).input == InputPace(50.0, 80.0, 15)


def test_overview_knows_since_when_the_watermark_has_not_advanced() -> None:
    now, watermarks = 100.0, {0: 7_000, 1: 7_000, 2: 9_000}

    class Logs:
        def has(self, batch_id: int) -> bool:
            return True

        def times(self, batch_id: int) -> BatchTimes:
            return BatchTimes(0, watermarks[batch_id])

    logs = SparkLogs(Logs(), lambda: now, uses_time=True)  # type: ignore[arg-type]
    assert logs.rose_at is None
    rose = []
    for batch, now in ((0, 100.0), (1, 160.0), (2, 170.0)):  # noqa: B007
        logs.times_for_tasks(batch)
        rose.append(logs.rose_at)
    assert rose == [100.0, 100.0, 170.0]
