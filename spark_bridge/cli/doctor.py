"""The command ``statestore doctor``."""

from __future__ import annotations

import os
import re
import shutil
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from rich.console import Group, RenderableType
from rich.text import Text

from backends.exceptions import FileExistsInStorageError, StateStoreError
from backends.storage.checkpoint_storage import CheckpointStorage, OpenStorage
from coordinator_actor.coordinator_conf import COORDINATOR_NAME, NAMESPACE
from spark_bridge.cli.output import FOUND, AsJson, show
from spark_bridge.cli.sources import Address, CoordinatorName, Namespace, Option, joined_ray, options_of
from spark_bridge.exceptions import EnvironmentProblemError
from spark_bridge.overview.model import ERROR, WARNING, Overview, to_plain
from spark_bridge.session.lifecycle import remedy_of_pair
from spark_bridge.session.ray_cluster import ensure_java
from spark_bridge.session.settings import MIN_BATCHES_CONF, STATE_LOCATION_CONF, STATELESS_AQE

# The result of a check: its status, the finding, and the remedy.


OK, SKIPPED = "ok", "skipped"
"""The status of a check, in addition to ``WARNING`` and ``ERROR``, which are severities of faults, too."""


@dataclass(frozen=True)
class Check:
    """One check. ``area`` is "machine", "spark", "storage" or "cluster"; ``remedy`` is empty if all is well."""

    area: str
    name: str
    status: str
    found: str
    remedy: str = ""


def checked(area: str, name: str, check: Callable[[], Iterable[Check]]) -> list[Check]:
    """Return the findings of a check; a check that fails itself is a finding, and does not end the others."""
    try:
        return list(check())
    except Exception as error:  # noqa: BLE001 - the doctor reports any failure of a sick machine
        text = str(error) or type(error).__name__
        return [Check(area, name, ERROR, f"The check failed: {text}", "Look at this error first.")]


# Checks of a Ray cluster: whether it can be joined, its token mode, its nodes' versions and clocks, and its ports.


CLUSTER_AREA = "cluster"
PORT_CHECK_SECONDS = 3.0
NODE_SECONDS = 30.0
"""A node may have to start a process before it answers."""
MAX_SKEW_SECONDS = 1.0
"""Clocks that differ by more make TTLs, processing time and the times of checkpoints differ by as much."""
PACKAGES = ("ray-statestore", "ray", "pyspark", "raydp", "pyarrow", "msgspec", "rocksdict")


def token_mode_check(environment: Mapping[str, str] = os.environ, home: Path | None = None) -> Iterator[Check]:
    """Check whether Ray's tokens are on, and whether this machine has one."""
    mode = environment.get("RAY_AUTH_MODE", "")
    token_path = Path(environment.get("RAY_AUTH_TOKEN_PATH") or (home or Path.home()) / ".ray" / "auth_token")
    has_token = bool(environment.get("RAY_AUTH_TOKEN")) or token_path.exists()
    if mode.lower() == "token" and not has_token:
        found = f"RAY_AUTH_MODE is token, and there is neither RAY_AUTH_TOKEN nor {token_path}."
        remedy = (
            "Copy the token of the cluster's head node to that file, or put it into RAY_AUTH_TOKEN; 'ray "
            "get-auth-token --generate' makes one for a new cluster."
        )
        yield Check(CLUSTER_AREA, "ray-token", ERROR, found, remedy)
    elif mode.lower() == "token" or (not mode and has_token):
        yield Check(CLUSTER_AREA, "ray-token", OK, "Ray's token mode is on, and a token is there.")
    elif mode.lower() == "disabled":
        remedy = "Anyone who reaches Ray's ports can run code and get the store's token: use RAY_AUTH_MODE=token."
        yield Check(CLUSTER_AREA, "ray-token", WARNING, "RAY_AUTH_MODE is disabled.", remedy)
    else:
        message = "RAY_AUTH_MODE is not set and there is no token: a cluster that is started here makes one."
        yield Check(CLUSTER_AREA, "ray-token", OK, message)


def cluster_checks(address: str | None, namespace: str, coordinator: str) -> Iterator[Check]:
    """Join the cluster, look at its nodes and hosts, and leave. A missing cluster is an error only with ``address``."""
    yield from token_mode_check()
    try:
        with joined_ray(address, namespace):
            from spark_bridge.overview.from_cluster import cluster_overview

            yield from node_checks(_asked_nodes())
            yield from overview_checks(cluster_overview(namespace, coordinator))
    except EnvironmentProblemError as error:
        text, _, remedy = str(error).partition(";")
        remedy = remedy.strip().capitalize() or "Look at the cluster's head node."
        if address is None:
            yield Check(CLUSTER_AREA, "ray", SKIPPED, f"{text}: nothing of a cluster was checked.")
        else:
            yield Check(CLUSTER_AREA, "ray", ERROR, text, remedy)


