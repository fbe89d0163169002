"""Messages over connections to the coordinator: every message with its answer, errors, and connections that end."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from coordinator_actor import direct_calls
from coordinator_actor.coordinator import Coordinator
from coordinator_actor.direct_calls import DIRECT, CallServer, DirectCalls, NotDirectError, goes_direct
from coordinator_actor.exceptions import UnknownRunError
from coordinator_actor.messages import Completed, HandOver, OpenBatch, Refused
from tests.coordinator_actor.coordinator_world import World, begin
from tests.patience import HANG, PATIENCE

SECRET = "secret"
DONE = Completed("run", 3, {})


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture
def coordinator(world: World) -> Coordinator:
    return begin(world, "run")


def eventually(condition: Callable[[], bool], what: str) -> None:
    """Wait until it holds."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.002)


@pytest.fixture
def connect() -> Iterator[Callable[[str], DirectCalls]]:
    made: list[DirectCalls] = []

    def to(address: str, secret: str = SECRET) -> DirectCalls:
        calls = DirectCalls(secret)
        made.append(calls)
        calls.follow(address)
        eventually(lambda: len(calls._idle) == 1, "there is a connection")
        return calls

    yield to
    for calls in made:
        calls.follow("")


def serve(submit: Callable[..., Future[Any]], answered: Callable[..., None] = lambda *_: None) -> str:
    """Serve messages, and return the address."""
    return CallServer("127.0.0.1", SECRET, submit, answered).address


_unanswered: list[Future[Any]] = []


def hanging() -> Future[Any]:
    """The answer of a message that gets none before the end of its test."""
    _unanswered.append(Future())
    return _unanswered[-1]


@pytest.fixture(autouse=True)
def end_what_hangs() -> Iterator[None]:
    yield
    while _unanswered:
        future = _unanswered.pop()
        if not future.done():
            future.set_result(DONE)


