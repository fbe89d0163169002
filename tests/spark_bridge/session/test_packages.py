"""``init_spark(packages=...)`` takes paths and coordinates, and refuses others before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from spark_bridge import init_spark
from spark_bridge.exceptions import SessionError
from spark_bridge.session.packages import jar_settings


def test_paths_directories_and_coordinates_join_what_configs_name(tmp_path: Path) -> None:
    for name in ("b.jar", "a.jar", "notes.txt"):
        (tmp_path / name).touch()
    settings = jar_settings(
        [str(tmp_path), str(tmp_path / "a.jar"), "org.apache.spark:spark-sql-kafka-0-10_2.12:3.5.1", "g:a:1"],
        {"spark.jars": "/own.jar", "spark.jars.packages": "x:y:1", "spark.other": "1"},
        "3.5.7",
    )
    assert settings == {
        "spark.jars": f"/own.jar,{tmp_path}/a.jar,{tmp_path}/b.jar",
        "spark.jars.packages": "x:y:1,org.apache.spark:spark-sql-kafka-0-10_2.12:3.5.1,g:a:1",
    }
    assert jar_settings([], {}, "4.2.1") == {}


@pytest.mark.parametrize(
    ("package", "spark_version", "message"),
    [
        ("/no/such.jar", "3.5.7", "'/no/such.jar', which does not exist"),
        ("{tmp}/empty", "3.5.7", "which has no jars"),
        ("{tmp}/notes.txt", "3.5.7", "which is not a jar"),
        ("group:artifact", "3.5.7", "does not exist. Pass the path of a jar, a directory of jars, or Maven"),
        ("org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0", "3.5.7", r"Use '.*spark-sql-kafka-0-10_2\.12:3\.5\.7'"),
        ("org.apache.spark:spark-sql-kafka-0-10_2.12:3.4.1", "3.5.7", r"Use '.*spark-sql-kafka-0-10_2\.12:3\.5\.7'"),
        ("g:a_2.12:1.0", "4.2.1", r"built with Scala 2\.13\. Use 'g:a_2\.13:1\.0'"),
    ],
)
def test_refusals_name_the_remedy(tmp_path: Path, package: str, spark_version: str, message: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").touch()
    with pytest.raises(SessionError, match=message):
        jar_settings([package.format(tmp=tmp_path)], {}, spark_version)


def test_one_string_is_refused_before_ray_starts() -> None:
    with pytest.raises(SessionError, match=r"pass a list, packages=\['a:b:1'\]"):
        init_spark("t", packages="a:b:1")


def test_the_suggested_coordinates_are_accepted() -> None:
    with pytest.raises(SessionError) as refusal:
        jar_settings(["org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0"], {}, "3.5.7")
    suggested = str(refusal.value).split("'")[3]
    assert jar_settings([suggested], {}, "3.5.7") == {"spark.jars.packages": suggested}
