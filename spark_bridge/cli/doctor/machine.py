"""Checks of this machine: Python, packages, Java, and the settings of Spark that can be seen without a session."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from spark_bridge.cli.doctor.checks import OK, Check
from spark_bridge.exceptions import EnvironmentProblemError
from spark_bridge.overview.model import ERROR, WARNING
from spark_bridge.session.cluster.java import ensure_java
from spark_bridge.session.spark_settings import MIN_BATCHES_CONF, STATE_LOCATION_CONF, STATELESS_AQE

MACHINE_AREA = "machine"
PACKAGE = "ray-statestore"
TESTED = {"3.5": "1.6", "4.2": "1.7"}
"""The tested lines of Spark, and the RayDP that belongs to each."""
LEAST_FREE = 2 << 30
"""Bytes of the temporary directory: copies of partitions and Ray's own files go there."""


def python_check() -> Iterator[Check]:
    """Say whether this Python will do, and whether Spark's workers have the same."""
    version = ".".join(map(str, sys.version_info[:3]))
    is_known = (3, 10) <= sys.version_info[:2] < (3, 14)
    remedy = "" if is_known else "Use Python 3.10 to 3.13."
    yield Check(MACHINE_AREA, "python", OK if is_known else ERROR, f"Python {version} at {sys.executable}", remedy)
    workers = os.environ.get("PYSPARK_PYTHON")
    if workers and Path(workers).exists() and Path(workers).resolve() != Path(sys.executable).resolve():
        yield Check(
            MACHINE_AREA,
            "pyspark-python",
            WARNING,
            f"PYSPARK_PYTHON is {workers}, another Python than this one.",
            "Spark's workers need this project's packages: let PYSPARK_PYTHON name the Python of this environment.",
        )


def package_checks() -> Iterator[Check]:
    """Say which required packages are missing or of another version than is needed."""
    wrong = []
    for text in metadata.requires(PACKAGE) or ():
        needed = Requirement(text)
        if needed.marker is not None and not needed.marker.evaluate({"extra": ""}):
            continue
        version = installed(needed.name)
        if version is None or not needed.specifier.contains(version, prereleases=True):
            wrong.append(f"{needed.name} {version or 'is missing'} (needed: {needed.specifier or 'any version'})")
    known = ", ".join(f"{name} {installed(name)}" for name in (PACKAGE, "ray", "pyspark", "raydp", "pyarrow"))
    if wrong:
        yield Check(
            MACHINE_AREA, "packages", ERROR, "; ".join(wrong), f"Install them: pip install --upgrade {PACKAGE}."
        )
    else:
        yield Check(MACHINE_AREA, "packages", OK, known)
    yield from pair_checks(installed("pyspark") or "", installed("raydp") or "")


def pair_checks(pyspark: str, raydp: str) -> Iterator[Check]:
    """Say whether Spark and RayDP are a tested pair."""
    line = ".".join(pyspark.split(".")[:2])
    wanted = TESTED.get(line)
    if wanted is None:
        yield Check(
            MACHINE_AREA,
            "spark-version",
            WARNING,
            f"pyspark {pyspark or '(missing)'} is not tested; {' and '.join(TESTED)} are.",
            "Use the versions of constraints.txt or constraints-spark42.txt.",
        )
    elif not raydp.startswith(wanted):
        yield Check(
            MACHINE_AREA,
            "raydp-version",
            ERROR,
            f"RayDP {raydp or '(missing)'} does not run Spark {line}.",
            f"Install RayDP {wanted} for Spark {line}, as constraints say.",
        )


def installed(name: str) -> str | None:
    """Return the version of a package; None if there is none."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def java_check() -> Iterator[Check]:
    """Say whether there is a Java that Spark and RayDP run on."""
    try:
        yield Check(MACHINE_AREA, "java", OK, f"Java at {ensure_java()}")
    except EnvironmentProblemError as error:
        found, _, remedy = str(error).partition(". ")
        yield Check(MACHINE_AREA, "java", ERROR, f"{found}.", remedy)


def disk_check() -> Iterator[Check]:
    """Say whether the temporary directory has room."""
    where = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    free = shutil.disk_usage(where).free
    found = f"{where} has {free / (1 << 30):.1f} GiB free."
    if free < LEAST_FREE:
        yield Check(MACHINE_AREA, "disk", WARNING, found, "Free some space, or let RAY_TMPDIR name a larger disk.")
    else:
        yield Check(MACHINE_AREA, "disk", OK, found)


def spark_checks(given: Mapping[str, str]) -> Iterator[Check]:
    """Say which settings of Spark harm stateful queries. ``given`` go before those of spark-defaults.conf."""
    file = _defaults_file()
    settings = {**({} if file is None else defaults_of(file.read_text(encoding="utf-8"))), **given}
    wrong = list(_wrong_settings(settings))
    yield from wrong
    if not wrong:
        found = "No setting of Spark stands against state" + (f" (in {file})." if file else "; no spark-defaults.conf.")
        yield Check("spark", "settings", OK, found)


def _wrong_settings(settings: Mapping[str, str]) -> Iterator[Check]:
    def check(name: str, status: str, remedy: str) -> Check:
        return Check("spark", name, status, f"{name} is {settings[name]!r}.", remedy)

    if settings.get("spark.speculation", "false").lower() == "true":
        remedy = "Two tasks of one partition do the same work, and one of them is thrown away: set it to false."
        yield check("spark.speculation", WARNING, remedy)
    if settings.get(STATELESS_AQE, "false").lower() == "true":
        remedy = "init_spark and attach set it to false; leave it so, or Spark drops state tasks without input."
        yield check(STATELESS_AQE, WARNING, remedy)
    kept = settings.get(MIN_BATCHES_CONF, "100")
    if not kept.isdigit() or int(kept) < 2:
        yield check(
            MIN_BATCHES_CONF, WARNING, "No earlier version can be read or gone back to: keep 100, or at least 2."
        )
    location = settings.get(STATE_LOCATION_CONF, "")
    if location and not location.startswith("/") and "://" not in location:
        yield check(
            STATE_LOCATION_CONF, ERROR, "Give an absolute path or a URL, which means the same on every machine."
        )
    cores = settings.get("spark.task.cpus", "1")
    if cores.isdigit() and int(cores) > 1:
        remedy = "Each state task takes this many cores: fewer partitions run at once. 1 is usual."
        yield check("spark.task.cpus", WARNING, remedy)


def _defaults_file() -> Path | None:
    home = os.environ.get("SPARK_HOME")
    directory = os.environ.get("SPARK_CONF_DIR") or (f"{home}/conf" if home else None)
    file = None if directory is None else Path(directory) / "spark-defaults.conf"
    return file if file is not None and file.exists() else None


def defaults_of(text: str) -> dict[str, str]:
    """Return the settings of a spark-defaults.conf: a name, then white space or =, then the value."""
    found = {}
    for raw in text.splitlines():
        line = raw.strip()
        if line and not line.startswith("#"):
            name, *value = re.split(r"\s*=\s*|\s+", line, maxsplit=1)
            found[name] = value[0].strip() if value else ""
    return found
