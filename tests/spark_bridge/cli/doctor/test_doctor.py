"""``statestore doctor``: each check with its remedy, with neither Ray nor Spark."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from backends.storage.checkpoint_storage import CheckpointStorage
from backends.storage.file_ref import FileRef
from spark_bridge.cli.doctor import cluster, machine
from spark_bridge.cli.doctor.checks import Check, checked
from spark_bridge.cli.doctor.storage import storage_checks
from spark_bridge.cli.main import app
from spark_bridge.overview.model import Fault, Overview
from spark_bridge.overview.processes import CoordinatorInfo, HostOverview
from tests.command_line import CliRunner


def of(checks: Any) -> dict[str, Check]:
    found = {check.name: check for check in checks}
    assert all((check.status in ("ok", "skipped")) == (not check.remedy) for check in found.values())
    return found


class Replacing(CheckpointStorage):
    """A look-alike of S3 that ignores If-None-Match."""

    def put_new(self, path: str, data: bytes) -> FileRef:
        self.replace(path, data)
        return FileRef(path, len(data), "")


def test_storage_that_replaces_what_should_be_created(tmp_path: Path) -> None:
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
    assert of(machine.spark_checks(settings))[name or next(iter(settings))].status == status


def test_settings_are_read_from_the_defaults_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "spark-defaults.conf").write_text("# mine\nspark.speculation   true\nspark.task.cpus=2\n\n")
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    assert set(of(machine.spark_checks({}))) == {"spark.speculation", "spark.task.cpus"}
    assert set(of(machine.spark_checks({"spark.speculation": "false"}))) == {"spark.task.cpus"}


@pytest.mark.parametrize(
    ("pyspark", "raydp", "name"),
    [("3.5.7", "1.6.5", None), ("4.2.1", "1.6.5", "raydp-version"), ("4.1.0", "1.7.0", "spark-version")],
)
def test_pairs_of_versions(pyspark: str, raydp: str, name: str | None) -> None:
    assert list(of(machine.pair_checks(pyspark, raydp))) == ([] if name is None else [name])


def test_this_environment_is_well() -> None:
    assert {c.status for c in [*machine.python_check(), *machine.package_checks()]} == {"ok"}


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
    here = {name: machine.installed(name) for name in cluster.PACKAGES}
    python = ".".join(str(machine.sys.version_info[i]) for i in (0, 1))
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


def test_a_check_that_fails_does_not_end_the_others() -> None:
    def failing() -> list[Check]:
        raise OSError("no disk")

    (check,) = checked("machine", "disk", failing)
    assert check.status == "error" and "no disk" in check.found


def test_the_command_says_all_and_its_exit_code(tmp_path: Path) -> None:
    args = ["doctor", "--no-cluster", "--checkpoint", str(tmp_path), "--json"]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["is_well"] and {c["area"] for c in found["checks"]} == {"machine", "spark", "storage"}
    result = CliRunner().invoke(app, ["doctor", "--no-cluster", "--conf", "spark.statestore.location=here"])
    assert result.exit_code == 1 and "Give an absolute path" in result.stdout and "1 errors" in result.stdout
    assert CliRunner().invoke(app, ["doctor", "--no-cluster", "--conf", "x"]).exit_code == 2