def _asked_nodes() -> list[dict[str, Any]]:
    """Return the description of each living node: its versions, and how far its clock is from this one."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    asked = {}
    probe = ray.remote(num_cpus=0, max_retries=0)(said_of_node)
    for node in ray.nodes():
        if node["Alive"]:
            strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            asked[probe.options(scheduling_strategy=strategy).remote(PACKAGES)] = node["NodeManagerAddress"]
    # A first answer may wait for a process; the clock is read after that.
    ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=NODE_SECONDS)
    nodes_info: list[dict[str, Any]] = []
    for answer, ip in asked.items():
        if answer not in ready:
            nodes_info.append({"ip": ip, "failure": f"no answer within {NODE_SECONDS:.0f} s"})
            continue
        try:
            facts = ray.get(answer)
        except ray.exceptions.RayError as error:
            nodes_info.append({"ip": ip, "failure": str(error).splitlines()[0]})
            continue
        strategy = NodeAffinitySchedulingStrategy(facts["node_id"], soft=False)
        nodes_info.append({"ip": ip, **facts, "skew": _skew(probe, strategy)})
    return nodes_info


def said_of_node(packages: Sequence[str]) -> dict[str, Any]:
    """Return the versions, the clock and the id of the node that this runs on."""
    import ray

    return {
        "python": ".".join(map(str, sys.version_info[:2])),
        "packages": {name: installed(name) for name in packages},
        "time": time.time(),
        "node_id": ray.get_runtime_context().get_node_id(),
    }


def _skew(probe: Any, strategy: Any) -> float:
    """Return how far a node's clock is at least ahead of this one, in seconds; the message's travel is not counted."""
    import ray

    begun = time.time()
    remote_time: float = ray.get(probe.options(scheduling_strategy=strategy).remote(()), timeout=NODE_SECONDS)["time"]
    ended = time.time()
    return remote_time - ended if remote_time > ended else min(0.0, remote_time - begun)


def node_checks(nodes: Sequence[Mapping[str, Any]]) -> Iterator[Check]:
    """Check which nodes do not answer, have other versions than this machine, or another time."""
    here = {name: installed(name) for name in PACKAGES}
    python = ".".join(map(str, sys.version_info[:2]))
    wrong = 0
    for node in nodes:
        name = f"node {node['ip']}"
        if "failure" in node:
            wrong += 1
            remedy = "Look at this machine and its raylet; if code cannot be imported there, install the packages."
            yield Check(CLUSTER_AREA, name, ERROR, str(node["failure"]), remedy)
            continue
        other = [f"{p} {v or 'is missing'}, here {here[p]}" for p, v in node["packages"].items() if v != here[p]]
        if node["python"] != python:
            other.append(f"Python {node['python']}, here {python}")
        if other:
            wrong += 1
            yield Check(CLUSTER_AREA, name, ERROR, "; ".join(other), "Install the same versions on all machines.")
        if abs(node["skew"]) > MAX_SKEW_SECONDS:
            wrong += 1
            message = f"Its clock is {node['skew']:+.1f} s from this machine's."
            remedy = "Let all machines follow NTP (chrony)."
            yield Check(CLUSTER_AREA, f"clock of {node['ip']}", WARNING, message, remedy)
    if not wrong:
        message = f"{len(nodes)} nodes answer, with the versions and the time of this machine."
        yield Check(CLUSTER_AREA, "nodes", OK, message)


def overview_checks(overview: Overview) -> Iterator[Check]:
    """Check whether the hosts' ports can be reached from here, and which faults the overview has."""
    if overview.coordinator is None:
        yield Check(CLUSTER_AREA, "coordinator", SKIPPED, "No stream with state has run in this namespace.")
        return
    where = f"in namespace {overview.coordinator.namespace}, on {overview.coordinator.node_ip}"
    yield Check(CLUSTER_AREA, "coordinator", OK, f"It answers {where}.")
    ports = [
        (what, address, host.host_id)
        for host in overview.hosts
        for what, address in (("queries", host.query_address), ("tasks", host.address.rpartition("//")[2]))
        if address
    ]
    closed = [
        f"{address} of {host_id} (for {what}): {failure}"
        for what, address, host_id in ports
        if (failure := unreachable(address)) is not None
    ]
    if closed:
        remedy = "Open these ports in firewalls and network policies; query_port= fixes the port for queries."
        yield Check(CLUSTER_AREA, "ports", ERROR, "; ".join(closed), remedy)
    elif ports:
        message = f"{len(ports)} ports of {len(overview.hosts)} hosts can be reached from here."
        yield Check(CLUSTER_AREA, "ports", OK, message)
    for fault in overview.faults:
        yield Check(CLUSTER_AREA, fault.kind, fault.severity, f"{fault.subject}: {fault.what}", fault.remedy)


