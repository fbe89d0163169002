"""Whatever a client sends to a host's Flight port: an error or an answer, nothing crashes, hangs or leaks."""

from __future__ import annotations

import contextlib
import gc
import logging
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil
import pyarrow as pa
import pytest
from pyarrow import flight

from backends.exceptions import SchemaMismatchError
from coordinator_actor.messages import OperatorFigures
from spark_bridge.flight_server import HostFlightServer
from spark_bridge.transport.flight_client import HostClient
from spark_bridge.transport.protocol import (
    COMMIT_SCHEMA,
    END_OF_CHANGES,
    KEYS_SCHEMA,
    RANGES_SCHEMA,
    CommitCommand,
    CoordinatorCall,
    GetCommand,
    LocateRequest,
    OpenAndGetCommand,
    ScanCommand,
)
from tests.coordinator_actor.coordinator_world import World
from tests.patience import PATIENCE
from tests.spark_bridge.host.host_steps import make_host, plan_spark, reg, run_task, task

T = TypeVar("T")

TOKEN = "right-token"
ROUNDS = pytest.mark.parametrize("rounds", [12, pytest.param(500, marks=[pytest.mark.long, pytest.mark.thorough])])


class Served:
    """A real host with one completed version and an open batch, behind its Flight server."""

    def __init__(self, root: Path) -> None:
        world = World(root)
        coordinator = world.coordinator(0)
        self.host = make_host(world, coordinator, 0, root)
        coordinator.register_query(reg(world))
        plan_spark(world, 0)
        for partition in (0, 1):
            run_task([self.host], 0, partition)
        world.commit_spark(0)
        coordinator.batch_committed("run1", 0)
        self.host.heartbeat()
        plan_spark(world, 1)
        for partition in (0, 1):
            self.host.open(task(1, partition))
        self.open_scans = 0
        self._scan = self.host.reads.scan
        self.host.reads.scan = self.scan

        def call_coordinator(method: str, args: dict[str, object]) -> object:
            return {"method": method, "args": args}

        self.server = HostFlightServer(lambda: self.host, "127.0.0.1", TOKEN, call_coordinator)
        self.address = f"grpc://127.0.0.1:{self.server.port}"

    def scan(self, *args: Any) -> Iterator[pa.RecordBatch]:
        self.open_scans += 1
        try:
            yield from self._scan(*args)
        finally:
            self.open_scans -= 1

    def still_answers(self) -> None:
        """Send valid requests on a new connection."""
        client = HostClient(self.address, TOKEN, timeout=PATIENCE)
        keys = pa.array([b"k", b"nobody"])
        try:
            assert client.get_many(GetCommand("run1", "op", 0), keys).to_pylist() == [b"v", None]
            assert client.describe()["host_id"] == "h0"
            assert sum(b.num_rows for b in client.scan(ScanCommand("run1", "op", 0, 1), [(b"", None)])) == 1
        finally:
            client.close()

    def figures(self) -> tuple[int, int, int]:
        """Return the numbers of threads, file descriptors and open scans once they have settled."""
        least = (1 << 30,) * 3
        for _ in range(100):
            gc.collect()
            now = threading.active_count(), psutil.Process().num_fds(), self.open_scans
            least = min(least, now)
            if self.open_scans == 0 and now <= least:
                break
            time.sleep(0.02)
        return least


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    made = Served(tmp_path_factory.mktemp("flight"))
    yield made
    made.server.shutdown()
    made.host.close()


