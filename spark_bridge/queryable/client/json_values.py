"""Values of the state as JSON, in answers and in requests.

| state | JSON |
| --- | --- |
| integers | numbers; beyond ±(2^53 - 1), which JavaScript would round, strings |
| floats | numbers; "NaN", "Infinity", "-Infinity" |
| decimals | strings |
| timestamps, dates | strings in ISO 8601, timestamps with a time zone in UTC: "2024-03-09T23:00:00Z" |
| times of day | strings in ISO 8601: "23:00:00" |
| times outside the years 1 to 9999 | strings in expanded ISO 8601, in UTC, without a zone: "+10000-01-01T00:00:00" |
| durations | strings in ISO 8601, in days, hours, minutes and seconds: "P1DT2H0.5S", "-PT90S" |
| strings | strings; a byte of one that is not UTF-8, which Spark allows, is written as \\xff |
| binary | strings in base64 |
| structs | objects |
| maps | objects if all keys are strings, else arrays of {"key": ..., "value": ...} |

In a request any number, and true and false, may also be a string.
"""

from __future__ import annotations

import base64
import datetime as dt
import decimal
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from backends.encoding.columns import distinct_names
from backends.encoding.user_values import python_values
from spark_bridge.exceptions import RequestError, UnknownKeyOrNamespaceError
from spark_bridge.queryable.protocol import WATERMARK

EXACT = (1 << 53) - 1
"""Greater integers are strings."""
_FLOATS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_DURATION = re.compile(
    r"(-?)P(?:(\d{1,9})D)?(?:T(?:(\d{1,9})H)?(?:(\d{1,9})M)?(?:(\d{1,18})(?:\.(\d{1,6}))?S)?)?", re.ASCII
)
_KEY_PART = re.compile(r'(?:"([^"]*(?:""[^"]*)*)"|(?!")[^,]*)(?=,|\Z)')
_INTEGER = re.compile(r"-?[0-9]{1,20}")
_encode = msgspec.json.Encoder().encode


# -- to JSON -------------------------------------------------------------------------------------


