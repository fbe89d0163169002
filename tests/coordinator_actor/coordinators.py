"""What tests ask of a coordinator that no message asks."""

from __future__ import annotations

from coordinator_actor.coordinator import Coordinator
from coordinator_actor.messages import Acknowledge, Acknowledged, Refused
from coordinator_actor.run.query_state import QueryState
from spark_bridge.exceptions import rebuilt_error


def run_of(coordinator: Coordinator, run_id: str = "run1") -> QueryState:
    """A registered run."""
    return coordinator.registries.runs.by_id[run_id]


def acknowledge(coordinator: Coordinator, message: Acknowledge) -> Acknowledged:
    """One acknowledgement by itself; raises the error that refuses it."""
    (answer,) = coordinator.acknowledge_many(message.run_id, message.host_id, message.incarnation, (message,))
    if isinstance(answer, Refused):
        raise rebuilt_error(answer.error, answer.message)
    return answer
