"""What several test modules need is in modules of helpers: no test module imports from another one."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent


def imported(source: str) -> Iterator[str]:
    """Give the dotted names of all that a module imports, the imported names included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module or ''}.{alias.name}" for alias in node.names)


def modules_imported_from(source: str) -> set[str]:
    """Return the test modules that a module imports from."""
    return {part for name in imported(source) for part in name.split(".") if part.startswith("test_")}


def test_imports_of_test_modules_are_found() -> None:
    source = (
        "import a.test_b\nfrom . import test_c\ndef f():\n    from .test_d import World\n"
        "from tests.effort import effort"
    )
    assert modules_imported_from(source) == {"test_b", "test_c", "test_d"}


def test_no_module_imports_from_a_test_module() -> None:
    sources = {str(p.relative_to(ROOT)): p.read_text() for p in ROOT.rglob("*.py")}
    modules = [Path(path).stem for path in sources if Path(path).stem.startswith("test_")]
    assert len(modules) > 100
    # Only a few modules name a test module; only those are parsed.
    names_one = re.compile(rf"\b(?:{'|'.join(modules)})\b")
    found = {path: modules_imported_from(source) for path, source in sources.items() if names_one.search(source)}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "module",
    ["task.task_store", "task.state_task", "operators.aggregate_task", "operators.join_task", "stateful.process_task"],
)
def test_a_worker_of_spark_imports_neither_ray_nor_storage(module: str) -> None:
    """Each worker process pays for the imports of its first task: Ray and object stores would take half a second."""
    program = (
        f"import sys, spark_bridge.{module}; print(*{{'ray', 'obstore', 'rocksdict', 'duckdb'}} & {{*sys.modules}})"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert ran.stdout.strip() == ""


def test_a_lookup_imports_no_ray_in_a_worker_of_spark() -> None:
    """The task reads from storage where no host answers, so it needs object stores."""
    program = "import sys, spark_bridge.lookups; print(*{'ray', 'rocksdict', 'duckdb'} & {*sys.modules})"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert ran.stdout.strip() == ""
