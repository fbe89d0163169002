"""Finds the rows of an operator's state that belong to some keys, in every column family, and their partitions."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from backends.encoding.key_groups import key_groups, partition_of
from backends.encoding.keys import decode_keys, encode_keys
from backends.encoding.schema import StateSchema
from backends.encoding.sorted_pairs import SortedPairs


class ForgottenKeys:
    """Keys whose rows are to go. ``columns`` are the values of the key columns, a row for each key.

    A column of the stored key that is not among ``columns``, as a window, may have any value. ``families`` are the
    column families of the operator. ``num_groups`` is the number of key groups, ``is_whole`` whether ``columns`` are
    all the columns by which rows are routed, in their stored order: then only the partitions of these keys have rows.
    """

    def __init__(
        self, columns: pa.RecordBatch, families: Mapping[str, StateSchema], num_groups: int, *, is_whole: bool
    ) -> None:
        self.num_keys = columns.num_rows
        self._names = columns.schema.names
        self._encoded = _encoded(columns)
        self._families = families
        self._num_groups = num_groups
        self._groups = np.unique(key_groups(columns, num_groups)) if is_whole else None

    def partitions(self, num_partitions: int) -> frozenset[int]:
        """Return the partitions of a layout that may have rows of the keys."""
        if self._groups is None:
            return frozenset(range(num_partitions))
        return frozenset(partition_of(int(group), self._num_groups, num_partitions) for group in self._groups)

    def without(self, family: str, pairs: SortedPairs) -> SortedPairs:
        """Return the pairs of a column family that belong to none of the keys.

        A family that is in no schema has no rows, but notes of where a sweep stands, whose values are keys: none stays.
        """
        schema = self._families.get(family)
        if schema is None:
            return SortedPairs.empty()
        if not len(pairs):
            return pairs
        found = self.among(schema, pairs.keys)
        if not found.any():
            return pairs
        keep = pa.array(~found)
        return SortedPairs(pairs.keys.filter(keep), pairs.values.filter(keep))

    def among(self, schema: StateSchema, keys: pa.BinaryArray) -> npt.NDArray[np.bool_]:
        """Return for each stored key of a column family whether it belongs to one of the keys."""
        columns = decode_keys(keys, schema.key)
        found = pc.is_in(_encoded(columns.select(self._names)), self._encoded)
        return np.asarray(found.to_numpy(zero_copy_only=False), np.bool_)


def _encoded(columns: pa.RecordBatch) -> pa.BinaryArray:
    """Return the values of the columns as one value that is equal where all of them are: nulls and NaNs too."""
    return encode_keys(columns, np.zeros(columns.num_rows, np.int64))