def unreachable(address: str) -> str | None:
    """Return why connections to ``ip:port`` fail, or None."""
    ip, _, port = address.rpartition(":")
    try:
        socket.create_connection((ip.strip("[]"), int(port)), PORT_CHECK_SECONDS).close()
    except (OSError, ValueError) as error:
        return str(error)
    return None


# Checks of this machine: Python, packages, Java, and the settings of Spark that can be seen without a session.


MACHINE_AREA = "machine"
PACKAGE = "ray-statestore"
SUPPORTED_SPARK = SpecifierSet(">=3.5,<4.4")
"""The versions of Spark that `make test-matrix` runs."""
CLUSTER_EXTRAS = ("", "cluster", "rocksdb", "spark")
"""The extras that a machine of the cluster needs."""
MIN_FREE = 2 << 30
"""Bytes of the temporary directory: copies of partitions and Ray's own files go there."""


def python_check() -> Iterator[Check]:
    """Check whether this Python is supported, and whether Spark's workers have the same."""
    version = ".".join(map(str, sys.version_info[:3]))
    is_known = (3, 10) <= sys.version_info[:2] < (3, 15)
    remedy = "" if is_known else "Use Python 3.10 to 3.14."
    yield Check(MACHINE_AREA, "python", OK if is_known else ERROR, f"Python {version} at {sys.executable}", remedy)
    workers = os.environ.get("PYSPARK_PYTHON")
    if workers and Path(workers).exists() and Path(workers).resolve() != Path(sys.executable).resolve():
        found = f"PYSPARK_PYTHON is {workers}, another Python than this one."
        remedy = "Spark's workers need this project's packages: let PYSPARK_PYTHON name the Python of this environment."
        yield Check(MACHINE_AREA, "pyspark-python", WARNING, found, remedy)


def package_checks() -> Iterator[Check]:
    """Check which required packages are missing or of another version than is needed."""
    wrong = []
    for text in metadata.requires(PACKAGE) or ():
        needed = Requirement(text)
        marker = needed.marker
        if needed.name == PACKAGE or not (marker is None or any(marker.evaluate({"extra": e}) for e in CLUSTER_EXTRAS)):
            continue
        version = installed(needed.name)
        if version is None or not needed.specifier.contains(version, prereleases=True):
            wrong.append(f"{needed.name} {version or 'is missing'} (needed: {needed.specifier or 'any version'})")
    versions = ", ".join(f"{name} {installed(name)}" for name in (PACKAGE, "ray", "pyspark", "raydp", "pyarrow"))
    if wrong:
        remedy = f"Install them: pip install --upgrade '{PACKAGE}[cluster,spark]'."
        yield Check(MACHINE_AREA, "packages", ERROR, "; ".join(wrong), remedy)
    else:
        yield Check(MACHINE_AREA, "packages", OK, versions)
    yield from pair_checks(installed("pyspark") or "", installed("raydp") or "")


def pair_checks(pyspark: str, raydp: str) -> Iterator[Check]:
    """Check whether the versions of Spark and RayDP work together. ``attach`` needs no RayDP."""
    if not pyspark or not SUPPORTED_SPARK.contains(pyspark):
        found = f"pyspark {pyspark or '(missing)'} is not tested; the tested versions are {SUPPORTED_SPARK}."
        remedy = "pip install 'ray-statestore[spark]', unless your platform brings its own PySpark."
        yield Check(MACHINE_AREA, "spark-version", WARNING, found, remedy)
    pair = remedy_of_pair(raydp, pyspark) if raydp and pyspark else None
    if pair is not None:
        yield Check(MACHINE_AREA, "raydp-version", ERROR, f"RayDP {raydp} does not run Spark {pyspark}.", f"{pair}.")


