"""Calls between processes: late, lost, twice, out of order, or without an answer.

A call runs as a task of the process that is called. Its answer is lost with either of the two.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from coordinator_actor.coordinator_port import CoordinatorPort
from coordinator_actor.direct_calls import DIRECT_HEARTBEAT_SECONDS, goes_direct
from coordinator_actor.exceptions import FencedError, HostUnavailableError
from spark_bridge.exceptions import STATESTORE_ERRORS
from tests.simulation import scheduler as scheduling
from tests.simulation.scheduler import Killed, Process, Task, Violation
from tests.simulation.sometimes import sometimes
from tests.simulation.storage import Faults

log = logging.getLogger(__name__)


class UnreachableError(Exception):
    """The call got no answer: it is not known whether it was carried out."""


class _Call:
    __slots__ = ("answer", "caller", "error", "is_over")

    def __init__(self, caller: Task) -> None:
        self.caller = caller
        self.is_over = False
        self.answer: Any = None
        self.error: BaseException | None = None

    def settle(self, answer: Any, error: BaseException | None) -> None:
        if not self.is_over:
            self.is_over, self.answer, self.error = True, answer, error
            scheduling.active.wake(self.caller)


class Network:
    """The way between all processes. ``calls_under_way`` are the tasks that carry out calls, and since when."""

    def __init__(self, faults: Faults, acknowledged: Callable[[str, Any, Any], None]) -> None:
        self.faults = faults
        self.acknowledged = acknowledged
        self.calls_under_way: dict[Task, float] = {}

    def delay(self) -> float:
        """How long a message takes."""
        s = scheduling.active
        if self.faults.message_late and s.random.random() < self.faults.message_late:
            return s.random.random() * 8.0
        return s.random.random() * 0.004

    def call(
        self, target: Process | None, name: str, function: Callable[[], Any], timeout: float, *, through_ray: bool
    ) -> Any:
        """Have a function called in another process; raises what it raises, or ``UnreachableError``.

        Ray forgets a process that it takes for dead (``is_cut_off``); a direct connection may still reach it.
        """
        s = scheduling.active
        call = _Call(s.current)
        self._deliver(call, target, name, function, through_ray)
        if self.faults.message_twice and s.random.random() < self.faults.message_twice:
            self._deliver(call, target, name, function, through_ray)
        if not call.is_over:
            s.park(timeout)
        if not call.is_over:
            call.is_over = True
            raise UnreachableError(f"{name}: no answer within {timeout:.0f} s")
        if call.error is not None:
            raise call.error
        return call.answer

    def _deliver(
        self, call: _Call, target: Process | None, name: str, function: Callable[[], Any], through_ray: bool
    ) -> None:
        s, faults = scheduling.active, self.faults
        # A forgetter asks for an exchange once, so at the common rate a search would rarely lose that one message.
        lost = faults.message_lost * (50 if name == "adopt_rewritten" else 1)

        def arrive() -> None:
            if target is None or not target.is_alive or (through_ray and target.is_cut_off):
                s.at(self.delay(), lambda: call.settle(None, UnreachableError(f"{name}: the process is gone")))
                return
            task = s.spawn(target, function, name)
            task.on_end = ended
            self.calls_under_way[task] = s.now

        def ended(task: Task) -> None:
            self.calls_under_way.pop(task, None)
            error = task.error
            if error is not None and not isinstance(error, (*STATESTORE_ERRORS, Killed)):
                s.fail(error)
                return
            if isinstance(error, FencedError):
                sometimes("a coordinator meets a fence")
            s.log("answer of", task.process.name, name, "ok" if error is None else f"{type(error).__name__}: {error}")
            if isinstance(error, Killed) or (through_ray and task.process.is_cut_off):
                error = UnreachableError(f"{name}: the process died")
            elif lost and s.random.random() < lost:
                s.log("LOST the answer", name)
                if s.random.random() < 0.5:
                    return  # the caller waits for as long as it will
                error = UnreachableError(f"{name}: the connection broke")
            result = task.result
            s.at(self.delay(), lambda: call.settle(result, error))

        if s.current.process.severed_until > s.now:
            s.log("SEVERED:", s.current.process.name, "cannot call", name)
            return
        if lost and s.random.random() < lost:
            s.log("LOST the call", name)
            if s.random.random() < 0.5:
                s.at(self.delay(), lambda: call.settle(None, UnreachableError(f"{name}: the connection broke")))
            return
        s.at(self.delay(), arrive)


class SimulatedPort(CoordinatorPort):
    """Sends the coordinator's messages as ``RayCoordinatorPort`` does: again, until a deadline.

    ``is_direct``: some messages go over a connection to the coordinator that Ray found last, even if it was replaced.
    """

    def __init__(
        self, network: Network, find: Callable[[], Process | None], timeout: float, *, is_direct: bool = False
    ) -> None:
        self._network = network
        self._find = find
        self._timeout = timeout
        self._is_direct = is_direct
        self._connected: Process | None = None
        self._followed = 0.0

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """One message."""
        s = scheduling.active
        slow = self._network.faults.registration_slow
        if method == "register_host" and slow and s.random.random() < slow:
            # Another host may be there long before: behind a coordinator's restart it must not be given everything.
            s.sleep(s.random.random() * 7.0)
        if method == "report_runs":
            sometimes("a host reports a run again that its coordinator does not know")
        if method == "suspect_host":
            sometimes("a host reports an owner that a task cannot reach")
        deadline = s.now + self._timeout
        caller = s.current.process.memory
        connected = self._connected if goes_direct(method, s.now - self._followed) else None
        while True:
            target = self._find() if connected is None else connected
            if connected is not None and connected.is_cut_off and connected.is_alive:
                sometimes("a direct message reaches a coordinator that was replaced")

            def carry_out(target: Process | None = target) -> Any:
                assert target is not None
                answer = target.memory["coordinator"].submit(method, args, kwargs).result()
                if method == "adopt_rewritten":
                    if args[3] in caller.setdefault("exchanged", set()):
                        sometimes("an exchange is asked for again that was made already")
                    caller["exchanged"].add(args[3])
                if method == "acknowledge_many":
                    self._network.acknowledged(target.name, args[3], answer)
                return answer

            try:
                through_ray = connected is None
                timeout = self._timeout
                if method == "heartbeat_host" and not through_ray:
                    timeout = DIRECT_HEARTBEAT_SECONDS
                answer = self._network.call(target, method, carry_out, timeout, through_ray=through_ray)
                if self._is_direct and through_ray and method == "heartbeat_host":
                    self._connected, self._followed = target, s.now
                return answer
            except UnreachableError as error:
                connected = None
                if s.now > deadline:
                    raise HostUnavailableError(f"The coordinator did not answer {method}: {error}") from error
                s.sleep(0.1)


__all__ = ["STATESTORE_ERRORS", "Network", "SimulatedPort", "UnreachableError", "Violation"]
