"""Many lists in one Arrow array: picking ranges of elements, dropping expired elements, and sizes in bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from backends.encoding.columns import (
    Mask,
    Offsets,
    binary_content,
    binary_values,
    fixed_dtype,
    is_list_like,
    list_array,
    list_parts,
    struct_array,
)

_BLOCK_ELEMENTS = 4096


def flat_ranges(starts: Offsets, counts: Offsets) -> Offsets:
    """Return the numbers of the ranges, one range after the other: ``counts[i]`` numbers from ``starts[i]`` on."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    numbers: Offsets = np.repeat(starts - (ends - counts), counts) + np.arange(total)
    return numbers


def offsets_of(counts: npt.NDArray[Any]) -> Offsets:
    """Return the n+1 offsets of n lists with these numbers of elements."""
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def pick(elements: pa.Array, starts: Offsets, counts: Offsets, kind: pa.DataType) -> pa.Array:
    """Return lists of type ``kind``: list i has ``counts[i]`` of the elements, from ``starts[i]`` on."""
    return list_array(elements.take(pa.array(flat_ranges(starts, counts))), offsets_of(counts), None, kind)


def structs(rows: pa.RecordBatch, kind: pa.DataType) -> pa.Array:
    """Return rows as an array of structs of type ``kind``."""
    return struct_array(rows.columns, rows.num_rows, None, kind)


def rows_of_structs(array: pa.Array) -> pa.RecordBatch:
    """Return an array of structs, none of them null, as rows."""
    return pa.RecordBatch.from_arrays(
        array.flatten(), names=[array.type.field(i).name for i in range(array.type.num_fields)]
    )


def alive_lists(array: pa.Array, alive_of: Callable[[pa.RecordBatch], Mask] | None) -> tuple[pa.Array, Offsets]:
    """Return the elements (structs) of all lists that are alive, and n+1 offsets; ``alive_of`` None: all are."""
    elements, offsets = list_parts(array)
    if alive_of is not None and len(elements):
        alive = alive_of(rows_of_structs(elements))
        if not alive.all():
            elements = elements.filter(pa.array(alive))
            offsets = offsets_of(alive)[offsets]
    return elements, offsets


def sizes_of(array: pa.Array) -> npt.NDArray[np.int64]:
    """Return about how many bytes each value takes when stored."""
    kind = array.type
    dtype = fixed_dtype(kind)
    if dtype is not None:
        return np.full(len(array), dtype.itemsize, np.int64)
    if pa.types.is_struct(kind):
        total = np.zeros(len(array), np.int64)
        for child in array.flatten():
            total += sizes_of(child)
        return total
    if is_list_like(kind):
        elements, offsets = list_parts(array)
        ends = offsets_of(sizes_of(elements))
        sizes: npt.NDArray[np.int64] = ends[offsets[1:]] - ends[offsets[:-1]] + 4
        return sizes
    content: npt.NDArray[np.int64] = np.diff(binary_content(binary_values(array))[1]) + 4
    return content


class LazyLists:
    """Lists whose elements are made into Python values when they are asked for, some thousand at a time.

    ``decode`` makes Python values of elements. Lists that are asked for in order are decoded once.
    """

    def __init__(self, elements: pa.Array, offsets: Offsets, decode: Callable[[pa.RecordBatch], list[Any]]) -> None:
        self.elements = elements
        self.offsets = offsets
        self._decode = decode
        self._bounds: list[int] = offsets.tolist()
        self._first = self._end = 0
        self._block: list[Any] = []

    def __getitem__(self, i: int) -> list[Any]:
        """Return the elements of list ``i``, in a new list."""
        a, b = self._bounds[i], self._bounds[i + 1]
        if a == b:
            return []
        if not self._first <= a <= b <= self._end:
            behind = int(np.searchsorted(self.offsets, a + _BLOCK_ELEMENTS, "right")) - 1
            self._first, self._end = a, max(b, self._bounds[behind])
            self._block = self._decode(rows_of_structs(self.elements.slice(a, self._end - a)))
        return self._block[a - self._first : b - self._first]
