"""The result of a check: its status, the finding, and the remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from spark_bridge.overview.model import ERROR

OK, SKIPPED = "ok", "skipped"
"""The status of a check, beside ``WARNING`` and ``ERROR``, which are severities of faults, too."""


@dataclass(frozen=True)
class Check:
    """One check. ``area`` is "machine", "spark", "storage" or "cluster"; ``remedy`` is empty where all is well."""

    area: str
    name: str
    status: str
    found: str
    remedy: str = ""


def checked(area: str, name: str, check: Callable[[], Iterable[Check]]) -> list[Check]:
    """Return the findings of a check; a check that fails itself is a finding, and does not end the others."""
    try:
        return list(check())
    except Exception as error:  # noqa: BLE001 - whatever fails on a sick machine is what somebody wants to know
        text = str(error) or type(error).__name__
        return [Check(area, name, ERROR, f"The check failed: {text}", "Look at this error first.")]
