"""Checks of an environment into which ``pip install`` has put this project's wheel and its dependencies.

``tests/matrix.py`` runs it from an unpacked source distribution: ``python -I tests/installed.py CHECK ...``. The
packages come from the environment, the pages and their runner from the source distribution.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import urllib.error
import urllib.request
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parents[1]
BIN = Path(sys.prefix) / "bin"
CLIENT_PYTHON = "STATESTORE_CLIENT_PYTHON"
"""The variable with the Python of an environment for clients only."""
PACKAGES = ("backends", "coordinator_actor", "ray_statestore", "spark_bridge")
INSTALL = re.compile(r"pip install 'ray-statestore\[([\w-]+)\]'")
USER = "from ray_statestore import QueryableStateClient as C; print(C.connect().get('user_totals', 42)['n'])"


def run(*words: str | Path, environment: dict[str, str] | None = None) -> str:
    """Run a program, and return what it prints. Raises ``CalledProcessError``; stderr is this process's."""
    ran = subprocess.run(
        words, env={**os.environ, **(environment or {})}, stdout=subprocess.PIPE, text=True, check=True
    )
    return ran.stdout


def package() -> None:
    """All packages come from the wheel, with their types, a version, and a description without relative links."""
    site_packages = Path(metadata.distribution("ray-statestore").locate_file("."))
    for name in PACKAGES:
        directory = Path(importlib.import_module(name).__file__ or "").parent
        assert directory == site_packages / name, f"{name} comes from {directory}"
        assert (directory / "py.typed").is_file(), f"{directory} has no py.typed"
    declared = re.search(r'^version = "(.+)"$', (SOURCE / "pyproject.toml").read_text(), re.MULTILINE)
    assert declared is not None and metadata.version("ray-statestore") == declared[1]
    assert run(BIN / "statestore", "--version").split() == ["ray-statestore", declared[1]]
    description = metadata.metadata("ray-statestore").get_payload()
    assert description.startswith("# ray-statestore") and not re.search(r"\]\((?!https://|#)", description)


def client() -> None:
    """Without extras, the client connects, and each name that needs more says which extra to install."""
    import ray_statestore
    from spark_bridge.exceptions import SparkBridgeError

    present = [name for name in ("ray", "pyspark", "rocksdict", "pandas", "duckdb") if importlib.util.find_spec(name)]
    assert present == [], f"a client outside needs none of {present}"
    extras: dict[str, list[str]] = {}
    for name in ray_statestore.__all__:
        try:
            getattr(ray_statestore, name)
        except ImportError as error:
            named = INSTALL.search(str(error))
            assert named is not None, f"{name}: {error}"
            extras.setdefault(named[1], []).append(name)
    assert extras.keys() == {"cluster", "spark", "rocksdb"}, extras
    print({extra: len(names) for extra, names in extras.items()}, "names need an extra")
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    for given, expected in ({}, INSTALL), ({"address": address, "token": "none", "timeout": 2.0}, re.compile(address)):
        try:
            ray_statestore.QueryableStateClient.connect(**given).get("user_totals", 42)
        except SparkBridgeError as error:
            assert expected.search(str(error)), error
        else:
            raise AssertionError(f"connected with {given}")


