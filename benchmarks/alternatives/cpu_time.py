"""The CPU time that a process and all below it use between two moments."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class Used:
    """CPU seconds of one process: its own, and those of its children that have ended and been waited for."""

    parent: int
    own: float
    children: float


Moment = Mapping[int, Used]
"""By number of the process."""


def family(pid: int) -> list[psutil.Process]:
    """Return the process and all below it."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def moment(pid: int) -> Moment:
    """Return what the process and all below it have used until now."""
    found = {}
    for process in family(pid):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            ended = times.children_user + times.children_system
            found[process.pid] = Used(process.ppid(), times.user + times.system, ended)
    return found


def seconds_between(before: Moment, after: Moment) -> float:
    """Return the CPU seconds used between two moments.

    When a process ends in between, the kernel adds all its CPU time to the process that waited for it. The part from
    before the first moment is subtracted. If no process waits for it, its time after the first moment is lost, and its
    time before that is not subtracted from that of others.
    """
    handed_on: dict[int, float] = defaultdict(float)
    for pid, used in before.items():
        if pid not in after:
            parent = used.parent
            while parent in before and parent not in after:
                parent = before[parent].parent
            handed_on[parent] += used.own + used.children
    total, none = 0.0, Used(0, 0.0, 0.0)
    for pid, used in after.items():
        earlier = before.get(pid, none)
        total += used.own - earlier.own + max(0.0, used.children - earlier.children - handed_on[pid])
    return total
