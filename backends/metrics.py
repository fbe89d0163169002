"""Figures about one store (Spark: ``StateStoreMetrics``)."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class StateStoreMetrics:
    """``num_keys`` over all column families, ``memory_bytes`` held by this store alone.

    ``custom`` has the provider's own figures; names end in their unit (``_ms``, ``_bytes``) or are counts.
    """

    num_keys: int
    memory_bytes: int
    custom: dict[str, float] = field(default_factory=dict)
