"""Versioned, fault-tolerant, queryable state for PySpark streams on Ray clusters: every public name of the project.

The names come from ``spark_bridge``, ``coordinator_actor`` and ``backends``, which can be imported as well. Importing
this package loads neither Ray nor PySpark; each name loads what it needs when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import backends
import coordinator_actor
import spark_bridge

if TYPE_CHECKING:
    from backends import *  # noqa: F403
    from coordinator_actor import *  # noqa: F403
    from spark_bridge import *  # noqa: F403

__all__ = []
__all__ += backends.__all__
__all__ += coordinator_actor.__all__
__all__ += spark_bridge.__all__


def __getattr__(name: str) -> Any:
    for package in (spark_bridge, coordinator_actor, backends):
        if name in package.__all__:
            return getattr(package, name)
    raise AttributeError(f"module 'ray_statestore' has no attribute {name!r}; it has {', '.join(sorted(__all__))}")


def __dir__() -> list[str]:
    return sorted(__all__)