def to_json(value: Any) -> Any:
    """Return a value that a client has returned, made of Python types that JSON has."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return value if -EXACT <= value <= EXACT else str(value)
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return _map(value.items()) if any(not isinstance(k, str) for k in value) else _object(value.items())
    # Arrow's maps are lists of pairs; nothing else has tuples in a list.
    if isinstance(value, list) and value and all(isinstance(v, tuple) for v in value):
        return _object(value) if all(isinstance(k, str) for k, _ in value) else _map(value)
    if isinstance(value, list | tuple):
        return [to_json(v) for v in value]
    if isinstance(value, decimal.Decimal):
        return format(value, "f")
    if isinstance(value, dt.datetime):
        return value.isoformat() if value.tzinfo is None else _in_utc(value).isoformat().replace("+00:00", "Z")
    if isinstance(value, dt.date | dt.time):
        return value.isoformat()
    if isinstance(value, np.datetime64):  # which Python's datetime cannot hold
        text = str(value)
        return (text if text[0] == "-" else f"+{text}").removesuffix(".000000")
    if isinstance(value, dt.timedelta):
        return duration_text(value)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    raise TypeError(f"{value!r} ({type(value).__name__}) has no JSON form.")


def duration_text(duration: dt.timedelta) -> str:
    """Return a duration in ISO 8601, exact to the microsecond."""
    sign, much = ("-", -duration) if duration.days < 0 else ("", duration)
    hours, rest = divmod(much.seconds, 3600)
    minutes, seconds = divmod(rest, 60)
    fraction = f".{much.microseconds:06}".rstrip("0") if much.microseconds else ""
    parts = [(f"{hours}", "H"), (f"{minutes}", "M"), (f"{seconds}{fraction}", "S")]
    time = "".join(number + unit for number, unit in parts if number != "0")
    days = f"{much.days}D" if much.days else ""
    return f"{sign}P{days}T{time}" if time else f"{sign}P{days or 'T0S'}"


def duration_of(text: str) -> dt.timedelta:
    """Return the duration of an ISO 8601 text from days to seconds. Raises ``ValueError`` and ``OverflowError``."""
    match = _DURATION.fullmatch(text)
    if match is None or text.endswith(("P", "T")):
        raise ValueError("A duration is written as P1DT2H3M4.5S.")
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups()[1:5])
    micros = int((match[6] or "").ljust(6, "0"))
    much = dt.timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds, microseconds=micros)
    return -much if match[1] else much


def _object(items: Any) -> dict[str, Any]:
    return {k: to_json(v) for k, v in items}


def _map(items: Any) -> list[dict[str, Any]]:
    return [{"key": to_json(k), "value": to_json(v)} for k, v in items]


def rows_to_json(batch: pa.RecordBatch | pa.Table) -> list[dict[str, Any]]:
    """Return rows as objects. ``distinct_names`` renames columns that share a name."""
    columns = [column_to_json(column) for column in batch.columns]
    names = distinct_names(batch.schema.names)
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def lines(batch: pa.RecordBatch) -> bytes:
    """Return rows as JSON, one in each line."""
    return b"".join(_encode(row) + b"\n" for row in rows_to_json(batch))


def json_bytes(value: Any) -> bytes:
    """Return the JSON bytes of an object that ``to_json`` has made."""
    return _encode(value)


def column_to_json(column: pa.Array | pa.ChunkedArray) -> list[Any]:
    """Return the values of a column, made of Python types that JSON has."""
    values, kind = python_values(column), column.type
    if pa.types.is_nested(kind):
        return [_of_type(v, kind) for v in values]
    return values if _is_plain(column) else [to_json(v) for v in values]


def _of_type(value: Any, kind: pa.DataType) -> Any:
    """Return what ``to_json`` does, but for an empty map, whose Python value is that of an empty list."""
    if value is None or pa.types.is_union(kind):
        return to_json(value)
    if pa.types.is_map(kind):
        pairs = [(_of_type(k, kind.key_type), _of_type(v, kind.item_type)) for k, v in value]
        return dict(pairs) if _is_text(kind.key_type) else [{"key": k, "value": v} for k, v in pairs]
    if pa.types.is_struct(kind):
        return {name: _of_type(v, kind.field(name).type) for name, v in value.items()}
    if isinstance(value, list):
        return [_of_type(v, kind.value_type) for v in value]
    return to_json(value)


def _is_text(kind: pa.DataType) -> bool:
    plain = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_string(plain) or pa.types.is_large_string(plain))


def _is_plain(column: pa.Array | pa.ChunkedArray) -> bool:
    """Return whether all values of a column are the same in JSON and in Python, without looking at each value."""
    kind = column.type
    if pa.types.is_boolean(kind) or pa.types.is_string(kind):
        return True
    if pa.types.is_integer(kind):
        if kind.bit_width <= 32:
            return True
        bounds = pc.min_max(column).as_py()
        return bounds["min"] is None or (bounds["min"] >= -EXACT and bounds["max"] <= EXACT)
    if pa.types.is_floating(kind):
        return bool(pc.all(pc.is_finite(column)).as_py() is not False)
    return False


# -- from JSON -----------------------------------------------------------------------------------


def from_json(value: Any, kind: pa.DataType, what: str) -> Any:
    """Return a JSON value as clients take it for a type. Raises ``UnknownKeyOrNamespaceError`` naming ``what``."""
    if value is None:
        return None
    try:
        return _from_json(value, kind)
    except (ValueError, TypeError, decimal.InvalidOperation, OverflowError) as error:
        raise UnknownKeyOrNamespaceError(f"{what}: {value!r} is no {kind}. {error}".rstrip()) from error


def _from_json(value: Any, kind: pa.DataType) -> Any:
    if value is None:
        return None
    if pa.types.is_boolean(kind):
        boolean = {"true": True, "false": False}.get(value) if isinstance(value, str) else value
        return _of(boolean, bool)
    if pa.types.is_integer(kind):
        return int(value) if isinstance(value, str) and _INTEGER.fullmatch(value) else _of(value, int)
    if isinstance(value, str) and "_" in value and (pa.types.is_floating(kind) or pa.types.is_decimal(kind)):
        raise ValueError("It should be a number.")  # Python would skip the underscore
    if pa.types.is_floating(kind):
        if isinstance(value, str):
            return _FLOATS[value] if value in _FLOATS else float(value)
        return float(_of(value, int, float))
    if pa.types.is_decimal(kind):
        number = decimal.Decimal(_of(value, str, int))
        return number if number.is_finite() else _of(None, str)
    text = value
    if pa.types.is_string(kind):
        return _of(text, str)
    if pa.types.is_binary(kind):
        return base64.b64decode(_of(text, str), validate=True)
    if pa.types.is_timestamp(kind):
        return time_of(_of(text, str))
    if pa.types.is_duration(kind):
        return duration_of(_of(text, str))
    if pa.types.is_date(kind):
        return np.datetime64(text, "D") if _of(text, str)[:1] in ("+", "-") else dt.date.fromisoformat(text)
    if pa.types.is_struct(kind):
        fields = {kind.field(i).name: kind.field(i).type for i in range(kind.num_fields)}
        unknown = [name for name in _of(value, dict) if name not in fields]
        if unknown:
            raise ValueError(f"It has no {', '.join(map(repr, unknown))}.")
        return {name: _from_json(value.get(name), of) for name, of in fields.items()}
    if pa.types.is_list(kind):
        return [_from_json(v, kind.value_type) for v in _of(value, list)]
    raise ValueError("Such values cannot be given in JSON.")


def _of(value: Any, *kinds: type) -> Any:
    """Return the value, if it is exactly of one of these types (JSON's true is not a number)."""
    if type(value) not in kinds:
        raise ValueError(f"It should be {' or '.join(_NAMES[k] for k in kinds)}.")
    return value


_NAMES = {str: "a string", int: "an integer", float: "a number", bool: "true or false"}
_NAMES |= {dict: "an object", list: "an array"}


def time_of(text: str) -> dt.datetime | np.datetime64:
    """Return the time of an ISO 8601 text; without a zone it is UTC. Raises ``ValueError``.

    For an expanded year, with a sign, return a ``numpy.datetime64``.
    """
    if text[:1] in ("+", "-"):
        return np.datetime64(text.removesuffix("Z"), "us")
    time = dt.datetime.fromisoformat(text[:-1] + "+00:00" if text.endswith(("Z", "z")) else text)
    return _in_utc(time)


def _in_utc(time: dt.datetime) -> dt.datetime:
    return time.replace(tzinfo=dt.timezone.utc) if time.tzinfo is None else time.astimezone(dt.timezone.utc)


def window_of_text(text: str) -> Any:
    """Parse a window, "start" or "start/end". Raises ``UnknownKeyOrNamespaceError``."""
    try:
        times = [time_of(part) for part in text.split("/")]
    except (ValueError, OverflowError) as error:
        raise UnknownKeyOrNamespaceError(
            f"window={text!r}: a window is its start in ISO 8601, as 2024-03-09T23:00:00Z, or start/end. {error}"
        ) from error
    if len(times) > 2:
        raise UnknownKeyOrNamespaceError(f"window={text!r} has {len(times)} times; a window has a start and an end.")
    return times[0] if len(times) == 1 else tuple(times)


def at_of_text(text: str) -> dt.datetime | str:
    """Return ``at`` of a request: a time in ISO 8601, UTC without a zone, or "watermark". Raises ``RequestError``."""
    if text == WATERMARK:
        return text
    try:
        at = time_of(text)
        if not isinstance(at, dt.datetime):
            raise ValueError("Years are 1 to 9999.")
    except (ValueError, OverflowError) as error:
        raise RequestError(
            f"at={text!r}: give a time in ISO 8601, as 2024-03-09T23:00:00Z, in UTC if it has no zone, or 'watermark'. "
            f"{error}"
        ) from error
    return at


# -- keys ----------------------------------------------------------------------------------------


def key_of_text(text: str, schema: pa.Schema) -> Any:
    """Return the key of a path: all of ``text`` for a key of one column, else the columns' values with commas between.

    A value that contains a comma or a double quote is enclosed in double quotes, and its own double quotes are doubled
    (as in CSV). Raises ``UnknownKeyOrNamespaceError``.
    """
    if len(schema) == 1:
        return _key([text], schema)
    parts = list(_comma_separated(text))
    if len(parts) != len(schema):
        wanted = ",".join(schema.names)
        raise UnknownKeyOrNamespaceError(
            f"The key {text!r} has {len(parts)} parts, the key columns are {len(schema)}: {wanted}. Enclose a part "
            "that contains a comma in double quotes."
        )
    return _key(parts, schema)


def _comma_separated(text: str) -> Iterator[str]:
    at = 0
    while at <= len(text):
        part = _KEY_PART.match(text, at)
        if part is None:
            is_open = text.count('"', at) % 2
            wrong = "a double quote without its other" if is_open else "more characters after a closing double quote"
            raise UnknownKeyOrNamespaceError(f"The key {text!r} has {wrong}.")
        yield part[0] if part[1] is None else part[1].replace('""', '"')
        at = part.end() + 1


def key_of_json(value: Any, schema: pa.Schema) -> Any:
    """Return a key of a lookup: a value for one column; for several columns an array of values, or an object.

    Raises ``UnknownKeyOrNamespaceError``.
    """
    if isinstance(value, dict) and set(value) == set(schema.names):
        return _key([value[name] for name in schema.names], schema)
    if len(schema) == 1 and not (
        isinstance(value, list) and len(value) == 1 and not pa.types.is_nested(schema.types[0])
    ):
        return _key([value], schema)
    if not isinstance(value, list) or len(value) != len(schema):
        wanted = ", ".join(f"{f.name}: {f.type}" for f in schema)
        raise UnknownKeyOrNamespaceError(
            f"{value!r} is neither an array of the key columns ({wanted}) nor an object of them."
        )
    return _key(value, schema)


def bound_of_json(value: Any, schema: pa.Schema, what: str) -> Any:
    """Return a bound of a scan: an array of first key columns, or the first. Raises ``UnknownKeyOrNamespaceError``."""
    if value is None:
        return None
    parts = value if isinstance(value, list) else [value]
    if len(parts) > len(schema):
        raise UnknownKeyOrNamespaceError(f"{what} has {len(parts)} values, the key {len(schema)} columns.")
    columns = [from_json(v, f.type, f"{what}, key column {f.name!r}") for v, f in zip(parts, schema, strict=False)]
    # A plain string is a prefix; an array with a string is the whole value of a column.
    return columns[0] if isinstance(value, str) and pa.types.is_string(schema.types[0]) else tuple(columns)


def _key(values: Sequence[Any], schema: pa.Schema) -> Any:
    columns = [from_json(v, f.type, f"Key column {f.name!r}") for v, f in zip(values, schema, strict=True)]
    return columns[0] if len(columns) == 1 else tuple(columns)