COMMANDS: list[Any] = [
    GetCommand("run1", "op", 0),
    GetCommand("run1", "op", 1, 1),
    OpenAndGetCommand(task(1, 1)),
    ScanCommand("run1", "op", 0, 1),
    ScanCommand("run1", "op", 0, 1, limit=1),
    CommitCommand(task(1, 0), {"a": 1.0}, OperatorFigures()),
]
ACTIONS = [
    ("open", msgspec.json.encode(task(1, 0))),
    ("locate", msgspec.json.encode(LocateRequest("op"))),
    ("coordinator", msgspec.json.encode(CoordinatorCall("verify", {"a": 1}))),
    ("describe", b"{}"),
]
SCHEMAS = [
    KEYS_SCHEMA,
    RANGES_SCHEMA,
    COMMIT_SCHEMA,
    pa.schema([]),
    pa.schema([("key", pa.string())]),
    pa.schema([("key", pa.binary()), ("value", pa.int64())]),
    pa.schema([("a", pa.list_(pa.struct([("b", pa.float64())])))]),
    pa.schema([("key", pa.dictionary(pa.int32(), pa.binary()))]),
]


def mutated(rng: random.Random, said: bytes) -> bytes:
    changed = bytearray(said)
    for _ in range(rng.choice([0, 1, 2, 6])):
        at = rng.randrange(len(changed) + 1)
        match rng.randrange(4):
            case 0:
                del changed[at : at + rng.randrange(1, 9)]
            case 1:
                changed[at:at] = rng.choice(
                    [b"null", b"\xff", b'"', b"-1", b"1e999", b"[" * 3000, b"18446744073709551616"]
                )
            case 2 if at < len(changed):
                changed[at] = rng.randrange(256)
            case _:
                changed[at:at] = rng.randbytes(3)
    return bytes(changed)


def odd_command(rng: random.Random, commands: list[Any]) -> bytes:
    """Nearly a right one, often quite."""
    kind = rng.randrange(5)
    if kind == 0:
        return rng.randbytes(rng.randrange(50))
    said = msgspec.to_builtins(rng.choice(commands))
    if kind == 1:
        return msgspec.json.encode(said)
    if rng.random() < 0.6:
        said[rng.choice(list(said))] = rng.choice([None, "", -1, 1 << 62, 3.5, [], {}, "op", "\x00", "é" * 1000, True])
    return mutated(rng, msgspec.json.encode(said))


def odd_batch(rng: random.Random, schema: pa.Schema) -> pa.RecordBatch:
    size = rng.choice([0, 1, 5])
    columns = []
    for field in schema:
        if pa.types.is_dictionary(field.type):
            columns.append(pa.array([b"x"] * size).dictionary_encode())
        elif pa.types.is_nested(field.type):
            columns.append(pa.array([[{"b": 1.0}]] * size, field.type))
        elif pa.types.is_integer(field.type):
            columns.append(pa.array(range(size), field.type))
        else:
            given = [rng.choice([None, "", "k", "z" * 50]) for _ in range(size)]
            columns.append(pa.array(given, pa.string()).cast(field.type))
    return pa.record_batch(columns, schema=schema)


def options(rng: random.Random | None = None, timeout: float = PATIENCE) -> flight.FlightCallOptions:
    token = TOKEN if rng is None else rng.choice(["", "wrong", "right-token ", TOKEN[:-1], "x" * 5000])
    return flight.FlightCallOptions(timeout=timeout, headers=[(b"authorization", f"Bearer {token}".encode())])


def in_time(begin: Callable[[], T]) -> T:
    """A stream that has little time: another one if that was over before it was begun, for the machine may stand
    still.
    """
    until = time.monotonic() + PATIENCE
    while True:
        try:
            return begin()
        except flight.FlightTimedOutError:
            assert time.monotonic() < until, "none of them was begun in time"


def exchange(client: flight.FlightClient, rng: random.Random, given: flight.FlightCallOptions) -> None:
    descriptor = flight.FlightDescriptor.for_command(odd_command(rng, COMMANDS))
    writer, reader = client.do_exchange(descriptor, given)
    _talk(rng, writer, reader, reader.read_all)


def put(client: flight.FlightClient, rng: random.Random, given: flight.FlightCallOptions) -> None:
    descriptor = flight.FlightDescriptor.for_command(odd_command(rng, COMMANDS[-1:]))
    schema = rng.choice([COMMIT_SCHEMA, *SCHEMAS])
    writer, reader = client.do_put(descriptor, schema, given)
    _talk(rng, writer, None, reader.read, schema)


