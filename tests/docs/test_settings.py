"""docs/reference/configuration.md names every setting and every environment variable that the code reads."""

from __future__ import annotations

import re

from tests.docs.pages import ROOT

PAGE = ROOT / "docs" / "reference" / "configuration.md"
SOURCES = [p for name in ("backends", "coordinator_actor", "spark_bridge") for p in sorted((ROOT / name).rglob("*.py"))]


def found(pattern: str, *, without_demo: bool = False) -> set[str]:
    sources = [p for p in SOURCES if not (without_demo and "demo" in p.parts)]
    return {name for p in sources for name in re.findall(pattern, p.read_text())}


def test_every_setting_of_ours_is_on_the_page() -> None:
    names = found(r'"(spark\.statestore\.\w+)"')
    assert len(names) > 3
    assert {n for n in names if f"`{n}`" not in PAGE.read_text()} == set()


def test_every_environment_variable_is_on_the_page() -> None:
    read = found(r'environ(?:\.get\(|\[|\.setdefault\()"(\w+)"', without_demo=True)
    read |= found(r'"((?:STATESTORE|RAY_TLS)_\w+)"', without_demo=True)
    ours = {
        n for n in read if n not in ("PATH", "PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON") and not n.startswith("AWS_")
    }
    assert len(ours) > 5
    assert {n for n in ours if f"`{n}`" not in PAGE.read_text()} == set()
