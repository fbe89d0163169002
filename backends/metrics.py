"""The figures of one store (Spark: ``StateStoreMetrics``)."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class StateStoreMetrics:
    """The number of keys of all column families, and the bytes of memory that this store alone holds.

    ``custom`` has the provider's own figures. Their names end in their unit (``_ms``, ``_bytes``), or they are counts.
    """

    num_keys: int
    memory_bytes: int
    custom: dict[str, float] = field(default_factory=dict)