def _talk(
    rng: random.Random, writer: Any, reader: Any, read: Callable[[], object], schema: pa.Schema | None = None
) -> None:
    """Write some or all of a stream, perhaps with metadata that is not a name, and leave at any moment."""
    try:
        if schema is None and rng.random() < 0.9:
            schema = rng.choice(SCHEMAS)
            writer.begin(schema)
        for _ in range(rng.choice([0, 1, 1, 3])):
            if schema is not None:
                writer.write_with_metadata(
                    odd_batch(rng, schema), rng.choice([b"default", b"", b"\xff\xfe", b"../x", b"a" * 999])
                )
        if rng.random() < 0.3:
            writer.write_metadata(rng.choice([END_OF_CHANGES, b"", b"\xff"]))
        ending = rng.randrange(4)
        if ending == 0 and reader is not None:
            reader.cancel()
        if ending > 1:
            writer.done_writing()
            read()
    finally:
        with contextlib.suppress(pa.ArrowException):
            writer.close()


def action(client: flight.FlightClient, rng: random.Random, given: flight.FlightCallOptions) -> None:
    kind, body = rng.choice(ACTIONS)
    if rng.random() < 0.2:
        kind = rng.choice(["", "Open", "x" * 1000, "é"])
    list(client.do_action(flight.Action(kind, mutated(rng, body)), given))


def other_calls(client: flight.FlightClient, rng: random.Random, given: flight.FlightCallOptions) -> None:
    ticket = odd_command(rng, COMMANDS)
    match rng.randrange(5):
        case 0:
            client.do_get(flight.Ticket(ticket), given).read_all()
        case 1:
            list(client.list_flights(ticket, given))
        case 2:
            client.get_flight_info(flight.FlightDescriptor.for_command(ticket), given)
        case 3:
            with contextlib.suppress(OSError):  # which is how pyarrow raises every Flight error here
                client.get_schema(flight.FlightDescriptor.for_path(b"x", b""), given)
        case 4:
            list(client.list_actions(given))


CALLS = {"exchanges": exchange, "puts": put, "actions": action, "other calls": other_calls}


@pytest.mark.parametrize("call", CALLS)
@ROUNDS
def test_every_call_is_answered_or_rejected(served, call, rounds, caplog):
    rng = random.Random(f"{call} {rounds}")

    def round_of(count: int) -> None:
        client = flight.FlightClient(served.address, generic_options=[("grpc.use_local_subchannel_pool", 1)])
        for _ in range(count):
            with contextlib.suppress(flight.FlightError, pa.ArrowException, NotImplementedError):
                CALLS[call](client, rng, options())
        client.close()

    round_of(5)
    served.still_answers()
    before = served.figures()
    round_of(rounds)
    served.still_answers()
    eventually_no_more_than(served, before)
    unexpected = [
        f"{r.getMessage()}: {r.exc_info and r.exc_info[1]!r}" for r in caplog.records if r.levelno >= logging.ERROR
    ]
    assert unexpected == []


@pytest.mark.parametrize("call", CALLS)
def test_no_token_no_answer(served, call):
    rng = random.Random(call)
    client = flight.FlightClient(served.address, generic_options=[("grpc.use_local_subchannel_pool", 1)])
    for _ in range(20):
        commits = served.host.describe()["commits"]
        with contextlib.suppress(pa.ArrowException, StopIteration):
            try:
                CALLS[call](client, rng, options(rng))
            except flight.FlightUnauthenticatedError:
                continue
            except flight.FlightError as error:
                assert "token" in str(error) or "anceled" in str(error) or "ancelled" in str(error), error
        assert served.host.describe()["commits"] == commits
    client.close()
    served.still_answers()


