"""An overview for tests of printed output, and printing without a terminal."""

from __future__ import annotations

import io

from rich.console import Console, RenderableType

from spark_bridge.overview.model import (
    Checkpoint,
    CoordinatorInfo,
    Fault,
    HostOverview,
    Operator,
    Overview,
    Partition,
    Query,
)

PARTITIONS = (
    Partition("aircraft", 0, 7, "host-a-0", 2_022, 3 << 20, 5, 2, commit_ms={"get_ms": 5.0, "changelog_ms": 7.4}),
    Partition("aircraft", 1),
)
CHECKPOINT = Checkpoint(
    9,
    7,
    2,
    "r-1",
    completed_ms=1_700_000_000_000,
    duration_ms=1_234,
    phases={"tasks": 900, "manifest": 34},
    delta_bytes=2048,
    rows=12_345,
    retried=3,
)
QUERY = Query(
    "q-1",
    "r-1",
    "flights",
    "running",
    "/ck",
    "/ck/statestore",
    2,
    7,
    8,
    3,
    (Operator("aircraft", 2, skew=2.5, partitions=PARTITIONS),),
    (CHECKPOINT,),
    pending_partitions=1,
)
HOSTS = (
    HostOverview(
        "host-a-0",
        "grpc://192.0.2.1:5",
        query_address="192.0.2.1:7005",
        pid=12,
        heartbeat_ms=300,
        partitions=2,
        memory={"host_memory": 1 << 30, "cache": 512 << 20},
    ),
    HostOverview("host-a-1", "grpc://192.0.2.1:6", answered=False),
)
FAULT = Fault("error", "host-silent", "host host-a-1", "Nothing was heard.", "Look at its machine.")
OVERVIEW = Overview("cluster", 0, CoordinatorInfo("c", "statestore", "192.0.2.1", 11), (QUERY,), HOSTS, (FAULT,))


def printed(view: RenderableType) -> str:
    out = io.StringIO()
    Console(file=out, width=220).print(view)
    return out.getvalue()
