"""Jars that ``init_spark(packages=...)`` ships to the driver and the executors: paths and Maven coordinates."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spark_bridge.exceptions import EnvironmentProblemError, SessionError

JARS = "spark.jars"
MAVEN = "spark.jars.packages"
_COORDINATES = re.compile(r"[\w.\-]+:[\w.\-]+:[\w.\-]+")
_SCALA = re.compile(r"_(2\.1\d)$")


def jar_settings(packages: Sequence[str], configs: Mapping[str, str], spark_version: str) -> dict[str, str]:
    """Return Spark's settings for ``packages``, added to the jars and packages that ``configs`` name.

    A package is the path of a jar, a directory of jars, or ``group:artifact:version``, which Spark resolves with what
    it depends on. Raises ``SessionError`` for a path without jars, for anything else, and for an artifact that was
    built for another Scala or another line of Spark: its classes would fail in the first batch.
    """
    if isinstance(packages, str):
        raise SessionError(f"packages={packages!r} is one string: pass a list, packages=[{packages!r}].")
    jars = [jar for jar in configs.get(JARS, "").split(",") if jar]
    coordinates = [one for one in configs.get(MAVEN, "").split(",") if one]
    for package in packages:
        if _COORDINATES.fullmatch(package):
            _check_coordinates(package, spark_version)
            coordinates.append(package)
        else:
            jars += _jars_at(package)
    settings = {JARS: ",".join(dict.fromkeys(jars)), MAVEN: ",".join(dict.fromkeys(coordinates))}
    return {name: value for name, value in settings.items() if value}


def _jars_at(package: str) -> list[str]:
    path = Path(package).expanduser()
    jars = sorted(path.glob("*.jar")) if path.is_dir() else [path] if path.is_file() and path.suffix == ".jar" else []
    if not jars:
        problem = "has no jars" if path.is_dir() else "is not a jar" if path.exists() else "does not exist"
        raise SessionError(
            f"packages has {package!r}, which {problem}. Pass the path of a jar, a directory of jars, or Maven "
            "coordinates such as 'org.apache.spark:spark-sql-kafka-0-10_2.12:3.5.7'."
        )
    return [str(jar.resolve()) for jar in jars]


def _check_coordinates(package: str, spark_version: str) -> None:
    group, artifact, version = package.split(":")
    line = spark_version.rpartition(".")[0]
    scala = "2.12" if line.startswith("3.") else "2.13"
    suffix = _SCALA.search(artifact)
    built_for = suffix[1] if suffix else scala
    spark_line = version.rpartition(".")[0] if group == "org.apache.spark" else line
    if built_for != scala or spark_line != line:
        name = _SCALA.sub("", artifact)
        newest = spark_version if group == "org.apache.spark" and spark_line != line else version
        raise SessionError(
            f"packages has {package!r}, but this is Spark {spark_version}, which is built with Scala {scala}. "
            f"Use '{group}:{name}_{scala}:{newest}', or the newest version of {line} that exists."
        )


def unresolved(settings: Mapping[str, str], error: BaseException) -> EnvironmentProblemError:
    """Return the error for a JVM that did not start while it had packages to resolve."""
    return EnvironmentProblemError(
        f"Spark's JVM ended before it answered ({str(error).rstrip('.')}). It had to fetch {settings[MAVEN]} first; "
        "the lines above say what was missing. If this machine cannot reach a Maven repository, set "
        "spark.jars.repositories or spark.jars.ivySettings in configs, or fetch the jars elsewhere (mvn "
        "dependency:copy-dependencies) and pass their directory in packages."
    )


def is_jvm_failure(error: BaseException) -> bool:
    """Whether PySpark says that its JVM ended before it answered."""
    text: Any = getattr(error, "getErrorClass", lambda: None)() or str(error)
    return "JAVA_GATEWAY_EXITED" in str(text) or "Java gateway process exited" in str(error)
