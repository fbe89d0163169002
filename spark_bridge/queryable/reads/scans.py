"""Scans of one partition: the stored pairs of a state variable, within bounds of the grouping key."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import ROUND_FLOOR, Context, Decimal, InvalidOperation
from functools import reduce
from itertools import chain
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from backends.conf import DEFAULT_FAMILY
from backends.encoding.keys import KEY_GROUP_BYTES, KeyRange
from backends.encoding.operator_schema import TIMERS
from spark_bridge.exceptions import RequestError
from spark_bridge.queryable.protocol import Comparison, raise_if_cancelled
from spark_bridge.queryable.reads.answer_version import PartitionView
from spark_bridge.queryable.reads.operator_plan import without_prefix
from spark_bridge.state_format.layouts import ROLLING, ROWS, VALUE
from spark_bridge.state_format.stored_rows import VariableRows

# Streams of row batches: limited, gathered from small batches, and released wherever they end.


STREAM_BATCH_ROWS = 1 << 14
STREAM_BATCH_BYTES = 1 << 20
"""Smaller batches are gathered until they have this many rows or bytes."""


class RowStream(Iterator[pa.RecordBatch]):
    """An iterator that calls ``release`` once: at its end, at a failure, when closed, or when garbage collected."""

    def __init__(self, batches: Iterator[pa.RecordBatch], release: Callable[[], None]) -> None:
        self._batches: Iterator[pa.RecordBatch] | None = batches
        self._release = release

    def __next__(self) -> pa.RecordBatch:
        if self._batches is None:
            raise StopIteration
        try:
            return next(self._batches)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        batches, self._batches = self._batches, None
        if batches is None:
            return
        close = getattr(batches, "close", None)
        if close is not None:
            close()
        del batches
        self._release()

    def __del__(self) -> None:
        self.close()


def limited(batches: Iterator[pa.RecordBatch], limit: int | None) -> Iterator[pa.RecordBatch]:
    """Yield the first ``limit`` rows (None: all); no batch is empty."""
    left = limit
    for batch in batches if limit != 0 else ():
        rows = batch if left is None else batch.slice(0, left)
        if rows.num_rows:
            yield rows
        else:
            raise_if_cancelled()  # much may be read without a row being found
        if left is not None:
            left -= rows.num_rows
            if not left:
                return


def gather_batches(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the same rows in batches of about ``STREAM_BATCH_ROWS`` rows or ``STREAM_BATCH_BYTES``, or larger ones."""
    pending: list[pa.RecordBatch] = []
    num_rows = nbytes = 0
    for batch in batches:
        raise_if_cancelled()
        if not batch.num_rows:
            continue
        pending.append(batch)
        num_rows, nbytes = num_rows + batch.num_rows, nbytes + batch.nbytes
        if num_rows >= STREAM_BATCH_ROWS or nbytes >= STREAM_BATCH_BYTES:
            yield _one(pending)
            pending, num_rows, nbytes = [], 0, 0
    if pending:
        yield _one(pending)


