"""The rows that single grouping keys have in a state variable of any kind, in the order of the keys asked."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from backends.conf import DEFAULT_FAMILY
from backends.encoding.columns import MAX_BYTES, binary_content, concatenated, content_bytes, fixed_dtype, list_parts
from backends.encoding.key_groups import key_groups
from backends.encoding.keys import KEY_GROUP_BYTES, decode_keys, encode_keys
from backends.encoding.operator_schema import TIMERS
from backends.encoding.sorted_pairs import key_order
from backends.encoding.values import encode_values
from backends.exceptions import InvalidStateStoreArgument, SchemaMismatchError
from backends.formats.changelog import Changes
from backends.host_memory import BoundedDict
from spark_bridge.exceptions import RequestError, RequestLimitError
from spark_bridge.host.instances import Instance
from spark_bridge.queryable.protocol import raise_if_cancelled, reserve_memory
from spark_bridge.queryable.reads.answer_version import PartitionView
from spark_bridge.queryable.reads.operator_plan import OperatorPlan, without_prefix
from spark_bridge.queryable.reads.scans import POSITION
from spark_bridge.state_format import layouts
from spark_bridge.state_format.stored_rows import DecodedRows, Positions, VariableRows, key_groups_of, prefix_range

READ_KEYS = 1 << 14
"""Keys that are read at once."""
READ_BYTES = 64 << 20
"""Bytes of values that are read at once, estimated from the values read before."""
FIRST_KEYS = 1 << 10
"""Keys that are read first, to learn how large values are."""
SINGLE_KEYS = 16
"""At most so many keys with horizons are answered one by one, without columns."""
DECODED_ROWS = 1 << 14
"""The most keys whose rows are decoded at once."""
LONG_ROWS = 1 << 8
"""Stored rows of one key that are decoded at once: each may be a chunk of many elements."""


@dataclass(frozen=True)
class FoundPairs:
    """Stored pairs that were found in one partition, and the positions of their keys, ascending.

    ``more`` has, by position, the pairs that are too long to be stored with the key: chunks of lists, entries of
    large maps. ``tiles`` are the values of the tiles of keys with horizons, else nulls.
    """

    positions: Positions
    keys: pa.BinaryArray
    values: pa.BinaryArray
    more: dict[int, Iterator[pa.RecordBatch]]
    tiles: pa.BinaryArray

    @classmethod
    def joined(cls, parts: Sequence[FoundPairs]) -> FoundPairs:
        """Return the pairs of all parts, one part after the other. Raises as ``joined_arrays`` does."""
        return cls(
            np.concatenate([np.zeros(0, np.int64), *(f.positions for f in parts)]),
            joined_arrays([f.keys for f in parts]),
            joined_arrays([f.values for f in parts]),
            {position: pairs for f in parts for position, pairs in f.more.items()},
            joined_arrays([f.tiles for f in parts]),
        )


def values_of(view: PartitionView, keys: pa.BinaryArray, family: str) -> pa.BinaryArray:
    """Return the values of stored keys, null if there is none. Sorted keys are fastest."""
    if family != DEFAULT_FAMILY and family not in view.reads.column_families(view.version, head=view.head):
        return pa.nulls(len(keys), pa.binary())
    # A completed version is applied when the reads of the version before are done: no single read may take long.
    parts: list[pa.BinaryArray] = []
    at, nbytes, step = 0, 0, FIRST_KEYS
    while at < len(keys) or not parts:
        raise_if_cancelled()
        try:
            part = view.reads.get_many(keys.slice(at, step), view.version, family, head=view.head, remember=False)
        except pa.ArrowInvalid as error:
            if "overflow" not in str(error):
                raise
            raise RequestLimitError(
                f"{step:,} values are more than one answer can have: ask for fewer keys."
            ) from error
        size = content_bytes(part)  # absent values cost little, and are soon dropped where windows are tried
        reserve_memory(size)
        parts.append(part)
        at, nbytes = at + len(part), nbytes + size
        require_bytes(nbytes)
        step = max(1, min(READ_KEYS, READ_BYTES * at // max(1, nbytes)))
    return joined_arrays(parts)


def require_bytes(nbytes: int) -> None:
    """Raise ``RequestLimitError`` for more bytes than one Arrow array can have."""
    if nbytes > MAX_BYTES:
        raise RequestLimitError(
            f"The answer has {nbytes:,} bytes, more than the {MAX_BYTES:,} that one can have: ask for fewer keys."
        )


def joined_arrays(parts: Sequence[pa.BinaryArray]) -> pa.BinaryArray:
    """Return keys or values one after the other. Raises ``RequestLimitError`` if they have too many bytes."""
    try:
        return concatenated(parts)
    except pa.ArrowInvalid:
        require_bytes(sum(map(content_bytes, parts)))
        raise


def require_retained(plan: OperatorPlan, rows: VariableRows, view: PartitionView) -> None:
    """Raise ``StateTimeError`` if rolling aggregates as of the moment of ``rows`` need rows that the partition lost."""
    if rows.rolling is None:
        return
    at = (view.partition, view.version, view.head)
    first = plan.first_moments.get(at)
    if first is None:
        has_lost = layouts.LOST_FAMILY in view.reads.column_families(view.version, head=view.head)
        pairs = view.reads.scan(view.version, None, None, layouts.LOST_FAMILY, head=view.head) if has_lost else ()
        first = plan.first_moments[at] = rows.first_moment(batch.column(1) for batch in pairs)
    rows.require_retained(first)


def find_pairs(view: PartitionView, rows: VariableRows, keys: pa.BinaryArray, positions: Positions) -> FoundPairs:
    """Return the pairs that a partition has of grouping keys, whose positions ascend."""
    values = _sorted_values(view, keys, _family(rows))
    is_there = pc.is_valid(values)
    keys, values = keys.filter(is_there), values.filter(is_there)
    positions = positions[np.asarray(is_there)]
    if rows.kind == layouts.ROLLING:
        return FoundPairs(positions, keys, values, {}, _sorted_values(view, keys, layouts.TILES_FAMILY))
    more = _more(view, rows, keys, values, positions)
    return FoundPairs(positions, keys, values, more, pa.nulls(len(keys), pa.binary()))


def rolled_value(rows: VariableRows, recent: bytes | None, tiles: bytes | None) -> bytes | None:
    """Return the results of one key with horizons as a stored value; None if the key is absent."""
    if recent is None:
        return None
    if rows.singles is not None and isinstance(rows.moment, int):
        value = rows.singles.value(recent, tiles, rows.moment)
        if value is not None:
            return value
    columns = rows.rolled(pa.array([recent], pa.binary()), pa.array([tiles], pa.binary()))
    encoded: bytes = encode_values(pa.RecordBatch.from_arrays(columns, schema=rows.value))[0].as_py()
    return encoded


def one_value(view: PartitionView, key: bytes, family: str) -> bytes | None:
    """Return the value of one stored key; None if there is none, or if the family was never written."""
    try:
        return view.reads.get_one(key, view.version, family, head=view.head)
    except InvalidStateStoreArgument:
        if family == DEFAULT_FAMILY:
            raise
        return None


def rolled_values(rows: VariableRows, values: pa.BinaryArray, tiles: pa.BinaryArray) -> pa.BinaryArray:
    """Return a stored value, null if absent, for each key with horizons, by their values in both families."""
    if len(values) <= SINGLE_KEYS:
        singles = [rolled_value(rows, *both) for both in zip(values.to_pylist(), tiles.to_pylist(), strict=True)]
        return pa.array(singles, pa.binary())
    is_there = values.is_valid()
    columns = rows.rolled(values.drop_null(), tiles.filter(is_there) if values.null_count else tiles)
    encoded = encode_values(pa.RecordBatch.from_arrays(columns, schema=rows.value))
    if not values.null_count:
        return encoded
    places = np.where(is_there, np.cumsum(is_there) - 1, -1)
    return encoded.take(pa.array(places, mask=places < 0))


def _family(rows: VariableRows) -> str:
    return layouts.family_of(rows.variable, layouts.TIMERS_BY_KEY)[0] if rows.kind == TIMERS else rows.main


def _sorted_values(view: PartitionView, keys: pa.BinaryArray, family: str) -> pa.BinaryArray:
    order = np.asarray(key_order(keys))
    back = np.empty(len(order), np.int64)
    back[order] = np.arange(len(order))
    return values_of(view, keys.take(pa.array(order)), family).take(pa.array(back))


def _more(
    view: PartitionView, rows: VariableRows, keys: pa.BinaryArray, values: pa.BinaryArray, positions: Positions
) -> dict[int, Iterator[pa.RecordBatch]]:
    if rows.second is None or not len(keys):
        return {}
    stored = rows.variable.families[rows.main].decode_values(values)
    if rows.kind == layouts.LIST:
        is_long = np.asarray(stored.column(layouts.NUM_CHUNKS).fill_null(0)) > 0
    else:
        is_long = np.asarray(stored.column(layouts.IS_LARGE).fill_null(False))
    asked = np.flatnonzero(is_long).tolist()
    if not asked or rows.second not in view.reads.column_families(view.version, head=view.head):
        return {}
    # An iterator for each position: a key that is asked for twice is read twice.
    return {
        int(positions[i]): view.reads.scan(
            view.version, *prefix_range(keys[i].as_py()), column_family=rows.second, head=view.head
        )
        for i in asked
    }


def rows_of_keys(
    plan: OperatorPlan, rows: VariableRows, groups: Sequence[FoundPairs], *, by_window: bool
) -> Iterator[pa.RecordBatch]:
    """Yield rows in the columns of ``VariableRows.output`` and the position of each row's key, ascending.

    Within a key as in a scan. ``by_window``: the rows of one key are in several partitions, and come in the order of
    their windows.
    """
    found = FoundPairs.joined(groups)
    if by_window:
        # Without their key groups, the stored keys of one grouping key are in the order of their windows.
        order = np.lexsort((_ranks(without_prefix(found.keys)), found.positions))
    else:
        order = np.argsort(found.positions, kind="stable")
    positions, places = found.positions[order], pa.array(order)
    keys, values, tiles = (column.take(places) for column in (found.keys, found.values, found.tiles))
    begin = 0
    is_long = np.isin(positions, list(found.more)) if found.more else np.zeros(len(positions), np.bool_)
    while begin < len(positions):
        if is_long[begin]:
            yield from _rows_of_long(plan, rows, found.more[int(positions[begin])], int(positions[begin]))
            end = begin + 1
        else:
            long = np.flatnonzero(is_long[begin:])
            end = min(begin + DECODED_ROWS, begin + int(long[0]) if len(long) else len(positions))
        part = slice(begin, end)
        yield _decoded(plan, rows, rows.main, keys[part], values[part], positions[part], tiles[part])
        begin = end


def _ranks(keys: pa.BinaryArray) -> npt.NDArray[np.int64]:
    ranks = np.empty(len(keys), np.int64)
    ranks[np.asarray(key_order(keys))] = np.arange(len(keys))
    return ranks


def _rows_of_long(
    plan: OperatorPlan, rows: VariableRows, pairs: Iterator[pa.RecordBatch], position: int
) -> Iterator[pa.RecordBatch]:
    """Yield the part of a key's rows that is stored elsewhere; it comes before the part stored with the key."""
    for batch in pairs:
        raise_if_cancelled()
        for at in range(0, batch.num_rows, LONG_ROWS):
            keys, values = batch.column(0)[at : at + LONG_ROWS], batch.column(1)[at : at + LONG_ROWS]
            yield _decoded(plan, rows, rows.second or "", keys, values, np.full(len(keys), position))


