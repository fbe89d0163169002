"""Executors are given up where their machine does not answer, and not where this machine is the one cut off.

What happens then is tried on machines: ``tests/cluster/test_losses.py``.
"""

from __future__ import annotations

import pickle
import socket

import pytest

from spark_bridge.session import executors
from spark_bridge.session.executors import (
    INSTANCES,
    MASTER_JAVA_OPTIONS,
    MasterSettings,
    SilentExecutors,
    expected_executors,
    is_cut_off,
    machine_of,
    master_java_options,
    master_on_head,
    place_of,
)
from spark_bridge.transport import flight_client
from spark_bridge.transport.flight_client import silent_places

A, A2, B, OWN = ("10.0.0.1", 7), ("10.0.0.1", 8), ("10.0.0.2", 7), ("10.0.0.9", 7)


@pytest.mark.parametrize(
    ("places", "silent", "cut_off"),
    [
        ({A, B, OWN}, {A}, False),
        ({A, B, OWN}, {A, B}, True),
        ({A, B}, {A, B}, True),
        ({A, A2}, {A, A2}, False),  # one machine: it may as well be that one
        ({A, OWN}, {A}, False),
        ({OWN}, set(), False),
    ],
)
def test_if_no_other_machine_answers_this_one_is_cut_off(
    places: set[tuple[str, int]], silent: set[tuple[str, int]], cut_off: bool
) -> None:
    assert is_cut_off(places, silent, OWN[0]) is cut_off


class Looks:
    """Looks at executors, whose time passes as the watch would let it."""

    def __init__(self) -> None:
        self.now = self.ended = 100.0
        self.executors = SilentExecutors(lambda: self.now)

    def look(self, *silent: str, at_once: bool = False) -> set[str]:
        seconds = self.executors.begin()
        assert executors.LEAST_ANSWER_SECONDS <= seconds <= executors.ANSWER_SECONDS
        self.now += seconds if silent and not at_once else 0.0
        lost = self.executors.end(silent)
        self.ended = self.now
        self.now = max(self.now, self.executors.looked_at + executors.EXECUTOR_LOOK_SECONDS)
        return lost


@pytest.mark.parametrize(("at_once", "looks_until_lost"), [(False, 3), (True, 4)])
def test_an_executor_is_lost_four_seconds_after_its_last_answer(at_once: bool, looks_until_lost: int) -> None:
    """Also if the network says at once that the machine cannot be reached."""
    looks = Looks()
    for _ in range(3):
        assert looks.look() == set()
    answered = looks.executors.looked_at
    for _ in range(looks_until_lost - 1):
        assert looks.look("1", at_once=at_once) == set()
    assert looks.look("1", "2", at_once=at_once) == {"1"}, "the other one has been silent for one look"
    assert looks.ended - answered == pytest.approx(4.0)
    assert looks.look("1", "2", at_once=at_once) == set(), "Spark lists it for a moment longer"


def test_an_executor_that_answers_once_is_not_lost() -> None:
    looks = Looks()
    looks.look()
    for _ in range(5):
        assert looks.look("1") == set() and looks.look("1") == set()
        assert looks.look() == set()


@pytest.mark.parametrize("silent_before", [0, 1, 2])
@pytest.mark.parametrize("at_once", [False, True])
def test_a_watch_that_stood_still_begins_again(silent_before: int, at_once: bool) -> None:
    looks = Looks()
    looks.look()
    for _ in range(silent_before):
        assert looks.look("1") == set()
    looks.now += 60
    began = looks.now
    while not looks.look("1", at_once=at_once):
        assert looks.now < began + 10
    assert looks.ended - began >= 3.0


def test_a_driver_whose_own_cable_is_back_begins_again() -> None:
    looks = Looks()
    looks.look()
    for _ in range(9):
        if looks.look("1", "2"):
            looks.executors.forget_all()
    began = looks.now
    assert looks.look("1") == set() and looks.look("1") == set()
    assert looks.now - began >= 2 * executors.EXECUTOR_LOOK_SECONDS


def test_machine_that_refuses_a_connection_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_client, "PROBE_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as takes, socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        with socket.create_server(("127.0.0.1", 0)) as closed:
            refuses: tuple[str, int] = closed.getsockname()
        places: list[tuple[str, int]] = [takes.getsockname(), full.getsockname(), refuses]
        # The accept queue is full, so the kernel drops further connections, as a cut cable would.
        with socket.create_connection(places[1]), socket.socket() as waits:
            waits.setblocking(False)
            waits.connect_ex(places[1])
            assert silent_places(places, refusals=False) == {places[1]}


@pytest.mark.parametrize(
    ("said", "place"),
    [("10.0.0.1:7", ("10.0.0.1", 7)), ("10.0.0.1", None), ("[fd00::1]:7", ("fd00::1", 7)), ("[fd00::1]", None)],
)
def test_an_executor_is_at_a_place_once_its_port_is_known(said: str, place: tuple[str, int] | None) -> None:
    assert place_of(said) == place
    machine = said if place is None else said[: said.rindex(":")]
    assert machine_of(said) == machine, "an executor counts on its machine before its port is known, and nowhere else"


def test_raydp_starts_executors_in_the_place_of_others_without_end() -> None:
    """Its master gets no number that would count those that were started again."""
    settings = MasterSettings({"spark.a": "b"})
    settings[INSTANCES] = "3"
    assert pickle.loads(pickle.dumps(settings)) == {"spark.a": "b"}
    assert dict(settings) == {"spark.a": "b", INSTANCES: "3"}, "the driver has the number"


def test_raydps_masters_run_on_the_head_by_default() -> None:
    ours = master_on_head({})
    assert ours == {
        "spark.ray.raydp_spark_master.actor.resource.CPU": "0",
        "spark.ray.raydp_spark_master.actor.resource.node:__internal_head__": "0.001",
    }
    for prefix in ("spark.ray.raydp_spark_master.resource.", "spark.ray.raydp_spark_master.actor.resource."):
        assert master_on_head({f"{prefix}master": "1"}) == {}


def test_java_options_of_the_user_win_in_raydps_masters() -> None:
    assert master_java_options({}) == {MASTER_JAVA_OPTIONS: "-XX:TieredStopAtLevel=1"}
    of_user = {MASTER_JAVA_OPTIONS: "-Xmx2g -XX:TieredStopAtLevel=4"}
    assert master_java_options(of_user) == {
        MASTER_JAVA_OPTIONS: "-XX:TieredStopAtLevel=1 -Xmx2g -XX:TieredStopAtLevel=4"
    }


def test_executors_are_expected_on_the_only_node_that_can_take_them_all() -> None:
    def node(ip: str, cpus: float | None, *, alive: bool = True) -> dict[str, object]:
        return {"NodeManagerAddress": ip, "Alive": alive, "Resources": {} if cpus is None else {"CPU": cpus}}

    assert expected_executors([node("10.0.0.1", 2)], 2) == {"10.0.0.1": 2}
    assert expected_executors([node("10.0.0.1", 8), node("10.0.0.2", 8, alive=False)], 2) == {"10.0.0.1": 2}
    assert expected_executors([node("10.0.0.1", 8), node("10.0.0.2", 8)], 2) == {}, "Ray chooses the node"
    for cpus in (None, 0, 1):
        assert expected_executors([node("10.0.0.1", cpus)], 2) == {}, "further nodes come, or executors wait"
