"""The fields of a dataclass, a pydantic model or a ``msgspec.Struct`` as a table: name, type, default, meaning.

The meaning is the description of a pydantic field, or the line of the docstring's list that begins with the field's
name in double backticks, such as "- ``fsync``: ...". The rest of the docstring comes before the table. A field whose
default is such a class itself gets another table below.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from importlib import import_module
from typing import Any

import msgspec

from tests.docs.reference.docstrings import as_markdown, inline

_ITEM = re.compile(r"^- (``\w+``(?:, ``\w+``)*): (.*)$")
_SCALE = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
_EXACT_BELOW = 1 << 16
"""Numbers below are shown as they are: they may be counts."""


@dataclasses.dataclass(frozen=True)
class Option:
    """One field: its name, its type and default as text, and what it means (Markdown, as the docstrings of these
    classes are).
    """

    name: str
    type: str
    default: str
    meaning: str


def load(path: str) -> Any:
    """Return the object at ``package.module.name``; the last part may be a name that the package loads when it is
    asked for.
    """
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def split_docstring(docstring: str) -> tuple[str, dict[str, str]]:
    """Return the prose of a docstring, and the meanings of its listed fields by name.

    A heading of fields ("Memory and work:") is dropped with the list behind it.
    """
    prose: list[str] = []
    meanings: dict[str, str] = {}
    current: list[str] = []
    for line in inspect.cleandoc(docstring).splitlines():
        found = _ITEM.match(line)
        if found:
            current = re.findall(r"``(\w+)``", found[1])
            meanings.update(dict.fromkeys(current, found[2]))
        elif current and line.startswith("  "):
            for name in current:
                meanings[name] += f" {line.strip()}"
        else:
            current = []
            prose.append(line)
    kept = [p for p in "\n".join(prose).split("\n\n") if p.strip() and not (meanings and p.strip().endswith(":"))]
    return "\n\n".join(kept), meanings


def shown(value: object, name: str) -> str:
    """Return a default as text: bytes in MiB, everything else as Python writes it."""
    if "bytes" in name and isinstance(value, int) and not isinstance(value, bool) and value >= _EXACT_BELOW:
        for size, unit in _SCALE:
            if value % size == 0:
                return f"``{value:_}`` ({value // size} {unit})"
    return f"``{value:_}``" if isinstance(value, int) and not isinstance(value, bool) else f"``{value!r}``"


def options_of(kind: Any) -> tuple[str, list[Option], list[Any]]:
    """Return the prose, the options, and the classes of options that are nested in ``kind``.

    Raises ``TypeError`` if ``kind`` is none of the three kinds of classes.
    """
    if hasattr(kind, "model_fields"):
        prose, _ = split_docstring(kind.__doc__ or "")
        found, nested = [], []
        for name, field in kind.model_fields.items():
            text = field.description or ""
            default = field.default
            if hasattr(type(default), "model_fields"):
                nested.append(type(default))
                found.append(Option(name, type(default).__name__, "see below", text))
            else:
                found.append(Option(name, _type_name(field.annotation), shown(default, name), text))
        return prose, found, nested
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = inspect.get_annotations(kind)
        found = [
            Option(f.name, str(hints.get(f.name, f.type)), _struct_default(f), "") for f in msgspec.structs.fields(kind)
        ]
        return inspect.cleandoc(kind.__doc__ or ""), found, []
    if not dataclasses.is_dataclass(kind):
        raise TypeError(f"{kind!r} is neither a dataclass nor a pydantic model nor a msgspec.Struct")
    prose, meanings = split_docstring(kind.__doc__ or "")
    found, nested = [], []
    for field in dataclasses.fields(kind):
        default = _default_of(field)
        if dataclasses.is_dataclass(default):
            nested.append(type(default))
            text = "see below"
        else:
            text = "required" if default is dataclasses.MISSING else shown(default, field.name)
        found.append(Option(field.name, str(field.type), text, meanings.pop(field.name, "")))
    if meanings:
        raise ValueError(f"The docstring of {kind.__name__} explains {sorted(meanings)}, which are no fields.")
    return prose, found, nested


def _default_of(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _struct_default(field: msgspec.structs.FieldInfo) -> str:
    if field.default_factory is not msgspec.NODEFAULT:
        return shown(field.default_factory(), field.name)
    return "required" if field.default is msgspec.NODEFAULT else shown(field.default, field.name)


def _type_name(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)


def markdown(kind: Any) -> str:
    """Return the prose and the table of a class, and of the classes nested in it."""
    prose, options, nested = options_of(kind)
    is_record = isinstance(kind, type) and issubclass(kind, msgspec.Struct)
    headings = ["field" if is_record else "option", "type", "default", "meaning"]
    if not any(option.meaning for option in options):
        headings.pop()
    rows = [headings, ["---"] * len(headings)]
    for option in options:
        cells = [f"``{option.name}``", f"``{option.type}``", option.default, option.meaning]
        rows.append([inline(cell).replace("|", "\\|") for cell in cells[: len(headings)]])
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return "\n\n".join([as_markdown(prose), table, *(f"**{one.__name__}**\n\n{markdown(one)}" for one in nested)])