def first_example() -> None:
    """The first example of README.md runs; without RayDP, with ``attach`` to a local Spark.

    Then a client of the environment that ``CLIENT_PYTHON`` names asks the same state.
    """
    import ray

    import ray_statestore
    from spark_bridge.session.current import current_cluster
    from tests.docs.pages import Page
    from tests.docs.pages import run as run_page

    if importlib.util.find_spec("raydp") is None:
        # Where `from ray_statestore import init_spark` looks first.
        ray_statestore.init_spark = attached  # type: ignore[attr-defined]
    readme = Page("README.md")
    checked = next(i for i, block in enumerate(readme.run_blocks(), start=1) if "assert" in block.code)
    run_page(readme, blocks=checked)
    outside = os.environ.get(CLIENT_PYTHON)
    if outside is not None:
        here = {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
        token = run(BIN / "statestore", "token", "issue", "--name", "outside", environment=here).split()[0]
        where = {"STATESTORE_ADDRESS": current_cluster().query_addresses()[0], "STATESTORE_TOKEN": token}
        assert run(outside, "-I", "-c", USER, environment=where).split() == ["20"]
    ray_statestore.stop_spark()


def attached(*_: object, **__: object) -> Any:
    """Return a local Spark with a state store, for the arguments of ``init_spark``."""
    from pyspark.sql import SparkSession

    from ray_statestore import attach

    settings = {"spark.sql.shuffle.partitions": "2", "spark.ui.enabled": "false"}
    return attach(SparkSession.builder.master("local[2]").config(map=settings).getOrCreate())


def state_api() -> None:
    """The command of deploy/README.md serves the state over HTTP, to holders of a token only."""
    import ray

    from coordinator_actor.actor import get_or_create_coordinator

    command = re.search(r"^ +serve run (\S+)", (SOURCE / "deploy" / "README.md").read_text(), re.MULTILINE)
    assert command is not None, "deploy/README.md has no line with `serve run`"
    ray.init(address="local", num_cpus=2, namespace="statestore", log_to_driver=False, include_dashboard=False)
    get_or_create_coordinator()
    here = {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    token = run(BIN / "statestore", "token", "issue", "--name", "curl", environment=here).split()[0]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    # The page's port may be taken here.
    run(BIN / "serve", "start", "--http-port", str(port), environment=here)
    url = f"http://127.0.0.1:{port}/v1/operators"
    with subprocess.Popen([BIN / "serve", "run", command[1]], env={**os.environ, **here}) as serving:
        try:
            while status(url, token)[0] != 200:
                assert serving.poll() is None, f"serve run ended with status {serving.returncode}"
                time.sleep(0.2)
            assert status(url, token)[1] == '{"operators":[]}'
            assert status(url, "wrong")[0] == 401
        finally:
            serving.send_signal(signal.SIGINT)
    ray.shutdown()


def status(url: str, token: str) -> tuple[int, str]:
    """Return the status and the body of an answer; 0 without one."""
    try:
        asked = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, ""
    except OSError:
        return 0, ""


def quick_tests() -> None:
    """The tests that need neither clusters nor much time pass in the source distribution."""
    options = ("-q", "-n", "2", "--dist", "loadfile", "-m", "not ray and not spark and not long")
    subprocess.run([sys.executable, "-m", "pytest", *options], cwd=SOURCE, check=True)


def feast() -> None:
    """Feast's stores pass their tests; without conftest.py, which needs packages that do not fit beside Feast."""
    files = ["tests/test_feast.py", "tests/test_feast_offline.py"]
    subprocess.run([sys.executable, "-m", "pytest", "-q", "--noconftest", *files], cwd=SOURCE, check=True)


CHECKS: dict[str, Callable[[], None]] = {
    check.__name__: check for check in (package, client, first_example, state_api, quick_tests, feast)
}


def main(names: list[str]) -> int:
    """Run the checks in a temporary directory; return 0 if all of them hold."""
    sys.path.append(str(SOURCE))  # behind the environment's packages
    failed = []
    for name in names:
        begun = time.monotonic()
        with tempfile.TemporaryDirectory() as directory:
            os.chdir(directory)
            try:
                CHECKS[name]()
            except Exception:  # noqa: BLE001 - the other checks run too
                traceback.print_exc()
                failed.append(name)
            os.chdir(SOURCE)
        print(f"{name}: {'failed' if name in failed else 'passed'} after {time.monotonic() - begun:.0f} s", flush=True)
    print(f"= failed: {', '.join(failed)} =" if failed else f"= passed: {', '.join(names)} =", flush=True)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
