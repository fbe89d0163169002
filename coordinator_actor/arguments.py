"""Converts the arguments of a message to the types of its declaration in ``coordinator_port.py``: ids are texts.

A caller may hold an id as a ``uuid.UUID``. The coordinator's dicts have texts as keys, so that such an id would not be
found. So a UUID is converted to its text. An id of any other type is refused.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Struct

from coordinator_actor.exceptions import InvalidRequestError

Take = Callable[[Any, str], Any]
"""Returns a value with texts for ids, from the value and from words that say whose it is."""


class Arguments:
    """The arguments of one message. What is done grows with the texts in them."""

    def __init__(self, declared: Callable[..., Any]) -> None:
        self._message = declared.__name__
        hints = get_type_hints(declared)
        self._names = list(signature(declared).parameters)[1:]  # without ``self``
        self._takes = {name: take for name in self._names if (take := _take(hints[name])) is not None}

    def take(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments with texts for ids. Raises ``InvalidRequestError`` for what is no id.

        Too many arguments and unknown ones are left as they are, for the handler to refuse.
        """
        by_place = [self._taken(self._names[i], arg) if i < len(self._names) else arg for i, arg in enumerate(args)]
        return by_place, {name: self._taken(name, arg) for name, arg in kwargs.items()}

    def _taken(self, name: str, arg: Any) -> Any:
        take = self._takes.get(name)
        return arg if take is None else take(arg, f"{name} of {self._message}")


def _take(hint: Any) -> Take | None:
    """Return the function that takes values declared as ``hint``; None if there is no text in them."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is str:
        return _text
    if origin in (Union, UnionType):
        (one,) = [a for a in args if a is not NoneType]
        return _optional(_take(one))
    if origin is tuple and args[-1] is not Ellipsis:
        return _fields([_take(a) for a in args])
    if origin in (Sequence, list, tuple):
        return _several(_take(args[0]))
    if origin in (Mapping, dict):
        return _by_key(_take(args[0]), _take(args[1]))
    # Records that name files are made by our own code alone, from other records.
    if isinstance(hint, type) and issubclass(hint, Struct) and hint.__module__.startswith("coordinator_actor."):
        return _record(hint)
    return None


def _text(value: Any, where: str) -> Any:
    if isinstance(value, str):
        return value
    if isinstance(value, uuid.UUID):
        return str(value)
    raise InvalidRequestError(f"The {where} must be a text or a uuid.UUID, not {value!r} ({type(value).__name__}).")


def _optional(take: Take | None) -> Take | None:
    if take is None:
        return None
    return lambda value, where: None if value is None else take(value, where)


def _several(take: Take | None) -> Take | None:
    if take is None:
        return None

    def several(value: Any, where: str) -> Any:
        if isinstance(value, str | uuid.UUID):
            raise InvalidRequestError(f"The {where} must be several values, not {value!r} alone.")
        taken = tuple(take(one, where) for one in value)
        return value if all(new is old for new, old in zip(taken, value, strict=True)) else taken

    return several


def _fields(takes: Sequence[Take | None]) -> Take | None:
    if not any(takes):
        return None
    return lambda value, where: tuple(
        one if take is None else take(one, where) for take, one in zip(takes, value, strict=True)
    )


def _by_key(take_key: Take | None, take_value: Take | None) -> Take | None:
    if take_key is None and take_value is None:
        return None

    def by_key(value: Any, where: str) -> Any:
        return {
            key if take_key is None else take_key(key, where): one if take_value is None else take_value(one, where)
            for key, one in value.items()
        }

    return by_key


def _record(kind: type[Struct]) -> Take | None:
    takes = {name: take for name, hint in get_type_hints(kind).items() if (take := _take(hint)) is not None}
    if not takes:
        return None

    def record(value: Any, where: str) -> Any:
        changes = {}
        for name, take in takes.items():
            held = getattr(value, name)
            # A message may have thousands of records, and nearly all of their texts are texts.
            if type(held) is not str and (new := take(held, f"{name} in {where}")) is not held:
                changes[name] = new
        return msgspec.structs.replace(value, **changes) if changes else value

    return record
