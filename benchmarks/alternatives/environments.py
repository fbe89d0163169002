"""The Pythons of the contestants. Each other engine has its own environment with pinned packages.

The environments are in ``benchmarks/.environments``, outside of Git. One is made again when its file of
``requirements`` has changed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from suite.comparison import VENV, VENV42
from suite.runner import interpreter

HERE = Path(__file__).resolve().parent
REQUIREMENTS = HERE / "requirements"
ENVIRONMENTS = HERE.parent / ".environments"
SPARK = {"spark35": VENV, "spark42": VENV42}


def python_of(name: str) -> Path:
    """Return the Python of an environment, which is made if needed. Raises ``RuntimeError`` if it cannot be made."""
    if name in SPARK:
        return interpreter(SPARK[name])
    directory, wanted = ENVIRONMENTS / name, (REQUIREMENTS / f"{name}.txt").read_text()
    python, made = directory / "bin" / "python", directory / ".made-of"
    if made.exists() and made.read_text() == wanted:
        return python
    shutil.rmtree(directory, ignore_errors=True)
    _call([sys.executable, "-m", "venv", str(directory)])
    pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    _call([*pip, "-r", str(REQUIREMENTS / f"{name}.txt")])
    made.write_text(wanted)
    return python


def _call(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()] or ["no reason given"]
        raise RuntimeError(f"{' '.join(command[1:])} ended with status {done.returncode}: {said[-1]}")


def version_of(package: str, python: Path) -> str:
    """Return the version of a package in an environment."""
    ask = f"import importlib.metadata as m; print(m.version({package!r}))"
    return subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout.strip()
