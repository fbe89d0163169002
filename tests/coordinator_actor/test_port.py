"""Every message is declared once: one handler has it, with the declared signature, and actor and ports have it as a
method.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from coordinator_actor.access_tokens import AccessTokens
from coordinator_actor.coordinator import Coordinator
from coordinator_actor.handlers.batches import Batches
from coordinator_actor.handlers.figures import Figures
from coordinator_actor.handlers.hosts import Hosts
from coordinator_actor.handlers.instances import Instances
from coordinator_actor.handlers.locations import Locations
from coordinator_actor.handlers.queries import Queries
from coordinator_actor.handlers.savepoints import Savepoints
from coordinator_actor.port import MESSAGES, CoordinatorPort

HANDLERS = (AccessTokens, Batches, Figures, Hosts, Instances, Locations, Queries, Savepoints)


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
