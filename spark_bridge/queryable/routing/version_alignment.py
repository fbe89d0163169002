"""The version of a query's answer, where several hosts answer: all answers are brought to one version.

Hosts hear of a completed version one after the other, so their first answers may be of different versions. Then the
hosts that are ahead are asked again for exactly the lowest version, which they usually still hold. So two round trips
are enough, unless one host is far behind. ``reads/versions/answer_version.py`` decides within one host.

A large request goes out in chunks, one after the other. The answer to the first chunk fixes the version of all chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from spark_bridge.exceptions import ConnectionClosedError, HostUnavailableError, StateVersionError
from spark_bridge.queryable.protocol.messages import At
from spark_bridge.queryable.routing.monotonic_reads import SeenVersions
from spark_bridge.queryable.routing.scatter_gather import ScatterGather
from spark_bridge.queryable.routing.scattered_requests import ScatteredRequest

P = TypeVar("P")
T = TypeVar("T")

MAX_RESTARTS = 3
"""The chunks of a large request are read again from the first one so often, before chunks are read from storage."""


class VersionAlignment:
    """Ask several hosts until all their answers are of one version."""

    def __init__(self, hosts: ScatterGather, seen: SeenVersions) -> None:
        self._hosts = hosts
        self._seen = seen

    def answers(
        self, run_id: str, requests: Sequence[ScatteredRequest[T]], at: At, deadline: float
    ) -> tuple[int, list[T]]:
        """Return the version, and the answer to each request. With ``latest`` the version is the lowest one.

        Raises what hosts raise, and ``ConnectionClosedError`` for an answer of another version than the one asked for.
        """
        is_completed = at.isolation == "completed"
        if is_completed:
            at = self._seen.floor(run_id, at)
        try:
            answers = self._hosts.answers(requests, at, deadline)
            versions = [version for version, _ in answers]
            low, high = min(versions), max(versions)
            while is_completed and low != high:
                answers = self._aligned(requests, answers, at.version, deadline)
                versions = [version for version, _ in answers]
                low, high = min(versions), max(versions)
        except StateVersionError as error:
            raise retryable(at, error) from error
        if is_completed:
            self._seen.note(run_id, low)
        elif at.isolation == "version" and not low == high == at.version:
            raise ConnectionClosedError(
                f"Version {at.version} of run {run_id} was asked for, versions {versions} came."
            )
        return low, [answer for _, answer in answers]

    def _aligned(
        self, requests: Sequence[ScatteredRequest[T]], answers: list[tuple[int, T]], floor: int, deadline: float
    ) -> list[tuple[int, T]]:
        """Ask some hosts again, so that all answers are of one version, or at least nearer to one version."""
        versions = [version for version, _ in answers]
        low, high = min(versions), max(versions)
        if low >= floor:
            ahead = [i for i, version in enumerate(versions) if version > low]
            try:
                again = self._hosts.answers([requests[i] for i in ahead], At("version", low, held_only=True), deadline)
            except StateVersionError:
                pass  # the slowest host is further behind than the other hosts hold versions
            else:
                return _replaced(answers, ahead, again)
        behind = [i for i, version in enumerate(versions) if version < high]
        again = self._hosts.answers([requests[i] for i in behind], At("completed", high), deadline)
        return _replaced(answers, behind, again)


def _replaced(answers: list[tuple[int, T]], places: list[int], newer: list[tuple[int, T]]) -> list[tuple[int, T]]:
    changed = list(answers)
    for place, answer in zip(places, newer, strict=True):
        changed[place] = answer
    return changed


def retryable(at: At, error: StateVersionError) -> Exception:
    """Return the error to raise instead of ``error`` for a request at ``at``: a retryable one for ``completed``.

    A caller that asks for the completed version has named none. A host that does not know the version which other hosts
    have shown, or no longer has it, is a passing failure.
    """
    if at.isolation != "completed":
        return error
    return HostUnavailableError(f"A host does not have a version that others have shown to be completed: {error}")


class PinnedVersion:
    """The version of chunks that are read one after the other: ``at`` is what the next chunk asks for.

    The first answer fixes the version. If the chunks take long, hosts may no longer hold that version in memory. Then
    all chunks are read again, a few times. If that does not help, the other chunks are read from storage, which takes
    every host much longer.
    """

    def __init__(self, asked: At) -> None:
        self.at = asked
        self._asked = asked
        self._restarts = MAX_RESTARTS

    def answered(self, version: int) -> None:
        """Note the version of a chunk's answer."""
        if self.at.isolation == "completed":
            self.at = At("version", version, held_only=True)

    def restarts(self, error: StateVersionError) -> bool:
        """Return whether all chunks are read again after a chunk has failed; else that chunk is.

        Raises ``error``, or the retryable one for it, if neither can help.
        """
        if self._asked.isolation != "completed" or not self.at.held_only:
            raise retryable(self._asked, error) from error
        if not self._restarts:
            self.at = At("version", self.at.version)
            return False
        self._restarts -= 1
        self.at = self._asked
        return True


def read_in_chunks(chunks: Sequence[P], at: At, read: Callable[[P, At], tuple[int, T]]) -> tuple[int, list[T]]:
    """Return the version, and what ``read`` answers to each of the chunks, of which there is at least one."""
    pinned = PinnedVersion(at)
    version = 0
    answers: list[T] = []
    while len(answers) < len(chunks):
        try:
            version, answer = read(chunks[len(answers)], pinned.at)
        except StateVersionError as error:
            if pinned.restarts(error):
                answers.clear()
            continue
        answers.append(answer)
        pinned.answered(version)
    return version, answers
