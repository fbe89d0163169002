"""Every public name is what its name says when a user imports it first, in a process that has imported nothing else
of ours.

The entry points that pyproject.toml declares exist, whatever an older installation says.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


import ray_statestore
from backends.lazy_names import EXTRAS
from tests.effort import effort
from tests.spark_bridge.state_data.format_fixtures import Stored

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PACKAGES = ("backends", "coordinator_actor", "spark_bridge")
NAMES = [(package, name) for package in PACKAGES for name in importlib.import_module(package).__all__]
MODULES = {("spark_bridge", "functions")}
"""Public names of modules; all others are classes, functions and type aliases."""

LOOK = """
import json, sys

def forget():
    # As in a new process: nothing of ours is imported yet. What others have made stays, for it costs most of the time.
    for module in [m for m in sys.modules if m.partition(".")[0] in ("backends", "coordinator_actor", "spark_bridge")]:
        del sys.modules[module]

def look(package, name):
    scope = {}
    exec(f"from {package} import {name} as found", scope)
    found = scope["found"]
    return type(found).__name__, getattr(found, "__name__", None), getattr(found, "__module__", None)

for names in json.loads(sys.argv[1]):
    forget()
    for package, name in names:
        try:
            said = look(package, name)
        except BaseException as error:
            said = ("error", repr(error), None)
        print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def seen() -> dict[tuple[str, str], tuple[str, str | None, str | None]]:
    """By package and name: the kind of the object, its own name and its module, as the first import gives them."""
    homes: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for package, name in NAMES:
        # The first import of a name loads the same modules as that of another name from the same module.
        home = importlib.import_module(package)._HOMES.get(name, name)
        # A usual run imports first only one name of each directory: lint-imports refuses circles within one.
        homes.setdefault((package, effort(home.rpartition(".")[0], home)), []).append((package, name))
    program = [sys.executable, "-c", LOOK, json.dumps([*homes.values()])]
    ran = subprocess.run(program, capture_output=True, text=True, check=True, timeout=120)
    names = [name for group in homes.values() for name in group]
    return {name: tuple(json.loads(line)) for name, line in zip(names, ran.stdout.splitlines(), strict=True)}


@pytest.mark.parametrize(("package", "name"), NAMES)
def test_a_public_name_is_its_definition(
    package: str, name: str, seen: dict[tuple[str, str], tuple[str, str | None, str | None]]
) -> None:
    kind, own_name, module = seen[package, name]
    assert kind != "error", own_name
    if (package, name) in MODULES:
        assert (kind, own_name) == ("module", f"{package}.{name}")
        return
    assert kind != "module"
    # Once it is imported, a module of this name would stand where the name is looked up.
    assert importlib.util.find_spec(f"{package}.{name}") is None
    home = importlib.import_module(package)._HOMES[name]
    if name[0].islower():
        assert (kind, own_name, module) == ("function", name, home)
    elif own_name is not None and kind != "_UnionGenericAlias":
        assert (own_name, module) == (name, home)


@pytest.mark.parametrize("package", PACKAGES)
def test_the_list_of_public_names_is_sorted_and_complete(package: str) -> None:
    imported = importlib.import_module(package)
    assert sorted(imported.__all__) == sorted({*imported._HOMES, *(n for p, n in MODULES if p == package)})
    with pytest.raises(AttributeError, match="nothing_like_this"):
        _ = imported.nothing_like_this


def test_ray_statestore_has_every_public_name() -> None:
    """One import gives what the three packages give, and no two of them give the same name."""
    names = [name for _, name in NAMES]
    assert sorted(ray_statestore.__all__) == sorted(names) == sorted({*names})
    for package, name in NAMES:
        assert getattr(ray_statestore, name) is getattr(importlib.import_module(package), name), name
    with pytest.raises(AttributeError, match=r"no attribute 'nothing_like_this'; it has .*init_spark"):
        _ = ray_statestore.nothing_like_this


def test_importing_ray_statestore_loads_neither_ray_nor_pyspark() -> None:
    program = "import sys, ray_statestore; print(*{'ray', 'pyspark', 'pyarrow', 'rocksdict'} & {*sys.modules})"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert ran.stdout.strip() == ""


