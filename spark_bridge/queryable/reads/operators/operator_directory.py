"""The coordinator's answers about operators, kept for a moment, because the coordinator has commits to take."""

from __future__ import annotations

import math
import threading
import time
from typing import Any

from backends.bounded_dict import BoundedDict
from coordinator_actor.messages import OperatorLocation, RunningOperator
from spark_bridge.host.host import Host
from spark_bridge.queryable.reads.operators.operator_summary import operator_summary

DIRECTORY_SECONDS = 0.5
"""An answer of the coordinator about operators is given again for this many seconds."""
MAX_LOCATIONS = 1000


class OperatorDirectory:
    """Locations of operators, and the partitions of them that this host holds.

    Thread-safe; the lock guards changes of the kept locations.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._locations: BoundedDict[tuple[str, str | None], tuple[float, OperatorLocation]] = BoundedDict(
            MAX_LOCATIONS
        )
        self._operators: tuple[float, tuple[RunningOperator, ...]] = (-math.inf, ())
        self._lock = threading.Lock()

    def locate(self, operator: str, query: str | None) -> OperatorLocation:
        """See ``StateReads``.

        The answer may be ``DIRECTORY_SECONDS`` old, as every answer is a little old when it arrives.
        """
        key, now = (operator, query), time.monotonic()
        until, location = self._locations.get(key, (-math.inf, None))
        if location is None or now >= until:
            location = self._host.coordinator.locate(operator, query)
            with self._lock:
                self._locations[key] = (now + DIRECTORY_SECONDS, location)
        return location

    def operators(self) -> list[dict[str, Any]]:
        """See ``StateReads``."""
        return [operator_summary(found) for found in self._running()]

    def _running(self) -> tuple[RunningOperator, ...]:
        until, operators = self._operators
        now = time.monotonic()
        if now >= until:
            operators = self._host.coordinator.operators()
            self._operators = (now + DIRECTORY_SECONDS, operators)
        return operators

    def describe(self, operator: str | None, query: str | None) -> dict[str, Any]:
        """See ``StateReads``. ``held`` are the partitions that are loaded here, by operator."""
        info = self._host.info
        wanted = [o for o in self._running() if _is_wanted(o, operator, query)]
        if operator is not None and not wanted:
            self._host.coordinator.locate(
                operator, query
            )  # raises which operators there are, or that the query has ended
        described = []
        for found in wanted:
            completed = self._host.completed.newest(found.run_id)
            described.append(
                {
                    **operator_summary(found),
                    "completed_version_here": None if completed is None else completed.version,
                    "held": self._host.reads.partitions(found.run_id, found.operator.name),
                }
            )
        return {
            "host_id": info.host_id,
            "incarnation": info.incarnation,
            "address": info.address,
            "query_address": info.query_address,
            "node_id": info.node_id,
            "operators": described,
        }

    def forget(self, run_id: str | None) -> None:
        """Forget a run that is over (None: all runs): clients must hear of its end, or of the next run, at once."""
        with self._lock:
            for key, (_, location) in list(self._locations.items()):
                if run_id in (None, location.run_id):
                    del self._locations[key]
        self._operators = (-math.inf, ())


def _is_wanted(found: RunningOperator, operator: str | None, query: str | None) -> bool:
    names = (found.query_name, found.query_id, found.run_id)
    return (operator is None or operator == found.operator.name) and (query is None or query in names)
