"""A process whose release speaks another wire version is refused with a clear error, before anything changes."""

from __future__ import annotations

import difflib
import pickle
from typing import Any

import pytest

from coordinator_actor import messages
from coordinator_actor.coordinator_port import CoordinatorPort
from coordinator_actor.messages import WIRE_VERSION, other_version
from spark_bridge.exceptions import EnvironmentProblemError, StateStoreRefusedError
from spark_bridge.host_actor import SessionOptions, require_same_driver
from spark_bridge.session.state_cluster import require_same_messages
from spark_bridge.task import executor as properties
from tests.spark_bridge.session.message_shapes import COMMAND, FIXTURE, shapes


class Coordinator(CoordinatorPort):
    """Answers with a version; None is an actor that has no such method, as Ray says so."""

    def __init__(self, version: int | None) -> None:
        self._version = version

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        if self._version is None:
            raise AttributeError(f"'ActorHandle' object has no attribute {method!r}")
        return self._version


def test_same_version_is_accepted_everywhere() -> None:
    require_same_messages(Coordinator(WIRE_VERSION))
    require_same_driver(pickle.loads(pickle.dumps(SessionOptions(1))))
    told = {properties.RUN_ID: "r", properties.ADDRESSES: '["grpc://h:1"]', properties.TOKEN: "t"}
    assert properties.endpoints_from({**told, properties.WIRE: str(WIRE_VERSION)}.get, "op")[1] == "r"


@pytest.mark.parametrize(("theirs", "words"), [(None, "version 0"), (WIRE_VERSION + 1, f"version {WIRE_VERSION + 1}")])
def test_other_version_is_rejected_with_both_versions(theirs: int | None, words: str) -> None:
    with pytest.raises(EnvironmentProblemError, match=rf"coordinator .*{words} .*{WIRE_VERSION}: two releases"):
        require_same_messages(Coordinator(theirs))
    told = {properties.RUN_ID: "r", properties.ADDRESSES: '["grpc://h:1"]', properties.TOKEN: "t"}
    with pytest.raises(StateStoreRefusedError, match=f"driver .*{words} "):
        properties.endpoints_from({**told, **({} if theirs is None else {properties.WIRE: str(theirs)})}.get, "op")


def test_a_host_refuses_the_driver_of_another_release(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = pickle.dumps(SessionOptions(1))
    monkeypatch.setattr("spark_bridge.host_actor.other_version", other_version)
    monkeypatch.setattr(messages, "WIRE_VERSION", WIRE_VERSION + 1)
    with pytest.raises(EnvironmentProblemError, match=rf"driver .*version {WIRE_VERSION} .*{WIRE_VERSION + 1}: two"):
        require_same_driver(pickle.loads(sent))


def test_driver_without_a_wire_version_is_rejected() -> None:
    options = SessionOptions(1)
    del options.__dict__["wire_version"]  # what its pickle has
    with pytest.raises(EnvironmentProblemError, match=r"driver .*version 0 "):
        require_same_driver(pickle.loads(pickle.dumps(options)))


def test_messages_of_other_shapes_have_another_version() -> None:
    """Ray pickles a record as the values of its fields in their order: another release cannot take one more or less."""
    noted = FIXTURE.read_text().splitlines() if FIXTURE.exists() else []
    changed = [line for line in difflib.ndiff(noted, shapes()) if line[0] in "+-"]
    assert not changed, (
        f"The messages between processes are not those that {FIXTURE.name} has for version {WIRE_VERSION}. If there is "
        "a release of this version, count WIRE_VERSION up in coordinator_actor/messages.py. Then run "
        f"{COMMAND}, and remove "
        "the file of the version before.\n" + "\n".join(changed)
    )
