"""The local properties of Spark by which the driver tells the tasks of a query where the hosts are.

The driver's query listener sets them (``spark_bridge.session.queries.listener``), and Spark gives them to every task of
the query.
"""

from __future__ import annotations

from collections.abc import Callable

from backends.decoders import json_decoder
from coordinator_actor.wire_version import other_version
from spark_bridge.exceptions import StateStoreRefusedError
from spark_bridge.task.endpoints import Endpoints
from spark_bridge.transport.tls import TlsConf

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
"""The directory on every node in which hosts leave their addresses."""
TIMEOUT = "statestore.recoveryTimeout"
"""How long a task waits for a new owner of its partition, in seconds."""
TRACING = "statestore.tracing"
"""Where spans go (``backends.tracing.set_up``); not set if there are none."""
TLS = "statestore.tls"
"""The paths of a ``TlsConf``; not set if the hosts do not use TLS."""


def endpoints_from(local_property: Callable[[str], str | None], operator: str) -> tuple[Endpoints, str]:
    """Return where the hosts are, and the run id, from the properties that the listener has set.

    Raises ``StateStoreRefusedError``, before any state is touched, where the query may not run.
    """
    refusal = local_property(REFUSAL)
    if refusal:
        raise StateStoreRefusedError(refusal)
    run_id, endpoints = local_property(RUN_ID), local_endpoints(local_property)
    if not run_id or endpoints is None:
        raise StateStoreRefusedError(
            f"Operator {operator!r} runs in a query that the state store does not know: its Spark session has no state "
            "store listener. Start the query from the session that init_spark returned or that attach(spark) was "
            "called with; sessions made by spark.newSession() reach no listener, and a batch query keeps no state."
        )
    theirs = local_property(WIRE)
    known = int(theirs) if theirs and theirs.isdecimal() else None
    if (problem := other_version("The driver", known, "the release on this executor's machine")) is not None:
        raise StateStoreRefusedError(problem)
    return endpoints, run_id


def local_endpoints(local_property: Callable[[str], str | None]) -> Endpoints | None:
    """Return where the hosts are, from a task's local properties; None if the properties do not say."""
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