@ROUNDS
def test_non_http2_bytes_end_a_connection(served, rounds):
    rng = random.Random(rounds)
    served.still_answers()
    before = served.figures()
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    settings = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
    clients = []
    for _ in range(rounds):
        client = socket.create_connection(("127.0.0.1", served.server.port), timeout=PATIENCE)
        noise = rng.randbytes(rng.choice([0, 1, 9, 100, 5000]))
        sent = rng.choice(
            [noise, preface + noise, preface + settings + noise, preface + settings + b"\x00\xff\xff" + noise]
        )
        with contextlib.suppress(OSError):
            client.sendall(sent)
            match rng.randrange(3):
                case 0:
                    client.shutdown(socket.SHUT_WR)
                case 1:
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if rng.random() < 0.7:
            client.close()
        else:
            clients.append(client)  # half open for a while
    served.still_answers()
    for client in clients:
        client.close()
    eventually_no_more_than(served, before)


def test_streams_that_stay_half_open_end_with_their_clients(served):
    def begun(client: flight.FlightClient, command: Any) -> tuple[Any, Any]:
        descriptor = flight.FlightDescriptor.for_command(msgspec.json.encode(command))
        if command is COMMANDS[4]:
            return client.do_put(descriptor, COMMIT_SCHEMA, options(timeout=0.5))
        writer, reader = client.do_exchange(descriptor, options(timeout=0.5))
        writer.begin(RANGES_SCHEMA if isinstance(command, ScanCommand) else KEYS_SCHEMA)
        return writer, reader

    served.still_answers()
    before = served.figures()
    commits = served.host.describe()["commits"]
    for _ in range(10):
        client = flight.FlightClient(served.address, generic_options=[("grpc.use_local_subchannel_pool", 1)])
        for command in (*COMMANDS[:3], COMMANDS[4]):
            stream = in_time(partial(begun, client, command))
    served.still_answers()
    del stream, client
    eventually_no_more_than(served, before)
    assert served.host.describe()["commits"] == commits


def test_changes_of_other_columns_are_refused(served):
    """Also if keys and values are at the right positions and the stream is complete."""
    commits = served.host.describe()["commits"]
    client = flight.FlightClient(served.address, generic_options=[("grpc.use_local_subchannel_pool", 1)])
    command = CommitCommand(task(1, 0), {}, OperatorFigures())
    changes = pa.record_batch([pa.array(["k"]), pa.array(["text"])], ["key", "value"])
    writer, reader = client.do_put(
        flight.FlightDescriptor.for_command(msgspec.json.encode(command)), changes.schema, options()
    )
    with pytest.raises(flight.FlightServerError, match="Expected a stream of key: binary not null, value: binary, got"):
        with contextlib.suppress(pa.ArrowException):  # the host may end the stream before all is sent
            writer.write_with_metadata(changes, b"default")
            writer.write_metadata(END_OF_CHANGES)
            writer.done_writing()
        reader.read()
        writer.close()  # where the host has ended the stream before, this says why
    client.close()
    assert served.host.describe()["commits"] == commits


@pytest.mark.parametrize("letter", ["x", "é", '"', "\x01"])
@pytest.mark.parametrize("length", [5_000, 20_000, 1_000_000])
def test_a_long_error_is_not_taken_for_a_lost_host(
    served: Served, monkeypatch: pytest.MonkeyPatch, letter: str, length: int
) -> None:
    def failing(*_: Any) -> None:
        raise SchemaMismatchError(f"Begins. {letter * length} A remedy.")

    monkeypatch.setattr(served.host, "open", failing)
    client = HostClient(served.address, TOKEN, timeout=PATIENCE)
    with pytest.raises(SchemaMismatchError, match=r"(?s)^Begins\. .* \.\.\. .* A remedy\.$"):
        client.open(task(1, 0))
    client.close()


