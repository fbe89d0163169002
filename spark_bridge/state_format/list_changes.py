"""Changes of lists between two versions: the elements that were deleted, and those that were inserted.

An element that stays is no change. These stay: the elements that the old and the new list have in common at their
beginnings, then those at their ends. And where elements left at the beginning and came at the end, as with a TTL, those
between.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from backends.encoding.columns import Mask
from spark_bridge.state_format.stored_rows import Positions


def changed_elements(
    lists: tuple[pa.BinaryArray, pa.BinaryArray], values: tuple[pa.Array, pa.Array]
) -> tuple[Positions, Positions]:
    """Return the deleted and inserted elements by list, those deleted from a list first.

    Each is a position among the old elements and one among the new elements; the one that does not apply is -1. Both
    arguments have an array for the old elements and one for the new: ``lists`` has the id of each element's list,
    ``values`` bytes that are equal where elements are. The elements of a list stand together and in order.
    """
    known = pc.unique(pa.concat_arrays(list(lists)))
    known = known.take(pc.sort_indices(known))
    of_before, of_after = (np.asarray(pc.index_in(ids, value_set=known)).astype(np.int64) for ids in lists)
    old, new = (np.searchsorted(of, np.arange(len(known) + 1)) for of in (of_before, of_after))
    lengths = np.minimum(np.diff(old), np.diff(new))
    prefix = _in_common(values, old[:-1], new[:-1], lengths, 1)
    suffix = _in_common(values, old[1:] - 1, new[1:] - 1, lengths - prefix, -1)
    begins, ends = (old[:-1] + prefix, new[:-1] + prefix), (old[1:] - suffix, new[1:] - suffix)
    is_lost, is_added = (_between(of, a, b) for of, a, b in zip((of_before, of_after), begins, ends, strict=True))
    for i in np.flatnonzero((ends[0] > begins[0]) & (ends[1] > begins[1])).tolist():
        stays = _overlap(*(v[int(a[i]) : int(b[i])].to_pylist() for v, a, b in zip(values, begins, ends, strict=True)))
        is_lost[int(ends[0][i]) - stays : int(ends[0][i])] = False
        is_added[int(begins[1][i]) : int(begins[1][i]) + stays] = False
    lost, added = np.flatnonzero(is_lost), np.flatnonzero(is_added)
    order = np.argsort(np.concatenate([of_before[lost], of_after[added]]), kind="stable")
    return (
        np.concatenate([lost, np.full(len(added), -1)])[order],
        np.concatenate([np.full(len(lost), -1), added])[order],
    )


def _in_common(
    values: tuple[pa.Array, pa.Array], old: Positions, new: Positions, lengths: Positions, step: int
) -> Positions:
    """Return, per list, how many elements are equal from the positions ``old`` and ``new`` on, ``lengths`` at most."""
    lists = np.repeat(np.arange(len(lengths)), lengths)
    nth = np.arange(len(lists)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    equal = np.asarray(
        pc.equal(values[0].take(pa.array(old[lists] + step * nth)), values[1].take(pa.array(new[lists] + step * nth)))
    ).astype(np.bool_)
    found: Positions = lengths.copy()
    np.minimum.at(found, lists[~equal], nth[~equal])
    return found


def _between(lists: Positions, begins: Positions, ends: Positions) -> Mask:
    """Return which elements are from ``begins`` (included) to ``ends`` (not included) of their list."""
    at = np.arange(len(lists))
    found: Mask = (at >= begins[lists]) & (at < ends[lists])
    return found


def _overlap(before: list[bytes], after: list[bytes]) -> int:
    """Return how many of the last elements of one list are the first elements of the other."""
    shortest = max(1, len(before) - len(after))
    starts = (
        s for s in range(shortest, len(before)) if before[s] == after[0] and before[s:] == after[: len(before) - s]
    )
    start = next(starts, None)
    return 0 if start is None else len(before) - start
