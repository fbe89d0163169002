"""Functions, classes and errors as Markdown: the signature as the source has it, then the docstring."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from itertools import pairwise
from types import ModuleType
from typing import Any

import msgspec

from tests.docs.reference.docstrings import as_markdown, inline

WIDTH = 100
_NAME = re.compile(r"(?P<name>[\w.]+)(?:\((?P<members>[^)]*)\))?")
_CONSTANT = re.compile(r"_?[A-Z][A-Z0-9_]*")
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def objects(arguments: str, level: int) -> str:
    """Return the functions and classes of ``package: name, name``, one heading below ``level`` for each.

    ``Name`` is a class with its own public members, ``Name(*)`` also with those of its bases, ``Name(one, two)`` with
    these alone, and ``Name()`` with none.
    """
    package, _, names = arguments.partition(":")
    return "\n\n".join(
        _object(import_module(package), found["name"], found["members"], level) for found in _NAME.finditer(names)
    )


def module(name: str, level: int) -> str:
    """Return the docstring of a module, and the functions and classes of its ``__all__``."""
    loaded = import_module(name)
    described = [_object(loaded, public, None, level) for public in loaded.__all__]
    return "\n\n".join([as_markdown(inspect.getdoc(loaded) or ""), *described])


def errors(name: str) -> str:
    """Return the errors that a module defines as a table, in the order of the source."""
    loaded = import_module(name)
    kinds = [kind for kind in vars(loaded).values() if inspect.isclass(kind) and kind.__module__ == name]
    rows = [
        f"| `{kind.__name__}` | {', '.join(f'`{base.__name__}`' for base in kind.__bases__)} "
        f"| {inline(' '.join((inspect.getdoc(kind) or '').split()))} |"
        for kind in kinds
    ]
    return "\n".join(["| error | is a | meaning |", "| --- | --- | --- |", *rows])


def _object(package: ModuleType, name: str, members: str | None, level: int) -> str:
    target = getattr(package, name)
    heading = f"{'#' * (level + 1)} {name}"
    if target.__name__ != name:
        return f"{heading}\n\nThe same as `{target.__name__}`."
    if inspect.isclass(target):
        return "\n\n".join([heading, *_class(target, members, level)])
    node = _definition(target)
    assert isinstance(node, _Function)
    return "\n\n".join([heading, _signature(node, name, _source(target)), as_markdown(inspect.getdoc(target) or "")])


def _class(kind: type, members: str | None, level: int) -> Iterator[str]:
    name = kind.__name__
    yield _constructor(kind)
    yield as_markdown(inspect.getdoc(kind) or "")
    if documented := [f"- `{field}`: {inline(' '.join(text.split()))}" for field, text in _documented_fields(kind)]:
        yield "\n".join(documented)
    wanted = None if members in (None, "*") else {member.strip() for member in members.split(",") if member.strip()}
    owners = [base for base in kind.__mro__ if base is kind or (members == "*" and _is_ours(base))]
    described: set[str] = set()
    for owner in owners:
        for method in _methods(owner):
            if method.name in described or (wanted is not None and method.name not in wanted):
                continue
            described.add(method.name)
            yield f"{'#' * (level + 2)} {name}.{method.name}"
            yield _signature(method, f"{name}.{method.name}", _source(owner))
            yield as_markdown(_docstring_of(kind, method.name))
    if wanted is not None and wanted - described:
        raise ValueError(f"{name} has no public methods {sorted(wanted - described)}.")


def _is_ours(kind: type) -> bool:
    return kind.__module__.split(".")[0] in ("backends", "coordinator_actor", "spark_bridge")


def _docstring_of(kind: type, name: str) -> str:
    """Return the docstring of a method, or that of the method that it overrides."""
    for owner in filter(_is_ours, kind.__mro__):
        for method in _methods(owner):
            if method.name == name and (text := ast.get_docstring(method)):
                return text
    return ""


@dataclasses.dataclass(frozen=True)
class _Source:
    """The source of a function or class, and the names that its module defines."""

    text: str
    names: Mapping[str, Any] = dataclasses.field(hash=False)

    def segment(self, node: ast.AST) -> str:
        """Return the source of ``node`` as one line."""
        return " ".join((ast.get_source_segment(self.text, node) or "").split())

    def default(self, node: ast.expr) -> str:
        """Return the source of a default, or the value of a constant that it names."""
        name = self.segment(node)
        value = self.names.get(name) if _CONSTANT.fullmatch(name) else None
        if isinstance(value, str):
            return json.dumps(value)
        return repr(value) if isinstance(value, (int, float)) else name


@cache
def _source(target: Any) -> _Source:
    return _Source(textwrap.dedent(inspect.getsource(target)), vars(inspect.getmodule(target)))


def _definition(target: Any) -> ast.stmt:
    return ast.parse(_source(target).text).body[0]


def _body(kind: type) -> Sequence[ast.stmt]:
    definition = _definition(kind)
    assert isinstance(definition, ast.ClassDef)
    return definition.body


def _decorators(method: _Function) -> set[str]:
    return {ast.unparse(decorator) for decorator in method.decorator_list}


def _methods(kind: type) -> list[_Function]:
    """Return the public methods and properties of a class itself, without setters and overloads."""
    methods = [node for node in _body(kind) if isinstance(node, _Function) and not node.name.startswith("_")]
    return [m for m in methods if not any(d.endswith((".setter", "overload")) for d in _decorators(m))]


def _fields(kind: type) -> Iterator[tuple[ast.AnnAssign, _Source]]:
    for owner in reversed([base for base in kind.__mro__ if _is_ours(base)]):
        for node in _body(owner):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                is_public = not node.target.id.startswith("_") and "ClassVar" not in ast.unparse(node.annotation)
                if is_public:
                    yield node, _source(owner)


def _documented_fields(kind: type) -> Iterator[tuple[str, str]]:
    body = _body(kind)
    for node, after in pairwise(body):
        if isinstance(node, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            name = ast.unparse(node.target)
            if not name.startswith("_"):
                yield name, str(after.value.value)


def _constructor(kind: type) -> str:
    init = next((n for n in _body(kind) if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)
    if init is not None:
        return _code(f"class {kind.__name__}", _arguments(init, _source(kind))[1:], "")
    if dataclasses.is_dataclass(kind) or issubclass(kind, msgspec.Struct):
        return _code(f"class {kind.__name__}", [source.segment(node) for node, source in _fields(kind)], "")
    return f"```py\nclass {kind.__name__}\n```"


def _signature(function: _Function, name: str, source: _Source) -> str:
    decorators = _decorators(function)
    result = f" -> {source.segment(function.returns)}" if function.returns is not None else ""
    if {"property", "cached_property"} & set(decorators):
        return f"```py\nproperty {name}{result.replace(' ->', ':', 1)}\n```"
    words = sorted(decorators & {"classmethod", "staticmethod"})
    words += ["async"] if isinstance(function, ast.AsyncFunctionDef) else []
    is_method = "." in name and "staticmethod" not in decorators
    return _code(" ".join([*words, name]), _arguments(function, source)[1 if is_method else 0 :], result)


def _arguments(function: _Function, source: _Source) -> list[str]:
    """Return the arguments as the source has them, with ``*`` and ``/`` where they belong."""
    of = function.args
    positional = [*of.posonlyargs, *of.args]
    defaults: list[ast.expr | None] = [*[None] * (len(positional) - len(of.defaults)), *of.defaults]
    made = [_argument(source, one, default) for one, default in zip(positional, defaults, strict=True)]
    if of.posonlyargs:
        made.insert(len(of.posonlyargs), "/")
    if of.vararg:
        made.append(f"*{_argument(source, of.vararg, None)}")
    elif of.kwonlyargs:
        made.append("*")
    made += [_argument(source, one, default) for one, default in zip(of.kwonlyargs, of.kw_defaults, strict=True)]
    return [*made, f"**{_argument(source, of.kwarg, None)}"] if of.kwarg else made


def _argument(source: _Source, argument: ast.arg, default: ast.expr | None) -> str:
    return source.segment(argument) + (f" = {source.default(default)}" if default is not None else "")


def _code(head: str, arguments: list[str], result: str) -> str:
    line = f"{head}({', '.join(arguments)}){result}"
    if len(line) > WIDTH:
        line = "\n".join([f"{head}(", *(f"    {argument}," for argument in arguments), f"){result}"])
    return f"```py\n{line}\n```"
