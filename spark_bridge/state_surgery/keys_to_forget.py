"""Keys as users give them, as the columns of stored keys by which rows are found in every column family."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from backends.encoding.operator_schema import OperatorSchema
from backends.exceptions import InvalidStateStoreArgument
from coordinator_actor.surgery.forgotten_keys import ForgottenKeys
from spark_bridge.queryable.client.arguments.key_codec import KeyCodec, names_in_order
from spark_bridge.state_format.families import family_of
from spark_bridge.state_format.windowed_keys import window_place


def keys_to_forget(operator: str, schema: OperatorSchema, num_groups: int, keys: Any) -> ForgottenKeys:
    """Return the rows of these keys. A window is no part of a key: all windows of a key go.

    ``keys`` may be a function that makes them from the schema of the key's columns, for who has only their texts.

    Raises ``UnknownKeyOrNamespaceError`` for values that cannot be a key, ``InvalidStateStoreArgument`` for no keys,
    and for an operator whose only key is a window.
    """
    variable = schema.in_use[0]
    stored = family_of(variable)[1].key
    window = window_place(variable)
    given = stored if window is None else stored.remove(window)
    if not len(given):
        raise InvalidStateStoreArgument(
            f"Operator {operator!r} has no key but its window, so none of its rows is of somebody: nothing was changed."
        )
    codec = KeyCodec(operator, given, names_in_order(given, schema.key_columns), num_groups)
    columns = codec.columns(keys(codec.schema) if callable(keys) else keys).select(given.names)
    if not columns.num_rows:
        raise InvalidStateStoreArgument("keys= is empty: nothing was changed. Give at least one key.")
    columns = pa.RecordBatch.from_arrays(columns.columns, schema=given.remove_metadata())
    return ForgottenKeys(columns, schema.families, num_groups, is_whole=window is None)
