"""Named points where a test can make the process die, hang or fail (after TiKV's ``fail`` points).

In production the hook is None and a point costs one comparison.
"""

from __future__ import annotations

from collections.abc import Callable

_hook: Callable[[str], None] | None = None


def set_hook(hook: Callable[[str], None] | None) -> None:
    """Call ``hook`` with the name of every point that is reached; None calls nothing."""
    global _hook
    _hook = hook


def reached(point: str) -> None:
    """Report that the process is at ``point``."""
    if _hook is not None:
        _hook(point)
