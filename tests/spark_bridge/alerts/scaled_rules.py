"""The project's alerts with shorter durations: they fire after seconds in a test, after minutes for an operator.

Only two things change:

- Each duration of a rule (``for:``, the windows in brackets with their steps, and ``offset``) is divided by ``FACTOR``,
  or by the rule's own in ``FACTORS``. No duration becomes shorter than a second, Prometheus's evaluation interval.
- The limits in ``LIMITS`` are lowered where a fault would need minutes, or much disk space, to reach them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

FACTOR = 20
FACTORS = {
    "StatestoreStateGrows": 1440,  # a day becomes a minute
    "StatestoreRestartLoop": 10,  # a host takes some seconds to come back, three times
}
LIMITS: Mapping[str, tuple[str, str]] = {
    "StatestoreNotFresh": ("(ray_statestore_freshness_seconds) > 300", "(ray_statestore_freshness_seconds) > 60"),
    "StatestoreSnapshotsLag": (
        "(ray_statestore_snapshot_lag_versions) > 50",
        "(ray_statestore_snapshot_lag_versions) > 20",
    ),
    "StatestoreStateGrows": (
        "(ray_statestore_checkpoint_full_bytes) > 1e8",
        "(ray_statestore_checkpoint_full_bytes) > 1e7",
    ),
}
"""For each alert, a part of its expression and the replacement."""

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATIONS = re.compile(r"(?<=[\[:])\d+[smhd](?=[\]:])|(?<=\boffset )\d+[smhd]\b")
"""Windows and their steps, as in ``[15m:30s]``, and offsets."""


def scaled(rules: Mapping[str, Any], factor: float | None = None) -> dict[str, Any]:
    """Return the content of a file of rules, made quick; all durations are divided by ``factor``, if one is given.

    Raises ``ValueError`` if an alert's limit is no longer what ``LIMITS`` says.
    """
    made: dict[str, Any] = deepcopy(dict(rules))
    for rule in (rule for group in made["groups"] for rule in group["rules"]):
        name = rule["alert"]
        by = FACTORS.get(name, FACTOR) if factor is None else factor
        usual, lowered = LIMITS.get(name, ("", ""))
        if usual and rule["expr"].count(usual) != 1:
            raise ValueError(f"The expression of {name} does not have {usual!r} once: change LIMITS with the rules.")
        rule["expr"] = _DURATIONS.sub(lambda found, by=by: _divided(found[0], by), rule["expr"].replace(usual, lowered))
        if "for" in rule:
            rule["for"] = _divided(rule["for"], by)
    return made


def _divided(duration: str, factor: float) -> str:
    milliseconds = max(1000, round(int(duration[:-1]) * _SECONDS[duration[-1]] * 1000 / factor))
    return f"{milliseconds}ms"
