"""How long tests wait for what must happen."""

from __future__ import annotations

PATIENCE = 120.0
"""Seconds. Not a bound on the product: a wait ends as soon as what it is for is there, and a shared machine may stand still for ten seconds."""
