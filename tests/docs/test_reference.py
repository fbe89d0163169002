"""The generated blocks of docs/reference are those of the code, and name everything that users import.

docs/reference/configuration.md names every setting and every environment variable that the code reads, and
docs/how-to/page.md has a row for every kind of fault that the overview finds.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import ray_statestore
import spark_bridge
from tests.docs.pages import ROOT
from tests.docs.reference import END, pages, rendered, without_generated
from tests.docs.reference.docstrings import as_markdown


@pytest.mark.parametrize("path", pages(), ids=lambda path: path.name)
def test_generated_blocks_are_those_of_the_code(path: Path) -> None:
    page = path.read_text()
    assert rendered(page) == page, "run `make reference`"


def test_every_public_name_has_a_place() -> None:
    text = "\n".join(path.read_text() for path in pages())
    described = set(re.findall(r"^#+ (\w+)$", text, re.MULTILINE))
    described |= {
        name.rpartition(".")[2] for name in re.findall(r"^<!-- generated: \w+ (\S+) -->$", text, re.MULTILINE)
    }
    assert {name for name in ray_statestore.__all__ if name not in described} == set()


def test_a_changed_docstring_changes_its_page(monkeypatch: pytest.MonkeyPatch) -> None:
    page = f"# Page\n\n## Sessions\n\n<!-- generated: api spark_bridge: stop_spark -->\n{END}\n"
    monkeypatch.setattr(spark_bridge.stop_spark, "__doc__", "End ``all``.")
    assert rendered(page) == (
        "# Page\n\n## Sessions\n\n<!-- generated: api spark_bridge: stop_spark -->\n\n"
        f"### stop_spark\n\n```py\nstop_spark() -> None\n```\n\nEnd `all`.\n\n{END}\n"
    )


def test_lines_that_generate_nothing_are_errors() -> None:
    with pytest.raises(ValueError, match="Unknown generator 'opinions'"):
        rendered(f"# Page\n\n<!-- generated: opinions spark_bridge -->\n{END}\n")
    with pytest.raises(ValueError, match="1 lines begin a generated block, 0 end one"):
        rendered("# Page\n\n<!-- generated: module spark_bridge.functions -->\n")
    with pytest.raises(ValueError, match=r"StateScan has no public methods \['no_method'\]"):
        rendered(f"# Page\n\n<!-- generated: api spark_bridge: StateScan(no_method) -->\n{END}\n")


def test_prose_without_generated_blocks_keeps_its_lines() -> None:
    page = f"# Page\n\n<!-- generated: metrics host -->\n\n| a |\n\n{END}\nLast.\n"
    assert without_generated(page).splitlines()[7] == "Last."
    assert "| a |" not in without_generated(page)


def test_docstrings_as_markdown() -> None:
    docstring = (
        "Take ``*args`` of ``A``s, a < b, **one** * c:\n\n    f(1)\n\n- ``x``: a list\n  of one.\n\n    % run\n\nEnd."
    )
    assert as_markdown(docstring) == (
        "Take `*args` of `A`s, a \\< b, **one** * c:\n\n```py\nf(1)\n```\n\n- `x`: a list\n  of one.\n\n"
        "```text\n% run\n```\n\nEnd."
    )


FAULTS_PAGE = ROOT / "docs" / "how-to" / "page.md"
BRIDGE_SOURCES = sorted((ROOT / "spark_bridge").rglob("*.py"))


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
    found = set().union(*(kinds_of(path.read_text()) for path in BRIDGE_SOURCES))
    assert len(found) > 20
    (table,) = re.findall(r"^\| the page says \| .*?\n\n", FAULTS_PAGE.read_text(), re.DOTALL | re.MULTILINE)
    listed = {kind for row in table.splitlines()[2:] if row for kind in re.findall(r"`([^`]+)`", row.split("|")[1])}
    assert listed == found


SETTINGS_PAGE = ROOT / "docs" / "reference" / "configuration.md"
SOURCES = [p for name in ("backends", "coordinator_actor", "spark_bridge") for p in sorted((ROOT / name).rglob("*.py"))]


def found(pattern: str, *, without_demo: bool = False) -> set[str]:
    sources = [p for p in SOURCES if not (without_demo and "demo" in p.parts)]
    return {name for p in sources for name in re.findall(pattern, p.read_text())}


def test_every_setting_of_ours_is_on_the_page() -> None:
    names = found(r'"(spark\.statestore\.\w+)"')
    assert len(names) > 3
    assert {n for n in names if f"`{n}`" not in SETTINGS_PAGE.read_text()} == set()


def test_every_environment_variable_is_on_the_page() -> None:
    read = found(r'environ(?:\.get\(|\[|\.setdefault\()"(\w+)"', without_demo=True)
    read |= found(r'"((?:STATESTORE|RAY_TLS)_\w+)"', without_demo=True)
    ours = {
        n for n in read if n not in ("PATH", "PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON") and not n.startswith("AWS_")
    }
    assert len(ours) > 5
    assert {n for n in ours if f"`{n}`" not in SETTINGS_PAGE.read_text()} == set()
