"""The comparisons of the suite, in the order of their runs and of the report.

A module here has ``COMPARISONS``, and imports the measured programs only when it runs. Add a new module to ``MODULES``.
"""

from __future__ import annotations

from nexmark import comparison as nexmark
from suite.comparison import Comparison

from comparisons import (
    alternatives,
    coordinators,
    enrichment,
    eviction,
    growth,
    latency,
    lookups,
    object_storage,
    providers,
    recovery,
    savepoints,
    surgery,
    throughput,
)

MODULES = (
    throughput,
    growth,
    latency,
    recovery,
    savepoints,
    surgery,
    lookups,
    enrichment,
    nexmark,
    eviction,
    providers,
    object_storage,
    coordinators,
    alternatives,
)
COMPARISONS: dict[str, Comparison] = {c.name: c for module in MODULES for c in module.COMPARISONS}