@pytest.mark.parametrize("kind", ["another directory", "overwritten"])
@pytest.mark.parametrize("package", PACKAGES)
def test_another_package_of_our_name_is_reported(tmp_path: Path, package: str, kind: str) -> None:
    """A user's project may have a directory ``backends``, and another distribution may install one."""
    own = tmp_path / "site-packages"
    for name in (*PACKAGES, "ray_statestore"):
        shutil.copytree(ROOT / name, own / name, ignore=shutil.ignore_patterns("__pycache__"))
    other = tmp_path / "project" / package if kind == "another directory" else own / package
    shutil.rmtree(other, ignore_errors=True)
    other.mkdir(parents=True)
    other.joinpath("__init__.py").write_text("NAME = 'another'\n")
    program = [sys.executable, "-S", "-c", "import ray_statestore"]
    where: dict[str, Any] = {"cwd": tmp_path, "env": {"PYTHONPATH": f"{tmp_path / 'project'}:{own}"}, "timeout": 60}
    for command in (program, [sys.executable, "-S", "-m", "ray_statestore", "--help"]):
        ran = subprocess.run(command, capture_output=True, text=True, check=False, **where)
        message = ran.stderr.splitlines()[-1]
        assert ran.returncode == 1 and f"its own package {package!r}" in message and str(other) in message
    # The remedy: without the other one, all packages are found.
    shutil.rmtree(other)
    if kind == "overwritten":
        shutil.copytree(ROOT / package, other)
    subprocess.run(program, check=True, **where)


