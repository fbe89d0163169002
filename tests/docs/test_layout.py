"""The drawings of packages in docs/explanation/layout.md are true: all packages are there, no import runs upwards."""

from __future__ import annotations

import re
import sys

import grimp
import pytest

from tests.docs.pages import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PAGE = ROOT / "docs" / "explanation" / "layout.md"
STOREYS = (
    ("pyspark_ray_statestore", "ray_statestore"),
    ("spark_bridge",),
    ("coordinator_actor",),
    ("backends",),
)
"""The root packages from top to bottom; those of one storey do not import each other."""
ROOTS = [root for storey in STOREYS for root in storey]


def drawn() -> dict[str, list[list[str]]]:
    """The lines of each package that is drawn, from top to bottom: packages and modules by their dotted names.

    A package that has nothing but its ``__init__.py`` has one line with a dot, and no names in it.
    """
    blocks = re.findall(r"<!-- layout: .*? -->\n```text\n(.*?)```", PAGE.read_text(), re.DOTALL)
    lines: dict[str, list[list[str]]] = {}
    root = ""
    for line in "".join(blocks).splitlines():
        if not line.strip():
            continue
        left, _, right = line.partition("|")
        root = left.strip() or root
        names = re.split(r"\s{2,}", right.strip())[0]
        found = [] if names == "." else [f"{root}.{name.strip()}" for name in names.split(",")]
        lines.setdefault(root, []).append(found)
    return lines


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph(*ROOTS, exclude_type_checking_imports=True, cache_dir=None)


def place_of(module: str, places: dict[str, int]) -> str | None:
    """The package or module of the drawing that a module belongs to: the one with the longest name."""
    parts = module.split(".")
    return next((name for i in range(len(parts), 1, -1) if (name := ".".join(parts[:i])) in places), None)


@pytest.mark.parametrize("root", drawn())
def test_every_module_is_drawn(graph: grimp.ImportGraph, root: str) -> None:
    places = {name: i for i, line in enumerate(drawn()[root]) for name in line}
    modules = {m for m in graph.modules if m.startswith(f"{root}.")}
    packages_of_subpackages = {f"{root}.queryable"}
    assert {m for m in modules if place_of(m, places) is None} <= packages_of_subpackages
    assert [name for name in places if name not in graph.modules] == []


@pytest.mark.parametrize("root", drawn())
def test_no_import_runs_upwards(graph: grimp.ImportGraph, root: str) -> None:
    places = {name: i for i, line in enumerate(drawn()[root]) for name in line}
    upwards = set()
    for module in graph.modules:
        importer = place_of(module, places)
        for imported in graph.find_modules_directly_imported_by(module):
            place = place_of(imported, places)
            if importer and place and importer != place and places[place] <= places[importer]:
                upwards.add(f"{importer} imports {place}")
    assert sorted(upwards) == []


@pytest.mark.parametrize("root", ["spark_bridge", "coordinator_actor", "backends"])
def test_the_contracts_of_the_linter_say_the_same(root: str) -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    drawing = drawn()[root]
    of_layers = (contract["layers"] for contract in contracts if contract["type"] == "layers")
    (layers,) = (layers for layers in of_layers if set(layers[0].split(" | ")) & set(drawing[0]))
    lines = []
    for layer in layers:
        names = {name.strip() for name in layer.split("|")}
        (line,) = (i for i, line in enumerate(drawing) if names & set(line))
        assert names <= set(drawing[line]), f"{layer} is not one line of the drawing"
        lines.append(line)
    assert lines == sorted(set(lines))


def test_roots_are_in_layers(graph: grimp.ImportGraph) -> None:
    assert [name for name in drawn() if "." not in name] == list(ROOTS)
    for i, storey in enumerate(STOREYS):
        below = {root for lower in STOREYS[i + 1 :] for root in lower}
        for module in (m for m in graph.modules if m.split(".")[0] in storey):
            imported = {m.split(".")[0] for m in graph.find_modules_directly_imported_by(module)}
            assert imported <= {module.split(".")[0], *below}, module


def test_ray_and_spark_are_imported_where_the_page_says() -> None:
    def importers(package: str, of: str) -> set[str]:
        pattern = re.compile(rf"^\s*(?:import {package}\b|from {package}\b)", re.MULTILINE)
        files = [ROOT / of] if of.endswith(".py") else sorted((ROOT / of).rglob("*.py"))
        return {str(p.relative_to(ROOT)) for p in files if pattern.search(p.read_text())}

    assert importers("ray", "backends") == importers("pyspark", "backends") == set()
    assert importers("pyspark", "coordinator_actor") == importers("pyspark", "spark_bridge/state_http") == set()
    assert importers("ray", "spark_bridge/state_http") == {"spark_bridge/state_http/serve_app.py"}
    assert importers("ray", "pyspark_ray_statestore") == importers("ray", "ray_statestore") == set()
    assert importers("ray", "coordinator_actor") == {"coordinator_actor/actor.py", "coordinator_actor/reference.py"}
    within = {"/".join(p.split("/")[:2]) for p in importers("ray", "spark_bridge")} - {"spark_bridge/queryable"}
    within -= {"spark_bridge/state_data", "spark_bridge/state_surgery"}
    packages = ("host_actor.py", "serving.py", "session", "cli", "demo", "overview", "state_http")
    assert within == {f"spark_bridge/{name}" for name in packages}
    assert set(importers("ray", "spark_bridge/overview")) == {"spark_bridge/overview/from_cluster.py"}
    assert set(importers("ray", "spark_bridge/state_data")) == {"spark_bridge/state_data/ray_dataset.py"}
    by_hand = {f"spark_bridge/state_surgery/{name}.py" for name in ("new_state", "declared_operators")}
    assert set(importers("ray", "spark_bridge/state_surgery")) == by_hand
    assert set(importers("ray", "spark_bridge/queryable")) == {"spark_bridge/queryable/client/discovery.py"}
    spark_free = ("host", "host_actor.py", "flight_server.py", "queryable", "transport", "aggregates", "state_format")
    assert {of: importers("pyspark", f"spark_bridge/{of}") for of in spark_free} == {of: set() for of in spark_free}
