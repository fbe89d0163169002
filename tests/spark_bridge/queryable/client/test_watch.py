"""``client.watch``: every completed version's changes, in order, once; through deaths, replacements and restarts."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from spark_bridge.exceptions import (
    ConnectionClosedError,
    QueryEndedError,
    RequestLimitError,
    StateVersionError,
    UnknownKeyOrNamespaceError,
    UnknownKvStateIdError,
    UnknownOperatorError,
)
from spark_bridge.queryable.client import watch
from spark_bridge.queryable.client.watch import StateChange, StateWatch
from spark_bridge.queryable.reads import answer_version, operator_plan
from spark_bridge.queryable.server import request_handler
from spark_bridge.queryable.server.limits import RequestLimits
from tests.effort import only_thorough
from tests.patience import HANG, PATIENCE
from tests.spark_bridge.queryable.client.client_rows import UntilGone
from tests.spark_bridge.queryable.client_world import Cluster, go_back, served
from tests.spark_bridge.queryable.memory_reads import eventually
from tests.spark_bridge.state_flows import Flow


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Cluster]]:
    """Makes queries whose hosts soon ask the coordinator where these are, and whether they have ended."""
    monkeypatch.setattr(operator_plan, "DIRECTORY_SECONDS", 0.05)
    monkeypatch.setattr(answer_version, "ASK_COORDINATOR_SECONDS", 0.1)
    made: list[Cluster] = []

    def make(**arguments: Any) -> Cluster:
        made.append(Cluster(tmp_path, **arguments))
        return made[-1]

    yield make
    for one in made:
        one.close()


def rows(change: StateChange) -> list[tuple[Any, ...]]:
    """Change, user, and the count before and after."""
    assert set(change.batch.column(0).to_pylist()) == {change.version}
    return sorted(
        (r["change_type"], r["user"], (r["before"] or {}).get("n"), (r["after"] or {}).get("n"))
        for r in change.batch.to_pylist()
    )


def at(changes: StateWatch, position: int, then: Callable[[], object]) -> None:
    """Once a watch is there, as it waits in this thread, something happens in another."""

    def wait() -> None:
        eventually(lambda: changes.position == position)
        then()

    threading.Thread(target=wait, daemon=True).start()


def test_every_version_that_changed_something_comes_once_in_order(cluster: Callable[..., Cluster]) -> None:
    c = cluster()
    c.batch({1: (1, "a"), 2: (2, "b")})
    client = c.client()
    with client.watch("totals", from_version=0) as changes:
        first = next(changes)
        assert (first.version, rows(first)) == (1, [("insert", 1, None, 1), ("insert", 2, None, 2)])
        assert first.batch.schema.names == ["version", "change_type", "user", "before", "after"]
        c.batch({1: (10, "a"), 2: None})
        c.batch({})
        c.batch({3: (3, "c")})
        assert [(v.version, rows(v)) for v in (next(changes), next(changes))] == [
            (2, [("delete", 2, 2, None), ("update", 1, 1, 10)]),
            (4, [("insert", 3, None, 3)]),
        ]
        assert changes.position == 4
    with pytest.raises(StopIteration):
        next(changes)


def test_watch_begins_at_the_completed_or_a_given_version(cluster: Callable[..., Cluster]) -> None:
    c = cluster()
    for n in range(1, 4):
        c.batch({1: (n, "a")})
    client = c.client(direct=True)
    with client.watch("totals", from_version=1) as changes:
        assert next(changes).version == 2
    with client.watch("totals", from_version=2) as changes:
        assert next(changes).version == 3
    now = client.watch("totals")
    at(now, 3, lambda: c.batch({1: (4, "a")}))
    change = next(now)
    assert (change.version, rows(change)) == (4, [("update", 1, 3, 4)])


def test_only_the_changes_of_some_keys(cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch) -> None:
    c = cluster()
    c.batch(dict.fromkeys(range(20), (1, "a")))
    c.batch(dict.fromkeys(range(10, 20), (2, "a")))
    c.batch(dict.fromkeys(range(20), (3, "a")))
    client = c.client()
    for keys in ([3, 4], iter([3, 4]), pa.table({"user": [3, 4]})):
        with client.watch("totals", keys, from_version=1) as changes:
            change = next(changes)
            assert (change.version, rows(change)) == (3, [("update", 3, 1, 3), ("update", 4, 1, 3)])
    monkeypatch.setattr(watch, "AWAIT_SECONDS", 0.05)
    nobody = client.watch("totals", [], from_version=0)
    at(nobody, 3, nobody.close)
    assert list(nobody) == []
    assert nobody.position == 3


def test_wrong_watches_are_rejected(cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "AWAIT_SECONDS", 0.1)
    c = cluster()
    c.batch({1: (1, "a")})
    client = c.client()
    with pytest.raises(UnknownOperatorError, match="'totals'"):
        next(client.watch("nothing"))
    with pytest.raises(UnknownKvStateIdError, match="'default'"):
        next(client.watch("totals", state="nothing", from_version=0))
    with pytest.raises(UnknownKeyOrNamespaceError, match="'x'"):
        next(client.watch("totals", ["x"], from_version=0))
    with pytest.raises(StateVersionError, match=r"from_version=9.*last completed version is 1"):
        next(client.watch("totals", from_version=9))


def follow(client: Any, got: dict[int, list[Any]], until: int, from_version: int = 0) -> threading.Thread:
    """Take changes up to a version in another thread; a failure is put under version -1."""

    def run() -> None:
        try:
            for change in client.watch("totals", from_version=from_version):
                assert change.version > max(got, default=from_version)
                got[change.version] = rows(change)
                if change.version >= until:
                    return
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            got[-1] = [error]

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def model(history: list[dict[int, int]]) -> dict[int, list[tuple[Any, ...]]]:
    """What each version changed, by the counts that its batch wrote."""
    held: dict[int, int] = {}
    expected = {}
    for version, batch in enumerate(history, 1):
        changed = [
            ("update" if k in held else "insert", k, held.get(k), n) for k, n in batch.items() if held.get(k) != n
        ]
        held.update(batch)
        if changed:
            expected[version] = sorted(changed)
    return expected


@pytest.mark.parametrize("direct", [only_thorough(True), False])
def test_watch_skips_and_repeats_no_version_while_processes_die(cluster: Callable[..., Cluster], direct: bool) -> None:
    rng = random.Random(3)
    c = cluster()
    history: list[dict[int, int]] = []
    got: dict[int, list[Any]] = {}

    def batch() -> None:
        written = {rng.randrange(30): rng.randrange(5) for _ in range(5)}
        history.append(written)
        c.batch({k: (n, "x") for k, n in written.items()})

    batch()
    thread = follow(c.client(direct=direct, hosts=(0, 1)), got, 12)
    for n in range(2, 13):
        if n == 4:
            c.hosts[1].kill()
            c.replace_host(1, "b")
        if n == 6:
            c.replace_coordinator()
        if n == 8:
            c.partitions = 3
            c.start("run2")
        if n == 10:
            c.hosts[1].kill()
            time.sleep(0.1)
            c.replace_host(1, "c")
        batch()
        time.sleep(rng.random() * 0.05)
    while 12 not in model(history):
        batch()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    expected = model(history)
    assert got == {version: expected[version] for version in expected if version <= max(got)}
    assert max(got) >= 12


def test_complete_versions_are_not_repeated_after_a_broken_stream(cluster: Callable[..., Cluster]) -> None:
    c = cluster()
    for n in range(1, 6):
        c.batch({1: (n, "a")})
    client = c.client()
    stream, broken = client._access.stream, 0

    class Breaking:
        """The frames of a stream up to the third one."""

        def __init__(self, frames: Any) -> None:
            self.frames = frames

        def __iter__(self) -> Iterator[Any]:
            nonlocal broken
            for n, one in enumerate(self.frames):
                if n == 2 and broken < 3:
                    broken += 1
                    raise ConnectionClosedError("broken by the test")
                yield one

        def close(self) -> None:
            self.frames.close()

    client._access.stream = lambda *args: Breaking(stream(*args))
    changes = client.watch("totals", from_version=0)
    assert [(v.version, rows(v)[0][3]) for v in (next(changes) for _ in range(5))] == [(n, n) for n in range(1, 6)]
    assert broken > 0


def test_watch_of_a_rolled_back_query_is_an_error(cluster: Callable[..., Cluster]) -> None:
    c = cluster()
    for n in range(1, 4):
        c.batch({1: (n, "a")})
    client = c.client()
    changes = client.watch("totals", from_version=0)
    assert [next(changes).version for _ in range(3)] == [1, 2, 3]
    for batch in (1, 2):  # the user goes back
        (c.world.root / f"ck/offsets/{batch}").unlink()
        (c.world.root / f"ck/commits/{batch}").unlink()
    c.start("run2")
    assert c.version == 1
    with pytest.raises(StateVersionError, match=r"rolled back.*from version 1.*up to version 3"):
        next(changes)


def test_unretained_version_is_an_error_that_names_the_retained_ones(cluster: Callable[..., Cluster]) -> None:
    c = cluster(min_versions_to_retain=2, maintenance_interval=1.0)
    for n in range(1, 9):
        c.batch(dict.fromkeys(range(40), (n, "a")))
        c.remove_old_versions()
    oldest = c.client().operators()[0]["oldest_version"]
    assert 1 < oldest < 7
    with pytest.raises(StateVersionError, match=str(oldest)):
        next(c.client().watch("totals", from_version=1))
    assert next(c.client().watch("totals", from_version=oldest)).version == oldest + 1


def test_a_query_that_does_not_come_back_has_ended(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    c = cluster()
    c.batch({1: (1, "a")})
    client = c.client()
    changes = client.watch("totals", from_version=0)
    assert next(changes).version == 1
    monkeypatch.setattr(watch, "Attempts", UntilGone)
    c.c.deactivate_instances("run1")
    for h in c.hosts:
        h.host.heartbeat()
    assert list(changes) == []
    with pytest.raises(QueryEndedError, match="ended"):
        next(c.client().watch("totals"))


def test_changes_of_lists_maps_and_values(tmp_path: Path) -> None:
    flow = Flow(tmp_path)
    with served(flow) as client:
        watches = {name: client.watch("op", state=name, from_version=0) for name in ("total", "visits", "pages")}

        def first(of: Any) -> None:
            of.total.update((1, "u"))
            of.visits.appendList([("/", 1)])
            of.pages.updateValue(("/a", "x"), (1, None))

        def second(of: Any) -> None:
            of.visits.appendList([("/b", 2)])

        flow.batch({("a", 1): first})
        flow.host.heartbeat()
        found = {name: next(w) for name, w in watches.items()}
        assert {name: change.version for name, change in found.items()} == {"total": 1, "visits": 1, "pages": 1}
        (page,) = found["pages"].batch.to_pylist()
        assert (page["page"], page["after"]) == ("/a", {"n": 1, "note": None})
        flow.batch({("a", 1): second})
        flow.host.heartbeat()
        (visit,) = next(watches["visits"]).batch.to_pylist()
        assert (visit["change_type"], visit["after"]) == ("insert", {"page": "/b", "at": 2})
        only = client.watch("op", [("b", 1)], state="visits", from_version=0)
        flow.batch({("b", 1): second})
        flow.host.heartbeat()
        assert next(only).version == 3
    flow.close()


def test_closing_ends_the_wait_of_another_thread(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "AWAIT_SECONDS", 0.2)
    monkeypatch.setattr(request_handler, "MAX_AWAIT_SECONDS", HANG)
    c = cluster()
    c.batch({1: (1, "a")})
    changes = c.client(timeout=2 * HANG).watch("totals")
    begun = time.monotonic()
    at(changes, 1, changes.close)
    assert list(changes) == []
    assert time.monotonic() - begun < PATIENCE


def test_a_closed_watch_keeps_nothing_at_the_host(cluster: Callable[..., Cluster]) -> None:
    c = cluster(hosts=1, limits=RequestLimits(max_scans=1))
    for n in range(4):  # more than the buffers of a connection hold
        c.batch(dict.fromkeys(range(20_000), (n, "x" * 200)))
    client = c.client(direct=True, timeout=5.0)
    with client.watch("totals", from_version=0) as changes:
        assert next(changes).version == 1
    assert client.scan("totals").to_arrow().num_rows == 20_000
    assert (changes.position, changes.run_id) == (1, "run1")
    assert list(changes) == []


def test_closing_ends_a_stream_that_another_thread_reads(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    c = cluster(hosts=1)
    c.batch({1: (1, "a")})
    reads, asked, may_answer = c.hosts[0].proxy._reads, threading.Event(), threading.Event()
    of_host = reads.changes

    def held(*args: Any) -> Any:
        asked.set()
        may_answer.wait(HANG)
        return of_host(*args)

    monkeypatch.setattr(reads, "changes", held)
    changes = c.client(timeout=2 * HANG).watch("totals", from_version=0)
    got = list[list[StateChange]]()
    thread = threading.Thread(target=lambda: got.append(list(changes)), daemon=True)
    thread.start()
    assert asked.wait(PATIENCE)
    changes.close()
    thread.join(PATIENCE)
    assert got == [[]] and changes.position == 0
    may_answer.set()


def test_rollback_before_the_first_change_is_an_error_however_late_it_is_seen(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "AWAIT_SECONDS", 0.05)
    c = cluster()
    for n in range(1, 4):
        c.batch({1: (n, "a")})
    changes = c.client().watch("totals", from_version=3)
    known, asked, may_ask = changes._access.known, list[int](), threading.Event()

    def held(*args: Any) -> Any:
        asked.append(1)
        assert len(asked) == 1 or may_ask.wait(PATIENCE)
        return known(*args)

    monkeypatch.setattr(changes._access, "known", held)

    def rolled_back() -> None:
        eventually(lambda: len(asked) == 2)
        go_back(c, 1, "run2")
        for n in (21, 31, 41):
            c.batch({1: (n, "other")})
        may_ask.set()

    thread = threading.Thread(target=rolled_back, daemon=True)
    thread.start()
    with pytest.raises(StateVersionError, match="rolled back"):
        next(changes)
    thread.join(PATIENCE)


def test_changes_of_more_than_two_gib_in_one_version_are_an_error() -> None:
    content = np.zeros(1_500_000_000, np.uint8)  # of pages that the system has not filled
    offsets = np.array([0, len(content)], np.int32)
    text = pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(offsets), pa.py_buffer(content)])
    part = pa.record_batch({"version": [3], "text": text, "key_group": [0], "partition": [0]})
    assert watch.without_last_columns([part]).schema.names == ["version", "text"]
    with pytest.raises(RequestLimitError, match="ask for fewer keys"):
        watch.without_last_columns([part, part])
