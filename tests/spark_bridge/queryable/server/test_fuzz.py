"""Whatever a client sends to the query port: an answer or a closed connection, nothing crashes, hangs or leaks."""

from __future__ import annotations

import contextlib
import gc
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import psutil
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_bridge.exceptions import RequestError
from spark_bridge.queryable.protocol import (
    FRAME_PREFIX,
    PROTOCOL,
    At,
    AwaitRequest,
    ChangesRequest,
    Comparison,
    CountRequest,
    DescribeRequest,
    Failure,
    Hello,
    KeyRowsRequest,
    LocateOperatorRequest,
    LookupReply,
    LookupRequest,
    OperatorsRequest,
    ScanRequest,
    decode_reply,
    pack_bytes,
    pack_one,
    unpack_bytes,
    unpack_one,
)
from spark_bridge.queryable.server import framed_socket, request_handler
from spark_bridge.queryable.server.limits import AdmissionLimiter
from spark_bridge.queryable.server.server import KvStateServer, decoded_request
from tests.effort import effort, examples
from tests.spark_bridge.queryable.memory_reads import (
    TOKEN,
    MemoryReads,
    RawClient,
    eventually,
    frame_bytes,
    rows,
    serving,
)

HELLO = frame_bytes(Hello(PROTOCOL, TOKEN))
KEYS = pack_bytes(pa.array([b"k1", b"", b"nobody", b"k" * 300]))
REQUESTS = [
    frame_bytes(LookupRequest("run", "totals"), pack_one(b"k1")),
    frame_bytes(LookupRequest("run", "totals", At("version", 7, True), "family", True), KEYS),
    frame_bytes(KeyRowsRequest("run", "totals", "state", At("latest"), ["k", "v"]), KEYS),
    frame_bytes(
        ScanRequest(
            "run",
            "totals",
            None,
            At(),
            b"a",
            b"z",
            ["k"],
            [Comparison("k", "in", [1, 2.5, "x", True])],
            5,
            True,
            [0, 1],
        )
    ),
    frame_bytes(CountRequest(ScanRequest("run", "totals"))),
    frame_bytes(ChangesRequest("run", "totals", 1, 7), KEYS),
    frame_bytes(AwaitRequest("run", 7, 0.01)),
    frame_bytes(LocateOperatorRequest("totals", "query")),
    frame_bytes(OperatorsRequest()),
    frame_bytes(DescribeRequest("totals", None, True)),
    frame_bytes(LookupRequest("run", "broken"), pack_one(b"k1")),
]


ROUNDS = pytest.mark.parametrize("rounds", [12, pytest.param(1000, marks=[pytest.mark.long, pytest.mark.thorough])])


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[KvStateServer, MemoryReads]]:
    reads = MemoryReads(batches=[rows(0, 100, 200)] * 5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request_handler, "AWAIT_SLICE_SECONDS", 0.02)
        patch.setattr(framed_socket.log, "disabled", True)  # thousands of tracebacks of operator "broken"
        with serving(reads, max_request_bytes=1 << 20, max_keys=1000) as made:
            yield made


def say(server: KvStateServer, sent: bytes) -> list[object]:
    """Send it all and read all that comes, which must be frames of the protocol; the server closes within some
    seconds.
    """
    ip, port = server.server_address.split(":")
    with socket.create_connection((ip, int(port)), timeout=10) as client:
        received = bytearray()
        sender = threading.Thread(target=_send, args=(client, sent))
        sender.start()
        try:
            while part := client.recv(1 << 16):
                received += part
        except ConnectionResetError:
            pass
        finally:
            sender.join()
    replies = []
    while received:
        length, header = FRAME_PREFIX.unpack_from(received)
        replies.append(decode_reply(bytes(received[8 : 8 + header])))
        assert len(received) >= 8 + length
        del received[: 8 + length]
    return replies


def _send(client: socket.socket, sent: bytes) -> None:
    with contextlib.suppress(OSError):  # the server may close
        client.sendall(sent)
        client.shutdown(socket.SHUT_WR)


def random_bytes(rng: random.Random) -> bytes:
    """Any bytes; sometimes with lengths in front that nearly make sense."""
    noise = rng.randbytes(rng.choice([0, 1, 7, 8, 9, 50, 3000]))
    if rng.random() < 0.5:
        return noise
    return (
        FRAME_PREFIX.pack(rng.choice([0, 1, len(noise), rng.randrange(1 << 32)]), rng.choice([0, 1, 5, len(noise)]))
        + noise
    )


