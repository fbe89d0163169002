"""The order of rows that stand in two column families, such as a list's chunks and its last elements.

The last elements of a list stand under the list's own key, which is the beginning of the keys of its chunks. For the
elements to be in their order, such a key gets a byte appended that is greater than what any chunk's key goes on with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from backends.encoding.sorted_pairs import SortedPairs
from spark_bridge.state_format.layouts import LIST
from spark_bridge.state_format.stored_keys import INT64_KEY_BYTES
from spark_bridge.state_format.stored_rows import Positions, VariableRows

_BEHIND_CHUNKS = b"\x02"


def order_keys(rows: VariableRows, family: str, keys: pa.BinaryArray) -> pa.BinaryArray:
    """Return stored keys in a form whose byte order is the order of the rows."""
    if rows.kind != LIST or family != rows.main:
        return keys
    return pc.binary_join_element_wise(keys, _BEHIND_CHUNKS, pa.scalar(b""))


def without_order(rows: VariableRows, family: str, ordered: pa.BinaryArray) -> pa.BinaryArray:
    """Return the stored keys that ``order_keys`` was given."""
    if rows.kind != LIST or family != rows.main:
        return ordered
    return pc.binary_slice(ordered, 0, -1) if len(ordered) else ordered


def list_keys(rows: VariableRows, family: str, keys: pa.BinaryArray) -> pa.BinaryArray:
    """Return the stored keys of the lists whose elements stand under ``keys`` of ``family``."""
    if family == rows.main or not len(keys):
        return keys
    return pc.binary_slice(keys, 0, -INT64_KEY_BYTES)


def in_step(streams: Sequence[Iterator[SortedPairs]]) -> Iterator[list[SortedPairs]]:
    """Read several sorted streams side by side: yield a part of each, whose keys are above all keys yielded before."""
    held: list[SortedPairs | None] = [next(stream, None) for stream in streams]
    while True:
        for i, stream in enumerate(streams):
            while (pairs := held[i]) is not None and not len(pairs):
                held[i] = next(stream, None)
        lasts = [pairs.keys[len(pairs) - 1].as_py() for pairs in held if pairs is not None]
        if not lasts:
            return
        end = min(lasts) + b"\x00"
        step = []
        for i, pairs in enumerate(held):
            if pairs is None:
                step.append(SortedPairs.empty())
                continue
            cut = pairs.lower_bound(end)
            step.append(pairs.slice(0, cut))
            held[i] = pairs.slice(cut)
        yield step


def row_order(keys: Sequence[pa.BinaryArray], pairs: Sequence[Positions]) -> Positions:
    """Return the order of the rows of several parts by the keys of their pairs.

    ``pairs`` are, for each part, the positions of its rows' pairs in that part of ``keys``.
    """
    ranks = np.empty(sum(map(len, keys)), np.int64)
    ranks[np.asarray(pc.sort_indices(pa.concat_arrays(keys)))] = np.arange(len(ranks))
    begins = np.cumsum([0, *map(len, keys)])[:-1]
    of_rows = np.concatenate([ranks[at + positions] for at, positions in zip(begins, pairs, strict=True)])
    return np.argsort(of_rows, kind="stable")
