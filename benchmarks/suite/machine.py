"""The surroundings of a measurement: versions, the machine, directories, and the Ray cluster of a benchmark."""

from __future__ import annotations

import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from importlib import metadata
from pathlib import Path

import psutil

WRITTEN = ("benchmarks/results", "benchmarks/RESULTS.md")
PROCESSES = {
    "pyspark.daemon": "Python workers",
    "pyspark/daemon": "Python workers",
    "StateStoreHost": "hosts",
    "StateStoreCoordinator": "coordinator",
    "-Dspark.driver.port=": "executors' JVMs",
    "SparkSubmit": "driver's JVM",
    "redis-server": "Redis",
}
"""A string in the command line of a process, and the role of such a process."""
PACKAGES = {"Spark": "pyspark", "Ray": "ray", "RayDP": "raydp", "rocksdict": "rocksdict", "pyarrow": "pyarrow"}


def versions() -> dict[str, str]:
    """Return this project's commit, and the versions of Python, packages, Redis and the operating system."""
    found = {"ray-statestore": commit(), "Python": platform.python_version()}
    for name, package in PACKAGES.items():
        try:
            found[name] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if (redis := shutil.which("redis-server")) is not None:
        said = subprocess.run([redis, "--version"], capture_output=True, text=True, check=True).stdout
        found["Redis"] = next((word[2:] for word in said.split() if word.startswith("v=")), said.strip())
    found["OS"] = f"{_os_name()}, Linux {platform.release()}"
    return found


def commit() -> str:
    """Return the commit that is measured, shortened; ``, changed`` behind it if other files than results differ.

    Outside a git checkout, return the version of the installed package.
    """
    try:
        changed = _git("status", "--porcelain", "--", ":/", *(f":(top,exclude){path}" for path in WRITTEN))
        return f"{_git('rev-parse', '--short=8', 'HEAD')}{', changed' * bool(changed)}"
    except (OSError, subprocess.CalledProcessError):
        return metadata.version("ray-statestore")


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _os_name() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    except OSError:
        return platform.system()


def machine() -> dict[str, str]:
    """Return cores, memory, and the load before anything was started."""
    cores = len(os.sched_getaffinity(0))
    return {
        "cores": f"{cores}, {_cpu_name()}",
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "load": f"{os.getloadavg()[0]:.1f}",
    }


def memory_by_role(child: int, processes: Iterable[psutil.Process]) -> dict[str, float]:
    """Return the resident MiB of the processes of a comparison by role, ``child`` being its driver or client."""
    memory: dict[str, float] = defaultdict(float)
    for process in processes:
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            command, resident = " ".join(process.cmdline()), process.memory_info().rss
            role = next((role for mark, role in PROCESSES.items() if mark in command), "others")
            memory["driver or client" if process.pid == child else role] += resident / 2**20
    return memory


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


@contextmanager
def directory(prefix: str = "statestore-bench-", where: str | None = None) -> Iterator[Path]:
    """Give a directory for input and checkpoints."""
    with tempfile.TemporaryDirectory(prefix=prefix, dir=where, ignore_cleanup_errors=True) as name:
        yield Path(name)


def ray_directory() -> AbstractContextManager[Path]:
    """Give a directory for Ray, whose path is short: Ray's sockets live below it."""
    return directory("rs-", "/tmp")


@contextmanager
def own_ray(cpus: int, object_store_memory: int = 200 << 20) -> Iterator[None]:
    """Start Ray on this machine alone, for ``init_spark`` to join; all of it ends afterwards.

    ``object_store_memory`` is in bytes. A small value is enough, because streams have no objects; Ray's default is 30 %
    of the memory.
    """
    import ray

    with ray_directory() as temporary, ExitStack() as stack:
        stack.callback(ray.shutdown)
        ray.init(
            address="local",
            num_cpus=cpus,
            namespace="statestore",
            log_to_driver=False,
            logging_level=logging.WARNING,
            include_dashboard=False,
            object_store_memory=object_store_memory,
            _temp_dir=str(temporary),
            # Executors and hosts run as they do without Ray, not with its niceness of 15.
            _system_config={"worker_niceness": 0},
        )
        yield
