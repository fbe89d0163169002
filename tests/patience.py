"""How long tests wait, and how long what they hold up hangs."""

from __future__ import annotations

PATIENCE = 120.0
"""Seconds to wait for an event that must happen. Not a bound on the product: a wait ends with its event, but a shared
machine may stall for ten seconds.
"""

HANG = 300.0
"""Seconds that something hangs unless it is let go: so long that what wrongly waits for it is not there within
``PATIENCE``.
"""
