"""The comparisons of the suite, in the order in which they are run and shown.

A module here has ``COMPARISONS``, and imports what it measures only when it runs. Another one is added to ``MODULES``.
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
