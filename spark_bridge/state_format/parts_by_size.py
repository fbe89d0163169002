"""Divides lists and maps by size: small ones stand beside the grouping key, large ones in chunks or entries."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from backends.encoding.columns import Offsets
from spark_bridge.state_format.ranges import offsets_of, sizes_of
from spark_bridge.state_format.stored_keys import longs_of_key, with_more

TAIL_ELEMENTS = 64
TAIL_BYTES = 16 << 10
"""The most elements and bytes (about) of a list beside its key; a chunk has as many bytes."""
CHUNK_ELEMENTS = 256
"""The most elements of a chunk."""
SMALL_ENTRIES = 64
SMALL_MAP_BYTES = 16 << 10
"""The most entries and bytes (about) of a small map."""


def cut_lists(elements: pa.Array, offsets: Offsets) -> tuple[Offsets, Offsets, Offsets, Offsets]:
    """Return where each list's tail begins, and the chunks before the tails: their lists, starts and lengths.

    ``offsets`` are the n+1 bounds of the n lists among the ``elements``.
    """
    ends = offsets_of(sizes_of(elements))
    tails = offsets[:-1].copy()
    is_long = (np.diff(offsets) > TAIL_ELEMENTS) | (ends[offsets[1:]] - ends[offsets[:-1]] > TAIL_BYTES)
    chunks: list[tuple[int, int, int]] = []
    for i in np.flatnonzero(is_long).tolist():
        start, stop = int(offsets[i]), int(offsets[i + 1])
        while stop - start > TAIL_ELEMENTS or ends[stop] - ends[start] > TAIL_BYTES:
            by_bytes = int(np.searchsorted(ends, ends[start] + TAIL_BYTES, "right")) - 1
            end = min(max(by_bytes, start + 1), start + CHUNK_ELEMENTS, stop)
            chunks.append((i, start, end - start))
            start = end
        tails[i] = start
    columns = np.array(chunks, np.int64).reshape(-1, 3)
    return tails, columns[:, 0], columns[:, 1], columns[:, 2]


def chunk_keys(keys: pa.BinaryArray, numbers: Offsets) -> pa.BinaryArray:
    """Return the stored keys of chunks of the lists that have the stored keys ``keys``."""
    return with_more(keys, longs_of_key(numbers))


def are_large(entries: pa.Array, offsets: Offsets) -> npt.NDArray[np.bool_]:
    """Return which maps have too many entries, or bytes, to stand beside their keys; ``offsets`` are their bounds."""
    ends = offsets_of(sizes_of(entries))
    large: npt.NDArray[np.bool_] = (np.diff(offsets) > SMALL_ENTRIES) | (
        ends[offsets[1:]] - ends[offsets[:-1]] > SMALL_MAP_BYTES
    )
    return large
