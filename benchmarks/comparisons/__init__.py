"""The comparisons of the suite, in the order of their runs and of the report.

A module here has ``COMPARISONS``, and imports the measured programs only when it runs.
"""

from __future__ import annotations

from alternatives import comparison as alternatives
from nexmark import comparison as nexmark
from suite.model import Comparison

from comparisons import coordinators, kafka, lookups, object_storage, providers, restarts, startup, throughput

_ORDER = (throughput, restarts, startup, lookups, nexmark, providers, object_storage, coordinators, kafka, alternatives)
COMPARISONS: dict[str, Comparison] = {c.name: c for module in _ORDER for c in module.COMPARISONS}
