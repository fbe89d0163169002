"""Versioned, fault-tolerant, queryable state for PySpark streams on Ray clusters: every public name of the project.

The names come from ``spark_bridge``, ``coordinator_actor`` and ``backends``, which can be imported as well. Importing
this package loads neither Ray nor PySpark; each name loads what it needs when it is first used.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

_PACKAGES = ("backends", "coordinator_actor", "spark_bridge")
_MARKS = ("lazy_names.py", "messages.py", "functions.py")
"""A module that each of the packages has, and that another package of its name hardly has."""


def _require_own_packages() -> None:
    """Raise ``ImportError`` if Python finds another package under one of our names."""
    root = Path(__file__).resolve().parents[1]
    for package, mark in zip(_PACKAGES, _MARKS, strict=True):
        spec = importlib.util.find_spec(package)
        directory = None if spec is None or spec.origin is None else Path(spec.origin).resolve().parent
        if directory == root / package and (directory / mark).exists():
            continue
        if directory is None:
            problem = "is missing"
        elif directory == root / package:
            problem = f"at {directory} was overwritten by another distribution"
        else:
            problem = f"is another one for Python, at {directory}"
        raise ImportError(
            f"ray-statestore needs its own package {package!r}, which {problem}. Rename or uninstall the other "
            f"package, or remove its directory from sys.path; then: pip install --force-reinstall ray-statestore."
        )


_require_own_packages()

import backends  # noqa: E402
import coordinator_actor  # noqa: E402
import spark_bridge  # noqa: E402

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