def done(answer: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(answer)
    return future


def test_each_message_has_the_answer_that_it_has_without_a_connection(
    world: World, coordinator: Coordinator, connect: Callable[[str], DirectCalls]
) -> None:
    calls = connect(serve(coordinator.submit))
    sent: set[str] = set()

    def both(method: str, *args: Any, **kwargs: Any) -> Any:
        sent.add(method)
        answer = calls.call(method, args, kwargs, PATIENCE)
        assert answer == coordinator.call(method, *args, **kwargs)
        return answer

    grant = both("open_batch", OpenBatch("run", 0, "h0", "a", waiting=(("op", 0), ("op", 1))))
    assert grant.registration == world.registration("run") and len(grant.owners["op"]) == 2
    grants = [world.open(coordinator, 0, partition, "run") for partition in range(2)]
    of_h0 = [partition for partition in range(2) if grants[partition].owner.host_id == "h0"]
    messages = tuple(world.stage(grants[partition], partition, 0, "t", "run") for partition in range(2))
    for partition, message in enumerate(messages):
        (answer,) = both("acknowledge_many", "run", message.host_id, "a", (message,))
        assert (answer.manifest_id is None) == (partition == 0)
    late = replace(messages[0], version=7)
    (refused,) = both("acknowledge_many", "run", messages[0].host_id, "a", (late,))
    assert isinstance(refused, Refused)
    world.commit_spark(0)
    assert both("see_commit", "run", 0, "h0").version == 1
    assert list(both("completed", "run", host_id="h0").heads["op"]) == of_h0
    assert both("open_for_read", "run", "op", 1).version == 1
    orders = both("heartbeat_host", "h0", "a", {"run": 0}, HandOver(1, {"run": {"op": {0: 1}}}))
    assert list(orders.completed[0].heads["op"]) == of_h0
    assert sent == set(DIRECT)


def test_an_error_of_the_coordinator_is_raised_as_it_is(
    coordinator: Coordinator, connect: Callable[[str], DirectCalls]
) -> None:
    calls = connect(serve(coordinator.submit))
    with pytest.raises(UnknownRunError, match="nobody"):
        calls.call("completed", ("nobody", "h0"), {}, PATIENCE)
    assert calls.call("completed", ("run", "h0"), {}, PATIENCE).version == 0  # the connection is still usable


def test_an_unexpected_error_and_an_answer_that_is_too_long_go_through_ray(
    connect: Callable[[str], DirectCalls], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Future[Any]:
        raise RuntimeError("unexpected")

    with pytest.raises(NotDirectError, match="through Ray only"):
        connect(serve(fail)).call("completed", ("run", "h0"), {}, PATIENCE)
    calls = connect(serve(lambda *_: done(replace(DONE, run_id="x" * 1000))))
    monkeypatch.setattr(direct_calls, "MAX_DIRECT_BYTES", 500)
    with pytest.raises(NotDirectError, match="through Ray only"):
        calls.call("completed", ("run", "h0"), {}, PATIENCE)
    with pytest.raises(NotDirectError, match="at most 500 are allowed"):
        calls.call("completed", ("r" * 500, "h0"), {}, PATIENCE)


def test_nobody_without_the_secret_gets_an_answer(connect: Any) -> None:
    asked: list[str] = []
    address = serve(lambda method, *_: done(asked.append(method)))
    calls = connect(address, secret="another secret")
    with pytest.raises(NotDirectError):
        calls.call("completed", ("run", "h0"), {}, PATIENCE)
    ip, _, port = address.rpartition(":")
    with socket.create_connection((ip, int(port)), timeout=PATIENCE) as connected:
        connected.sendall(b"\xff\xff\xff\x7f")  # announces 2 GB, and has not shown the secret
        assert connected.recv(1) == b""
    assert asked == []


def test_a_message_without_an_answer_does_not_delay_another_one(connect: Any) -> None:
    answer = hanging()
    answered = threading.Event()
    address = serve(lambda method, *_: answer if method == "see_commit" else done(DONE))
    calls = connect(address)

    def wait() -> None:
        with pytest.raises(NotDirectError):
            calls.call("see_commit", ("run", 0, "h0"), {}, PATIENCE)
        answered.set()

    thread = threading.Thread(target=wait)
    thread.start()
    eventually(lambda: not calls._idle, "the message has the connection")
    with pytest.raises(NotDirectError, match="no connection is free"):
        calls.call("completed", ("run", "h0"), {}, PATIENCE)
    eventually(lambda: len(calls._idle) == 1, "there is another connection")
    assert calls.call("completed", ("run", "h0"), {}, PATIENCE) == DONE
    assert not answered.is_set()
    answer.set_exception(RuntimeError("unexpected"))
    thread.join(PATIENCE)
    assert answered.is_set()


def test_a_message_ends_when_its_time_is_over(connect: Any) -> None:
    calls = connect(serve(lambda *_: hanging()))
    with pytest.raises(TimeoutError, match="no answer in time"):
        calls.call("completed", ("run", "h0"), {}, 0.05)


def test_the_time_of_a_message_does_not_begin_again_with_each_piece_of_the_answer(connect: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ip, port = listener.getsockname()
        calls = connect(f"{ip}:{port}")
        connected = listener.accept()[0]
        is_over = threading.Event()

        def drip() -> None:
            connected.sendall(b"\xff\xff\xff\x00")
            while not is_over.wait(0.01):
                connected.sendall(b"x")

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            with pytest.raises(TimeoutError):
                calls.call("completed", ("run", "h0"), {}, 0.2)
        finally:
            is_over.set()
            thread.join(PATIENCE)
            connected.close()


def test_a_heartbeat_without_an_answer_goes_through_ray_soon(connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_calls, "DIRECT_HEARTBEAT_SECONDS", 0.05)
    calls = connect(serve(lambda *_: hanging()))
    with pytest.raises(NotDirectError, match="no answer in time"):
        calls.call("heartbeat_host", ("h0", "a", {}), {}, HANG)


def test_arguments_that_cannot_be_encoded_go_through_ray_and_end_no_connection(connect: Any) -> None:
    calls = connect(serve(lambda *_: done(DONE)))
    for odd in (object(), 2**70, "\ud800"):
        with pytest.raises(NotDirectError, match="cannot be encoded"):
            calls.call("completed", ("run", odd), {}, PATIENCE)
    assert len(calls._idle) == 1


def test_answers_are_reported_with_their_seconds(connect: Any) -> None:
    answers: list[tuple[str, Any, float]] = []
    calls = connect(serve(lambda *_: done(DONE), lambda *answer: answers.append(answer)))
    calls.call("completed", ("run", "h0"), {}, PATIENCE)
    ((method, answer, seconds),) = answers
    assert (method, answer) == ("completed", DONE) and seconds >= 0


def test_few_connections_may_wait_without_the_secret(connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_calls, "MAX_WITHOUT_SECRET", 1)
    monkeypatch.setattr(direct_calls, "DIRECT_CONNECT_SECONDS", HANG)
    ip, _, port = serve(lambda *_: done(DONE)).rpartition(":")
    with socket.create_connection((ip, int(port)), timeout=PATIENCE) as silent:
        silent.sendall(b"\x01")
        with socket.create_connection((ip, int(port)), timeout=PATIENCE) as second:
            assert second.recv(1) == b""
    calls = DirectCalls(SECRET)

    def is_answered() -> bool:  # once the server has seen that the silent one has left
        calls.follow(f"{ip}:{port}")
        try:
            return bool(calls.call("completed", ("run", "h0"), {}, PATIENCE) == DONE)
        except NotDirectError:
            return False

    eventually(is_answered, "a connection with the secret is served")
    calls.follow("")


def test_a_thread_that_cannot_start_is_no_connection(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(direct_calls, "RECONNECT_SECONDS", 0.0)
    calls = DirectCalls(SECRET)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail_to_start)
        calls.follow(address := "127.0.0.1:1")
        with pytest.raises(NotDirectError, match="no connection is free"):
            calls.call("completed", ("run", "h0"), {}, PATIENCE)
        calls.follow(address)
    assert caplog.text.count("messages go through Ray") == 1
    assert address == calls._address and not calls._is_connecting
    calls.follow(serve(lambda *_: done(DONE)))
    eventually(lambda: len(calls._idle) == 1, "there is a connection")
    calls.follow("")


def fail_to_start(*_: Any) -> None:
    raise RuntimeError("can't start new thread")


def test_there_are_no_more_connections_than_allowed(connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_calls, "MAX_DIRECT_CONNECTIONS", 2)
    calls = connect(serve(lambda *_: hanging()))
    threads = []
    for busy in range(2):
        threads.append(threading.Thread(target=lambda: calls.call("completed", ("run", "h0"), {}, PATIENCE)))
        threads[-1].start()
        eventually(lambda busy=busy: len(_unanswered) == busy + 1, "the message is there")
        with pytest.raises(NotDirectError):
            calls.call("completed", ("run", "h0"), {}, PATIENCE)
        if not busy:
            eventually(lambda: len(calls._idle) == 1, "there is another connection")
    assert not calls._is_connecting and len(calls._open) == 2
    for future in _unanswered:
        future.set_result(DONE)
    for thread in threads:
        thread.join(PATIENCE)


def test_connections_follow_the_coordinator(connect: Any) -> None:
    old, new = (serve(lambda *_, is_new=is_new: done(replace(DONE, ended=is_new))) for is_new in (False, True))
    calls = connect(old)
    assert calls.call("completed", ("run", "h0"), {}, PATIENCE).ended is False
    (connected,) = calls._idle
    calls.follow(new)
    assert connected.fileno() == -1  # the connection to the coordinator that was replaced is closed
    eventually(lambda: len(calls._idle) == 1, "there is a connection to the new one")
    assert calls.call("completed", ("run", "h0"), {}, PATIENCE).ended is True
    calls.follow("")
    assert not calls.takes("completed")


def test_a_message_to_a_coordinator_that_was_replaced_ends(connect: Any) -> None:
    calls = connect(serve(lambda *_: hanging()))
    ended = threading.Event()

    def wait() -> None:
        with pytest.raises(NotDirectError, match="has ended the connection"):
            calls.call("completed", ("run", "h0"), {}, HANG)
        ended.set()

    thread = threading.Thread(target=wait)
    thread.start()
    eventually(lambda: len(_unanswered) == 1, "the message is there")
    calls.follow("")
    thread.join(PATIENCE)
    assert ended.is_set() and not calls._idle and not calls._open


def test_a_coordinator_that_is_gone_is_left_and_found_again(connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_calls, "RECONNECT_SECONDS", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ip, port = listener.getsockname()
        calls = connect(f"{ip}:{port}")
        listener.accept()[0].close()
        with pytest.raises(NotDirectError):
            calls.call("completed", ("run", "h0"), {}, PATIENCE)
        assert not calls._open
    with pytest.raises(NotDirectError, match="no connection is free"):
        calls.call("completed", ("run", "h0"), {}, PATIENCE)
    eventually(lambda: not calls._is_connecting, "the attempt to connect has failed")
    assert not calls._open
    calls.follow(serve(lambda *_: done(DONE)))
    eventually(lambda: len(calls._idle) == 1, "there is a connection")
    assert calls.call("completed", ("run", "h0"), {}, PATIENCE) == DONE


def test_a_heartbeat_goes_through_ray_each_second_and_so_does_everything_without_one() -> None:
    assert goes_direct("heartbeat_host", 0.4) and not goes_direct("heartbeat_host", 0.5)
    assert goes_direct("open_batch", 2.9) and not goes_direct("open_batch", 3.0)
    assert not goes_direct("register_host", 0.0)


def test_a_process_that_cannot_listen_has_no_address(caplog: pytest.LogCaptureFixture) -> None:
    assert CallServer("192.0.2.1", SECRET, lambda *_: done(None), lambda *_: None).address == ""
    assert "all messages go through Ray" in caplog.text