def _decoded(
    plan: OperatorPlan,
    rows: VariableRows,
    family: str,
    keys: pa.BinaryArray,
    values: pa.BinaryArray,
    positions: Positions,
    tiles: pa.BinaryArray | None = None,
) -> pa.RecordBatch:
    if rows.kind == layouts.ROLLING:
        decoded = rows.decode_rolling(keys, values, tiles)
    else:
        decoded = _timers(rows, keys, values) if rows.kind == TIMERS else rows.decode(family, keys, values)
    groups = key_groups_of(keys)[decoded.pair]
    n = len(rows.key)
    columns = [
        *(decoded.columns[i] for i in rows.key_order),
        *decoded.columns[n:],
        pa.array(groups, pa.int32()),
        pa.array(plan.partitions_of(groups.astype(np.int64)), pa.int32()),
        pa.array(positions[decoded.pair], pa.int64()),
    ]
    return pa.RecordBatch.from_arrays(columns, names=[*rows.output.names, POSITION])


def _timers(rows: VariableRows, keys: pa.BinaryArray, values: pa.BinaryArray) -> DecodedRows:
    schema = layouts.family_of(rows.variable, layouts.TIMERS_BY_KEY)[1]
    expiries, offsets = list_parts(schema.decode_values(values).column(layouts.EXPIRIES))
    pair = np.repeat(np.arange(len(keys)), np.diff(offsets))
    columns = [column.take(pa.array(pair)) for column in decode_keys(keys, rows.key).columns]
    return DecodedRows(pair, [*columns, expiries])


