"""Hosts and their leases; Spark's active instances, and the debug messages that Spark documents."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends import StateStoreId, StateStoreProviderId
from coordinator_actor.exceptions import ReplacedHostError, UnknownHostError
from coordinator_actor.handlers.registries import HostRegistry, InstanceRegistry, Loss
from coordinator_actor.messages import HostInfo


def host(number: int, incarnation: str = "a", session: str = "s", node: str = "n") -> HostInfo:
    return HostInfo(f"h{number}", incarnation, f"grpc://10.0.0.{number}:1", node, session)


def provider(partition: int, run: str = "run") -> StateStoreProviderId:
    return StateStoreProviderId(StateStoreId("/ck", "op", partition), run)


@pytest.fixture
def messages(caplog: pytest.LogCaptureFixture) -> Iterator[Any]:
    with caplog.at_level(logging.DEBUG, "coordinator_actor"):
        yield lambda: [r.getMessage() for r in caplog.records if r.levelno == logging.DEBUG]


# -- hosts -------------------------------------------------------------------------------------


def test_hosts_of_a_session_are_in_order_and_have_nodes() -> None:
    hosts = HostRegistry()
    for number, session in ((3, "s"), (1, "s"), (2, "other")):
        hosts.register(host(number, session=session, node=f"n{number}"), 0.0)
    assert hosts.of_session("s") == ["h1", "h3"]
    assert dict(hosts.nodes_of_session("s")) == {"h1": "n1", "h3": "n3"}
    assert hosts.of_session("none") == []


def test_a_list_of_hosts_is_the_callers_own() -> None:
    hosts = HostRegistry()
    hosts.register(host(1), 0.0)
    hosts.of_session("s").clear()
    assert hosts.of_session("s") == ["h1"]


def test_the_hosts_of_a_session_are_worked_out_once_per_generation() -> None:
    hosts = HostRegistry()
    hosts.register(host(1), 0.0)
    assert hosts.nodes_of_session("s") is hosts.nodes_of_session("s")
    hosts.register(host(1), 5.0)
    assert hosts.renew("h1", "a", 6.0) is not None
    unchanged = hosts.nodes_of_session("s")
    hosts.register(host(1, "b"), 7.0)
    assert hosts.nodes_of_session("s") is not unchanged


@given(
    st.lists(
        st.tuples(st.sampled_from(["register", "expire", "remove"]), st.integers(0, 4), st.sampled_from("ab")),
        max_size=30,
    )
)
def test_cached_views_match_the_leases(steps: list[tuple[str, int, str]]) -> None:
    """However leases come and go."""
    hosts, now = HostRegistry(), 0.0
    for step, number, kind in steps:
        now += 1.0
        infos, generation = {h: lease.info for h, lease in hosts.leases.items()}, hosts.generation
        if step == "register":
            hosts.register(host(number, kind, session=f"s{kind}"), now)
        elif step == "expire":
            hosts.expire(now - number, now)
        elif step == "remove" and f"h{number}" in hosts.leases:
            hosts.remove(f"h{number}")
        after = {h: lease.info for h, lease in hosts.leases.items()}
        assert (hosts.generation > generation) == (after != infos)
        for session in ("sa", "sb"):
            assert hosts.of_session(session) == sorted(h for h, i in after.items() if i.session_id == session)


def test_leases_are_renewed_by_the_same_incarnation_only() -> None:
    hosts = HostRegistry()
    hosts.register(host(1), 0.0)
    hosts.register(host(2), 0.0)
    assert hosts.renew("h1", "other", 9.0) is None and hosts.renew("h9", "a", 9.0) is None
    assert hosts.renew("h1", "a", 9.0) is not None
    hosts.expire(5.0, 9.0)
    assert hosts.of_session("s") == ["h1"]
    hosts.require("h1", "a")
    for host_id, incarnation in (("h1", "b"), ("h2", "a")):
        with pytest.raises(UnknownHostError, match=rf"{host_id} \(incarnation {incarnation}\)"):
            hosts.require(host_id, incarnation)


# -- instances ---------------------------------------------------------------------------------


def test_the_last_executor_that_reports_is_the_active_one() -> None:
    instances = InstanceRegistry(threading.RLock())
    assert instances.report_active_instance(provider(0), "hostA", "e1") == []
    assert instances.get_location(provider(0)) == "executor_hostA_e1"
    assert instances.verify_if_instance_active(provider(0), "e1") and not instances.verify_if_instance_active(
        provider(0), "e2"
    )
    instances.report_active_instance(provider(0), "hostB", "e2")
    assert instances.get_location(provider(0)) == "executor_hostB_e2"
    assert instances.verify_if_instance_active(provider(0), "e2") and not instances.verify_if_instance_active(
        provider(0), "e1"
    )


def test_others_that_are_active_elsewhere_are_to_be_unloaded() -> None:
    instances = InstanceRegistry(threading.RLock())
    for partition, executor in enumerate(["e1", "e2", "e1"]):
        instances.report_active_instance(provider(partition), "hostA", executor)
    instances.report_active_instance(provider(3), "hostB", "e1")
    others = (provider(0), provider(1), provider(2), provider(3), provider(99))
    # The same executor id on another host is another executor; one without a report stays, as in Spark.
    assert instances.report_active_instance(provider(4), "hostA", "e1", others) == [provider(1), provider(3)]


def test_many_are_asked_for_in_their_order() -> None:
    instances = InstanceRegistry(threading.RLock())
    for partition in (2, 0):
        instances.report_active_instance(provider(partition), "hostA", f"e{partition}")
    asked = [provider(0), provider(1), provider(2), provider(0, "other run")]
    assert instances.get_locations(asked) == ["executor_hostA_e0", None, "executor_hostA_e2", None]
    assert [instances.verify_if_instance_active(p, "e2") for p in asked] == [False, False, True, False]
    assert instances.get_locations([]) == []


def test_deactivation_is_of_one_run() -> None:
    instances = InstanceRegistry(threading.RLock())
    for run in ("run1", "run2"):
        for partition in (0, 1):
            instances.report_active_instance(provider(partition, run), "hostA", "e1")
    instances.deactivate("run1")
    instances.deactivate("never there")
    assert instances.get_locations([provider(0, "run1"), provider(0, "run2")]) == [None, "executor_hostA_e1"]
    assert [i["id"] for i in instances.describe_instances()] == [str(provider(0, "run2")), str(provider(1, "run2"))]
    assert [i["executor_id"] for i in instances.describe_instances()] == ["e1", "e1"]
    instances.deactivate("run2")
    assert instances.describe_instances() == []


def test_debug_messages_are_those_of_spark(messages: Any) -> None:
    instances, held = InstanceRegistry(threading.RLock()), provider(3)
    instances.report_active_instance(held, "hostA", "e1")
    instances.verify_if_instance_active(held, "e1")
    instances.verify_if_instance_active(provider(4), "e1")
    instances.get_location(held)
    instances.get_location(provider(4))
    instances.report_active_instance(provider(4), "hostB", "e2")
    instances.deactivate("run")
    assert messages() == [
        f"Reported state store {held} is active at e1",
        f"Verified that state store {held} is active: True",
        f"Verified that state store {provider(4)} is active: False",
        f"Got location of the state store {held}: executor_hostA_e1",
        f"Got location of the state store {provider(4)}: None",
        f"Reported state store {provider(4)} is active at e2",
        f"Deactivating instances related to checkpoint location run: {held}, {provider(4)}",
    ]
    # The id in them names store and run.
    assert all(part in str(held) for part in ("/ck", "op", "3", "run"))


def test_messages_about_many_are_one_each(messages: Any) -> None:
    instances = InstanceRegistry(threading.RLock())
    instances.report_active_instance(provider(0), "hostA", "e1")
    before = len(messages())
    instances.get_locations([provider(0), provider(1)])
    assert messages()[before:] == [
        f"Got location of the state store {provider(0)}: executor_hostA_e1",
        f"Got location of the state store {provider(1)}: None",
    ]


def test_an_instance_costs_no_more_because_others_have_many() -> None:
    """Counted, not timed: how often ids are compared or hashed while one run of a thousand is dealt with."""
    hashed = 0

    class Counted(StateStoreProviderId):
        def __hash__(self) -> int:
            nonlocal hashed
            hashed += 1
            return hash(self.store_id)

    instances = InstanceRegistry(threading.RLock())
    for run in range(1000):
        instances.report_active_instance(Counted(StateStoreId("/ck", "op", 0), f"run{run}"), "hostA", "e1")
    hashed = 0
    instances.deactivate("run7")
    assert hashed == 0
    assert instances.get_locations([Counted(StateStoreId("/ck", "op", 0), "run8")]) == ["executor_hostA_e1"]
    assert hashed == 1


def restarted(times: int, incarnation: str) -> HostInfo:
    return msgspec.structs.replace(host(1, incarnation), restart=times)


def test_an_incarnation_that_was_replaced_stays_replaced_whichever_speaks_last() -> None:
    """A machine comes back from behind a cut cable after Ray has replaced its process."""
    hosts = HostRegistry()
    hosts.register(restarted(0, "old"), 0.0)
    hosts.register(restarted(1, "new"), 1.0)
    with pytest.raises(ReplacedHostError, match=r"old .*restart 0.* was replaced by incarnation new \(restart 1\)"):
        hosts.register(restarted(0, "old"), 2.0)
    hosts.require("h1", "new")
    hosts.expire(10.0, 20.0)
    assert not hosts.leases
    with pytest.raises(ReplacedHostError):  # also when the lease of the newer one is over
        hosts.register(restarted(0, "old"), 11.0)
    hosts.register(restarted(1, "new"), 12.0)
    hosts.register(restarted(2, "newest"), 13.0)
    hosts.require("h1", "newest")


def test_a_coordinator_that_has_forgotten_all_lets_the_newer_incarnation_win() -> None:
    hosts = HostRegistry()
    hosts.register(restarted(0, "old"), 0.0)  # it speaks first to a coordinator that was just started
    hosts.register(restarted(1, "new"), 1.0)
    assert hosts.renew("h1", "old", 2.0) is None
    with pytest.raises(ReplacedHostError):
        hosts.register(restarted(0, "old"), 2.0)


def test_the_hosts_on_dead_nodes_are_dropped() -> None:
    hosts = HostRegistry()
    for number in (1, 2, 3):
        hosts.register(host(number, node=f"n{number % 2}"), 0.0)
    hosts.expire(0.0, 9.0, {"n1"})
    assert hosts.of_session("s") == ["h2"] and hosts.losses == {Loss.NODE_DEAD: 2}
