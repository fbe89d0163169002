"""Names of columns and column families that operators store: sessions, deduplicated keys, and the kinds of state variables."""

from __future__ import annotations

import pyarrow as pa

SESSIONS, START, END = "sessions", "start", "end"
"""The column that holds the sessions of a key, and the bounds of each session in it."""
ENDS_FAMILY, DUE = "sessions.-ends", "__due"
"""The keys by the time before which none of their sessions ends."""

EXPIRY_FAMILY, EXPIRES_AT = "default.-expiry", "__expires_at"
"""The deduplicated keys by the time at which each expires."""
PRESENT = pa.schema([pa.field("present", pa.bool_())])
"""The value of a deduplicated key that does not expire."""

VALUE, ROWS, WINDOWS, LIST, MAP, TIMERS = "value", "rows", "windows", "list", "map", "timers"
"""The kinds of state that a query client tells apart."""
