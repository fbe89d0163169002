"""Answers of rolling aggregates for single keys, from stored bytes: some tens of microseconds, not a millisecond.

The results are those of ``rolling.answers_as_of``, bit by bit: states are merged in the same order, by the same
arithmetic. Functions and values that are not plain numbers are left to the columns.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from operator import add
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from backends.encoding.columns import Integers, binary_content, fixed_array, gather_fixed, gather_ranges
from spark_bridge.aggregates.computation import outputs_of, split_function
from spark_bridge.aggregates.rolling import Pieces, Rolling
from spark_bridge.exceptions import StateTimeError

_Piece: TypeAlias = tuple[Any, ...]
"""Null bits, first and last time, and the state columns of a piece."""
_Result: TypeAlias = Callable[[list[_Piece]], Any]
_CODES = {pa.int8(): "b", pa.int16(): "h", pa.int32(): "i", pa.int64(): "q", pa.float64(): "d"}
_CODES |= {pa.timestamp("us"): "q", pa.timestamp("us", "UTC"): "q"}
_DTYPES = {"b": "i1", "h": "i2", "i": "i4", "q": "i8", "d": "f8"}
_MAX_INT = (1 << 63) - 1
_FIRST_STATE = 3


class _Unsure(Exception):
    """The answer is left to the columns."""


class SingleAnswers:
    """Computes the stored value that clients look up (``layouts.ROLLED_FAMILY``) for one key. Make one with ``of``."""

    def __init__(self, rolling: Rolling, states: pa.Schema, numbers: tuple[int, int], results: pa.Schema) -> None:
        self._horizons = rolling.horizons
        self._numbers = numbers
        num_parts = 3 + len(states)  # a bit for the piece itself, too
        self._null_bytes = (num_parts + 7) // 8
        self._no_nulls = bytes(self._null_bytes)
        self._piece = struct.Struct(f"<{self._null_bytes}sqq{''.join(_CODES[f.type] for f in states)}")
        fields = [("nulls", f"V{self._null_bytes}"), ("first", "<i8"), ("last", "<i8")]
        self._piece_dtype = np.dtype([*fields, *((f.name, f"<{_DTYPES[_CODES[f.type]]}") for f in states)])
        self._states = states
        # Schema number, null bits, a time, and the ends of the columns of other widths.
        self._recent_head = struct.Struct("<HBqII")
        self._tiles_head = struct.Struct("<HBqI")
        head = [("number", "<u2"), ("nulls", "u1"), ("time", "<i8"), ("end", "<u4")]
        self._recent_dtype, self._tiles_dtype = np.dtype([*head, ("end_of_older", "<u4")]), np.dtype(head)
        places = {(h.us, h.hop): i for i, h in enumerate(rolling.horizons)}
        by_output = {name: _result_of(function, parts, states) for name, function, parts in outputs_of(states)}
        self._results = [(places[h.us, h.hop], by_output[output]) for output, hs in rolling.outputs for h in hs]
        self._answer_nulls = (len(results) + 7) // 8
        self._answer = struct.Struct(f"<H{self._answer_nulls}s{''.join(_CODES[f.type] for f in results)}")

    @classmethod
    def of(
        cls, rolling: Rolling, states: pa.Schema, numbers: tuple[int, int], results: pa.Schema
    ) -> SingleAnswers | None:
        """Return the answers for state columns; None if these, or results, are not all plain numbers.

        ``numbers`` are those of the schemas of newest pieces and of tiles, as stored values have them.
        """
        if any(field.type not in _CODES for field in (*states, *results)):
            return None
        if any(pa.types.is_timestamp(field.type) for field in results):
            return None  # as an integer, a time would have another null value
        try:
            return cls(rolling, states, numbers, results)
        except _Unsure:
            return None

    def value(self, recent: bytes, tiles: bytes | None, moment: int) -> bytes | None:
        """Return the stored value of the results as of ``moment`` (microseconds since 1970).

        None leaves the key to the columns. Raises ``StateTimeError``.
        """
        try:
            pieces = self._pieces(recent, tiles, moment)
            chosen = []
            for horizon in self._horizons:
                start = moment - horizon.us
                start = start // horizon.hop * horizon.hop if horizon.hop else start
                last = max((piece[2] for piece in pieces if piece[1] <= start < piece[2]), default=None)
                if last is not None:
                    raise StateTimeError.at_start(horizon.name, last, horizon.us + horizon.hop)
                chosen.append([piece for piece in pieces if start < piece[2] <= moment])
            answers = [result(chosen[place]) for place, result in self._results]
        except _Unsure:
            return None
        nulls = sum(1 << i for i, answer in enumerate(answers) if answer is None)
        plain = [0 if answer is None else answer for answer in answers] if nulls else answers
        return self._answer.pack(0, nulls.to_bytes(self._answer_nulls, "little"), *plain)

    def pieces(self, recent: pa.BinaryArray, tiles: pa.BinaryArray) -> tuple[Pieces, Pieces, Integers] | None:
        """Return the newest pieces of keys, those in tiles, and when these were merged (the least integer: no tiles).

        None leaves the keys to ``StateSchema.decode_values``. Tiles may be null, newest pieces not.
        """
        newest = self._of_values(recent, self._numbers[0], self._recent_dtype)
        older = self.tiles(tiles)
        return None if newest is None or older is None else (newest[0], *older)

    def tiles(self, values: pa.BinaryArray) -> tuple[Pieces, Integers] | None:
        """Return the pieces in the tiles of keys, and when these were merged, as ``pieces`` does."""
        older = self._of_values(values.drop_null(), self._numbers[1], self._tiles_dtype)
        if older is None:
            return None
        merged_at = np.full(len(values), np.iinfo(np.int64).min)
        has_tiles = np.flatnonzero(values.is_valid())
        merged_at[has_tiles] = older[1]
        return replace(older[0], ids=has_tiles[older[0].ids]), merged_at

    def _of_values(self, values: pa.BinaryArray, number: int, dtype: np.dtype[Any]) -> tuple[Pieces, Integers] | None:
        """Return the pieces of the first list of each stored value, and the time in the value's head."""
        content, offsets = binary_content(values)
        if (np.diff(offsets) < dtype.itemsize + 4).any():
            return None
        heads = gather_fixed(content, offsets[:-1], dtype)
        begins = offsets[:-1] + dtype.itemsize
        counts = gather_fixed(content, begins, np.dtype("<u4")).astype(np.int64)
        stops = begins + heads["end"]
        begins = begins + 4 + 4 * counts
        size = self._piece_dtype.itemsize
        is_plain = (heads["number"] == number) & (heads["nulls"] == 0) & (stops - begins == counts * size)
        if not is_plain.all():
            return None
        pieces = np.ascontiguousarray(gather_ranges(content, begins, stops)[0]).view(self._piece_dtype)
        ids = np.repeat(np.arange(len(counts)), counts)
        nulls = np.ascontiguousarray(pieces["nulls"]).view(np.uint8).reshape(-1, self._null_bytes)
        has_nulls = bool(nulls.any())
        states = []
        for i, field in enumerate(self._states):
            bit = _FIRST_STATE + i
            mask = (nulls[:, bit // 8] >> (bit % 8) & 1).astype(np.bool_) if has_nulls else None
            states.append(fixed_array(pieces[field.name], mask, field.type))
        of_states = pa.RecordBatch.from_arrays(states, schema=self._states)
        return Pieces(ids, pieces["first"], pieces["last"], of_states), heads["time"]

    def _pieces(self, recent: bytes, tiles: bytes | None, moment: int) -> list[_Piece]:
        """Return the pieces of a key, those in tiles first."""
        pieces: list[_Piece] = []
        if tiles is not None:
            number, nulls, merged_at, end = self._tiles_head.unpack_from(tiles)
            if number != self._numbers[1] or nulls:
                raise _Unsure
            if moment < merged_at:
                raise StateTimeError.too_old(moment, merged_at)
            begin = self._tiles_head.size
            pieces = self._listed(tiles, begin, begin + end)
        number, nulls, _, end, _ = self._recent_head.unpack_from(recent)
        if number != self._numbers[0] or nulls:
            raise _Unsure
        begin = self._recent_head.size
        pieces += self._listed(recent, begin, begin + end)
        for piece in pieces:
            if piece[1] <= moment < piece[2]:
                raise StateTimeError.in_tile(moment, piece[1], piece[2])
        return pieces

    def _listed(self, value: bytes, begin: int, end: int) -> list[_Piece]:
        """Return the pieces of a stored list: their number, their lengths, and they themselves."""
        count = int.from_bytes(value[begin : begin + 4], "little")
        begin += 4 + 4 * count
        if end - begin != count * self._piece.size:
            raise _Unsure
        pieces = list(self._piece.iter_unpack(value[begin:end]))
        if any(piece[0] != self._no_nulls for piece in pieces):
            return [self._with_nulls(piece) for piece in pieces]
        return pieces

    def _with_nulls(self, piece: _Piece) -> _Piece:
        """Return a piece with None for the state columns that are null."""
        nulls = int.from_bytes(piece[0], "little") >> 1
        return (piece[0], *(None if nulls >> i & 1 else value for i, value in enumerate(piece[1:])))


def _result_of(function: str, parts: Sequence[pa.Field], states: pa.Schema) -> _Result:
    """Return the function that computes a result from pieces. Raises ``_Unsure`` for other functions."""
    name, arguments = split_function(function)
    places = [_FIRST_STATE + states.get_field_index(part.name) for part in parts]
    kinds = [part.type for part in parts]
    first = places[0]
    match name:
        case "count" | "count_if":
            return lambda pieces: sum([piece[first] for piece in pieces])
        case "sum" if kinds[0] == pa.float64():
            return lambda pieces: _float_sum(pieces, first)
        case "sum" if kinds[0] == pa.int64():
            return lambda pieces: _integer_sum(pieces, first)
        case "mean" if not arguments:
            return lambda pieces: _mean(pieces, first, places[1])
        case "min" | "max":
            choose = min if name == "min" else max
            return lambda pieces: _extreme(pieces, first, choose)
        case "first" | "last":
            return lambda pieces: _ordered(pieces, first, places[1], greatest=name == "last")
        case "stddev_samp" | "stddev_pop" | "var_samp" | "var_pop":
            return lambda pieces: _moment(pieces, first, name)
    raise _Unsure


def _float_sum(pieces: list[_Piece], at: int) -> float:
    # As numpy adds them, one after the other: Python's sum is more exact, and so has other last digits.
    total: float = reduce(add, [piece[at] or 0.0 for piece in pieces], 0.0)
    return total


def _integer_sum(pieces: list[_Piece], at: int) -> int:
    total = sum([piece[at] or 0 for piece in pieces])
    if not -_MAX_INT <= total <= _MAX_INT:
        raise _Unsure
    return total


def _mean(pieces: list[_Piece], total_at: int, count_at: int) -> float | None:
    count = sum([piece[count_at] for piece in pieces])
    return _float_sum(pieces, total_at) / count if count else None


def _extreme(pieces: list[_Piece], at: int, choose: Callable[[list[Any]], Any]) -> Any:
    if not (values := [piece[at] for piece in pieces if piece[at] is not None]):
        return None
    extreme = choose(values)
    if type(extreme) is float:
        if any(map(math.isnan, values)):
            raise _Unsure
        return extreme + 0.0  # -0.0 becomes 0.0
    return extreme


def _ordered(pieces: list[_Piece], value_at: int, by_at: int, *, greatest: bool) -> Any:
    ordered = [(piece[by_at], piece[value_at]) for piece in pieces if piece[by_at] is not None]
    if not ordered:
        return None
    bys = [by for by, _ in ordered]
    best = max(bys) if greatest else min(bys)
    values = [value for by, value in ordered if by == best]
    if len(values) > 1 or type(best) is float:
        raise _Unsure
    return values[0]


def _moment(pieces: list[_Piece], at: int, name: str) -> float | None:
    """Return a variance or deviation, by the formula of ``builtin_aggregates.merged_moments``."""
    states = [(float(piece[at]), piece[at + 1], piece[at + 2]) for piece in pieces if piece[at]]
    count = reduce(add, [n for n, _, _ in states], 0.0)
    divisor = count - (1 if name.endswith("samp") else 0)
    if divisor <= 0:
        return None
    base = states[-1][1]
    distances = [mean - base for _, mean, _ in states]
    shift = reduce(add, [n * d for (n, _, _), d in zip(states, distances, strict=True)], 0.0) / count
    spread = 0.0
    for (n, _, squares), distance in zip(states, distances, strict=True):
        off = distance - shift
        spread += squares + n * off * off
    if not math.isfinite(spread):
        raise _Unsure
    variance = spread / divisor
    return math.sqrt(variance) if name.startswith("stddev") else variance
