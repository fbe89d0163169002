"""``statestore doctor``: each check with its remedy, with neither Ray nor Spark."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement

from backends.storage.checkpoint_storage import CheckpointStorage
from backends.storage.locations import FileRef
from spark_bridge.cli import doctor as cluster
from spark_bridge.cli.doctor import Check, checked, storage_checks
from spark_bridge.cli.main import app
from spark_bridge.overview.model import CoordinatorInfo, Fault, HostOverview, Overview
from tests.command_line import CliRunner
from tests.patience import HANG
from tests.spark_bridge.own_head import free_ports, own_head


def of(checks: Any) -> dict[str, Check]:
    found = {check.name: check for check in checks}
    assert all((check.status in ("ok", "skipped")) == (not check.remedy) for check in found.values())
    return found


class Replacing(CheckpointStorage):
    """A look-alike of S3 that ignores If-None-Match."""

    def put_new(self, path: str, data: bytes) -> FileRef:
        self.replace(path, data)
        return FileRef(path, len(data), "")


def test_storage_without_create_only_writes_fails(tmp_path: Path) -> None:
    found = of(storage_checks(str(tmp_path), {}, open_storage=lambda at, options=None: Replacing.open(at, options)))
    assert found["create-if-absent"].status == "error" and "If-None-Match" in found["create-if-absent"].remedy
    assert list(tmp_path.iterdir()) == []


def test_sound_storage_is_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    found = of(storage_checks(str(tmp_path), {}))
    assert {name: check.status for name, check in found.items()} == {
        "create-if-absent": "ok",
        "read": "ok",
        "latency": "ok",
    }
    assert [file.name for file in tmp_path.iterdir()] == ["mine"]


def test_slow_storage_and_storage_that_cannot_be_written(tmp_path: Path) -> None:
    times = iter([0.0, 2.0])
    assert of(storage_checks(str(tmp_path), {}, clock=lambda: next(times)))["latency"].status == "warning"
    (tmp_path / "file").write_text("x")
    assert of(storage_checks(str(tmp_path / "file"), {}))["write"].status == "error"


class Garbling(CheckpointStorage):
    """A storage that gives other bytes than were written."""

    def get(self, path: str) -> bytes:
        return b"other"


class Hiding(CheckpointStorage):
    """A storage whose listings lag behind."""

    def list(self, directory: str = "") -> list[tuple[str, int]]:
        return []


@pytest.mark.parametrize(
    ("settings", "name", "status"),
    [
        ({"spark.speculation": "true"}, "spark.speculation", "warning"),
        ({"spark.sql.adaptive.streaming.stateless.enabled": "true"}, None, "warning"),
        ({"spark.sql.streaming.minBatchesToRetain": "1"}, None, "warning"),
        ({"spark.statestore.location": "state"}, None, "error"),
        ({"spark.statestore.location": "s3://b/state", "spark.speculation": "false"}, "settings", "ok"),
    ],
)
def test_settings_of_spark(settings: Mapping[str, str], name: str | None, status: str) -> None:
    assert of(cluster.spark_checks(settings))[name or next(iter(settings))].status == status


def test_settings_are_read_from_the_defaults_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "spark-defaults.conf").write_text("# mine\nspark.speculation   true\nspark.task.cpus=2\n\n")
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    assert set(of(cluster.spark_checks({}))) == {"spark.speculation", "spark.task.cpus"}
    assert set(of(cluster.spark_checks({"spark.speculation": "false"}))) == {"spark.task.cpus"}


@pytest.mark.parametrize(
    ("pyspark", "raydp", "name"),
    [
        ("3.5.7", "1.6.5", None),
        ("4.2.1", "1.6.5", "raydp-version"),
        ("4.1.0", "1.7.0", None),
        ("4.3.0", "", None),
        ("5.0.0", "", "spark-version"),
    ],
)
def test_pairs_of_versions(pyspark: str, raydp: str, name: str | None) -> None:
    assert list(of(cluster.pair_checks(pyspark, raydp))) == ([] if name is None else [name])


def test_this_environment_passes() -> None:
    assert {c.status for c in [*cluster.python_check(), *cluster.package_checks()]} == {"ok"}


@pytest.mark.parametrize(
    ("environment", "has_file", "status"),
    [
        ({"RAY_AUTH_MODE": "token"}, False, "error"),
        ({"RAY_AUTH_MODE": "token"}, True, "ok"),
        ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "x"}, False, "ok"),
        ({"RAY_AUTH_MODE": "disabled"}, True, "warning"),
        ({}, False, "ok"),
    ],
)
def test_rays_token_mode(tmp_path: Path, environment: dict[str, str], has_file: bool, status: str) -> None:
    if has_file:
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray" / "auth_token").write_text("t")
    assert of(cluster.token_mode_check(environment, tmp_path))["ray-token"].status == status


def test_nodes_with_other_versions_and_clocks() -> None:
    here = {name: cluster.installed(name) for name in cluster.PACKAGES}
    python = ".".join(str(cluster.sys.version_info[i]) for i in (0, 1))
    node = {"ip": "10.0.0.1", "python": python, "packages": here, "skew": 0.1}
    assert of(cluster.node_checks([node]))["nodes"].status == "ok"
    found = of(
        cluster.node_checks(
            [
                {**node, "packages": {**here, "ray": "1.0"}},
                {**node, "ip": "10.0.0.2", "skew": -7.5},
                {"ip": "10.0.0.3", "failure": "no answer"},
            ]
        )
    )
    assert "ray 1.0, here" in found["node 10.0.0.1"].found
    assert "-7.5 s" in found["clock of 10.0.0.2"].found
    assert found["node 10.0.0.3"].status == "error" and "nodes" not in found


def test_ports_and_faults() -> None:
    with socket.create_server(("127.0.0.1", 0)) as open_port, socket.create_server(("127.0.0.1", 0)) as other:
        closed = other.getsockname()[1]
        other.close()
        address = f"127.0.0.1:{open_port.getsockname()[1]}"
        fault = Fault("error", "host-silent", "host h", "Nothing was heard.", "Look at its machine.")
        info = CoordinatorInfo("c", "ns", "127.0.0.1")
        sound = Overview("cluster", 0, info, (), (HostOverview("h", f"grpc://{address}", query_address=address),))
        assert of(cluster.overview_checks(sound))["ports"].status == "ok"
        hosts = (HostOverview("h", f"grpc://{address}", query_address=f"127.0.0.1:{closed}"),)
        found = of(cluster.overview_checks(Overview("cluster", 0, info, (), hosts, (fault,))))
    assert f"127.0.0.1:{closed} of h (for queries)" in found["ports"].found
    assert found["host-silent"].status == "error"


def remedies(checks: Any) -> dict[str, str]:
    return {check.name: check.remedy for check in checks if check.remedy}


@pytest.mark.parametrize(
    ("wrong", "words", "right"),
    [
        ({"spark.speculation": "true"}, "set it to false", "false"),
        ({"spark.sql.adaptive.streaming.stateless.enabled": "true"}, "set it to false; leave it so", "false"),
        ({"spark.sql.streaming.minBatchesToRetain": "1"}, "keep 100, or at least 2", "100"),
        ({"spark.sql.streaming.minBatchesToRetain": "1"}, "keep 100, or at least 2", "2"),
        ({"spark.statestore.location": "state"}, "an absolute path or a URL", "/mnt/state"),
        ({"spark.statestore.location": "state"}, "an absolute path or a URL", "s3://bucket/state"),
        ({"spark.task.cpus": "2"}, "1 is usual", "1"),
    ],
)
def test_the_remedies_of_settings_are_enough(wrong: dict[str, str], words: str, right: str) -> None:
    ((name, remedy),) = remedies(cluster.spark_checks(wrong)).items()
    assert words in remedy
    assert not remedies(cluster.spark_checks({name: right}))


def test_the_remedies_of_a_machine_are_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "python3"
    other.write_text("")
    monkeypatch.setenv("PYSPARK_PYTHON", str(other))
    remedy = remedies(cluster.python_check())["pyspark-python"]
    assert "let PYSPARK_PYTHON name the Python of this environment" in remedy
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    assert not remedies(cluster.python_check())

    monkeypatch.setattr(cluster, "sys", SimpleNamespace(version_info=(3, 9, 1), executable=sys.executable))
    remedy = remedies(cluster.python_check())["python"]
    first, last = re.findall(r"3\.(\d+)", remedy)
    for minor in range(int(first), int(last) + 1):
        monkeypatch.setattr(cluster, "sys", SimpleNamespace(version_info=(3, minor, 1), executable=sys.executable))
        assert not remedies(cluster.python_check())
    monkeypatch.undo()

    larger = tmp_path / "larger"
    larger.mkdir()
    free = {str(larger): 1 << 40}
    monkeypatch.setattr("shutil.disk_usage", lambda at: SimpleNamespace(free=free.get(str(at), 1 << 20)))
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    assert "let RAY_TMPDIR name a larger disk" in remedies(cluster.disk_check())["disk"]
    monkeypatch.setenv("RAY_TMPDIR", str(larger))
    assert not remedies(cluster.disk_check())
    monkeypatch.undo()

    monkeypatch.setattr(cluster, "installed", lambda name: None if name == "msgspec" else metadata.version(name))
    remedy = remedies(cluster.package_checks())["packages"]
    assert remedy == "Install them: pip install --upgrade 'ray-statestore[cluster,spark]'."
    assert any(Requirement(text).name == "msgspec" for text in metadata.requires("ray-statestore") or ())
    monkeypatch.undo()
    assert not remedies(cluster.package_checks())


def test_the_remedies_of_pairs_of_versions_name_extras_that_fit() -> None:
    for pyspark, raydp in (("3.5.7", "1.7.0"), ("4.0.5", "1.6.5"), ("4.2.1", "1.6.5")):
        remedy = remedies(cluster.pair_checks(pyspark, raydp))["raydp-version"]
        extra = re.search(r"pip install 'ray-statestore\[([\w-]+)\]'", remedy)
        assert extra is not None
        needed = requirements_of(extra[1])
        assert needed["pyspark"].specifier.contains(pyspark)
        (pin,) = needed["raydp"].specifier
        assert not remedies(cluster.pair_checks(pyspark, pin.version))
    assert "attach" in remedies(cluster.pair_checks("4.3.0", "1.7.0"))["raydp-version"]
    assert not remedies(cluster.pair_checks("4.3.0", ""))
    remedy = remedies(cluster.pair_checks("5.0.0", ""))["spark-version"]
    assert "ray-statestore[spark]" in remedy and not requirements_of("spark")["pyspark"].specifier.contains("5.0.0")


def requirements_of(extra: str) -> dict[str, Requirement]:
    """Return what an extra of this project requires, by the name of the package."""
    needed = [Requirement(text) for text in metadata.requires("ray-statestore") or ()]
    return {one.name: one for one in needed if one.marker is not None and one.marker.evaluate({"extra": extra})}


def test_the_remedies_of_rays_token_are_enough(tmp_path: Path) -> None:
    token_mode = {"RAY_AUTH_MODE": "token"}
    remedy = remedies(cluster.token_mode_check(token_mode, tmp_path))["ray-token"]
    assert not remedies(cluster.token_mode_check({**token_mode, "RAY_AUTH_TOKEN": "copied"}, tmp_path))
    made = re.search(r"'ray (get-auth-token --generate)' makes one", remedy)
    assert made is not None
    program = Path(sys.executable).with_name("ray")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_AUTH")}
    subprocess.run([program, *made[1].split()], env={**environment, "HOME": str(tmp_path)}, check=True, timeout=HANG)
    assert not remedies(cluster.token_mode_check(token_mode, tmp_path))
    remedy = remedies(cluster.token_mode_check({"RAY_AUTH_MODE": "disabled"}, tmp_path))["ray-token"]
    assert "use RAY_AUTH_MODE=token" in remedy and not remedies(cluster.token_mode_check(token_mode, tmp_path))


def test_the_remedies_of_nodes_and_ports_are_enough() -> None:
    python = ".".join(str(cluster.sys.version_info[i]) for i in (0, 1))
    same = {"python": python, "packages": {name: cluster.installed(name) for name in cluster.PACKAGES}, "skew": 0.0}
    wrong = [
        {**same, "ip": "a", "packages": dict.fromkeys(cluster.PACKAGES)},
        {**same, "ip": "b", "python": "3.9"},
        {**same, "ip": "c", "skew": 60.0},
        {"ip": "d", "failure": "ModuleNotFoundError: No module named 'spark_bridge'"},
    ]
    told = remedies(cluster.node_checks(wrong))
    assert set(told) == {"node a", "node b", "clock of c", "node d"}
    assert told["node a"] == told["node b"] == "Install the same versions on all machines."
    assert "install the packages" in told["node d"] and "NTP" in told["clock of c"]
    assert not remedies(cluster.node_checks([{**same, "ip": ip} for ip in "abcd"]))

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    host = HostOverview("h", f"grpc://127.0.0.1:{port}")
    overview = Overview("cluster", 0, CoordinatorInfo("c", "ns", "127.0.0.1"), (), (host,))
    assert "Open these ports" in remedies(cluster.overview_checks(overview))["ports"]
    with socket.create_server(("127.0.0.1", port)):
        assert not remedies(cluster.overview_checks(overview))


def test_the_remedies_of_storage_are_enough(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert "Look at the address" in remedies(storage_checks(str(tmp_path / "file"), {}))["write"]
    (tmp_path / "directory").mkdir()
    assert not remedies(storage_checks(str(tmp_path / "directory"), {}))
    faulty: dict[str, type[CheckpointStorage]] = {"create-if-absent": Replacing, "read": Garbling, "list": Hiding}
    for name, kind in faulty.items():
        found = remedies(storage_checks(str(tmp_path), {}, open_storage=lambda at, o=None, k=kind: k.open(at, o)))  # type: ignore[misc]
        assert name in found, found
    times = iter([0.0, 2.0])
    assert "a faster storage" in remedies(storage_checks(str(tmp_path), {}, clock=lambda: next(times)))["latency"]
    assert not remedies(storage_checks(str(tmp_path), {})), "a local disk is among the storages that are named"


@pytest.mark.ray
@pytest.mark.thorough  # otherwise: the tests of remedies above
def test_the_remedy_of_a_cluster_that_does_not_answer_leads_to_one_that_does() -> None:
    def doctor(environment: Mapping[str, str], address: str) -> tuple[int, dict[str, dict[str, str]]]:
        program = "from spark_bridge.cli.main import app; app()"
        done = subprocess.run(
            [sys.executable, "-c", program, "doctor", "--address", address, "--json"],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=HANG,
        )
        assert done.stdout, done.stderr
        return done.returncode, {check["name"]: check for check in json.loads(done.stdout)["checks"]}

    with own_head() as head:
        (closed,) = free_ports(1)
        code, found = doctor(head.environment(), f"127.0.0.1:{closed}")
        assert code == 1 and found["ray"]["status"] == "error"
        assert "Give the address of its head" in found["ray"]["remedy"] and "'ray status'" in found["ray"]["remedy"]
        status = [str(Path(sys.executable).with_name("ray")), "status", "--address", head.address]
        assert subprocess.run(status, env=head.environment(), check=False, timeout=HANG).returncode == 0
        _, found = doctor(head.environment(), head.address)
        assert "ray" not in found and found["nodes"]["status"] == "ok"


def test_a_check_that_fails_does_not_end_the_others() -> None:
    def failing() -> list[Check]:
        raise OSError("no disk")

    (check,) = checked("machine", "disk", failing)
    assert check.status == "error" and "no disk" in check.found


def test_command_prints_all_checks_and_sets_the_exit_code(tmp_path: Path) -> None:
    args = ["doctor", "--no-cluster", "--checkpoint", str(tmp_path), "--json"]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["is_well"] and {c["area"] for c in found["checks"]} == {"machine", "spark", "storage"}
    result = CliRunner().invoke(app, ["doctor", "--no-cluster", "--conf", "spark.statestore.location=here"])
    assert result.exit_code == 1 and "Give an absolute path" in result.stdout and "1 errors" in result.stdout
    assert CliRunner().invoke(app, ["doctor", "--no-cluster", "--conf", "x"]).exit_code == 2
