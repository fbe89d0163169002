"""The files for machines without Kubernetes: Ray's cluster launcher, systemd's units, the container's build steps."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from spark_bridge.cli.jobs import STOPPED_ELSEWHERE
from spark_bridge.cli.main import app

DEPLOY = Path(__file__).parents[2] / "deploy"


def test_ray_takes_the_launcher_file() -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    given = yaml.safe_load((DEPLOY / "ray-cluster.yaml").read_text())
    validate_config(prepare_config(given))
    with pytest.raises(Exception, match="max_workrs"):
        validate_config(prepare_config({**given, "max_workrs": 3}))


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize("unit", ["ray-head.service", "ray-worker.service", "stream@.service"])
def test_systemd_takes_the_units(unit: str, tmp_path: Path) -> None:
    """Paths of the machine that the units are for need not be here, so they are put there."""
    text = (DEPLOY / "systemd" / unit).read_text()
    for name in ("ray", "statestore"):
        program = tmp_path / name
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
        text = text.replace(f"/opt/statestore/bin/{name}", str(program))

    def complaints(text: str) -> str:
        (tmp_path / unit).write_text(text)
        done = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", tmp_path / unit], capture_output=True, text=True, check=False
        )
        return "".join(line for line in done.stderr.splitlines(True) if unit in line)

    assert complaints(text) == ""
    assert "Restrat" in complaints(text.replace("Restart=", "Restrat="))


def test_the_unit_of_a_stream_calls_the_program_as_it_is() -> None:
    unit = (DEPLOY / "systemd/stream@.service").read_text()
    (called,) = re.findall(r"ExecStart=/opt/statestore/bin/statestore (.*)", unit)
    run = get_command(app).commands["run"]  # type: ignore[attr-defined]
    context = run.make_context("run", called.replace("%i", "clicks").split()[1:])
    assert str(context.params["program"]) == "clicks.py"
    assert (context.params["name"], context.params["backoff_limit"]) == ("clicks", 20)
    codes = re.findall(r"SuccessExitStatus=(.*)", unit)[0].split()
    assert codes == [str(STOPPED_ELSEWHERE), str(128 + signal.SIGTERM)]


def test_units_and_their_settings_match() -> None:
    settings = (DEPLOY / "systemd/ray.env").read_text()
    for unit in DEPLOY.glob("systemd/*.service"):
        for name in re.findall(r"\$\{(\w+)\}", unit.read_text()):
            assert f"\n{name}=" in settings, f"{unit.name} needs {name}"


@pytest.mark.thorough  # otherwise: test_another_ray_in_the_image_is_refused
@pytest.mark.skipif(os.getuid() != 0, reason="a namespace of one's own needs root")
def test_the_steps_of_the_container_work(tmp_path: Path) -> None:
    """They run in a namespace of mounts, with a fresh environment, and without a Java of the machine's."""
    source = DEPLOY.parent
    steps = f"""
        set -eu
        mount -t tmpfs none /usr/lib/jvm 2>/dev/null || true
        {sys.executable} -m venv {tmp_path}/env
        export PATH={tmp_path}/env/bin:/usr/bin:/bin
        mkdir {tmp_path}/source
        tar -C {source} --exclude=.venv* --exclude=.git --exclude=docs -cf - . | tar -C {tmp_path}/source -xf -
        {source}/deploy/container/install.sh {tmp_path}/source {tmp_path}/java
        export JAVA_HOME={tmp_path}/java PATH={tmp_path}/java/bin:$PATH
        cd {tmp_path}
        statestore --help
    """
    done = subprocess.run(["unshare", "--mount", "bash", "-c", steps], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert 'openjdk version "17' in done.stderr


def test_another_ray_in_the_image_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ray.py").write_text('__version__ = "1.0"')
    (tmp_path / "python").symlink_to(sys.executable)
    done = subprocess.run(
        [DEPLOY / "container/install.sh", DEPLOY.parent, tmp_path / "java"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, "The image has Ray 1.0" in done.stderr) == (1, True), done.stderr
