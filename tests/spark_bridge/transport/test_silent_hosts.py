"""A machine that is cut off sends no reset. Calls to its host end because it accepts no connections."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
from pyarrow import flight

from spark_bridge.exceptions import HostUnavailableError
from spark_bridge.transport import flight_client
from spark_bridge.transport.flight_client import HostClient, SilentHosts, client_for, forget_client, silent_places
from tests.patience import HANG, PATIENCE
from tests.spark_bridge.conftest import wait_until


class Cable:
    """The way to a server: while ``is_cut``, it passes nothing on, refuses nothing and takes no connection."""

    def __init__(self, port: int) -> None:
        self.connections = 0
        self.cut = threading.Event()
        self._port = port
        self._open = ExitStack()
        self._listener = self._open.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        self.port: int = self._listener.getsockname()[1]
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            if self.cut.is_set():
                # This connection and the next one fill the accept queue: the kernel drops further ones.
                self._open.enter_context(client)
                return
            self.connections += 1
            server = socket.create_connection(("127.0.0.1", self._port))
            for pair in ((client, server), (server, client)):
                self._open.enter_context(pair[0])
                threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                if self.cut.is_set():
                    return
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            return  # closed at the end of the test

    def take_out(self) -> None:
        """Cut the host off, and wait until it accepts no connections."""
        self.cut.set()
        self._open.enter_context(socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE))
        self._accepting.join(PATIENCE)
        with pytest.raises(TimeoutError):
            while True:
                waiting = socket.create_connection(("127.0.0.1", self.port), timeout=0.3)
                self._open.enter_context(waiting)

    def close(self) -> None:
        self._open.close()


class Server(flight.FlightServerBase):  # type: ignore[misc]
    """Blocks an action until the test releases it, and a commit for as long as the client sends changes."""

    def __init__(self) -> None:
        super().__init__("grpc://127.0.0.1:0")
        self.is_asked = threading.Event()
        self.may_answer = threading.Event()

    def do_action(self, context: Any, action: Any) -> Iterator[bytes]:
        self.is_asked.set()
        assert self.may_answer.wait(HANG)
        return iter([b"{}"])


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as made:
        yield made
        made.may_answer.set()


@pytest.fixture
def cable(server: Server) -> Iterator[Cable]:
    made = Cable(server.port)
    yield made
    made.close()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("SILENT_SECONDS", 0.1), ("CALL_WATCH_SECONDS", 0.05), ("PROBE_SECONDS", 0.3)):
        monkeypatch.setattr(flight_client, name, seconds)


def test_a_call_to_a_host_that_is_cut_off_ends_long_before_its_time(
    server: Server, cable: Cable, quick: None, caplog: pytest.LogCaptureFixture
) -> None:
    client = HostClient(f"grpc://127.0.0.1:{cable.port}", "token", timeout=10 * HANG)
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(client.describe)
        assert server.is_asked.wait(PATIENCE)
        cable.take_out()
        with pytest.raises(HostUnavailableError):
            asked.result(HANG)
    assert f"No answer from 127.0.0.1:{cable.port}" in caplog.text
    client.close()


def test_slow_call_to_a_host_is_not_abandoned(server: Server, cable: Cable, quick: None) -> None:
    client = HostClient(f"grpc://127.0.0.1:{cable.port}", "token", timeout=10 * HANG)
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(client.describe)
        assert server.is_asked.wait(PATIENCE)
        deadline = time.monotonic() + HANG
        while cable.connections < 6:  # its own one, and as many probes
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert not asked.done()
        server.may_answer.set()
        assert asked.result(HANG) == {}
    client.close()


def test_only_hosts_of_calls_that_wait_for_long_are_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = SilentHosts()
    monkeypatch.setattr(flight_client, "CALL_WATCH_SECONDS", HANG)  # the test looks by itself
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        with hosts.watched(("127.0.0.1", listener.getsockname()[1])) as call:
            hosts.look()
            call.since -= flight_client.SILENT_SECONDS + 1
            call.pause()
            hosts.look()
            with pytest.raises(BlockingIOError):
                listener.accept()
            call.go_on()
            call.since -= flight_client.SILENT_SECONDS + 1
            hosts.look()
            listener.accept()[0].close()
        hosts.look()
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_one_unanswered_probe_does_not_end_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    given_up: list[tuple[str, int]] = []
    monkeypatch.setattr(flight_client, "shut_down_connections", given_up.append)
    hosts = SilentHosts()
    monkeypatch.setattr(flight_client, "CALL_WATCH_SECONDS", HANG)  # the test looks by itself
    with socket.create_server(("127.0.0.1", 0)) as listener:
        place = listener.getsockname()
    with hosts.watched(place) as call:
        call.since -= flight_client.SILENT_SECONDS + 1
        hosts.look()
        assert given_up == []
        with socket.create_server(place):
            hosts.look()
        hosts.look()
        assert given_up == [], "it has answered in between"
        hosts.look()
        assert given_up == [place]


def test_calls_that_begin_at_once_are_watched_by_one_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two loops, two probes at once would count as consecutive ones."""
    hosts, loops, second_came = SilentHosts(), list[object](), threading.Event()
    place = ("127.0.0.1", 1)

    class Lock:
        def __enter__(self) -> None:
            if loops:
                second_came.set()
            lock.acquire()

        def __exit__(self, *_: object) -> None:
            lock.release()

    class Loop:
        def __init__(self, *_: Any, **__: Any) -> None:
            loops.append(self)
            if len(loops) > 1:
                second_came.set()
                return
            second.start()
            assert second_came.wait(HANG)

        def start(self) -> Loop:
            return self

    def call() -> None:
        with hosts.watched(place):
            pass

    lock, second = threading.Lock(), threading.Thread(target=call)
    monkeypatch.setattr(hosts, "_starting", Lock(), raising=False)
    monkeypatch.setattr(flight_client, "BackgroundLoop", Loop)
    call()
    second.join(HANG)
    assert len(loops) == 1


def test_a_host_that_was_quiet_is_called_only_if_it_takes_a_connection(
    server: Server, cable: Cable, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.may_answer.set()
    address = f"grpc://127.0.0.1:{cable.port}"
    monkeypatch.setattr(flight_client, "MAX_UNANSWERED_SECONDS", HANG)
    assert client_for(address, "token").describe() == {}
    before = cable.connections
    assert client_for(address, "token").describe() == {} and cable.connections == before, "it has just answered"
    monkeypatch.setattr(flight_client, "MAX_UNANSWERED_SECONDS", 0.0)
    assert client_for(address, "token").describe() == {}
    wait_until(lambda: cable.connections == before + 1)
    cable.take_out()
    with pytest.raises(HostUnavailableError, match=rf"{address} took none of 2 connections within 0\.5 s"):
        client_for(address, "token")
    forget_client(address, "token")


def test_a_process_that_stood_still_during_a_probe_does_not_take_its_host_for_silent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert silent_places({listener.getsockname()}, seconds=-1.0) == set()


def test_a_machine_without_a_free_port_takes_no_host_for_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    class WithoutPort(socket.socket):
        def connect_ex(self, address: Any) -> int:
            return errno.EADDRNOTAVAIL

    monkeypatch.setattr(flight_client.socket, "socket", WithoutPort)
    assert silent_places({("127.0.0.1", 1)}) == set()