@pytest.mark.parametrize(
    ("package", "name", "extra"),
    [
        ("ray", "init_spark", "cluster"),
        ("pyspark", "aggregate", "spark"),
        ("rocksdict", "RocksDBStateStoreProvider", "rocksdb"),
    ],
)
def test_name_whose_package_is_missing_names_the_extra(package: str, name: str, extra: str) -> None:
    program = (
        f"import sys; sys.modules[{package!r}] = None\n"
        f"try:\n    from ray_statestore import {name}\nexcept ImportError as error:\n    print(error)"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert f"{name} needs the package {package}" in ran.stdout
    assert f"pip install 'ray-statestore[{extra}]'" in ran.stdout
    assert any(line.startswith(package) for line in PROJECT["optional-dependencies"][extra])


MISSING = {
    "connection": ("ray", "QueryableStateClient.connect()", "cluster"),
    "pandas frame": ("pandas", "results.formed(table, 'pandas')", "pandas"),
    "pandas frame of SQL": ("pandas", "answer.df()", "pandas"),
    "Polars frame": ("polars", "results.formed(table, 'polars')", "polars"),
    "Polars frame of SQL": ("polars", "answer.pl()", "polars"),
    "SQL": ("duckdb", "import_duckdb()", "sql"),
    "HTTP": ("fastapi", "import_module('spark_bridge.state_http.app')", "serve"),
    "Feast": ("feast", "import_module('ray_statestore.feast')", "feast"),
    "page over HTTP": ("jinja2", "import_module('spark_bridge.state_http.app')", "ui"),
}
"""What a program may do without having imported an optional package: package, call, and the extra that brings it."""


@pytest.mark.parametrize("what", MISSING)
def test_call_whose_package_is_missing_names_the_extra(what: str) -> None:
    package, call, extra = MISSING[what]
    program = (
        "import sys; from importlib import import_module; import pyarrow as pa\n"
        "from ray_statestore import QueryableStateClient\n"
        "from spark_bridge.queryable.client import results\n"
        "from spark_bridge.queryable.sql.sql import StateRelation, import_duckdb\n"
        f"sys.modules[{package!r}] = None\n"
        "table, answer = pa.table({'a': [1]}), StateRelation.__new__(StateRelation)\n"
        f"try:\n    {call}\nexcept Exception as error:\n    print(error)"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert f"pip install 'ray-statestore[{extra}]'." in ran.stdout


BY_OTHERS = {
    "confluent_kafka": "confluent-kafka",
    "fastapi": "ray[serve]",
    "hdfs_native": "hdfs-native",
    "opentelemetry": "opentelemetry-sdk",
    "py4j": "pyspark",
    "pydantic": "ray[serve]",
    "requests": "ray[default]",
}
"""Packages that come with another one, or whose distribution has another name."""


def test_each_import_of_another_package_is_a_dependency_or_has_an_extra() -> None:
    """Else a user would get a bare ``ModuleNotFoundError``."""
    required = {re.split(r"[^\w-]", line)[0] for line in PROJECT["dependencies"]}
    seen: set[str] = set()
    for path in (path for package in (*PACKAGES, "ray_statestore") for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                seen |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                seen.add((node.module or "").partition(".")[0])
    # Type checkers alone import typing_extensions.
    others = seen - {*sys.stdlib_module_names, *PACKAGES, "ray_statestore", "typing_extensions"} - required
    assert len(others) > 10
    assert others - EXTRAS.keys() == set()
    for package, extra in EXTRAS.items():
        brought = BY_OTHERS.get(package, package)
        assert any(line.startswith(brought) for line in PROJECT["optional-dependencies"][extra]), (package, extra)


def test_state_in_storage_is_read_without_spark_and_ray(tmp_path: Path) -> None:
    """What the pages promise of ``CheckpointClient``, ``state_table`` and savepoints."""
    stored = Stored("file").checkpoint
    program = (
        "import sys\n"
        "for package in ('ray', 'pyspark', 'py4j'):\n    sys.modules[package] = None\n"
        "from ray_statestore import CheckpointClient, list_savepoints, state_batches, state_table\n"
        f"client = CheckpointClient.open({str(stored)!r})\n"
        f"table = state_table({str(stored)!r}, 'totals')\n"
        f"assert client.count('totals') == table.num_rows > 0\n"
        f"assert sum(b.num_rows for b in state_batches({str(stored)!r}, 'totals')) == table.num_rows\n"
        f"assert list_savepoints({str(tmp_path)!r}) == []\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@pytest.mark.slow
def test_command_line_of_a_client_outside_needs_no_extra(tmp_path: Path) -> None:
    """A command that needs more names the extra, and the other commands run."""
    program = (
        "import sys\n"
        "for package in ('ray', 'pyspark', 'py4j', 'rocksdict', 'psutil', 'requests', 'duckdb', 'starlette'):\n"
        "    sys.modules[package] = None\n"
        "from spark_bridge.cli.main import main\n"
        "sys.argv = ['statestore', *sys.argv[1:]]\n"
        "main()"
    )

    def statestore(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", program, *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    shown = statestore("--help")
    assert shown.returncode == 0 and "doctor" in shown.stdout
    assert statestore("--version").stdout == f"ray-statestore {metadata.version('ray-statestore')}\n"
    for words in (["doctor"], ["run", "--", "x"], ["status"]):
        refused = statestore(*words)
        assert refused.returncode == 2 and "pip install 'ray-statestore[cluster]'" in refused.stderr
    checkpoint = statestore("checkpoints", "--checkpoint", str(tmp_path))
    assert checkpoint.returncode == 2 and "no query.json" in checkpoint.stderr


def test_command_line_of_a_machine_without_spark() -> None:
    """A machine that serves HTTP has Ray only, and doctor says what is missing for streams."""
    program = (
        "import sys\n"
        "from importlib import import_module, metadata\n"
        "for package in ('pyspark', 'py4j', 'raydp'):\n    sys.modules[package] = None\n"
        "for module in ('cli.jobs', 'host_actor', 'serving', 'session.ray_cluster', 'state_http.serve_app'):\n"
        "    import_module(f'spark_bridge.{module}')\n"
        "from spark_bridge.cli import doctor\n"
        "print(*(check.remedy for check in doctor.pair_checks('', '')))"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert "pip install 'ray-statestore[spark]'" in ran.stdout


PYPROJECT = (Path(__file__).parents[1] / "pyproject.toml").read_text()
TARGETS = re.findall(r'^[\w.-]+ = "((?:ray_statestore|spark_bridge)[\w.]*):(\w+)"$', PYPROJECT, re.MULTILINE)


def test_both_are_declared() -> None:
    assert len(TARGETS) == 2, TARGETS


@pytest.mark.parametrize(("module", "name"), TARGETS)
def test_what_is_declared_can_be_called(module: str, name: str) -> None:
    assert callable(getattr(importlib.import_module(module), name))
