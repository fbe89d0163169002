"""Fetch the jars of the test services with Maven: ``make services``, or ``python -m tests.services.artifacts kafka``.

The jars are in ``.services/<name>``, which git ignores. Maven takes them from where it is configured to. Tests that
need them are skipped, with the reason, until they are there.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

import pytest

ROOT = Path(__file__).parents[2] / ".services"
_WITH_SPARK = "hadoop-client-api,hadoop-client-runtime,jsr305,lz4-java,scala-library,slf4j-api,snappy-java"
"""What every installation of Spark brings itself."""
_WITH_SPARK += ",commons-logging,scala-parallel-collections_2.13,spark-tags_2.12,spark-tags_2.13"


@dataclass(frozen=True)
class Artifacts:
    """Jars by Maven coordinates (``group:artifact:version``), without those of the artifacts ``excluded``."""

    coordinates: tuple[str, ...]
    excluded: str = ""
    alone: tuple[str, ...] = ()
    """Further coordinates, of jars without what they depend on."""

    @property
    def pom(self) -> str:
        """Return a project whose dependencies are these artifacts."""
        parts = [(*c.split(":"), "") for c in self.coordinates]
        nothing = "<exclusions><exclusion><groupId>*</groupId><artifactId>*</artifactId></exclusion></exclusions>"
        parts += [(*c.split(":"), nothing) for c in self.alone]
        dependencies = "".join(
            f"<dependency><groupId>{escape(group)}</groupId><artifactId>{escape(artifact)}</artifactId>"
            f"<version>{escape(version)}</version>{exclusions}</dependency>"
            for group, artifact, version, exclusions in parts
        )
        return (
            '<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion><groupId>t</groupId>'
            "<artifactId>t</artifactId><version>1</version><packaging>pom</packaging>"
            f"<dependencies>{dependencies}</dependencies></project>"
        )


ARTIFACTS = {
    "kafka": Artifacts(("org.apache.kafka:kafka_2.13:4.3.1", "org.slf4j:slf4j-simple:1.7.36")),
    "spark35-kafka": Artifacts(("org.apache.spark:spark-sql-kafka-0-10_2.12:3.5.7",), _WITH_SPARK),
    "spark42-kafka": Artifacts(("org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0",), _WITH_SPARK),
    "hadoop": Artifacts(
        (
            "org.apache.hadoop:hadoop-client-minicluster:3.4.2",
            "javax.xml.bind:jaxb-api:2.3.1",
            "org.bouncycastle:bcpkix-jdk18on:1.78.1",
            "org.slf4j:slf4j-reload4j:1.7.36",
        )
    ),
    "spark35-s3a": Artifacts(
        ("org.apache.hadoop:hadoop-aws:3.3.4",), _WITH_SPARK, ("org.apache.spark:spark-hadoop-cloud_2.12:3.5.7",)
    ),
    "spark42-s3a": Artifacts(
        ("org.apache.hadoop:hadoop-aws:3.5.0",), _WITH_SPARK, ("org.apache.spark:spark-hadoop-cloud_2.13:4.1.1",)
    ),
}
"""The connector of Spark 4.2.0 serves 4.2.1 and 4.3 too, whose own ones could not be fetched. The newest
``spark-hadoop-cloud`` is that of Spark 4.1.1. Of that only the file manager of checkpoints is needed, not its dozens of
dependencies.
"""


def jars(name: str) -> list[Path]:
    """Return the fetched jars of ``ARTIFACTS[name]``, sorted. Skip the test if they have not been fetched."""
    directory = ROOT / name
    if not directory.is_dir():
        pytest.skip(f"The jars of {name} are missing: run `make services`, which needs Maven.")
    return sorted(directory.glob("*.jar"))


def class_path(name: str) -> str:
    """Return the class path of the fetched jars of ``ARTIFACTS[name]``, or skip the test."""
    return ":".join(map(str, jars(name)))


def connector_jars() -> list[str]:
    """Return the fetched jars of Spark's Kafka connector for the PySpark of this environment; none without them."""
    from importlib.metadata import version

    line = "spark35-kafka" if version("pyspark") < "4" else "spark42-kafka"
    return sorted(map(str, (ROOT / line).glob("*.jar")))


def fetch(name: str) -> Path:
    """Fetch the jars of ``ARTIFACTS[name]`` unless they are there; return their directory.

    A directory appears with all its jars or not at all. Raises ``CalledProcessError`` if Maven fails.
    """
    directory = ROOT / name
    if directory.is_dir():
        return directory
    ROOT.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT, prefix=".fetch-") as draft:
        pom = Path(draft, "pom.xml")
        pom.write_text(ARTIFACTS[name].pom)
        command = ["mvn", "-q", "-B", "-f", str(pom), "dependency:copy-dependencies", "-DincludeScope=runtime"]
        excluded = [f"-DexcludeArtifactIds={ARTIFACTS[name].excluded}"] if ARTIFACTS[name].excluded else []
        subprocess.run([*command, *excluded, f"-DoutputDirectory={draft}/jars"], check=True)
        Path(draft, "jars").rename(directory)
    return directory


def main() -> None:
    """Fetch the named sets of artifacts, or all."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=f"of {', '.join(ARTIFACTS)}; default: all")
    names = parser.parse_args().names or list(ARTIFACTS)
    if unknown := [name for name in names if name not in ARTIFACTS]:
        parser.error(f"unknown: {', '.join(unknown)}; choose from {', '.join(ARTIFACTS)}")
    if shutil.which("mvn") is None:
        sys.exit("Maven is missing: install it (Debian's package is maven), then run this again.")
    for name in names:
        print(f"Fetching {name} ...", flush=True)
        fetch(name)


if __name__ == "__main__":
    main()
