"""docs/how-to/page.md has a row for every kind of fault that the overview finds."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.docs.pages import ROOT

PAGE = ROOT / "docs" / "how-to" / "page.md"
SOURCES = sorted((ROOT / "spark_bridge").rglob("*.py"))


def kinds_of(source: str) -> set[str]:
    """Return the kinds of a module's faults. Raises ``AssertionError`` for a kind that is not a constant."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    faults = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "Fault"]
    return {kind for call in faults for kind in _constants(call.args[1])}


def _constants(kind: ast.expr) -> Iterator[str]:
    if isinstance(kind, ast.IfExp):
        yield from _constants(kind.body)
        yield from _constants(kind.orelse)
    else:
        assert isinstance(kind, ast.Constant) and isinstance(kind.value, str), ast.unparse(kind)
        yield kind.value


def test_the_table_has_every_fault() -> None:
    found = set().union(*(kinds_of(path.read_text()) for path in SOURCES))
    assert len(found) > 20
    (table,) = re.findall(r"^\| the page says \| .*?\n\n", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    listed = {kind for row in table.splitlines()[2:] if row for kind in re.findall(r"`([^`]+)`", row.split("|")[1])}
    assert listed == found
