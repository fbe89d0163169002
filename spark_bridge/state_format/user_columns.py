"""The names of the columns under which users see stored rows, in state data, scans and answers to queries.

Clients and hosts import this module: it must not import Spark or pandas, whose import would delay their start.
"""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

from backends.encoding.column_names import distinct_names

TTL = "ttl_expiration_ms"
"""When a row expires, in ms since 1970 (int64)."""
EXPIRATION = "expiration_timestamp_ms"
"""When a timer fires, in ms since 1970 (int64)."""
SESSION_WINDOW = "session_window"
"""The bounds of a session: a struct of the timestamps ``start`` and ``end``."""
KEY_GROUP = "key_group"
"""The key group of a row's key (int32)."""
PARTITION = "partition_id"
"""The number of the state partition that has the row (int32)."""
LIST_VALUE = "list_value"
"""All elements of a key's list, where there is one row per key."""
MAP_VALUE = "map_value"
"""All entries of a key's map, where there is one row per key."""


def with_distinct_names(fields: Iterable[pa.Field]) -> pa.Schema:
    """Return the fields, renamed where a field before has the same name; see ``distinct_names`` for the rule."""
    given = list(fields)
    names = distinct_names([field.name for field in given])
    return pa.schema([field.with_name(name) for field, name in zip(given, names, strict=True)])
