"""What state a query is in, for those that start and stop with it (Flink: ``JobStatus``, ``JobStatusListener``)."""

from __future__ import annotations

from enum import Enum
from typing import Protocol


class JobStatus(str, Enum):
    """A query's state, by Flink's names."""

    CREATED = "CREATED"
    RUNNING = "RUNNING"
    RESTARTING = "RESTARTING"
    FAILING = "FAILING"
    FAILED = "FAILED"
    CANCELLING = "CANCELLING"
    CANCELED = "CANCELED"
    FINISHED = "FINISHED"
    SUSPENDED = "SUSPENDED"


class JobStatusListener(Protocol):
    """One who is told when a query's state changes."""

    def job_status_changed(self, job_id: str, status: JobStatus | str) -> None:
        """The query ``job_id`` is in ``status`` from now on."""
        ...