# The windows that the keys of a windowed aggregate have in a partition: all of them, and perhaps some that no longer
# exist.
#
# The windows of one grouping key may be in any partition, because their key groups differ. With the windows known,
# the rows of a grouping key are single lookups. A partition is scanned for its windows when they are first asked for;
# from then on every commit reports the windows that it has added.


KNOWN_HEADS = 16
"""The most versions that are remembered as having only known windows."""
_MIN_RESCAN = 64


class KeyWindowIndex:
    """The windows in the keys of one loaded partition, as bytes of the encoded column.

    Thread-safe; the lock guards all of it. ``key`` are the columns of the stored key, ``place`` is the position of the
    window among them.
    """

    def __init__(self, key: pa.Schema, place: int) -> None:
        self._key = key
        self._place = place
        self._lock = threading.Lock()
        self._windows: frozenset[bytes] = frozenset()
        self._heads: BoundedDict[str | None, None] = BoundedDict(KNOWN_HEADS)
        self._heads[None] = None  # the empty version 0 has no windows
        self._scanned = 0

    @classmethod
    def of(cls, instance: Instance | None, key: pa.Schema, place: int) -> KeyWindowIndex:
        """Return the index of a loaded partition, or a new one for a mere copy (``instance`` None)."""
        if instance is None:
            return cls(key, place)
        windows = instance.key_windows
        if not isinstance(windows, KeyWindowIndex):
            windows = instance.key_windows = cls(key, place)
        return windows

    def follow_changes(self, base: str | None, head: str, changes: Changes) -> None:
        """Add the windows of the version of ``head``, which has ``changes`` over the one of the head ``base``."""
        if base not in self._heads:
            return
        pairs = changes.families.get(DEFAULT_FAMILY)
        changed = self._windows_of(iter(() if pairs is None else (pairs.keys,)))
        with self._lock:
            if base in self._heads:
                self._windows |= changed
                self._heads[head] = None

    def windows(self, view: PartitionView) -> frozenset[bytes]:
        """Return at least the windows that there are in a version."""
        with self._lock:  # another thread may be replacing the windows by those of another version
            is_known = view.head in self._heads and (view.head is not None or view.version == 0)
            if is_known and len(self._windows) <= 2 * self._scanned + _MIN_RESCAN:
                return self._windows
        scanned = view.reads.scan(view.version, head=view.head)
        windows = self._windows_of(batch.column(0) for batch in scanned)
        with self._lock:
            if is_known:
                # Most windows that commits have added no longer exist. Other versions are scanned again.
                self._windows, self._heads = windows, BoundedDict(KNOWN_HEADS)
            else:
                self._windows |= windows
            self._scanned = len(windows)
            if view.head is not None:
                self._heads[view.head] = None
        return windows

    def _windows_of(self, keys: Iterator[pa.BinaryArray]) -> frozenset[bytes]:
        windows: set[bytes] = set()
        for part in keys:
            if len(part):
                windows.update(pc.unique(self._window_bytes(part)).to_pylist())
        return frozenset(windows)

    def _window_bytes(self, keys: pa.BinaryArray) -> pa.BinaryArray:
        before = [_width(field.type) for field in list(self._key)[: self._place]]
        width = _width(self._key.field(self._place).type)
        if width is not None and None not in before:
            start = KEY_GROUP_BYTES + sum(w for w in before if w is not None)
            content, offsets = binary_content(keys)
            at = offsets[:-1, None] + np.arange(start, start + width)
            return pa.Array.from_buffers(pa.binary(width), len(keys), [None, pa.py_buffer(content[at].tobytes())])
        windows = decode_keys(keys, self._key).select([self._place])
        return without_prefix(encode_keys(windows, np.zeros(len(keys), np.uint16)))

    def decoded(self, windows: frozenset[bytes]) -> pa.Array:
        """Return windows as a column, ascending."""
        keys = pa.array([bytes(KEY_GROUP_BYTES) + window for window in sorted(windows)], pa.binary())
        return decode_keys(keys, pa.schema([self._key.field(self._place)])).column(0)


