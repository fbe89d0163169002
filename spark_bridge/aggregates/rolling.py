"""Rolling aggregates: the last 10 minutes, hour or day of a key as of any moment, from partial aggregates in tiles.

The rows of a key are kept as *pieces*: the event time of the first and of the last row, and the state of the aggregate
functions. The newest rows are pieces of their own. Older ones share a piece per *tile*. A tile of ``hop`` microseconds
covers the times after one multiple of ``hop``, up to and including the next one. A horizon of h as of a moment covers
the pieces after the last multiple of its hop at or before ``moment - h``, up to and including the moment. Chronon calls
this a sawtooth window. Each horizon has its own hop, and older pieces are merged into the tiles of longer horizons.
All hops divide the longer ones, so that tiles nest.

Hosts and clients import this module: no Spark, no state store.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from backends.conf import DAY, HOUR, MINUTE, SECOND, parse_duration
from backends.encoding.columns import Integers, list_array, list_parts, struct_array
from spark_bridge.aggregates.aggregator import merge_states, result_fields, results
from spark_bridge.aggregates.computation import outputs_of, split_function
from spark_bridge.exceptions import InvalidOperatorError, StateTimeError

HOPS = (
    *(1, 10, 100, 1_000, 10_000, 100_000),
    *(SECOND, 5 * SECOND, 10 * SECOND, 30 * SECOND, MINUTE, 5 * MINUTE, 10 * MINUTE, 30 * MINUTE),
    *(HOUR, 2 * HOUR, 6 * HOUR, DAY),
)
"""The lengths of tiles in microseconds; each divides the next one."""
TILES_PER_HORIZON = 10
"""A horizon has at least this many tiles, so that it covers at most a tenth more than asked for."""
MAX_HORIZON = 3660 * DAY
NO_MOMENT = -(1 << 63)
"""Before all moments."""
MAX_HORIZONS = 16
"""The most horizons of one operator: an answer merges all of them."""

# -- what an operator declares -----------------------------------------------------------------


@dataclass(frozen=True)
class Horizon:
    """The last ``us`` microseconds. ``name`` ends the names of its columns; ``hop`` is the length of its tiles, or 0.

    ``since`` is the event time in microseconds from which the state of a horizon is complete that a restart has made
    longer; 0 for all others.
    """

    name: str
    us: int
    hop: int
    since: int = 0

    def start(self, moment: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the time after which rows count, as of each moment."""
        start: npt.NDArray[np.int64] = moment - self.us
        return start // self.hop * self.hop if self.hop else start


def horizon_of(text: str, *, exact: bool = False) -> Horizon:
    """Return the horizon of a duration such as "10 minutes"; raises ``InvalidOperatorError``. Not in months or years.

    ``exact``: the horizon has no tiles.
    """
    duration = parse_duration(text)
    if duration is None or duration.us.denominator != 1 or "." in duration.name or duration.us > MAX_HORIZON:
        raise InvalidOperatorError(
            f"{text!r} is not a horizon; give a duration of 1 microsecond to 3660 days in whole numbers, such as "
            "'10 minutes', '1 hour 30 minutes' or '7 days'."
        )
    us = int(duration.us)
    hop = max((h for h in HOPS if h * TILES_PER_HORIZON <= us), default=1)
    return Horizon(duration.name, us, 0 if exact else hop)