def _one(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    if len(batches) == 1:
        return batches[0]
    columns = [pa.concat_arrays(c) for c in zip(*(b.columns for b in batches), strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=batches[0].schema)


MAX_RANGES = 4096
"""Ranges that are opened one by one. If there are more, one range that contains all of them is read, and filtered."""
_EXPIRY_BYTES = 9
"""The width of the time that timers stored by time have between key group and grouping key."""

Pairs = dict[str, Iterator[pa.RecordBatch]]


@dataclass(frozen=True)
class KeyBounds:
    """Grouping keys from ``start`` (included) to ``end`` (not included), by their columns' bytes, in each key group."""

    start: bytes | None = None
    end: bytes | None = None

    def __post_init__(self) -> None:
        if self.start is not None and self.end is not None and self.end < self.start:
            raise RequestError(f"The scan's end {self.end.hex()} is below its start {self.start.hex()}.")

    @property
    def is_open(self) -> bool:
        """Whether all keys are within the bounds."""
        return not self.start and self.end is None

    def ranges(self, groups: range) -> list[KeyRange]:
        ranges: list[KeyRange] = []
        for group in groups:
            begin = group.to_bytes(KEY_GROUP_BYTES, "big")
            after = (group + 1).to_bytes(KEY_GROUP_BYTES, "big") if group + 1 < 1 << 16 else None
            ranges.append((begin + (self.start or b""), after if self.end is None else begin + self.end))
        return ranges

    def within(self, pairs: pa.RecordBatch, skipped: int = KEY_GROUP_BYTES) -> pa.RecordBatch:
        """Return the pairs whose keys are within the bounds; the first ``skipped`` bytes of a key are ignored."""
        keys = without_prefix(pairs.column(0), skipped)
        if self.start:
            chosen = pc.greater_equal(keys, self.start)
            pairs, keys = pairs.filter(chosen), keys.filter(chosen)
        return pairs if self.end is None else pairs.filter(pc.less(keys, self.end))


def pairs_of(view: PartitionView, rows: VariableRows, groups: range, bounds: KeyBounds) -> Pairs:
    """Return the pairs that rows are made of, by family. All are opened at once, so that they show the same moment."""
    return {family: _checked(_pairs(view, rows, family, groups, bounds)) for family in rows.families}


def _checked(pairs: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the pairs as long as the request is wanted. Checked here, because many pairs may make no row for long."""
    for batch in pairs:
        raise_if_cancelled()
        yield batch


def _pairs(
    view: PartitionView, rows: VariableRows, family: str, groups: range, bounds: KeyBounds
) -> Iterator[pa.RecordBatch]:
    reads, at = view.reads, view.version
    if family != DEFAULT_FAMILY and family not in reads.column_families(at, head=view.head):
        return iter(())
    if bounds.is_open:
        return reads.scan(at, None, None, family, head=view.head)
    if rows.kind == TIMERS:
        # Stored by time: the timers of some keys may be anywhere.
        pairs = reads.scan(at, None, None, family, head=view.head)
        return gather_batches(bounds.within(batch, KEY_GROUP_BYTES + _EXPIRY_BYTES) for batch in _checked(pairs))
    ranges = bounds.ranges(groups)
    if len(ranges) > MAX_RANGES:
        pairs = reads.scan(at, ranges[0][0], ranges[-1][1], family, head=view.head)
        return gather_batches(bounds.within(batch) for batch in _checked(pairs))
    return gather_batches(chain.from_iterable(reads.scan_ranges(ranges, at, family, head=view.head)))


def has_row_per_pair(rows: VariableRows) -> bool:
    """Return whether each stored pair is one row that never expires: then rows are counted without reading values."""
    return rows.kind in (ROWS, ROLLING, VALUE, TIMERS) and not rows.has_ttl


# The rows and columns of an answer: comparisons and projection, on whole columns.


POSITION = "position"
_COMPARE: dict[str, Callable[[pa.Array, pa.Scalar], pa.Array]] = {
    "=": pc.equal,
    "!=": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}
_WIDEST = Context(prec=400)
"""Enough digits for every double."""
_MAX_DIGITS = 80
_FLOAT_LIMIT = 3.4028235677973366e38
"""Smaller values round to a finite number of four bytes."""
_NESTED = (pa.types.is_struct, pa.types.is_list, pa.types.is_map)

RowPredicate = Callable[[pa.RecordBatch], pa.Array]
"""Returns for each row whether it passes (boolean)."""


@dataclass(frozen=True)
class RowSelection:
    """Turns rows in the columns of ``VariableRows.output`` into the rows and columns of an answer.

    Make one with ``of``. ``schema`` is the answer's; ``positions`` are those of its columns among all columns.
    """

    schema: pa.Schema
    positions: tuple[int, ...]
    predicates: tuple[RowPredicate, ...]

    @classmethod
    def of(
        cls,
        rows: VariableRows,
        columns: Sequence[str] | None,
        where: Sequence[Comparison],
        *,
        with_position: bool = False,
    ) -> RowSelection:
        """Return the selection of ``columns``, in their order.

        None means all but key group, partition, and when a row expires. ``with_position``: the given rows have the
        position of their key as last column, the rows of the answer as first one. Raises ``RequestError`` for an
        unknown column, or a value that is not of a column's type.
        """
        output = rows.output
        hidden = {len(output) - 1, len(output) - 2}
        if rows.has_ttl and not rows.collect:
            hidden.add(len(output) - 3)
        if columns is None:
            positions = [i for i in range(len(output)) if i not in hidden]
        else:
            positions = [_place(output, name) for name in columns]
            if len(set(positions)) < len(positions):
                twice = next(name for name in output.names if columns.count(name) > 1)
                raise RequestError(f"Column {twice!r} is asked for more than once; name each column once.")
            if not positions:
                raise RequestError("columns=[] asks for no columns; name at least one, or leave it out.")
        fields = [output.field(i) for i in positions]
        if with_position:
            name = POSITION
            while name in (f.name for f in fields):
                name += "_"
            positions = [len(output), *positions]
            fields = [pa.field(name, pa.int64()), *fields]
        return cls(pa.schema(fields), tuple(positions), tuple(_predicate(output, comparison) for comparison in where))

    def rows(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        columns = [batch.column(i) for i in self.positions]
        if self.predicates:
            passing = reduce(pc.and_, [predicate(batch) for predicate in self.predicates])
            columns = [column.filter(passing) for column in columns]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)


def _place(output: pa.Schema, name: str) -> int:
    places = [i for i, field in enumerate(output.names) if field == name]
    if not places:
        raise RequestError(f"There is no column {name!r}; there are {', '.join(map(repr, output.names))}.")
    return places[0]


def _predicate(output: pa.Schema, comparison: Comparison) -> RowPredicate:
    place = _place(output, comparison.column)
    kind = output.field(place).type
    comparison = normalized_condition(comparison, kind)
    if comparison.comparison in ("is null", "is not null"):
        if comparison.values:
            raise RequestError(
                f"{comparison.column!r} {comparison.comparison} takes no values, not {comparison.values}."
            )
        test = pc.is_null if comparison.comparison == "is null" else pc.is_valid
        return lambda batch: test(batch.column(place))
    if any(is_kind(kind) for is_kind in _NESTED):
        raise RequestError(
            f"Column {comparison.column!r} is {kind}: it can be compared with null alone (is null, is not null)."
        )
    values = [scalar_of(comparison.column, value, kind) for value in comparison.values]
    if comparison.comparison == "in":
        among = pa.array(values, kind)
        if pa.types.is_floating(kind):  # the sum makes 0.0 of -0.0
            return lambda batch: pc.is_in(pc.add(batch.column(place), 0.0), pc.add(among, 0.0))
        return lambda batch: pc.is_in(batch.column(place), among)
    compare, value = _COMPARE[comparison.comparison], values[0]
    if pa.types.is_floating(kind):
        return _float_predicate(place, comparison.comparison, value.as_py())
    return lambda batch: compare(batch.column(place), value)


def _float_predicate(place: int, operator: str, value: float) -> RowPredicate:
    """Return a comparison as Spark makes it: NaN is equal to NaN and greater than all else."""
    compare = _COMPARE[operator]
    if math.isnan(value):
        # With "is it NaN" for the column and true for the value: a comparison of truth values.
        return lambda batch: compare(pc.is_nan(batch.column(place)), True)
    if operator in (">", ">="):
        return lambda batch: pc.or_(compare(batch.column(place), value), pc.is_nan(batch.column(place)))
    return lambda batch: compare(batch.column(place), value)


def normalized_condition(comparison: Comparison, kind: pa.DataType) -> Comparison:
    """Return a condition that the same rows meet, whose values a column of the type can have.

    As in Spark, 42.5 and 2**70 are greater or less than each long, and equal to none. Other types' conditions are as
    they were. Raises ``RequestError`` for another number of values than the comparison has.
    """
    operator, values = comparison.comparison, comparison.values
    if operator in ("is null", "is not null"):
        return comparison
    if operator != "in" and len(values) != 1:
        raise RequestError(f"{comparison.column!r} {operator} takes one value, not {len(values)}.")
    if comparison.is_base64:
        return Comparison(comparison.column, operator, [_bytes(comparison, value) for value in values])
    if not (pa.types.is_integer(kind) or pa.types.is_decimal(kind) or pa.types.is_floating(kind)):
        return comparison
    fitted: list[_Fitted] = []
    for value in values:
        number = _number(value, kind)
        if number is None:
            return comparison  # which is refused by its value
        fitted.append(_fitted("=" if operator == "in" else operator, number, kind))
    if operator == "in":
        return Comparison(comparison.column, "in", [value for name, value in fitted if name == "="])
    ((name, only),) = fitted
    return Comparison(comparison.column, name, [] if only is None else [only])


_Fitted: TypeAlias = tuple[Any, Any]
"""The name of a comparison, and its value or None."""
_NO_ROW: _Fitted = ("in", None)
_EVERY_ROW: _Fitted = ("is not null", None)


def _bytes(comparison: Comparison, value: Any) -> Any:
    try:
        return base64.b64decode(value, validate=True)
    except (TypeError, ValueError) as error:
        raise RequestError(f"{comparison.column!r} {comparison.comparison} {value!r}: no base64: {error}") from error


def _number(value: Any, kind: pa.DataType) -> Decimal | None:
    """Return a JSON value, or its text, as a number; None if it is not a number.

    Compared with decimals, a float has the digits that are displayed: 0.1 is a tenth.
    """
    if isinstance(value, bool):
        return None
    try:
        return Decimal(repr(value) if isinstance(value, float) and pa.types.is_decimal(kind) else value)
    except (InvalidOperation, TypeError, ValueError):
        return None


def _fitted(operator: str, number: Decimal, kind: pa.DataType) -> _Fitted:
    """Return the comparison with a number that the type has."""
    if pa.types.is_floating(kind):
        return _of_float(operator, number, _FLOAT_LIMIT if kind.bit_width == 32 else math.inf)
    if pa.types.is_integer(kind):
        least, most, scale = -(1 << (kind.bit_width - 1)), (1 << (kind.bit_width - 1)) - 1, 0
    else:
        least, most, scale = 1 - 10**kind.precision, 10**kind.precision - 1, kind.scale
    if number.is_nan():
        return _beyond(operator, above=True)
    if not number.is_finite() or number.adjusted() > _MAX_DIGITS:
        return _beyond(operator, above=number > 0)
    # In units of the last digit, as integers.
    scaled = number.scaleb(scale, _WIDEST)
    floor = scaled.to_integral_value(ROUND_FLOOR, _WIDEST)
    if floor > most or scaled < least:
        return _beyond(operator, above=floor > most)
    value = int(floor) if pa.types.is_integer(kind) else format(floor.scaleb(-scale, _WIDEST), "f")
    if floor == scaled:
        return operator, value
    if operator in ("=", "!="):
        return _NO_ROW if operator == "=" else _EVERY_ROW
    return "<=" if operator in ("<", "<=") else ">", value


def _of_float(operator: str, number: Decimal, limit: float) -> _Fitted:
    value = float(number)
    if not number.is_finite() or abs(value) < limit:
        return operator, value
    # It is between the greatest number of the type and infinity.
    if operator in ("=", "!="):
        return _NO_ROW if operator == "=" else _EVERY_ROW
    if number > 0:
        return "<" if operator in ("<", "<=") else ">=", math.inf
    return "<=" if operator in ("<", "<=") else ">", -math.inf


def _beyond(operator: str, *, above: bool) -> _Fitted:
    """Return the comparison with a number above, or else below, all values of a type."""
    passes = operator == "!=" or (operator != "=" and (operator in ("<", "<=")) == above)
    return _EVERY_ROW if passes else _NO_ROW


def scalar_of(column: str, value: Any, kind: pa.DataType) -> pa.Scalar:
    """Return a JSON value, or bytes, as a scalar of a column's type."""
    try:
        if isinstance(value, bool) and not pa.types.is_boolean(kind):
            raise TypeError("a truth value")
        if pa.types.is_boolean(kind) and not isinstance(value, bool | str) and value not in (0, 1):
            raise TypeError("no truth value")
        if isinstance(value, bytes) and not pa.types.is_binary(kind):
            raise TypeError("bytes")
        if pa.types.is_decimal(kind):
            return pa.scalar(str(value)).cast(kind)
        scalar = pa.scalar(value)
        if pa.types.is_timestamp(kind) and kind.tz is not None and isinstance(value, str):
            return _instant(scalar, kind)
        return scalar.cast(kind)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise RequestError(f"{value!r} cannot be compared with column {column!r}, which is {kind}: {error}") from error


def _instant(scalar: pa.Scalar, kind: pa.DataType) -> pa.Scalar:
    try:
        return scalar.cast(kind)
    except pa.ArrowInvalid:  # a time without a zone is UTC
        return pc.assume_timezone(scalar.cast(pa.timestamp(kind.unit)), "UTC").cast(kind)
