"""One client with a token, or without one, cannot stop the others: what long requests hold, and for how long."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from backends.host_memory import BoundedDict
from coordinator_actor.exceptions import UnknownRunError
from coordinator_actor.messages import HostInfo, OperatorLocation, OperatorSpec
from spark_bridge.exceptions import RequestError, RequestLimitError
from spark_bridge.host import prepared_versions
from spark_bridge.host.partition_loader import PartitionLoader
from spark_bridge.queryable.protocol import (
    At,
    AwaitRequest,
    Comparison,
    CountReply,
    CountRequest,
    Hello,
    KeyRowsRequest,
    LookupReply,
    LookupRequest,
    Request,
    RowsReply,
    ScanRequest,
    StateAnswer,
    active_context,
    decode_request,
    pack_bytes,
)
from spark_bridge.queryable.reads import key_reads, operator_plan, scans
from spark_bridge.queryable.reads.scans import gather_batches, limited
from spark_bridge.queryable.routing.scans import RoutedScan, ScanPlan
from spark_bridge.queryable.server import request_handler, server
from tests.patience import HANG, PATIENCE
from tests.spark_bridge.queryable.host_world import STATE, HostWorld, stored
from tests.spark_bridge.queryable.memory_reads import (
    ROWS,
    TOKEN,
    MemoryReads,
    RawClient,
    eventually,
    failed_with,
    rows,
    serving,
)

NOTHING = [Comparison("n", "=", [-1])]


class Stopped(Exception):
    """The client no longer wants the answer."""


class Watch:
    """Ends a request at its ``checks``-th check, or when it holds more than ``room`` bytes."""

    def __init__(self, checks: float = float("inf"), room: float = float("inf")) -> None:
        self.checks = checks
        self.room = room

    def raise_if_cancelled(self) -> None:
        self.checks -= 1
        if self.checks <= 0:
            raise Stopped

    def before_slow_work(self) -> None:
        pass

    def reserve_memory(self, nbytes: int) -> None:
        self.room -= nbytes
        if self.room < 0:
            raise Stopped


@pytest.fixture
def world(tmp_path) -> Iterator[HostWorld]:
    made = HostWorld(tmp_path, n=1)
    made.batch({k: k for k in range(20)})
    yield made
    made.close()


@pytest.fixture
def endless(world, monkeypatch) -> dict[str, int]:
    """A state that has the same pairs for ever; how many iterators of it are open."""
    open_now = {"iterators": 0}
    values = STATE.encode_values(pa.record_batch([pa.array([7]), pa.array([7])], names=["n", "w"]))
    pairs = pa.record_batch([stored([1]), values], names=["key", "value"])

    def forever(*_: Any) -> Iterator[pa.RecordBatch]:
        open_now["iterators"] += 1
        try:
            while True:
                time.sleep(0.002)
                yield pairs
        finally:
            open_now["iterators"] -= 1

    monkeypatch.setattr(scans, "_pairs", forever)
    for module in (request_handler, request_handler):
        monkeypatch.setattr(module, "QUIET_SECONDS", 0.05)
    return open_now


# -- scans that find nothing -----------------------------------------------------------------------


def test_client_waiting_for_a_rare_row_gets_empty_replies_and_may_leave(world, endless):
    scan = ScanRequest(world.run, "op", where=NOTHING)
    with serving(world.reads[0], max_scans=1) as (served, _):
        with RawClient(served.server_address) as client:
            client.say(scan)
            bodies = []
            for _ in range(3):
                reply, body = client.hear()
                assert isinstance(reply, RowsReply)
                bodies.append(body)
            heard = pa.ipc.open_stream(b"".join(bodies)).read_all()
            assert heard.num_rows == 0 and heard.column_names == ["k", "n", "w"]
            assert endless["iterators"] == 1
        eventually(lambda: endless["iterators"] == 0 and served.num_connections == 0)
        with RawClient(served.server_address) as client:
            client.say(scan)
            eventually(lambda: endless["iterators"] == 1)
        # The server ends it, too.
    assert endless["iterators"] == 0


@pytest.mark.parametrize(
    "made",
    [
        lambda run: ScanRequest(run, "op", where=NOTHING),
        lambda run: CountRequest(ScanRequest(run, "op", where=NOTHING)),
        lambda run: CountRequest(ScanRequest(run, "op", start=b"\x00")),
    ],
)
def test_scans_and_counts_have_an_end_whatever_they_find(world, endless, made: Callable[[str], Request]):
    with serving(world.reads[0], scan_seconds=0.2) as (served, _), RawClient(served.server_address) as client:
        client.say(made(world.run))
        while isinstance((reply := client.hear()[0]), RowsReply):
            pass
        assert "0.2 s" in failed_with(reply, "RequestLimitError")
        eventually(lambda: endless["iterators"] == 0)


def test_count_stops_for_a_gone_client_and_a_revoked_token(world, endless, monkeypatch):
    monkeypatch.setattr(request_handler, "TOKEN_SECONDS", 0.05)
    count = CountRequest(ScanRequest(world.run, "op", start=b"\x00"))
    with serving(world.reads[0]) as (served, _):
        with RawClient(served.server_address) as client:
            client.say(count)
            eventually(lambda: endless["iterators"] == 1)
        eventually(lambda: endless["iterators"] == 0)
        with RawClient(served.server_address) as client:
            client.say(count)
            eventually(lambda: endless["iterators"] == 1)
            served._tokens.valid.clear()  # type: ignore[attr-defined]
            failed_with(client.hear()[0], "AccessDeniedError")
        eventually(lambda: endless["iterators"] == 0)


def test_rows_that_are_dropped_are_checked_for_everywhere():
    def none() -> Iterator[pa.RecordBatch]:
        return itertools.repeat(rows(0, 0))

    owner = HostInfo("h0", "a", "grpc://127.0.0.1:1", "node", "s")
    location = OperatorLocation("q", "run", None, OperatorSpec("totals", 1, ""), 16, 7, (owner,))
    endless = StateAnswer(7, ROWS, none())
    plan = ScanPlan(
        ScanRequest("run", "totals"), location, lambda *_: lambda: endless, lambda *_: "a:1", None, timeout=1.0
    )
    for batches in (limited(none(), 5), gather_batches(none()), RoutedScan(plan, [("a:1", [0])], 0.0)):
        with active_context(Watch(checks=5)), pytest.raises(Stopped):
            next(batches)


# -- strings ---------------------------------------------------------------------------------------


def test_unknown_runs_cost_neither_memory_nor_coordinator_calls(world, monkeypatch):
    host, reads = world.hosts[0], world.reads[0]
    host.version_requests._asking = BoundedDict(10)
    for i in range(30):
        with pytest.raises(UnknownRunError):
            reads.await_completed(f"nobody{i}", 0, 0.01)
    assert len(host.version_requests._asking) <= 10
    monkeypatch.setattr(prepared_versions, "UNKNOWN_RUN_SECONDS", HANG)
    before = world.port.calls["completed"]
    for _ in range(30):
        with pytest.raises(UnknownRunError, match="nobody29"):
            reads.lookup(LookupRequest("nobody29", "op"), stored([1]))
    assert world.port.calls["completed"] == before
    monkeypatch.setattr(prepared_versions, "UNKNOWN_RUN_SECONDS", 0.0)
    with pytest.raises(UnknownRunError):
        reads.await_completed("nobody29", 0, 0.01)
    assert world.port.calls["completed"] == before + 1


@pytest.mark.parametrize(
    "request_",
    [
        AwaitRequest("r" * 257, 0, 1.0),
        LookupRequest("r", "o" * 1025),
        LookupRequest("r", "o", column_family="f" * 1025),
        ScanRequest("r", "o", "s" * 1025),
        ScanRequest("r", "o", columns=["c"] * 4097),
        ScanRequest("r", "o", where=NOTHING * 1025),
    ],
)
def test_overlong_names_are_rejected(request_):
    with pytest.raises(msgspec.ValidationError, match="length"):
        decode_request(msgspec.msgpack.encode(request_))


def test_a_column_is_asked_for_once(world):
    with pytest.raises(RequestError, match="'n' is asked for more than once"):
        world.reads[0].scan(ScanRequest(world.run, "op", columns=["k", "n", "n"]))


# -- the turns of lookups --------------------------------------------------------------------------


def keys(*given: bytes) -> bytes:
    return pack_bytes(pa.array(given, pa.binary()))


def test_slow_reader_of_key_rows_does_not_block_lookups():
    reads = MemoryReads(batches=[rows(0, 1000, 1000)] * 500)
    limits = {"max_requests": 1, "max_scans": 1, "wait_seconds": 0.05}
    with serving(reads, **limits) as (served, _), RawClient(served.server_address) as slow:
        slow.say(KeyRowsRequest("run", "totals"), keys(b"k1"))
        eventually(lambda: served._running is not None and served._running.admission.slow.taken == 1)
        with RawClient(served.server_address) as other:
            assert other.ask(LookupRequest("run", "totals"), keys(b"k1"))[0] == LookupReply(7)
            assert other.ask(CountRequest(ScanRequest("run", "totals")))[0] == CountReply(7, 500_000)
            failed_with(other.ask(KeyRowsRequest("run", "totals"), keys(b"k1"))[0], "TooManyRequestsError")
            reads.batches = [rows(0, 10)]  # few need no room of the slow ones
            assert other.stream(KeyRowsRequest("run", "totals"), keys(b"k1"))[0] is not None
        running = served._running
    assert running is not None and running.admission.slow.taken == running.admission.lookups.taken == 0


def test_wait_for_an_old_version_does_not_block_lookups(world, monkeypatch):
    for n in range(8):
        world.batch({1: n})
    loading, go_on = threading.Event(), threading.Event()
    fill = PartitionLoader.load_copy

    def slowly(*args: Any) -> Any:
        loading.set()
        assert go_on.wait(HANG)
        return fill(*args)

    monkeypatch.setattr(PartitionLoader, "load_copy", slowly)
    old, now = LookupRequest(world.run, "op", At("version", 1)), LookupRequest(world.run, "op")
    for body in (pack_bytes(stored([1])), pack_bytes(stored([1, 2]))):
        loading.clear()
        go_on.clear()
        with (
            serving(world.reads[0], max_requests=1, wait_seconds=0.05) as (served, _),
            RawClient(served.server_address) as first,
            RawClient(served.server_address) as second,
        ):
            try:
                first.say(old, body)
                assert loading.wait(PATIENCE)
                assert second.ask(now, body)[0] == LookupReply(9)
            finally:
                go_on.set()
            assert first.hear()[0] == LookupReply(1)
        world.hosts[0].cache.drop_copies(None)


def test_a_large_answer_is_refused_while_it_is_read(world, monkeypatch):
    monkeypatch.setattr(key_reads, "FIRST_KEYS", 4)
    monkeypatch.setattr(key_reads, "READ_KEYS", 4)
    sizes: list[int] = []
    state = world.instance(0).state
    get_many = state.reads.get_many

    def counted(asked: pa.BinaryArray, *args: Any, **kw: Any) -> pa.BinaryArray:
        sizes.append(len(asked))
        return get_many(asked, *args, **kw)

    monkeypatch.setattr(state.reads, "get_many", counted)
    lookup = LookupRequest(world.run, "op")
    assert world.lookup(range(20))[1] == list(range(20)) and sizes == [4] * 5
    sizes.clear()
    with active_context(Watch(room=100)), pytest.raises(Stopped):
        world.reads[0].lookup(lookup, stored(range(20)))
    assert len(sizes) == 2
    with active_context(Watch(checks=3)), pytest.raises(Stopped):
        world.reads[0].key_rows(KeyRowsRequest(world.run, "op"), stored(range(20)))
    monkeypatch.setattr(key_reads, "MAX_BYTES", 200)
    sizes.clear()
    with pytest.raises(RequestLimitError, match="fewer keys"):
        world.reads[0].lookup(lookup, stored(range(20)))
    assert 1 < len(sizes) < 5
    assert world.lookup(range(4))[1] == list(range(4))

    def overflowing(*_: Any, **__: Any) -> pa.BinaryArray:
        raise pa.ArrowInvalid("offset overflow while concatenating arrays, consider casting")

    monkeypatch.setattr(state.reads, "get_many", overflowing)
    with pytest.raises(RequestLimitError, match="fewer keys"):
        world.reads[0].lookup(lookup, stored(range(4)))


def test_oversized_answer_is_rejected_and_releases_its_memory(monkeypatch):
    class Reads(MemoryReads):
        chunks = 0

        def lookup(self, request: LookupRequest, asked: pa.BinaryArray) -> tuple[int, pa.BinaryArray]:
            for _ in range(100):
                key_reads.reserve_memory(100_000)
                self.chunks += 1
            return super().lookup(request, asked)

    limits = {"max_request_bytes": 4096, "max_buffered_bytes": 2 << 20}
    with serving(Reads(), **limits) as (served, reads), RawClient(served.server_address) as client:
        for _ in range(3):
            reads.chunks = 0
            failed_with(client.ask(LookupRequest("run", "totals"), keys(b"k1", b"k2"))[0], "RequestLimitError")
            assert reads.chunks == 20


# -- what the coordinator is asked -----------------------------------------------------------------


def test_coordinator_is_asked_once_for_equal_requests(world, monkeypatch):
    reads, calls = world.reads[0], world.port.calls
    for _ in range(20):
        assert reads.locate("op", None).operator.name == "op"
        assert [o["operator"] for o in reads.operators()] == ["op"]
        assert len(reads.describe("op", None)["operators"]) == 1
    assert (calls["locate"], calls["operators"]) == (1, 1)
    monkeypatch.setattr(operator_plan, "DIRECTORY_SECONDS", 0.0)
    reads._directory._locations = BoundedDict(1)
    for query in (None, world.run, None, world.run):
        assert reads.locate("op", query).run_id == world.run
    assert calls["locate"] == 5 and len(reads._directory._locations) == 1


# -- connections -----------------------------------------------------------------------------------


def test_silent_connections_do_not_keep_clients_out(monkeypatch):
    monkeypatch.setattr(server, "MAX_UNAUTHENTICATED", 4)
    monkeypatch.setattr(server, "REFUSED_AT_ONCE", 1)
    asked = (LookupRequest("run", "totals"), keys(b"k1"))
    with serving(max_connections=2) as (served, _), RawClient(served.server_address) as first:
        silent = [RawClient(served.server_address, token=None) for _ in range(3)]
        eventually(lambda: served.num_connections == 4)
        with RawClient(served.server_address) as second:  # neither counts the other's
            assert second.ask(*asked)[0] == LookupReply(7)
            silent.append(RawClient(served.server_address, token=None))
            eventually(lambda: served.num_connections == 6)
            with RawClient(served.server_address, token=None) as one_more:
                one_more.say(Hello(1, TOKEN))
                assert "yet to say" in failed_with(one_more.hear()[0], "TooManyRequestsError")
            assert second.ask(*asked)[0] == first.ask(*asked)[0] == LookupReply(7)
        for client in silent:
            client.close()
        eventually(lambda: served.num_connections == 1)
        with RawClient(served.server_address) as second:
            assert second.ask(*asked)[0] == LookupReply(7)