def _width(kind: pa.DataType) -> int | None:
    """Return the bytes that a column of a type takes in every key; None if keys differ in that."""
    if pa.types.is_struct(kind):
        parts = [_width(kind.field(i).type) for i in range(kind.num_fields)]
        return None if None in parts else 1 + sum(p for p in parts if p is not None)
    dtype = fixed_dtype(kind)
    return None if dtype is None else 1 + dtype.itemsize


# The rows of grouping keys of an aggregate by windows, whose windows may be in any partition.


CANDIDATES = 1 << 16
"""Keys with windows that are looked up at once."""
_Candidates: TypeAlias = tuple[pa.BinaryArray, Positions, Positions]
"""Stored keys that may be there, their partitions, and the positions of their grouping keys."""


@dataclass(frozen=True)
class WindowedKeys:
    """Grouping keys of an aggregate by windows, as columns without the window, which has ``place`` in stored keys."""

    rows: VariableRows
    place: int
    columns: pa.RecordBatch
    _made: dict[frozenset[bytes], _Candidates] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: VariableRows, place: int, keys: pa.BinaryArray) -> WindowedKeys:
        """Return the grouping keys of stored keys. Raises ``RequestError`` if these are other bytes."""
        schema = rows.key.remove(place)
        try:
            return cls(rows, place, decode_keys(keys, schema))
        except SchemaMismatchError as error:
            raise RequestError(
                f"The keys of a windowed aggregate are given without the window {rows.key.field(place).name!r}, as "
                f"({', '.join(f'{f.name}: {f.type}' for f in schema)}): {error}"
            ) from error

    def find(self, plan: OperatorPlan, view: PartitionView) -> FoundPairs:
        """Return the pairs that a partition has of the keys, in the order of the keys and then of the windows."""
        index = KeyWindowIndex.of(view.instance, self.rows.key, self.place)
        pairs: list[FoundPairs] = []
        for keys, partitions, positions in self._candidates(plan, index, index.windows(view)):
            raise_if_cancelled()
            own = partitions == view.partition
            pairs.append(find_pairs(view, self.rows, keys.filter(pa.array(own)), positions[own]))
        return FoundPairs.joined(pairs)

    def _candidates(
        self, plan: OperatorPlan, index: KeyWindowIndex, windows: frozenset[bytes]
    ) -> Iterator[_Candidates]:
        """Yield keys with all windows, ``CANDIDATES`` at a time; kept, as partitions usually have the same windows."""
        candidates = self._made.get(windows)
        if candidates is not None:
            yield candidates
            return
        decoded = index.decoded(windows)
        step = max(1, CANDIDATES // max(1, len(decoded)))
        for at in range(0, self.columns.num_rows if len(decoded) else 0, step):
            some = self._with_windows(plan, self.columns.slice(at, step), decoded, at)
            if step >= self.columns.num_rows:
                self._made[windows] = some
            yield some

    def _with_windows(self, plan: OperatorPlan, columns: pa.RecordBatch, windows: pa.Array, first: int) -> _Candidates:
        of_key = np.repeat(np.arange(columns.num_rows), len(windows))
        of_window = np.tile(np.arange(len(windows)), columns.num_rows)
        arrays = [column.take(pa.array(of_key)) for column in columns.columns]
        arrays.insert(self.place, windows.take(pa.array(of_window)))
        batch = pa.RecordBatch.from_arrays(arrays, schema=self.rows.key)
        groups = key_groups(batch, plan.registration.key_groups)
        return encode_keys(batch, groups), plan.partitions_of(groups.astype(np.int64)), of_key + first