@dataclass(frozen=True)
class Rolling:
    """The horizons of each output of an operator, in the order of the outputs."""

    outputs: tuple[tuple[str, tuple[Horizon, ...]], ...]

    @cached_property
    def horizons(self) -> tuple[Horizon, ...]:
        """Return the horizons of all outputs, the shortest first; of equal ones that which is complete the longest."""
        newest_first = sorted((h for _, horizons in self.outputs for h in horizons), key=lambda h: -h.since)
        by_length = {(h.us, h.hop): h for h in newest_first}
        return tuple(by_length[key] for key in sorted(by_length))

    @property
    def longest(self) -> Horizon:
        return self.horizons[-1]

    def floored(self, moment: Integers) -> Integers:
        """Return the last multiples of the shortest hop up to moments: a watermark is answered as of that time."""
        hop = self.horizons[0].hop
        floored: Integers = moment // hop * hop if hop else moment
        return floored

    def at_watermark(self, watermark_ms: int) -> int:
        """Return the moment in microseconds of an answer as of a watermark."""
        return int(self.floored(np.array([watermark_ms * 1000]))[0])

    def expired(self, watermark: int) -> int:
        """Return the time in microseconds up to which rows are late: no horizon as of the watermark or later has
        them.
        """
        return int(self.longest.start(self.floored(np.array([watermark])))[0])

    def first_moment(self, lost: int) -> int:
        """Return the first moment whose horizons all begin at ``lost`` or later, the newest time of rows that are gone.

        A horizon that a restart has made longer is left out if rows are gone from before the time since when it is
        complete.
        """
        if lost == NO_MOMENT:
            return NO_MOMENT
        counted = [h for h in self.horizons if not h.since or h.since < lost]
        return max((-(-lost // max(h.hop, 1)) * max(h.hop, 1) + h.us for h in counted), default=NO_MOMENT)

    def due(self, newest: Integers) -> Integers:
        """Return the first watermark in microseconds by which keys with newest rows of these times are expired."""
        hop, longest = self.horizons[0].hop, self.longest
        if not longest.hop:
            return newest + longest.us
        due: Integers = -(-(-(-newest // longest.hop) * longest.hop + longest.us) // hop) * hop
        return due

    def to_text(self) -> str:
        return json.dumps([[o, [[h.name, h.us, h.hop, h.since] for h in hs]] for o, hs in self.outputs])

    @staticmethod
    @lru_cache(256)
    def of_text(text: str) -> Rolling:
        return Rolling(tuple((output, tuple(Horizon(*h) for h in horizons)) for output, horizons in json.loads(text)))

    def fields(self, states: pa.Schema) -> list[pa.Field]:
        """Return the result columns, named ``<output>_<horizon>``, of an operator with these state columns."""
        kinds = {field.name: field.type for field in result_fields(states)}
        return [pa.field(f"{output}_{h.name}", kinds[output]) for output, hs in self.outputs for h in hs]

    # -- pieces and tiles ----------------------------------------------------------------------

    def tile_ends(self, times: Integers, reference: Integers | None) -> Integers:
        """Return the end of the tile of each time; without tiles the time itself.

        As of ``reference``, a time of each row, and later, the rows that a horizon may still lose are in tiles of its
        hop, or of a shorter one. None: all are in the shortest tiles.
        """
        if not self.longest.hop:
            return times
        size: Integers | int = self.horizons[0].hop
        if reference is not None:
            size = np.full(len(times), self.longest.hop)
            for shorter, longer in reversed(list(pairwise(self.horizons))):
                size[times > (reference - shorter.us) // longer.hop * longer.hop] = shorter.hop
        ends: Integers = -(-times // size) * size
        return ends

    def tiles_of_rows(self, ids: Integers, times: Integers) -> tuple[Integers, int]:
        """Return the number of the piece that each row becomes part of, and how many pieces there are.

        Rows of a key in one of the shortest tiles make a piece. Unlike those of ``groups``, ``times`` need no order,
        and no row stays apart. Pieces are in the order of keys and times.
        """
        ends = self.tile_ends(times, None)
        distinct, places = np.unique(ends, return_inverse=True)
        codes = ids * len(distinct) + places
        num = (int(ids.max()) + 1) * len(distinct)
        if num > 4 * len(ids) + (1 << 16):
            present, groups = np.unique(codes, return_inverse=True)
            return groups, len(present)
        is_there = np.zeros(num, np.bool_)
        is_there[codes] = True
        number = np.cumsum(is_there) - 1
        return number[codes], int(number[-1]) + 1

    def groups(
        self, ids: Integers, times: Integers, kept: Integers | int, reference: Integers | None = None
    ) -> Integers:
        """Return the number of the piece that each row or piece becomes part of, ascending from 0.

        ``ids`` are the numbers of their keys, and ``times`` those of the last row of each; both ascend. The newest
        ``kept`` times of each key stay apart (of key i, ``kept[i]`` if it is an array), as do all without tiles.
        ``reference`` is that of ``tile_ends``, for each key.
        """
        if not len(ids):
            return np.zeros(0, np.int64)
        same_key = ids[1:] == ids[:-1]
        same_time = same_key & (times[1:] == times[:-1])
        ends = self.tile_ends(times, None if reference is None else reference[ids])
        joins = same_key & (ends[1:] == ends[:-1])
        if not isinstance(kept, int) or kept:
            number = np.concatenate([[0], np.cumsum(~same_time)])
            newest = number[np.append(np.flatnonzero(~same_key), len(ids) - 1)]
            age = newest[np.concatenate([[0], np.cumsum(~same_key)])] - number
            is_apart = age < (kept if isinstance(kept, int) else kept[ids])
            joins = same_time | (joins & ~is_apart[1:] & ~is_apart[:-1])
        groups: Integers = np.concatenate([[0], np.cumsum(~joins)])
        return groups


def declared_rolling(outputs: Mapping[str, Iterable[str]], *, exact: bool) -> Rolling:
    """Return the horizons of each output by name; raises ``InvalidOperatorError`` for wrong or too many horizons."""
    rolling = Rolling(
        tuple((o, tuple(horizon_of(text, exact=exact) for text in texts)) for o, texts in outputs.items())
    )
    for output, horizons in rolling.outputs:
        if len({h.us for h in horizons}) != len(horizons):
            raise InvalidOperatorError(f"{output}: a horizon is named twice in {', '.join(h.name for h in horizons)}.")
    if len(rolling.horizons) > MAX_HORIZONS:
        raise InvalidOperatorError(
            f"The outputs have {len(rolling.horizons)} different horizons; one operator can have {MAX_HORIZONS}: put "
            "the others into another operator."
        )
    return rolling


def time_order(ids: Integers, times: Integers) -> npt.NDArray[np.intp]:
    """Return the order of rows by key and time, of equal ones as they come."""
    if not len(ids):
        return np.zeros(0, np.intp)
    first = int(times.min())
    span = int(times.max()) - first + 1
    if (int(ids.max()) + 1) * span < 1 << 63:
        # A stable sort merges runs that are sorted, as are the parts that pieces come from.
        return np.argsort(ids * span + (times - first), kind="stable")
    return np.lexsort((times, ids))


FIRST_TIME, LAST_TIME = "first", "last"


@dataclass(frozen=True)
class Pieces:
    """Pieces of keys: ``ids`` are the numbers of their keys, and ``first`` and ``last`` the times of their rows."""

    ids: Integers
    first: Integers
    last: Integers
    states: pa.RecordBatch

    @classmethod
    def of_rows(cls, ids: Integers, rows: pa.RecordBatch) -> Pieces:
        """Return pieces of rows in the columns of ``columns``."""
        states = pa.RecordBatch.from_arrays(rows.columns[2:], names=rows.schema.names[2:])
        first, last = (np.asarray(column.cast(pa.int64())) for column in rows.columns[:2])
        return cls(ids, first, last, states)

    @classmethod
    def of_lists(cls, lists: pa.Array) -> Pieces:
        """Return the pieces that stored lists have; the id of a piece is the place of its list. A null has none."""
        elements, offsets = list_parts(lists)
        ids = np.repeat(np.arange(len(lists), dtype=np.int64), np.diff(offsets))
        names = [elements.type.field(i).name for i in range(elements.type.num_fields)]
        return cls.of_rows(ids, pa.RecordBatch.from_arrays(elements.flatten(), names=names))

    @classmethod
    def concatenated(cls, first: Pieces, second: Pieces, *, by_time: bool = True) -> Pieces:
        """Return the pieces of both: in the order of keys and times, or with ``by_time`` False as they are."""
        columns = [pa.concat_arrays(c) for c in zip(first.states.columns, second.states.columns, strict=True)]
        both = cls(
            np.concatenate([first.ids, second.ids]),
            np.concatenate([first.first, second.first]),
            np.concatenate([first.last, second.last]),
            pa.RecordBatch.from_arrays(columns, names=first.states.schema.names),
        )
        return both.take(time_order(both.ids, both.last)) if by_time else both

    def take(self, places: npt.NDArray[Any]) -> Pieces:
        """Return the pieces at these places, or those that a mask marks."""
        rows = pa.array(places)
        states = self.states.filter(rows) if places.dtype == np.bool_ else self.states.take(rows)
        return Pieces(self.ids[places], self.first[places], self.last[places], states)

    def columns(self, time: pa.DataType) -> pa.RecordBatch:
        """Return the pieces as rows: their first and last time, of type ``time``, and their states."""
        times = [pa.array(t, pa.int64()).cast(time) for t in (self.first, self.last)]
        names = [FIRST_TIME, LAST_TIME, *self.states.schema.names]
        return pa.RecordBatch.from_arrays([*times, *self.states.columns], names=names)

    def lists(self, num_keys: int, kind: pa.DataType) -> pa.Array:
        """Return the list of each key's pieces, as it is stored; ``kind`` is the type of the lists."""
        element = kind.value_type
        rows = self.columns(element.field(0).type)
        offsets = np.concatenate([[0], np.cumsum(np.bincount(self.ids, minlength=num_keys))])
        return list_array(struct_array(rows.columns, len(self.ids), None, element), offsets, None, kind)


def piece_fields(time: pa.DataType, states: pa.Schema) -> list[pa.Field]:
    """Return the columns of a piece."""
    return [pa.field(FIRST_TIME, time), pa.field(LAST_TIME, time), *states]


# -- answers -----------------------------------------------------------------------------------


def states_as_of(rolling: Rolling, pieces: Pieces, moments: Integers) -> pa.RecordBatch:
    """Return the state of each horizon of each key as of the key's moment: the first horizon of all keys, the next ...

    Raises ``StateTimeError`` if rows on both sides of a moment, or of the start of a horizon, are in one piece. The
    latter is possible after a restart with shorter tiles only.
    """
    num_keys = len(moments)
    moment = moments[pieces.ids]
    is_split = (pieces.first <= moment) & (pieces.last > moment)
    if is_split.any():
        at = int(np.flatnonzero(is_split)[0])
        raise StateTimeError.in_tile(int(moment[at]), int(pieces.first[at]), int(pieces.last[at]))
    is_past = pieces.last <= moment
    places, groups = [], []
    for i, horizon in enumerate(rolling.horizons):
        start = horizon.start(moment)
        is_after = is_past & (pieces.last > start)
        straddling = np.flatnonzero(is_after & (pieces.first <= start))
        if len(straddling):
            raise StateTimeError.at_start(horizon.name, int(pieces.last[straddling].max()), horizon.us + horizon.hop)
        chosen = np.flatnonzero(is_after)
        places.append(chosen)
        groups.append(pieces.ids[chosen] + i * num_keys)
    states = pieces.states.take(pa.array(np.concatenate(places)))
    return merge_states(states, np.concatenate(groups), num_keys * len(rolling.horizons))


def results_of(
    rolling: Rolling, states: pa.RecordBatch, num_keys: int, unknown: npt.NDArray[np.bool_] | None = None
) -> list[pa.Array]:
    """Return the columns of ``Rolling.fields`` of the rows of ``states_as_of``. A sum of no rows is 0.

    ``unknown`` has a row for each key, and a column for each horizon: the results that it marks are null.
    """
    columns = dict(zip((name for name, _, _ in outputs_of(states.schema)), results(states), strict=True))
    functions = {name: split_function(function)[0] for name, function, _ in outputs_of(states.schema)}
    places = {(h.us, h.hop): i for i, h in enumerate(rolling.horizons)}
    answers = []
    for output, horizons in rolling.outputs:
        column = columns[output]
        if functions[output] == "sum" and column.null_count:
            column = pc.fill_null(column, pa.scalar(0, column.type))  # a cast to a decimal needs room for any long
        for horizon in horizons:
            place = places[horizon.us, horizon.hop]
            answer = column.slice(place * num_keys, num_keys)
            if unknown is not None and unknown[:, place].any():
                answer = answer.take(pa.array(np.arange(num_keys), mask=unknown[:, place]))
            answers.append(answer)
    return answers


Moment: TypeAlias = int | Integers | None
"""The time of answers in microseconds since 1970, or that of each key. None is the time of each key's newest row."""


def answers_as_of(
    rolling: Rolling, recent: Pieces, tiles: Pieces, merged_at: Integers, moment: Moment
) -> list[pa.Array]:
    """Return the columns of ``Rolling.fields`` of keys, by their newest pieces and those in tiles.

    ``merged_at`` is the watermark when the tiles of each key were merged, a very low one without tiles. Raises
    ``StateTimeError`` if the state can no longer answer as of the moment.
    """
    num_keys = len(merged_at)
    pieces = Pieces.concatenated(tiles, recent, by_time=False)
    if moment is None:
        moments = np.full(num_keys, np.iinfo(np.int64).min)
        np.maximum.at(moments, recent.ids, recent.last)
    else:
        moments = np.full(num_keys, moment) if isinstance(moment, int) else moment
        is_old = moments < merged_at
        if is_old.any():
            at = int(np.flatnonzero(is_old)[0])
            raise StateTimeError.too_old(int(moments[at]), int(merged_at[at]))
    return results_of(rolling, states_as_of(rolling, pieces, moments), num_keys)
