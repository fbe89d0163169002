"""The tables that SQL may name: the state variables of running queries, and the table that a name means."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from backends.encoding.operator_schema import TIMERS

_IDENTIFIER = r'(?:"(?:[^"]|"")+"|[^\W\d][\w$]*)'
_LEXEMES = re.compile(
    r"[eE]'(?:[^'\\]|\\.|'')*'|'(?:[^']|'')*'|--[^\n]*|/\*.*?\*/|\$(?P<tag>\w*)\$.*?\$(?P=tag)\$"
    rf"|(?P<name>{_IDENTIFIER}(?:\s*\.\s*{_IDENTIFIER}){{0,2}})",
    re.DOTALL,
)
_PART = re.compile(_IDENTIFIER)


def candidate_names(statement: str) -> list[tuple[str, ...]]:
    """Return the names in a SQL statement that may be names of tables: each is one to three identifiers, unquoted.

    There are more names than tables, because columns and keywords are names too.
    """
    found: dict[tuple[str, ...], None] = {}
    for lexeme in _LEXEMES.finditer(statement):
        if lexeme["name"] is not None:
            parts = _PART.findall(lexeme["name"])
            found[tuple(p[1:-1].replace('""', '"') if p[0] == '"' else p for p in parts)] = None
    return list(found)


@dataclass(frozen=True)
class CatalogTable:
    """One state variable of one operator of a running query. ``key`` are the grouping key's columns, without a window.

    ``is_only``: the operator has no other state variable. ``has_ranges``: its keys are stored in the order of ``key``.
    """

    query: str | None
    query_id: str
    run_id: str
    operator: str
    state: str
    key: tuple[str, ...]
    is_only: bool
    has_ranges: bool = True

    @property
    def names(self) -> list[tuple[str, ...]]:
        """The names of the table in SQL; other tables may have some of the same names."""
        short: list[tuple[str, ...]] = [(self.operator, self.state), *([(self.operator,)] if self.is_only else [])]
        queries = [q for q in (self.query, self.query_id, self.run_id) if q]
        return [*short, *((q, *name) for q in queries for name in short)]

    @property
    def full_name(self) -> str:
        """The name to write in SQL so that no other table is meant: with the query."""
        query = self.query_id if self.query_id == self.run_id else self.query or self.query_id
        parts = [query, self.operator, *([] if self.is_only else [self.state])]
        return ".".join(quoted(p) for p in parts)


def catalog(operators: Sequence[Mapping[str, Any]]) -> list[CatalogTable]:
    """Return the tables of a client's ``operators()``.

    Where the copy of a checkpoint runs beside the original, both have one query id: their run ids name them instead.
    """
    runs: dict[str, set[str]] = {}
    for operator in operators:
        runs.setdefault(operator["query_id"], set()).add(operator["run_id"])
    return [
        table if len(runs[table.query_id]) == 1 else replace(table, query_id=table.run_id)
        for operator in operators
        for table in catalog_tables(operator)
    ]


def catalog_tables(operator: Mapping[str, Any]) -> list[CatalogTable]:
    """Return the tables of one operator; ``operator`` is one of a client's ``operators()``."""
    states = operator["state"]
    return [
        CatalogTable(
            query=operator["query_name"],
            query_id=operator["query_id"],
            run_id=operator["run_id"],
            operator=operator["operator"],
            state=state["name"],
            key=tuple(name for name in state["key"] if name != state.get("window")),
            is_only=len(states) == 1,
            # Windows and timers are stored by time first.
            has_ranges="window" not in state and state["kind"] != TIMERS,
        )
        for state in states
    ]


class UnclearNameError(Exception):
    """Several tables have a name."""


def resolve(name: tuple[str, ...], known: Sequence[CatalogTable]) -> CatalogTable | None:
    """Return the table that a name in SQL means; None if there is none. Case counts only if it tells two tables apart.

    A single name with dots is also read as several parts. Raises ``UnclearNameError``, which names the tables that
    there are.
    """
    readings = [name, *([tuple(name[0].split("."))] if len(name) == 1 and "." in name[0] else [])]
    for fold in (str, str.lower):
        for parts in readings:
            wanted = tuple(map(fold, parts))
            found = [s for s in known if wanted in (tuple(map(fold, n)) for n in s.names)]
            if len(found) == 1:
                return found[0]
            if found:
                options = ", ".join(sorted(s.full_name for s in found))
                raise UnclearNameError(f"{'.'.join(map(quoted, name))} can be any of {options}; write which one.")
            operators = [s for s in known if wanted in {(fold(s.operator),), (fold(s.query or ""), fold(s.operator))}]
            if operators:
                options = ", ".join(sorted(s.full_name for s in operators))
                raise UnclearNameError(
                    f"{'.'.join(map(quoted, name))} has several state variables: {options}; write which one."
                )
    return None


def quoted(identifier: str) -> str:
    """Return an identifier as SQL writes it, in quotes where it needs them."""
    if re.fullmatch(r"[a-z_][a-z0-9_]*", identifier):
        return identifier
    return '"' + identifier.replace('"', '""') + '"'
