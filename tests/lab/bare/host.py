"""A state host on a machine: ``bare.host COORDINATOR ADDRESS NUMBER HOST_FILES BEAT_SECONDS``.

As ``spark_bridge.host_actor`` around ``Host``, without Ray: two servers, a heartbeat, maintenance.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import uuid
from pathlib import Path

import msgspec

from backends.conf import StateStoreConf
from backends.exceptions import StateStoreError
from coordinator_actor.exceptions import CoordinatorError, HostUnavailableError
from coordinator_actor.messages import HostInfo
from spark_bridge.flight_server import HostFlightServer
from spark_bridge.host.host import Host
from spark_bridge.queryable.reads.host_reads import HostReads
from spark_bridge.queryable.server.limits import RequestLimits
from spark_bridge.queryable.server.proxy import KvStateClientProxy, connections_to_hosts
from spark_bridge.queryable.server.tokens import ClusterTokens
from spark_bridge.transport.flight_client import checked_call
from spark_bridge.transport.protocol import HostFile
from tests.lab.bare.calls import RemoteCoordinator

TOKEN = "the-lab's"
QUERY_PORT = 7001
BEATS_TO_MAINTENANCE = 10


def main(coordinator_address: str, address: str, number: str, host_files: str, beat_seconds: float) -> None:
    """Serve until the machine ends, or another incarnation is the host."""
    coordinator = RemoteCoordinator(coordinator_address)
    host: Host
    server = HostFlightServer(
        lambda: host, address, TOKEN, lambda method, args: coordinator.call(method, **checked_call(method, args))
    )
    proxy = KvStateClientProxy(
        lambda: HostReads(host),
        coordinator,
        ClusterTokens(TOKEN, lambda: host.revoked_tokens),
        connections_to_hosts(TOKEN),
        ip=address,
        port=QUERY_PORT,
        limits=RequestLimits(),
    )
    info = HostInfo(
        host_id=f"host-{address}-{number}",
        incarnation=uuid.uuid4().hex,
        address=server.address,
        node_id=f"node-{address}-{number}",
        session_id="lab",
        query_address=proxy.server_address,
    )
    host = Host(info, coordinator, Path("/tmp/state"), conf=StateStoreConf(fsync=False, host_memory=256 << 20))
    proxy.start()
    host.register()
    file = Path(host_files) / f"{address}.json"
    file.with_suffix(".draft").write_bytes(
        msgspec.json.encode(HostFile(info.host_id, info.incarnation, info.address, TOKEN))
    )
    file.with_suffix(".draft").replace(file)
    print("serves", flush=True)
    beats = 0
    while host.replaced is None:
        time.sleep(beat_seconds)
        try:
            host.heartbeat()
            beats += 1
            if beats % BEATS_TO_MAINTENANCE == 0:
                host.maintenance.do_maintenance()
        except (CoordinatorError, HostUnavailableError, StateStoreError):
            logging.exception("a heartbeat of %s failed", address)
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4], float(sys.argv[5]))
