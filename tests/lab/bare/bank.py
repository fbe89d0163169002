"""The bank's coordinator, driver, tasks and auditor: ``bare.bank CHECKPOINT ADDRESS HOST_SECONDS HOSTS...``.

Runs on machine 0, at ``ADDRESS``, with the hosts at the others. A host is lost after ``HOST_SECONDS`` without a
heartbeat. Prints ``batch N`` when batch N is committed, the
auditor's verdict on each answer, and ``wrong`` if a task has read data that is not in its version.
"""

from __future__ import annotations

import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from backends.encoding.key_groups import key_groups
from backends.encoding.keys import encode_keys
from backends.encoding.operator_schema import OperatorSchema
from backends.encoding.schema import StateSchema
from backends.storage.checkpoint_storage import CheckpointStorage
from coordinator_actor.coordinator import Coordinator, LeaseWatch
from coordinator_actor.coordinator_conf import CoordinatorConf
from coordinator_actor.handlers.suspicions import probe_address
from coordinator_actor.messages import OperatorFigures, OperatorSpec, QueryRegistration
from spark_bridge import QueryableStateClient
from spark_bridge.exceptions import QueryableStateError
from spark_bridge.task.executor import Endpoints
from spark_bridge.task.task_store import TaskStore
from spark_bridge.transport.protocol import TaskIdentity
from tests.lab import auditor
from tests.lab.accounts import ACCOUNTS, OPERATOR, postings
from tests.lab.bare.calls import serve
from tests.lab.bare.host import QUERY_PORT, TOKEN
from tests.patience import PATIENCE

PARTITIONS, GROUPS = 4, 64
PAUSE = 0.05
ACCOUNT = pa.schema([("k", pa.int64())])
BALANCE = pa.schema([("n", pa.int64()), ("money", pa.int64())])
STATE = StateSchema(ACCOUNT, BALANCE)


class Partition:
    """The accounts of one partition."""

    def __init__(self, partition: int) -> None:
        accounts = pa.record_batch([pa.array(range(ACCOUNTS), pa.int64())], schema=ACCOUNT)
        groups = key_groups(accounts, GROUPS)
        own = np.flatnonzero(groups * PARTITIONS // GROUPS == partition)
        stored = encode_keys(accounts, groups).take(pa.array(own))
        order = pa.compute.sort_indices(stored)
        self.accounts = own[order.to_numpy()]
        self.keys = stored.take(order)
        self.partition = partition

    def balances(self, version: int) -> pa.BinaryArray:
        """Return the values of the accounts at a version; null of accounts that have seen no row."""
        money, rows = (of[self.accounts] for of in postings(version))
        values = pa.record_batch([pa.array(rows), pa.array(money)], schema=BALANCE)
        return pa.compute.if_else(pa.array(rows > 0), STATE.encode_values(values), None)

    def post(self, run_id: str, batch: int, endpoints: Endpoints) -> None:
        """Run the task of a batch."""
        name = f"{self.partition}.{batch}"
        task = TaskIdentity(run_id, OPERATOR, self.partition, batch, name, uuid.uuid4().hex, batch)
        store = TaskStore(task, PARTITIONS, GROUPS, endpoints)
        store.open()
        if not store.get_many(self.keys).equals(self.balances(batch)):
            print(f"wrong at version {batch}: partition {self.partition} read other balances", flush=True)
        store.stage(self.keys, self.balances(batch + 1))
        store.commit(OperatorFigures())


def main(checkpoint: str, address: str, host_seconds: float, machines: list[str]) -> None:
    """Run batch after batch until the process receives a signal to end."""
    conf = CoordinatorConf(host_timeout=host_seconds, driver_timeout=1e9, report_timeout=0.0)
    begun = time.time() - time.monotonic()
    coordinator = Coordinator(lambda: begun + time.monotonic(), CheckpointStorage.open, conf, probe=probe_address)
    LeaseWatch(coordinator, lambda hosts, queries: None, lambda: None).loop().start()
    serve(coordinator, address)
    host_files = Path(checkpoint, "hosts")
    for directory in ("offsets", "commits", "hosts"):
        Path(checkpoint, directory).mkdir(parents=True)
    print("ready", flush=True)
    while len(list(host_files.glob("*.json"))) < len(machines):
        time.sleep(PAUSE)
    run_id = str(uuid.uuid4())
    registered = coordinator.register_query(
        QueryRegistration(
            query_id=str(uuid.uuid4()),
            run_id=run_id,
            name="bank",
            session_id="lab",
            checkpoint_location=checkpoint,
            state_location=f"{checkpoint}/statestore",
            operators=(OperatorSpec(OPERATOR, PARTITIONS, OperatorSchema.of_rows(STATE).to_json()),),
            key_groups=GROUPS,
            maintenance_interval=1.0,
            standby_replicas=1,
        )
    )
    assert registered.refusal is None, registered.refusal
    endpoints = Endpoints((), TOKEN, str(host_files), PATIENCE)
    threading.Thread(target=audit, args=(checkpoint, machines), daemon=True).start()
    partitions = [Partition(p) for p in range(PARTITIONS)]
    with ThreadPoolExecutor(PARTITIONS) as tasks:
        for batch in range(sys.maxsize):
            Path(checkpoint, "offsets", str(batch)).write_text("v1\n{}\n{}")
            for _ in tasks.map(partial(Partition.post, run_id=run_id, batch=batch, endpoints=endpoints), partitions):
                pass
            Path(checkpoint, "commits", str(batch)).write_text("v1\n{}")
            coordinator.batch_committed(run_id, batch, by_driver=True)
            print(f"batch {batch}", flush=True)
            time.sleep(PAUSE)


def audit(checkpoint: str, machines: list[str]) -> None:
    """Ask for all accounts again and again, at whatever host answers: exact answers, and those of copies, in turns."""
    seen = 0
    with QueryableStateClient.connect(address=[f"{m}:{QUERY_PORT}" for m in machines], token=TOKEN) as client:
        while True:
            try:
                said = auditor.audit(client, max(seen, auditor.committed(checkpoint)))
                seen = max(seen, int(said.split()[1])) if said.startswith("answer") else seen
                print(auditor.audit_copies(client, seen), flush=True)
            except QueryableStateError as error:
                said = f"late {type(error).__name__}: {error}"
            print(said, flush=True)
            time.sleep(PAUSE)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), sys.argv[4:])
