"""No two things share a name: each name is defined in one product module only."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("backends", "coordinator_actor", "deploy", "pyspark_ray_statestore", "ray_statestore", "spark_bridge")
EXCEPTED = {"P", "T", "app", "hosts", "log", "main", "run", "scan", "sql"}
"""Conventions: type variables, a module's logger, Typer's and FastAPI's ``app``. The functions of commands and pages
have their names, as ``hosts``, ``scan``, ``sql``, and ``run``, which is a subject of traces, too.
"""
HTTP_MODELS = Path("spark_bridge/state_http/models.py")
"""Its classes are schemas of the OpenAPI description, which names each schema after the object that it describes."""


def defined(body: list[ast.stmt]) -> Iterator[str]:
    """Give the names that a module defines at its top level. ``NAME = module.NAME`` defines none: it exports one."""
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            of_other = node.value.attr if isinstance(node.value, ast.Attribute) else None
            names = (n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name))
            yield from (name for name in names if name != of_other)
        elif isinstance(node, ast.If | ast.Try):
            yield from defined([*node.body, *node.orelse])


def shared_names(modules: dict[Path, str]) -> dict[str, list[str]]:
    """Return the names that several modules define, with these modules; private names and ``EXCEPTED`` do not count."""
    places: dict[str, list[str]] = {}
    for path, source in sorted(modules.items()):
        for name in set(defined(ast.parse(source).body)):
            if not name.startswith("_") and name not in EXCEPTED:
                places.setdefault(name, []).append(str(path))
    return {name: found for name, found in places.items() if len(found) > 1}


def test_names_that_count() -> None:
    first = "import x\nif x:\n    LIMIT, OTHER = 1, 2\nError = x.Error\n_own = log = 0\ndef f():\n    inner = 1\n"
    second = "LIMIT: int = 3\nclass Error: ...\ndef inner(): ...\n_own = log = 1\n"
    assert shared_names({Path("a.py"): first, Path("b.py"): second}) == {"LIMIT": ["a.py", "b.py"]}


def test_no_two_modules_define_the_same_name() -> None:
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    modules = {path.relative_to(ROOT): path.read_text() for path in paths}
    assert len(modules) > 200
    del modules[HTTP_MODELS]
    shared = shared_names(modules)
    assert shared == {}, f"Several modules define these names; give each thing a descriptive name: {shared}"
