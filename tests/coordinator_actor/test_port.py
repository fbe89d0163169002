"""Every message is declared once: one handler has it, with the declared signature, and actor and ports have it as a
method.
"""

from __future__ import annotations

import inspect
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from backends.conf import StateStoreId, StateStoreProviderId
from backends.exceptions import InvalidStateStoreArgument
from coordinator_actor.access_tokens import AccessTokens
from coordinator_actor.actor import StateStoreCoordinator
from coordinator_actor.coordinator import Coordinator
from coordinator_actor.coordinator_port import GROUPS, MESSAGES, CoordinatorPort, Group, with_string_ids
from coordinator_actor.exceptions import CoordinatorError, InvalidRequestError
from coordinator_actor.handlers.batches import Batches
from coordinator_actor.handlers.hosts import Hosts
from coordinator_actor.handlers.locations import FeatureViews, Figures, Locations
from coordinator_actor.handlers.queries import Queries
from coordinator_actor.handlers.registries import InstanceRegistry
from coordinator_actor.handlers.rewritings import Rewritings, Savepoints
from coordinator_actor.handlers.suspicions import Suspicions
from coordinator_actor.messages import OpenBatch
from tests.coordinator_actor.coordinator_world import World

HANDLERS = (
    AccessTokens,
    Batches,
    FeatureViews,
    Figures,
    Hosts,
    InstanceRegistry,
    Locations,
    Queries,
    Rewritings,
    Savepoints,
    Suspicions,
)


@pytest.mark.parametrize("message", MESSAGES)
def test_one_handler_has_the_message_as_it_is_declared(message: str) -> None:
    (handler,) = [h for h in HANDLERS if hasattr(h, message)]
    declared = inspect.signature(getattr(CoordinatorPort, message))
    assert inspect.signature(getattr(handler, message)) == declared


def test_the_coordinator_answers_every_message_and_no_other() -> None:
    coordinator = Coordinator(lambda: 0.0, lambda location, options: None)  # type: ignore[arg-type, return-value]
    assert sorted(coordinator._answers) == sorted(set(MESSAGES)) and len(MESSAGES) == len(set(MESSAGES))
    with pytest.raises(KeyError):
        coordinator.call("expire")


def test_a_message_sends_its_name_and_arguments() -> None:
    class Port(CoordinatorPort):
        def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
            return method, args, kwargs

    assert Port().locate("op", query="q") == ("locate", ("op",), {"query": "q"})  # type: ignore[comparison-overlap]
    assert Port().locate.__doc__ == CoordinatorPort.locate.__doc__


# -- ids as uuid.UUID --------------------------------------------------------------------------

RUN, QUERY = uuid.UUID(int=17), uuid.UUID(int=18)


@pytest.fixture
def started(tmp_path: Path) -> Coordinator:
    """A coordinator with one run and its owners; run and query have the ids that Spark and Python give."""
    world = World(tmp_path)
    c = world.coordinator()
    assert c.register_query(world.registration(str(RUN), query_id=str(QUERY))).refusal is None
    world.open(c, 0, run=str(RUN))
    return c


def test_a_run_is_ended_by_its_id_as_a_uuid(started: Coordinator) -> None:
    (instance, _) = [i["id"] for i in started.describe()["instances"]]
    assert str(RUN) in instance
    assert started.deactivate_instances(RUN) is True  # type: ignore[arg-type]
    assert (started.describe()["queries"], started.describe()["instances"]) == ([], [])
    assert started.heartbeat_host("h0", "a", {RUN: 0}).unload_runs == (str(RUN),)  # type: ignore[dict-item]


@pytest.mark.parametrize(
    "ask",
    [
        lambda c, run, query: c.driver_heartbeat(run),
        lambda c, run, query: [str(unknown) for unknown in c.renew_leases([run])],
        lambda c, run, query: c.heartbeat_host("h0", "a", {run: 0}),
        lambda c, run, query: c.verify_instances("h0", "a", [run]),
        lambda c, run, query: c.rebalance(run),
        lambda c, run, query: c.locate("op", query),
        lambda c, run, query: c.get_kv_state_location_oracle(query),
        lambda c, run, query: c.completed(run_id=run, host_id="h0"),
        lambda c, run, query: c.open_batch(OpenBatch(run, 0, "h0", "a")),
        lambda c, run, query: c.get_location(StateStoreProviderId(StateStoreId(ck_of(c), "op", 0), run)),
    ],
)
def test_a_uuid_is_answered_as_its_text(
    started: Coordinator, ask: Callable[[Coordinator, object, object], object]
) -> None:
    answer = ask(started, RUN, QUERY)
    assert answer == ask(started, str(RUN), str(QUERY))
    assert answer != unknown(started, ask)


def ck_of(c: Coordinator) -> str:
    (query,) = c.describe()["queries"]
    return str(query["checkpoint_location"])


def unknown(c: Coordinator, ask: Callable[[Coordinator, object, object], object]) -> object:
    """Return the answer to a question about an unknown query, operator or run."""
    try:
        return ask(c, "another", "another")
    except CoordinatorError as error:
        return type(error)


@pytest.mark.parametrize("message", MESSAGES)
def test_a_value_that_is_neither_string_nor_uuid_is_refused(message: str) -> None:
    declared = getattr(CoordinatorPort, message)
    hints = get_type_hints(declared)
    for name in inspect.signature(declared).parameters:
        if hints.get(name) in (str, str | None):
            with pytest.raises(
                InvalidRequestError, match=f"{name} of {message} must be a string or a uuid.UUID, not 5"
            ):
                with_string_ids(message, (), {name: 5})
            assert with_string_ids(message, (), {name: RUN}) == ([], {name: str(RUN)})


def test_records_have_strings_and_several_ids_are_not_a_string(started: Coordinator) -> None:
    with pytest.raises(InvalidRequestError, match="run_id in request of open_batch must be a string"):
        started.open_batch(OpenBatch(5, 0, "h0", "a"))  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="run_ids of verify_instances must be several values"):
        started.verify_instances("h0", "a", str(RUN))
    with pytest.raises(InvalidStateStoreArgument, match=r"query_run_id must be a string or a uuid\.UUID, not 5"):
        StateStoreProviderId(StateStoreId("/ck", "op", 0), 5)  # type: ignore[arg-type]


@pytest.mark.parametrize("message", MESSAGES)
def test_the_actor_answers_each_message_in_its_concurrency_group(message: str) -> None:
    """A method that is not a coroutine would run in the thread that all share, and delay the others."""
    method = getattr(StateStoreCoordinator, message)
    assert inspect.iscoroutinefunction(method)
    assert inspect.signature(method) == inspect.signature(getattr(CoordinatorPort, message))
    group = getattr(method, "__ray_concurrency_group__", Group.QUERIES.value)
    assert group == GROUPS[message].value