def installed(name: str) -> str | None:
    """Return the version of a package; None if there is none."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def java_check() -> Iterator[Check]:
    """Check whether there is a Java that Spark and RayDP run on."""
    try:
        yield Check(MACHINE_AREA, "java", OK, f"Java at {ensure_java()}")
    except EnvironmentProblemError as error:
        message, _, remedy = str(error).partition(". ")
        yield Check(MACHINE_AREA, "java", ERROR, f"{message}.", remedy)


def disk_check() -> Iterator[Check]:
    """Check whether the temporary directory has room."""
    where = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    free = shutil.disk_usage(where).free
    message = f"{where} has {free / (1 << 30):.1f} GiB free."
    if free < MIN_FREE:
        yield Check(MACHINE_AREA, "disk", WARNING, message, "Free some space, or let RAY_TMPDIR name a larger disk.")
    else:
        yield Check(MACHINE_AREA, "disk", OK, message)


def spark_checks(spark_settings: Mapping[str, str]) -> Iterator[Check]:
    """Check which settings of Spark harm stateful queries. ``given`` override those of spark-defaults.conf."""
    file = _defaults_file()
    settings = {**({} if file is None else defaults_of(file.read_text(encoding="utf-8"))), **spark_settings}
    wrong = list(_wrong_settings(settings))
    yield from wrong
    if not wrong:
        message = "No setting of Spark harms state" + (f" (in {file})." if file else "; no spark-defaults.conf.")
        yield Check("spark", "settings", OK, message)


def _wrong_settings(settings: Mapping[str, str]) -> Iterator[Check]:
    def check(name: str, status: str, remedy: str) -> Check:
        return Check("spark", name, status, f"{name} is {settings[name]!r}.", remedy)

    if settings.get("spark.speculation", "false").lower() == "true":
        remedy = "Two tasks of one partition do the same work, and one of them is thrown away: set it to false."
        yield check("spark.speculation", WARNING, remedy)
    if settings.get(STATELESS_AQE, "false").lower() == "true":
        remedy = "init_spark and attach set it to false; leave it so, or Spark drops state tasks without input."
        yield check(STATELESS_AQE, WARNING, remedy)
    kept = settings.get(MIN_BATCHES_CONF, "100")
    if not kept.isdigit() or int(kept) < 2:
        yield check(MIN_BATCHES_CONF, WARNING, "No earlier version can be read or restored: keep 100, or at least 2.")
    location = settings.get(STATE_LOCATION_CONF, "")
    if location and not location.startswith("/") and "://" not in location:
        remedy = "Give an absolute path or a URL, which means the same on every machine."
        yield check(STATE_LOCATION_CONF, ERROR, remedy)
    cores = settings.get("spark.task.cpus", "1")
    if cores.isdigit() and int(cores) > 1:
        remedy = "Each state task takes this many cores: fewer partitions run at once. 1 is usual."
        yield check("spark.task.cpus", WARNING, remedy)


def _defaults_file() -> Path | None:
    home = os.environ.get("SPARK_HOME")
    directory = os.environ.get("SPARK_CONF_DIR") or (f"{home}/conf" if home else None)
    file = None if directory is None else Path(directory) / "spark-defaults.conf"
    return file if file is not None and file.exists() else None


def defaults_of(text: str) -> dict[str, str]:
    """Return the settings of a spark-defaults.conf: a name, then white space or =, then the value."""
    defaults = {}
    for raw in text.splitlines():
        line = raw.strip()
        if line and not line.startswith("#"):
            name, *value = re.split(r"\s*=\s*|\s+", line, maxsplit=1)
            defaults[name] = value[0].strip() if value else ""
    return defaults


# Checks of storage: whether it creates files only if they are absent, shows written files at once, and how slow it is.


STORAGE_AREA = "storage"
DOCTOR_PROBE = ".statestore-doctor"
SLOW_WRITE_SECONDS = 0.5
STORAGE_RETRY_SECONDS = 10.0
"""Seconds for which a failing storage is retried."""


def _open(location: str, options: Mapping[str, str] | None = None) -> CheckpointStorage:
    return CheckpointStorage.open(location, options, retry_seconds=STORAGE_RETRY_SECONDS)


def storage_checks(
    location: str,
    options: Mapping[str, str],
    *,
    open_storage: OpenStorage = _open,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Check]:
    """Write, read, list and delete a small file below ``location``; nothing of it is left behind."""
    try:
        storage = open_storage(location, dict(options))
        path = f"{DOCTOR_PROBE}/{uuid.uuid4().hex}"
        begun = clock()
        storage.put_new(path, b"first")
    except StateStoreError as error:
        remedy = "Look at the address, the credentials (--storage-option) and the rights of this user."
        yield Check(STORAGE_AREA, "write", ERROR, f"{location} cannot be written to: {error}", remedy)
        return
    seconds = clock() - begun
    try:
        yield from _written(storage, path)
    finally:
        storage.delete(path)
        if storage.is_local:
            with suppress(OSError):  # another doctor is using it
                Path(storage.full_location(DOCTOR_PROBE).removeprefix("file://")).rmdir()
    message = f"A file is durable after {seconds * 1000:.0f} ms."
    if seconds > SLOW_WRITE_SECONDS:
        remedy = "Each batch waits for its changelogs and its manifest: look for a nearer or a faster storage."
        yield Check(STORAGE_AREA, "latency", WARNING, message, remedy)
    else:
        yield Check(STORAGE_AREA, "latency", OK, message)


def _written(storage: CheckpointStorage, path: str) -> Iterator[Check]:
    where = storage.full_location("")
    try:
        storage.put_new(path, b"second")
    except FileExistsInStorageError:
        yield Check(STORAGE_AREA, "create-if-absent", OK, f"{where} refuses to create a file twice.")
    else:
        found = f"{where} lets a second writer replace a file that it should only create."
        remedy = (
            "Two drivers could both own a query: use a storage with conditional writes (local disk, HDFS, S3, "
            "Google Cloud Storage, Azure); for an S3 look-alike turn conditional PUT (If-None-Match) on."
        )
        yield Check(STORAGE_AREA, "create-if-absent", ERROR, found, remedy)
        return
    if storage.get(path) != b"first":
        found = f"{where} gives other bytes than were written."
        yield Check(STORAGE_AREA, "read", ERROR, found, "Do not use this storage.")
    elif path not in (name for name, _ in storage.list(DOCTOR_PROBE)):
        remedy = "Manifests are found by listing: use a storage whose listings are consistent."
        yield Check(STORAGE_AREA, "list", ERROR, f"A new file is not listed at {where}.", remedy)
    else:
        yield Check(STORAGE_AREA, "read", OK, "A written file can be read and listed at once.")


_STYLES = {OK: "green", WARNING: "yellow", ERROR: "bold red", SKIPPED: "dim"}


def doctor(
    checkpoint: Annotated[
        str | None,
        typer.Option(metavar="LOCATION", help="Check the storage there too, by a small file that is removed again."),
    ] = None,
    storage_option: Option = None,
    conf: Annotated[
        list[str] | None, typer.Option(help="A setting of Spark, name=value, as for spark-submit. Repeatable.")
    ] = None,
    no_cluster: Annotated[bool, typer.Option("--no-cluster", help="Look for no Ray cluster.")] = False,
    address: Address = None,
    namespace: Namespace = NAMESPACE,
    coordinator: CoordinatorName = COORDINATOR_NAME,
    as_json: AsJson = False,
) -> None:
    """Check this machine, storage and the cluster: versions, Java, settings, tokens, ports, clocks; with remedies.

    The exit code is 1 if a check has found an error. Without a cluster, that part is skipped.

    Examples: statestore doctor; statestore doctor --checkpoint s3://bucket/ck --storage-option
    spark.hadoop.fs.s3a.endpoint=http://minio:9000; statestore doctor --no-cluster --conf spark.speculation=true --json
    """
    options, settings = options_of(storage_option), options_of(conf)
    checks = [
        *checked("machine", "python", python_check),
        *checked("machine", "packages", package_checks),
        *checked("machine", "java", java_check),
        *checked("machine", "disk", disk_check),
        *checked("spark", "settings", partial(spark_checks, settings)),
    ]
    if checkpoint is not None:
        checks += checked("storage", "storage", partial(storage_checks, checkpoint, options))
    if not no_cluster:
        checks += checked("cluster", "cluster", partial(cluster_checks, address, namespace, coordinator))
    is_well = all(check.status != ERROR for check in checks)
    show(lambda: {"is_well": is_well, "checks": to_plain(checks)}, lambda: _view(checks), as_json=as_json)
    if not is_well:
        raise typer.Exit(FOUND)


def _view(checks: list[Check]) -> RenderableType:
    lines = []
    for check in checks:
        lines.append(Text(f"{check.status:>7}  {check.area} {check.name}: {check.found}", _STYLES[check.status]))
        if check.remedy:
            lines.append(Text(f"         {check.remedy}"))
    errors, warnings = (sum(check.status == status for check in checks) for status in (ERROR, WARNING))
    lines.append(Text(f"{len(checks)} checks: {errors} errors, {warnings} warnings."))
    return Group(*lines)
