"""Acknowledgements of tasks that commit at the same time, sent to the coordinator in one message.

A thread that comes while a message is under way waits; then one of the waiting threads sends for all. So the number of
messages follows the number of hosts, not of partitions, and a single acknowledgement is sent at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coordinator_actor.exceptions import CoordinatorError
from coordinator_actor.messages import Acknowledge, Acknowledged, Refused
from spark_bridge.transport.error_codec import rebuilt_error

SendAcknowledgements = Callable[[str, tuple[Acknowledge, ...]], Sequence[Acknowledged | Refused]]
"""Sends messages of one run to the coordinator, and returns an answer for each."""


@dataclass(eq=False)
class _Waiting:
    message: Acknowledge
    answer: Acknowledged | Refused | BaseException | None = None


class Acknowledgements:
    """Collects the acknowledgements of one host.

    Thread-safe: ``_changed`` guards both tables, and is free during a message.
    """

    def __init__(self, send: SendAcknowledgements) -> None:
        self._send = send
        self._waiting: dict[str, list[_Waiting]] = {}
        self._sending: set[str] = set()
        self._changed = threading.Condition()

    def acknowledge(self, message: Acknowledge) -> Acknowledged:
        """Send a message, perhaps together with others.

        Raises the error with which the coordinator refuses the message.
        """
        run_id, own = message.run_id, _Waiting(message)
        with self._changed:
            self._waiting.setdefault(run_id, []).append(own)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: own.answer is not None or run_id not in self._sending)
                if own.answer is not None:
                    break
                self._sending.add(run_id)
                together = self._waiting.pop(run_id)
            answers: Sequence[Acknowledged | Refused | BaseException]
            try:
                answers = self._send(run_id, tuple(w.message for w in together))
                if len(answers) != len(together):
                    raise ValueError(f"{len(together)} acknowledgements of run {run_id} got {len(answers)} answers")
            except BaseException as error:  # noqa: BLE001 - all waiting threads must hear of it
                answers = [error] * len(together)
            with self._changed:
                for waiting, answer in zip(together, answers, strict=True):
                    waiting.answer = answer
                self._sending.discard(run_id)
                self._changed.notify_all()
        if isinstance(own.answer, Refused):
            raise rebuilt_error(own.answer.error, own.answer.message, CoordinatorError)
        if isinstance(own.answer, BaseException):
            raise own.answer
        return own.answer
