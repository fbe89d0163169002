"""Makes the work of PySpark between two tasks of a worker process cheap: 85 of the 100 ms CPU of a small task."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import time
import zipimport
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from backends.decoders import json_decoder
from coordinator_actor.messages import other_version
from spark_bridge.exceptions import HostUnavailableError, StateStoreRefusedError
from spark_bridge.transport.flight_client import client_for, forget_client, from_wire, to_wire
from spark_bridge.transport.protocol import HostFile
from spark_bridge.transport.tls import TlsConf

if TYPE_CHECKING:
    from coordinator_actor.reference import Transport  # which imports Ray

_is_frozen = False


def settle_worker() -> None:
    """Prepare the worker process for its next task. Call it at the end of each task, when all modules are imported.

    After every task PySpark's daemon collects all garbage, and goes through all objects of pyarrow, pandas and the
    other modules. These objects stay, so they are taken out of the collections once. Before every task PySpark 3.5
    makes each importer of its zip file, one per package, read the file's directory again. So the cached importers are
    dropped; the next import of a module makes its importer again.
    """
    global _is_frozen
    if not _is_frozen:
        gc.freeze()
        _is_frozen = True
    for path, finder in list(sys.path_importer_cache.items()):
        if isinstance(finder, zipimport.zipimporter):
            del sys.path_importer_cache[path]


# Addresses of hosts for tasks: those known at the start of the query, and those in files of hosts on a node.


@dataclass(frozen=True)
class Endpoints:
    """Possible addresses of hosts, and ``timeout``, the seconds that the task waits for a new owner.

    ``addresses`` and ``token`` were known at the start of the query. Hosts leave their addresses in the directory
    ``host_files``, on every node.
    """

    addresses: tuple[str, ...]
    token: str = field(repr=False)
    host_files: str
    timeout: float
    tls: TlsConf | None = None

    def candidates(self) -> list[tuple[str, str]]:
        """Return addresses and tokens to try: first those found on this node, which are newer."""
        from_files = read_host_files(Path(self.host_files))
        from_driver = [(a, self.token) for a in self.addresses]
        return list(dict.fromkeys([*((f.address, f.token) for f in from_files), *from_driver]))

    def call_coordinator(self, method: str, args: dict[str, Any]) -> Any:
        """Send a message through any host. Raises ``HostUnavailableError`` if none passes it on."""
        failure: Exception | None = None
        for address, token in self.candidates():
            try:
                return client_for(address, token, self.tls).call_coordinator(method, args)
            except HostUnavailableError as error:
                forget_client(address, token)
                failure = error
        raise HostUnavailableError(f"No state store host passed on {method}; last failure: {failure}")


def read_host_files(directory: Path) -> list[HostFile]:
    """Return the hosts that have left their address in a directory; unreadable or foreign files are an error."""
    files = []
    for path in sorted(directory.glob("*.json")) if directory.is_dir() else []:
        try:
            files.append(json_decoder(HostFile).decode(path.read_bytes()))
        except FileNotFoundError:
            continue  # the host went away between the listing and the read
    return files


# The local properties of Spark that carry the hosts' addresses from the driver to the tasks of a query.
#
# The driver's query listener sets them (``spark_bridge.session.listener``), and Spark passes them to every
# task of the query.


RUN_ID = "statestore.runId"
WIRE = "statestore.wireVersion"
"""The version of the messages that the driver speaks."""
REFUSAL = "statestore.refusal"
"""Why the query may not run; not set if it may."""
ADDRESSES = "statestore.addresses"
"""The Flight addresses of the hosts, a JSON list."""
TOKEN = "spark.statestore.token"
"""The cluster's token.

