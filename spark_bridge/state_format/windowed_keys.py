"""Finds the column of a stored key that is the window of a windowed aggregate, for clients and hosts alike.

The key group of such a key is computed from all its columns, the window included: the windows of one grouping key are
in all partitions. A client that asks ``KeyRows`` for all windows of keys therefore asks every owner. The client gives
the keys without the column of the window, under any key group: a host does not look at the key group. Session windows
are no part of the key.
"""

from __future__ import annotations

import pyarrow as pa

from backends.encoding.operator_schema import StateVariable
from backends.ids import DEFAULT_FAMILY
from spark_bridge.state_format.layouts import END, ROWS, START


def window_place(variable: StateVariable) -> int | None:
    """Return the place of the window in the stored key of an aggregate's rows; None if the key has no window.

    A window is a struct of the timestamps ``start`` and ``end``. Of several such columns, the first one in stored order
    counts; the others are ordinary columns of the key.
    """
    if variable.kind != ROWS or len(variable.families) != 1:
        return None
    key = variable.families[DEFAULT_FAMILY].key
    return next((i for i, field in enumerate(key) if _is_window(field.type)), None)


def _is_window(kind: pa.DataType) -> bool:
    """Return whether values of a type are windows of time."""
    if not pa.types.is_struct(kind) or kind.num_fields != 2:
        return False
    bounds = [kind.field(i) for i in range(2)]
    return [b.name for b in bounds] == [START, END] and all(pa.types.is_timestamp(b.type) for b in bounds)
