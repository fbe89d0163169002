"""Values as people type them into forms, for columns of Arrow types."""

from __future__ import annotations

import base64
import binascii
import datetime as dt
import json
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from spark_bridge.exceptions import RequestError


@dataclass(frozen=True)
class Input:
    """The control of a form for a value of a column: its kind, and an example."""

    name: str
    type: str
    control: str
    example: str


def input_for(name: str, kind: pa.DataType) -> Input:
    """Return the control for a column: "number", "choice" of true and false, "date", "moment" or "text"."""
    if pa.types.is_integer(kind):
        return Input(name, str(kind), "number", "42")
    if pa.types.is_boolean(kind):
        return Input(name, str(kind), "choice", "true")
    if pa.types.is_date(kind):
        return Input(name, str(kind), "date", "2024-03-09")
    if pa.types.is_timestamp(kind):
        return Input(name, str(kind), "moment", "2024-03-09 23:00:00")
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return Input(name, str(kind), "number", "1.5")
    if pa.types.is_binary(kind):
        return Input(name, str(kind), "text", "base64, as AP8=")
    if pa.types.is_nested(kind):
        return Input(name, str(kind), "text", "JSON")
    return Input(name, str(kind), "text", "")


def parsed(text: str, kind: pa.DataType, what: str) -> Any:
    """Return the Python value of a text. Times without a zone are UTC. Raises ``RequestError`` naming ``what``."""
    try:
        if pa.types.is_string(kind) or pa.types.is_large_string(kind):
            return text
        if pa.types.is_binary(kind):
            return base64.b64decode(text, validate=True)
        if pa.types.is_nested(kind):
            return pa.scalar(json.loads(text), kind).as_py()
        given = pa.scalar(text.strip())
        if pa.types.is_boolean(kind):
            return {"true": True, "false": False}[text.strip().lower()]
        if pa.types.is_timestamp(kind):
            return _moment(text.strip(), kind)
        return given.cast(kind).as_py()
    except (pa.ArrowException, binascii.Error, ValueError, KeyError, TypeError) as error:
        raise RequestError(f"{what}: {text[:100]!r} is no {kind}. {_reason(error)}".rstrip()) from error


def _moment(text: str, kind: pa.DataType) -> Any:
    plain = pa.scalar(text.replace("T", " ").removesuffix("Z"))
    if kind.tz is None:
        return plain.cast(kind).as_py()
    try:
        return pc.assume_timezone(plain.cast(pa.timestamp(kind.unit)), "UTC").cast(kind).as_py()
    except pa.ArrowInvalid:
        return pa.scalar(text).cast(kind).as_py()


def _reason(error: Exception) -> str:
    return "" if isinstance(error, KeyError) else str(error).splitlines()[0][:200]


def text_of(value: Any) -> str:
    """Return the text that ``parsed`` takes for a value."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, dt.datetime):
        moment = value if value.tzinfo is None else value.astimezone(dt.timezone.utc)
        return moment.replace(tzinfo=None).isoformat()
    return json.dumps(value, default=str) if isinstance(value, list | dict) else str(value)
