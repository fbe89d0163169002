"""``statestore ui``, and that a wheel carries what the page is made of."""

from __future__ import annotations

import fnmatch
import re
import subprocess
import sys

import httpx
import pytest

from spark_bridge.cli.main import app
from tests.command_line import CliRunner
from tests.docs.pages import ROOT
from tests.spark_bridge.state_data.format_fixtures import Stored

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@pytest.mark.long
def test_the_page_of_a_checkpoint_is_served_by_the_command() -> None:
    checkpoint = str(Stored("file").checkpoint)
    command = [sys.executable, "-m", "ray_statestore", "ui", "--checkpoint", checkpoint, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            told, token = process.stdout.readline(), process.stdout.readline().split()[-1]
            address = re.findall(r"http://\S+", told)[0]
            base = address.partition("/signin")[0]
            with httpx.Client(base_url=base, headers={"Accept": "text/html"}, follow_redirects=True) as browser:
                assert browser.get("/").status_code == 401
                assert "Nothing is wrong" in browser.get(address).text
                assert "server" not in browser.get("/").headers
            assert httpx.get(f"{base}/query", headers={"Authorization": f"Bearer {token}"}).status_code == 200
        finally:
            process.terminate()
    assert process.returncode is not None


def test_location_without_state_is_rejected_before_serving() -> None:
    outcome = CliRunner().invoke(app, ["ui", "--checkpoint", str(ROOT / "docs")])
    assert outcome.exit_code == 2 and "query.json" in outcome.output


def test_a_wheel_carries_templates_and_static_files() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["spark_bridge"]
    package = ROOT / "spark_bridge"
    files = [
        p.relative_to(package).as_posix() for d in ("static", "templates") for p in (package / "ui" / d).rglob("*")
    ]
    assert len(files) > 15
    assert [name for name in files if not any(fnmatch.fnmatch(name, pattern) for pattern in data)] == []
