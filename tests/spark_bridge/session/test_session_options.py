"""The options of a session are checked when they are given, before anything is started.

``init_spark(packages=...)`` takes paths and coordinates, and refuses others before anything starts.
"""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from spark_bridge.exceptions import SessionError, TlsError
from spark_bridge.host_actor import SessionOptions
from spark_bridge.session.lifecycle import attach, init_spark
from spark_bridge.session.packages import jar_settings
from spark_bridge.transport.tls import TlsConf


@pytest.mark.parametrize("start", [lambda **given: init_spark("app", **given), lambda **given: attach(None, **given)])
def test_wrong_options_are_refused_before_anything_is_started(start, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(SessionError, match=r"num_hosts=0: give at least 1"):
        start(num_hosts=0)
    with pytest.raises(SessionError, match=r"keep_serving=-1: give seconds"):
        start(keep_serving=-1)
    with pytest.raises(SessionError, match="keep_serving=nan"):
        start(keep_serving=float("nan"))
    nowhere = str(tmp_path / "none.pem")
    with pytest.raises(TlsError):
        start(tls=TlsConf(nowhere, nowhere, nowhere))


def test_a_host_gets_the_options_as_the_driver_has_made_them() -> None:
    options = SessionOptions(num_hosts=2, keep_serving=0.0)
    assert pickle.loads(pickle.dumps(options)) == options


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
