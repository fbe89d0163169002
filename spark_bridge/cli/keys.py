"""Keys and conditions as people type them on a command line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from backends.decoders import json_decoder
from spark_bridge.exceptions import RequestError, UnknownKeyOrNamespaceError
from spark_bridge.queryable.client.answers.json_values import from_json, key_of_json, key_of_text

_CONDITION = re.compile(
    r"\s*(?P<column>.+?)\s*(?:(?P<null>\bis(?:\s+not)?\s+null)|(?P<operator><=|>=|!=|<>|==?|<|>|\bin\b)\s*(?P<value>.+))",
    re.IGNORECASE | re.DOTALL,
)


def key_of_words(words: Sequence[str], schema: pa.Schema) -> Any:
    """Return the key that the words of a command line name.

    It is written as ``column=value`` for each column of the key; or as JSON, an object or an array; or as the values in
    the order of the columns, one a word, or in one word with commas between (as in CSV). Raises
    ``UnknownKeyOrNamespaceError``.
    """
    named = _by_name(words, schema)
    if named is not None:
        return named
    if len(words) == 1:
        given = _json(words[0])
        nested = isinstance(given, dict | list)
        if nested and not (len(schema) == 1 and pa.types.is_string(schema.types[0]) and isinstance(given, dict)):
            return key_of_json(given, schema)
        if given is None and words[0] == "null" and not pa.types.is_string(schema.types[0]):
            return key_of_json(given, schema)
        return key_of_text(words[0], schema)
    if len(words) != len(schema):
        wanted = ", ".join(f"{f.name}: {f.type}" for f in schema)
        raise UnknownKeyOrNamespaceError(
            f"{len(words)} values were given; the key has {len(schema)} columns ({wanted}). Write column=value for "
            "each, or JSON."
        )
    return tuple(_value(word, field) for word, field in zip(words, schema, strict=True))


def _by_name(words: Sequence[str], schema: pa.Schema) -> Any:
    """Return the key if every word is column=value of a column of the key; None if the words are something else."""
    pairs = [word.partition("=") for word in words]
    if len(words) != len(schema) or {name for name, _, _ in pairs} != set(schema.names):
        return None
    given = {name: value for name, _, value in pairs}
    made = [_value(given[field.name], field) for field in schema]
    return made[0] if len(made) == 1 else tuple(made)


def _value(text: str, field: pa.Field) -> Any:
    """Return a value of a column; ``null`` is null, except for text, and what is nested is JSON."""
    if text == "null" and not pa.types.is_string(field.type):
        return None
    given = _json(text) if pa.types.is_nested(field.type) else text
    return from_json(given, field.type, f"Key column {field.name!r}")


def bound_of(text: str | None) -> Any:
    """Return a bound of a scan as JSON has it, or plain text. None is none."""
    given = None if text is None else _json(text)
    return text if given is None else given


def condition_of(text: str) -> tuple[Any, ...]:
    """Return a condition as ``client.scan`` takes it, of text such as ``n > 10``, ``k in ["a", "b"]``, ``v is null``.

    A value is JSON, or plain text. Raises ``RequestError``.
    """
    found = _CONDITION.fullmatch(text)
    if found is None:
        raise RequestError(f"{text!r} is no condition; write a column, an operator and a value, such as 'n > 10'.")
    if found["null"]:
        return found["column"], " ".join(found["null"].lower().split())
    operator, written = found["operator"].lower(), found["value"].strip()
    value = _json(written)
    if operator == "in" and not isinstance(value, list):
        raise RequestError(f"{text!r}: after 'in' comes a JSON array, such as [1, 2].")
    return found["column"], operator, written if value is None else value


def _json(text: str) -> Any:
    """Return the value of JSON text; None for text that is none."""
    try:
        return json_decoder(Any).decode(text.encode())
    except ValueError:  # plain text
        return None