def mutated(rng: random.Random, sent: bytes) -> bytes:
    """A few bytes changed, cut out, put in, doubled or cut off."""
    changed = bytearray(sent)
    for _ in range(rng.choice([1, 1, 2, 5])):
        at = rng.randrange(len(changed) + 1)
        match rng.randrange(6):
            case 0 if at < len(changed):
                changed[at] ^= 1 << rng.randrange(8)
            case 1:
                del changed[at : at + rng.randrange(1, 9)]
            case 2:
                changed[at:at] = rng.randbytes(rng.randrange(1, 9))
            case 3:
                changed[at:at] = changed[at : at + rng.randrange(1, 40)]
            case 4:
                del changed[at:]
            case 5:
                changed[at : at + 4] = struct.pack("<i", rng.choice([-1, -2, 0, 1, 2**31 - 1, -(2**31), 1 << 20]))
    return bytes(changed)


def anything(rng: random.Random, depth: int = 0) -> object:
    """Any value that msgpack can say."""
    kind = rng.randrange(9 if depth < 4 else 7)
    if kind == 0:
        return rng.choice([None, True, False])
    if kind == 1:
        return rng.choice([0, 1, -1, 7, 2**31, 2**63, 2**64 - 1, -(2**63)])
    if kind == 2:
        return rng.choice([0.0, -1.5, float("nan"), float("inf"), 1e308])
    if kind in (3, 4):
        return rng.choice(["", "totals", "run", "broken", "completed", "latest", "=", "in", "\x00", "é" * 50])
    if kind in (5, 6):
        return rng.randbytes(rng.randrange(5))
    if kind == 7:
        return [anything(rng, depth + 1) for _ in range(rng.randrange(6))]
    return {rng.choice(["a", "scan"]): anything(rng, depth + 1) for _ in range(rng.randrange(3))}


def odd_request(rng: random.Random) -> bytes:
    """A frame in order, with a header that is a request's by its first word, or nearly a right one, and any body."""
    if rng.random() < 0.5:
        tag = rng.choice(
            ["hello", "locate", "lookup", "rows", "scan", "count", "changes", "await", "operators", "describe"]
        )
        said: object = [tag, *(anything(rng) for _ in range(rng.randrange(12)))]
    else:
        right = rng.choice(REQUESTS)
        _, length = FRAME_PREFIX.unpack_from(right)
        said = msgspec.msgpack.decode(right[8 : 8 + length])
        assert isinstance(said, list)
        for _ in range(rng.choice([0, 1, 1, 2])):
            said[rng.randrange(len(said))] = anything(rng)
    header = msgspec.msgpack.encode(said)
    body = rng.choice([b"", KEYS, pack_one(b"k1"), mutated(rng, KEYS), rng.randbytes(rng.randrange(30))])
    return FRAME_PREFIX.pack(len(header) + len(body), len(header)) + header + body


def huge(rng: random.Random) -> bytes:
    """Announces much, sends little."""
    length = rng.choice([1 << 20, (1 << 20) + 5, 1 << 21, 1 << 31, (1 << 32) - 1])
    return FRAME_PREFIX.pack(length, rng.choice([1, 20, 1 << 20, length])) + rng.randbytes(rng.choice([0, 10, 70_000]))


def greeted(make: Callable[[random.Random], bytes]) -> Callable[[random.Random], bytes]:
    return lambda rng: HELLO + b"".join(make(rng) for _ in range(rng.choice([1, 1, 3])))


KINDS: dict[str, Callable[[random.Random], bytes]] = {
    "random bytes": random_bytes,
    "random bytes behind a greeting": greeted(random_bytes),
    "a mutated greeting": lambda rng: mutated(rng, HELLO) + rng.choice(REQUESTS),
    "wrong tokens": lambda rng: (
        frame_bytes(
            Hello(rng.choice([0, 1, 2]), rng.choice(["", "right-toke", "right-token ", "é", "\x00", "x" * 9000]))
        )
        + rng.choice(REQUESTS)
    ),
    "mutated requests": greeted(lambda rng: mutated(rng, rng.choice(REQUESTS))),
    "odd requests": greeted(odd_request),
    "huge sizes": lambda rng: rng.choice([HELLO, b""]) + huge(rng),
    "truncated requests": greeted(lambda rng: (r := rng.choice(REQUESTS))[: rng.randrange(len(r))]),
    "right requests": greeted(lambda rng: rng.choice(REQUESTS)),
}