def test_a_range_without_a_start_is_refused(served):
    """The end of the last range may be null, which is the end of all keys."""
    client = flight.FlightClient(served.address, generic_options=[("grpc.use_local_subchannel_pool", 1)])
    command = ScanCommand("run1", "op", 0, 1)
    for starts, message in (([b"a", None], "has no start"), ([b"a", b"b"], None)):
        columns = [pa.array(starts, pa.binary()), pa.array([b"b", None], pa.binary())]
        ranges = pa.record_batch(columns, schema=RANGES_SCHEMA)
        writer, reader = client.do_exchange(
            flight.FlightDescriptor.for_command(msgspec.json.encode(command)), options()
        )
        writer.begin(ranges.schema)
        writer.write_batch(ranges)
        writer.done_writing()
        if message is None:
            reader.read_all()
        else:
            with pytest.raises(flight.FlightServerError, match=message):
                reader.read_all()
        with contextlib.suppress(flight.FlightError):
            writer.close()
    client.close()


@pytest.mark.parametrize(
    "ending",
    ["the client closes", "the client is gone", "no time is left", ZeroDivisionError("own"), pa.ArrowInvalid("own")],
)
def test_changes_that_break_off_are_not_committed(served, ending):
    """Flight ends a broken stream like any other. An earlier version committed the part that had arrived."""
    commits = served.host.describe()["commits"]
    client = flight.FlightClient(served.address, generic_options=[("grpc.use_local_subchannel_pool", 1)])
    command = CommitCommand(task(1, 0), {}, OperatorFigures())
    part = pa.record_batch([pa.array([b"k"]), pa.array([b"part"])], schema=COMMIT_SCHEMA)
    descriptor = flight.FlightDescriptor.for_command(msgspec.json.encode(command))

    def begun() -> tuple[Any, Any]:
        given = options(timeout=0.3 if ending == "no time is left" else PATIENCE)
        stream = client.do_put(descriptor, COMMIT_SCHEMA, given)
        stream[0].write_with_metadata(part, b"default")
        return stream

    writer, reader = in_time(begun)
    match ending:
        case "the client closes":
            with pytest.raises(flight.FlightServerError, match="broke off"):
                writer.close()
        case "the client is gone":
            del writer, reader, client
        case "no time is left":
            with contextlib.suppress(flight.FlightTimedOutError):
                reader.read()  # until then
        case _:

            def changes() -> Iterator[tuple[str, pa.RecordBatch]]:
                yield "default", part
                raise ending

            sender = HostClient(served.address, TOKEN)
            with pytest.raises(type(ending), match=r"^own$"):
                sender.commit(command, changes())
            sender.close()
            writer.write_metadata(b"end?")
            with pytest.raises(flight.FlightServerError, match="broke off"):
                writer.close()
    time.sleep(0.1)
    served.still_answers()
    assert served.host.describe()["commits"] == commits
    sender = HostClient(served.address, TOKEN)
    assert sender.commit(command, [("default", part)]).version == 2
    sender.close()
    assert served.host.describe()["commits"] == commits + 1


def test_nonsense_takes_no_memory(served):
    rng = random.Random(9)

    def much(count: int) -> int:
        client = flight.FlightClient(served.address, generic_options=[("grpc.use_local_subchannel_pool", 1)])
        for _ in range(count):
            for call in CALLS.values():
                with contextlib.suppress(flight.FlightError, pa.ArrowException, NotImplementedError):
                    call(client, rng, options(rng if rng.random() < 0.3 else None))
        client.close()
        gc.collect()
        return psutil.Process().memory_info().rss

    much(20)
    before = much(5)
    assert much(40) - before < 30 << 20


def eventually_no_more_than(served: Served, before: tuple[int, int, int]) -> None:
    deadline = time.monotonic() + PATIENCE
    while True:
        threads, files, scans = served.figures()
        if threads <= before[0] + 1 and files <= before[1] + 4 and scans == 0:
            return
        assert time.monotonic() < deadline, (before, (threads, files, scans))
        time.sleep(0.05)