There is a Spark setting of this name (``settings.redact``), so that Spark's event log hides it.
"""
HOST_FILES = "statestore.hostFiles"
"""The directory on every node where hosts leave their addresses."""
TIMEOUT = "statestore.recoveryTimeout"
"""How long a task waits for a new owner of its partition, in seconds."""
TRACING = "statestore.tracing"
"""Where spans go (``backends.tracing``); not set if there are none."""
TLS = "statestore.tls"
"""The paths of a ``TlsConf``; not set if the hosts do not use TLS."""


def endpoints_from(local_property: Callable[[str], str | None], operator: str) -> tuple[Endpoints, str]:
    """Return the hosts' addresses, and the run id, from the properties that the listener has set.

    Raises ``StateStoreRefusedError``, before any state is touched, if the query may not run.
    """
    if refusal := local_property(REFUSAL):
        raise StateStoreRefusedError(refusal)
    run_id, endpoints = local_property(RUN_ID), local_endpoints(local_property)
    if not run_id or endpoints is None:
        raise StateStoreRefusedError(
            f"Operator {operator!r} runs in a query that the state store does not know: its Spark session has no state "
            "store listener. Start the query from the session that init_spark returned or that attach(spark) was "
            "called with; sessions made by spark.newSession() reach no listener, and a batch query keeps no state."
        )
    theirs = local_property(WIRE)
    batch = int(theirs) if theirs and theirs.isdecimal() else None
    if (problem := other_version("The driver", batch, "the release on this executor's machine")) is not None:
        raise StateStoreRefusedError(problem)
    return endpoints, run_id


def local_endpoints(local_property: Callable[[str], str | None]) -> Endpoints | None:
    """Return the hosts' addresses from a task's local properties; None if the properties lack them."""
    addresses, token, tls = local_property(ADDRESSES), local_property(TOKEN), local_property(TLS)
    if not addresses or not token:
        return None
    return Endpoints(
        addresses=tuple(json_decoder(list[str]).decode(addresses)),
        token=token,
        host_files=local_property(HOST_FILES) or "",
        timeout=float(local_property(TIMEOUT) or 60),
        tls=TlsConf.from_json(tls) if tls else None,
    )


# The connection of a PySpark task to the coordinator: through a state store host, without joining Ray.
#
# ``StateStoreCoordinatorRef.for_executor()`` finds ``find`` through the entry point
# ``statestore.executor_transport``, since ``coordinator_actor`` does not depend on Spark.


def find() -> Transport | None:
    """Return the transport of the task that this process runs; None outside a task, or if the task knows no host."""
    from pyspark import TaskContext

    context = TaskContext.get()
    endpoints = None if context is None else local_endpoints(context.getLocalProperty)
    if endpoints is None:
        return None

    def send(method: str, args: dict[str, Any]) -> Any:
        answer = endpoints.call_coordinator(method, to_wire(args))
        return [from_wire(p) for p in answer] if method == "report_active_instance" else answer

    return send


# Finds a directory for the files that a task writes.


def local_directory() -> str:
    """Return one of Spark's local directories, or the system's directory for temporary files."""
    directories = filter(None, os.environ.get("SPARK_LOCAL_DIRS", "").split(","))
    return next((d for d in directories if Path(d).is_dir()), tempfile.gettempdir())


def temporary_file() -> IO[bytes]:
    """Open a file without a name in the local directory: it disappears once it is closed, or if the process dies."""
    return tempfile.TemporaryFile(dir=local_directory(), prefix="statestore-")


# Times that a task spends on each step, for progress reports.


class StepTimer:
    """Milliseconds by step. Names that end in ``_ms`` are work on state, ``input_wait`` is the wait for input rows."""

    def __init__(self) -> None:
        self.milliseconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def restart(self) -> None:
        """Forget the time since the last step: other code has used it."""
        self._last = time.perf_counter()

    def step(self, name: str) -> None:
        """Book the time since the last step under ``name``."""
        now = time.perf_counter()
        self.milliseconds[name] = self.milliseconds.get(name, 0.0) + (now - self._last) * 1e3
        self._last = now