def figures(server: KvStateServer, reads: MemoryReads) -> tuple[int, int, int, int]:
    """Threads, file descriptors, open iterators and admissions taken, once all connections are over."""
    eventually(lambda: server.num_connections == 0)
    gc.collect()
    running = server._running
    assert running is not None
    limiters = [one for one in vars(running.admission).values() if isinstance(one, AdmissionLimiter)]
    assert len(limiters) == 11
    taken = sum(limiter.taken for limiter in limiters)
    return threading.active_count(), psutil.Process().num_fds(), reads.open_iterators, taken


def no_more(now: tuple[int, ...], before: tuple[int, ...]) -> bool:
    """Whether nothing has come; it may have been counted while threads of an earlier test were ending."""
    return all(n <= b for n, b in zip(now, before, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@ROUNDS
def test_every_request_is_answered_or_rejected(server, kind, rounds):
    made, reads = server
    say(made, HELLO)
    before = figures(made, reads)
    rng = random.Random(f"{kind} {rounds}")
    for _ in range(rounds):
        replies = say(made, KINDS[kind](rng))
        if kind == "wrong tokens":
            assert [type(r) for r in replies] == [Failure]
    eventually(lambda: no_more(figures(made, reads), before))
    with RawClient(made.server_address) as client:
        reply, body = client.ask(LookupRequest("run", "totals"), pack_one(b"k1"))
        assert (reply, unpack_one(body)) == (LookupReply(7), b"v1")
    assert set(made.statistics.snapshot()) <= {"", "(other)", "totals"}


@ROUNDS
def test_clients_that_vanish_at_any_moment_leave_nothing(server, rounds):
    made, reads = server
    say(made, HELLO)
    before = figures(made, reads)
    rng = random.Random(5)
    ip, port = made.server_address.split(":")
    for _ in range(2 * rounds):
        client = socket.create_connection((ip, int(port)))
        sent = HELLO + rng.choice(REQUESTS) * rng.choice([1, 20])
        client.sendall(sent[: rng.randrange(len(sent) + 1)])
        if rng.random() < 0.5:
            time.sleep(rng.random() * 0.002)
        if rng.random() < 0.5:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
    eventually(lambda: no_more(figures(made, reads), before))  # some may not even be accepted yet


@pytest.mark.long
def test_much_nonsense_takes_no_memory(server):
    made, reads = server
    rng = random.Random(6)

    def much(count: int) -> int:
        for _ in range(count):
            say(made, HELLO + huge(rng))
            say(made, greeted(odd_request)(rng))
            say(made, frame_bytes(Hello(PROTOCOL, rng.randbytes(1000).hex())))
            say(made, HELLO + frame_bytes(LocateOperatorRequest(rng.randbytes(5000).hex())))
        figures(made, reads)
        return psutil.Process().memory_info().rss

    much(effort(15, 60))
    before = much(10)
    assert much(effort(30, 150)) - before < 20 << 20


def test_announced_megabytes_that_do_not_come_take_no_memory(server):
    made, reads = server
    before = psutil.Process().memory_info().rss
    clients = []
    for _ in range(100):
        client = RawClient(made.server_address)
        client.socket.sendall(FRAME_PREFIX.pack(1 << 20, 10) + bytes(100))
        clients.append(client)
    running = made._running
    assert running is not None
    eventually(lambda: running.admission.buffered_bytes.taken == 100 << 20)
    assert psutil.Process().memory_info().rss - before < 30 << 20
    for client in clients:
        client.close()
    assert figures(made, reads)[2:] == (0, 0)


@settings(max_examples=examples(100), deadline=None)
@given(st.binary(max_size=200))
def test_no_bytes_break_the_decoders(data):
    for decode in (decoded_request, unpack_bytes, unpack_one):
        with contextlib.suppress(RequestError):
            decode(memoryview(data))


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.one_of(st.none(), st.binary(max_size=40))))
def test_packed_values_round_trip(values):
    array = pa.array(values, pa.binary())
    for given_, expected in ((array, values), (pa.concat_arrays([array, array])[len(array) :], values)):
        packed = pack_bytes(given_)
        unpacked = unpack_bytes(packed)
        unpacked.validate(full=True)
        assert unpacked.to_pylist() == expected
    if len(values) == 1:
        assert unpack_one(pack_bytes(array)) == values[0]


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.integers(-3, 40), max_size=8), st.binary(max_size=60), st.integers(-2, 2))
def test_keys_that_are_unpacked_are_valid(lengths, content, more):
    body = struct.pack("<I", max(0, len(lengths) + more)) + struct.pack(f"<{len(lengths)}i", *lengths) + content
    with contextlib.suppress(RequestError):
        unpack_bytes(body).validate(full=True)
