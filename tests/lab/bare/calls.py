"""Messages to a coordinator on another machine, each over its own connection."""

from __future__ import annotations

import threading
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from typing import Any

from backends.exceptions import StateStoreError
from coordinator_actor.coordinator import Coordinator
from coordinator_actor.coordinator_port import CoordinatorPort
from coordinator_actor.exceptions import CoordinatorError, HostUnavailableError

PORT = 7000
KEY = b"lab"
ANSWER_SECONDS = 10.0


class RemoteCoordinator(CoordinatorPort):
    """The coordinator at an address."""

    def __init__(self, address: str) -> None:
        self._address = address

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Send one message and return the answer, or raise it. Without an answer raises ``HostUnavailableError``."""
        try:
            with Client((self._address, PORT), authkey=KEY) as link:
                link.send((method, args, kwargs))
                if not link.poll(ANSWER_SECONDS):
                    raise TimeoutError(f"no answer within {ANSWER_SECONDS:.0f} s")
                answer = link.recv()
        except (OSError, EOFError, AuthenticationError) as error:
            raise HostUnavailableError(
                f"The coordinator at {self._address} did not answer {method}: {error}"
            ) from error
        if isinstance(answer, Exception):
            raise answer
        return answer


def serve(coordinator: Coordinator, address: str) -> None:
    """Answer each message in its own thread, as long as the process lives.

    A caller also proves there that it has the key: ``accept`` would wait for a caller that is cut off.
    """
    listener = Listener((address, PORT), backlog=100)

    def accept() -> None:
        while True:
            try:
                link = listener.accept()
            except OSError:
                continue  # who has called is gone
            threading.Thread(target=_answer, args=(coordinator, link), daemon=True).start()

    threading.Thread(target=accept, name="calls", daemon=True).start()


def _answer(coordinator: Coordinator, link: Connection) -> None:
    with link:
        try:
            deliver_challenge(link, KEY)
            answer_challenge(link, KEY)
            method, args, kwargs = link.recv()
        except (OSError, EOFError, AuthenticationError):
            return
        answer: Any
        try:
            answer = coordinator.call(method, *args, **kwargs)
        except (CoordinatorError, StateStoreError) as error:  # it is the caller's
            answer = error
        try:
            link.send(answer)
        except OSError:
            return
