"""How long tests wait, and how long what they hold up hangs."""

from __future__ import annotations

PATIENCE = 120.0
"""Seconds to wait for what must happen. No bound on the product: the wait ends with what it is for, and a shared
machine may stand still for ten.
"""

HANG = 300.0
"""Seconds that something hangs unless it is let go: so long that what wrongly waits for it is not there within
``PATIENCE``.
"""
