"""Answers of several hosts, all of one version.

Hosts hear of a completed version one after the other, so that their answers may be of different ones. Then those that are ahead are
asked again for exactly the lowest version, which they still hold as a rule: so two round trips are the most that happens, unless one host
is far behind.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar
from weakref import WeakSet

from spark_bridge.exceptions import ConnectionClosedError, HostUnavailableError, StateVersionError
from spark_bridge.queryable.protocol.connections import KvConnections, KvExchange
from spark_bridge.queryable.protocol.messages import At
from spark_bridge.queryable.protocol.state_reads import StateReads
from spark_bridge.queryable.routing.scattered_requests import Question

P = TypeVar("P")
T = TypeVar("T")

REMEMBERED_RUNS = 4096
NEW_BEGINNINGS = 3
"""So often the parts of a large question are asked all over again before storage is read."""


class CompletedVersions:
    """The highest completed version that has been seen of each run; for any number of threads and routers, and processes that fork."""

    def __init__(self) -> None:
        self._versions: dict[str, int] = {}
        self._lock = threading.Lock()
        _in_use.add(self)

    def get(self, run_id: str) -> int:
        """The version; 0 of a run that is not known."""
        return self._versions.get(run_id, 0)

    def note(self, run_id: str, version: int) -> None:
        """A completed version has been seen."""
        if version <= self._versions.get(run_id, 0):
            return
        with self._lock:
            if version <= self._versions.get(run_id, 0):
                return
            if run_id not in self._versions and len(self._versions) >= REMEMBERED_RUNS:
                del self._versions[next(iter(self._versions))]
            self._versions[run_id] = version  # in place: get takes no lock, and must never find less


_in_use: WeakSet[CompletedVersions] = WeakSet()


def _after_fork() -> None:
    """A thread that is not in the new process may have held the lock."""
    for versions in _in_use:
        versions._lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class Interrogation:
    """Asks hosts. ``local``: an address and what is to be read there, without a network."""

    def __init__(
        self, connections: KvConnections, versions: CompletedVersions, local_address: str, local: StateReads | None
    ) -> None:
        self._connections = connections
        self._versions = versions
        self._local_address = local_address
        self._local = local

    def not_before(self, run_id: str, at: At) -> At:
        """A question for the completed version, so that the answer is not older than what has been seen."""
        floor = self._versions.get(run_id)
        return at if at.version >= floor else At("completed", floor)

    def answers(self, run_id: str, questions: Sequence[Question[T]], at: At, deadline: float) -> tuple[int, list[T]]:
        """The version, and the answer to each question. With ``latest`` the version is the lowest one.

        Raises what hosts raise, and ``ConnectionClosedError`` for an answer of another version than asked for.
        """
        is_completed = at.isolation == "completed"
        if is_completed:
            at = self.not_before(run_id, at)
        try:
            answers = self._ask(questions, at, deadline)
            versions = [version for version, _ in answers]
            low, high = min(versions), max(versions)
            while is_completed and low != high:
                answers = self._level(questions, answers, at.version, deadline)
                versions = [version for version, _ in answers]
                low, high = min(versions), max(versions)
        except StateVersionError as error:
            raise lagging(at, error) from error
        if is_completed:
            self._versions.note(run_id, low)
        elif at.isolation == "version" and not low == high == at.version:
            raise ConnectionClosedError(
                f"Version {at.version} of run {run_id} was asked for, versions {versions} came."
            )
        return low, [answer for _, answer in answers]

    def _level(
        self, questions: Sequence[Question[T]], answers: list[tuple[int, T]], floor: int, deadline: float
    ) -> list[tuple[int, T]]:
        """Ask some again, so that all answers are of one version, or at least nearer to it."""
        versions = [version for version, _ in answers]
        low, high = min(versions), max(versions)
        if low >= floor:
            ahead = [i for i, version in enumerate(versions) if version > low]
            try:
                again = self._ask([questions[i] for i in ahead], At("version", low, held_only=True), deadline)
            except StateVersionError:
                pass  # it is further behind than others hold
            else:
                return _with(answers, ahead, again)
        behind = [i for i, version in enumerate(versions) if version < high]
        return _with(answers, behind, self._ask([questions[i] for i in behind], At("completed", high), deadline))

    def _ask(self, questions: Sequence[Question[T]], at: At, deadline: float) -> list[tuple[int, T]]:
        """Ask all, then read all answers. If some fail, the others are read all the same, for their connections are good."""
        begun: list[KvExchange | None] = []
        answers: list[tuple[int, T]] = []
        failure: Exception | None = None
        try:
            for question in questions:
                exchange = None
                if self._local is None or question.address != self._local_address:
                    try:
                        exchange = question.send(self._connections, at, deadline)
                    except Exception as error:  # noqa: BLE001 - raised below
                        failure = error
                        break
                begun.append(exchange)
            for question, exchange in zip(questions, begun, strict=False):
                try:
                    if exchange is not None:
                        answers.append(question.receive(exchange, deadline))
                    elif self._local is not None and failure is None:
                        answers.append(question.read(self._local, at))
                except Exception as error:  # noqa: BLE001 - raised below
                    failure = failure or error
        finally:
            for exchange in begun:
                if exchange is not None:
                    exchange.abandon()  # those that have been read are not touched by it
        if failure is not None:
            raise failure
        return answers


def lagging(at: At, error: StateVersionError) -> Exception:
    """What to raise instead of ``error``, if ``at`` is what was asked for.

    Who asks for the completed version has named none: that a host does not know one which others have shown, or has it no more, passes.
    """
    if at.isolation != "completed":
        return error
    return HostUnavailableError(f"A host does not have a version that others have shown to be completed: {error}")


class OneVersion:
    """What the parts of a question ask for, one after the other, so that the answers are of one version: ``at`` is for the next part.

    The first answer says which version. If the parts take long, hosts may not hold it in memory any more. Then all begins anew, a few
    times; if that does not help, the rest is read from storage, which takes every host much longer.
    """

    def __init__(self, asked: At) -> None:
        self.at = asked
        self._asked = asked
        self._beginnings = NEW_BEGINNINGS

    def answered(self, version: int) -> None:
        """A part has been answered."""
        if self.at.isolation == "completed":
            self.at = At("version", version, held_only=True)

    def begins_anew(self, error: StateVersionError) -> bool:
        """After a part has failed: whether all parts are asked again; else this one is. Raises if neither may help."""
        if self._asked.isolation != "completed" or not self.at.held_only:
            raise lagging(self._asked, error) from error
        if not self._beginnings:
            self.at = At("version", self.at.version)
            return False
        self._beginnings -= 1
        self.at = self._asked
        return True


def in_parts(parts: Sequence[P], at: At, ask: Callable[[P, At], tuple[int, T]]) -> tuple[int, list[T]]:
    """The version, and what ``ask`` answers to each of the parts, of which there must be one at least."""
    wanted = OneVersion(at)
    version = 0
    answers: list[T] = []
    while len(answers) < len(parts):
        try:
            version, answer = ask(parts[len(answers)], wanted.at)
        except StateVersionError as error:
            if wanted.begins_anew(error):
                answers.clear()
            continue
        answers.append(answer)
        wanted.answered(version)
    return version, answers


def _with(answers: list[tuple[int, T]], places: list[int], newer: list[tuple[int, T]]) -> list[tuple[int, T]]:
    changed = list(answers)
    for place, answer in zip(places, newer, strict=True):
        changed[place] = answer
    return changed
