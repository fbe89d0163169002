"""Subjects of traces, and the ids that follow from a subject: every process makes the same ones, and nobody sends them.

A trace has a root span, which one process makes, often after other processes have made their spans. These spans name
the root as their parent, by an id that is a hash as well.
"""

from __future__ import annotations

from hashlib import sha256
from typing import NamedTuple


class Trace(NamedTuple):
    """The subject of a trace: a micro-batch, a savepoint, or the start of a run.

    ``number`` is the version that the batch makes, the id of the savepoint, or 0.
    """

    kind: str
    run_id: str
    number: int = 0

    @property
    def ids(self) -> tuple[int, int]:
        """Return the id of the trace (128 bits) and the id of its root span (64 bits). Neither is 0."""
        digest = sha256(f"{self.kind}/{self.run_id}/{self.number}".encode()).digest()
        return int.from_bytes(digest[:16], "big") or 1, int.from_bytes(digest[16:24], "big") or 1


def batch(run_id: str, version: int) -> Trace:
    """Return the trace of the batch that makes a version, with all its attempts."""
    return Trace("batch", run_id, version)


def run(run_id: str) -> Trace:
    """Return the trace of the start of a run, and of every time that a coordinator takes the run up again."""
    return Trace("run", run_id)


def savepoint(run_id: str, savepoint_id: int) -> Trace:
    """Return the trace of a savepoint."""
    return Trace("savepoint", run_id, savepoint_id)
