"""Which column of a stored key is the window of a windowed aggregate; for clients and hosts alike.

The key group of such a key is computed from all its columns, the window too: the windows of one grouping key are in all
partitions. Who asks ``KeyRows`` for the windows of keys therefore asks every owner, and gives the keys without the window's column
(``without_window``), with any key group: it does not count. Windows of sessions are no part of the key.
"""

from __future__ import annotations

import pyarrow as pa

from backends.encoding.operator_schema import StateVariable
from backends.ids import DEFAULT_FAMILY


def window_of(variable: StateVariable) -> int | None:
    """The place of the window in the stored key of an aggregate's rows; None if there is no window in it.

    A window is a struct of the timestamps ``start`` and ``end``. Of several the first one stored is it, and the others are
    ordinary columns of the key.
    """
    if variable.kind != "rows" or len(variable.families) != 1:
        return None
    key = variable.families[DEFAULT_FAMILY].key
    return next((i for i, field in enumerate(key) if is_window(field.type)), None)


def is_window(kind: pa.DataType) -> bool:
    """Whether values of a type are windows of time."""
    if not pa.types.is_struct(kind) or kind.num_fields != 2:
        return False
    bounds = [kind.field(i) for i in range(2)]
    return [b.name for b in bounds] == ["start", "end"] and all(pa.types.is_timestamp(b.type) for b in bounds)


def without_window(variable: StateVariable) -> pa.Schema:
    """The columns of a windowed aggregate's key as ``KeyRows`` takes them, in the order in which they are stored.

    Only of variables that have a window, see ``window_of``.
    """
    at = window_of(variable)
    assert at is not None
    return variable.families[DEFAULT_FAMILY].key.remove(at)
