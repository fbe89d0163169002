"""Streams without Spark: a coordinator and hosts that commit batches, whose state savepoints are made of."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from backends.conf import StateStoreConf
from backends.encoding.key_groups import key_groups, partition_of
from backends.encoding.keys import encode_keys
from backends.encoding.sorted_pairs import SortedPairs
from backends.encoding.values import decode_values, encode_values
from backends.formats.changelog import Changes
from coordinator_actor.coordinator import Coordinator
from coordinator_actor.coordinator_conf import CoordinatorConf
from coordinator_actor.durable.manifests import ManifestLog
from coordinator_actor.messages import OperatorSpec, QueryRegistration, SavepointStatus
from coordinator_actor.savepoints.savepoint_format import read_metadata, read_stored_savepoint
from spark_bridge.host.host import Host
from spark_bridge.transport.protocol import GetCommand, TaskIdentity
from tests.coordinator_actor.coordinator_world import SCHEMA, World
from tests.patience import PATIENCE

G = 16
Rows = dict[int, int]
KEYS, VALUES = pa.schema([("k", pa.int64())]), pa.schema([("n", pa.int64())])


class Port:
    """A coordinator within reach; ``calls`` are the methods called."""

    def __init__(self, c: Coordinator) -> None:
        self.c = c
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            return getattr(self.c, name)(*args, **kwargs)

        return call


def stored(rows: dict[int, int | None]) -> SortedPairs:
    keys = pa.record_batch([pa.array(list(rows), pa.int64())], schema=KEYS)
    values = pa.record_batch([pa.array([0 if v is None else v for v in rows.values()], pa.int64())], schema=VALUES)
    encoded = encode_values(values)
    removed = pa.array([v is None for v in rows.values()])
    encoded = pc.if_else(removed, pa.scalar(None, pa.binary()), encoded)
    return SortedPairs.last_wins(encode_keys(keys, key_groups(keys, G)), encoded)


class Stream:
    """A query as Spark runs it. ``at`` is what each version should show."""

    def __init__(
        self,
        root: Path,
        n: int = 2,
        hosts: int = 2,
        backend: str = "file",
        conf: CoordinatorConf | None = None,
        at: dict[int, Rows] | None = None,
        **changes: Any,
    ) -> None:
        self.world = World(root)
        self.conf = conf or CoordinatorConf(savepoint_timeout=30.0, report_timeout=0.0)
        self.n = n
        self.spec = OperatorSpec("op", n, SCHEMA, backend=backend)
        self.registration: QueryRegistration = self.world.registration(
            n=n, operators=(self.spec,), key_groups=G, **changes
        )
        self.at: dict[int, Rows] = at or {0: {}}
        self.background: list[Callable[[], None]] = []
        self.hosts: dict[int, Any] = {}
        self.c = self.coordinator()
        for i in range(hosts):
            self.add_host(i)
        self.register()

    def coordinator(self) -> Coordinator:
        return Coordinator(lambda: self.world.now, self.world.storage, self.conf, self.background.append)

    def register(self) -> None:
        answer = self.c.register_query(self.registration)
        assert answer.refusal is None, answer.refusal

    def add_host(self, i: int, incarnation: str = "a", **conf: Any) -> Any:
        host: Any = Host(
            self.world.host(i, incarnation),
            Port(self.c),  # type: ignore[arg-type]
            self.world.root / f"local{i}{incarnation}",
            conf=StateStoreConf(fsync=False, **conf),
            open_storage=self.world.storage,
            clock=lambda: self.world.now,
        )
        host.exports._sleep = lambda seconds: None
        host.register()
        self.hosts[i] = host
        return host

    def restart_coordinator(self) -> None:
        """It dies, and another one takes over; hosts and driver report again."""
        self.c = self.coordinator()
        self.background.clear()
        for host in self.hosts.values():
            host.coordinator.c = self.c
        self.heartbeat()
        self.register()

    def lose(self, i: int) -> None:
        """A host dies, and is found to be gone."""
        self.kill(i)
        for _ in range(3):
            self.world.now += 4
            for host in self.hosts.values():
                host.coordinator.heartbeat_host(host.info.host_id, host.info.incarnation, {})
            self.c.driver_heartbeat(self.registration.run_id)
        self.c.expire()

    def kill(self, i: int) -> None:
        host = self.hosts.pop(i)
        host.exports.close()
        host.maintenance.close()

    def begin(self, batch: int, rows: dict[int, int | None], partitions: Iterator[int] | range | None = None) -> None:
        """Some tasks of a batch, all by default: with them, the version is prepared."""
        run = self.registration.run_id
        for directory in ("offsets", "sources/0"):
            path = self.world.root / "ck" / directory / str(batch)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"v1\n{directory} {batch}")
        pairs = stored(rows)
        for p in partitions if partitions is not None else range(self.n):
            all_of_it = zip(pairs.keys.to_pylist(), pairs.values.to_pylist(), strict=True)
            own = {k: v for k, v in all_of_it if partition_of(int.from_bytes(k[:2], "big"), G, self.n) == p}
            task = TaskIdentity(run, "op", p, batch, uuid.uuid4().hex[:6], uuid.uuid4().hex)
            for host in self.hosts.values():
                if host.open(task).redirect is None:
                    host.commit(task, Changes({"default": SortedPairs.from_dict(own)}), {})
                    break
            else:
                raise AssertionError(f"no host owns partition {p}")

    def commit(self, batch: int) -> None:
        self.world.commit_spark(batch)
        self.c.batch_committed(self.registration.run_id, batch)

    def batch(self, batch: int, rows: dict[int, int | None] | None = None) -> None:
        given: dict[int, int | None] = rows if rows is not None else {k: batch * 1000 + k for k in range(batch, 30, 2)}
        self.begin(batch, given)
        self.commit(batch)
        after = {**self.at[batch], **given}
        self.at[batch + 1] = {k: v for k, v in after.items() if v is not None}

    def batches(self, first: int, end: int) -> None:
        for batch in range(first, end):
            self.batch(batch)

    def trigger(self, request: str = "r1", path: str | None = None, *, stop: bool = False) -> SavepointStatus:
        base = path or str(self.world.root / "sp")
        return self.c.trigger_savepoint(request, "name", base, stop=stop)

    def copy_spark_files(self) -> None:
        while self.background:
            self.background.pop(0)()

    def heartbeat(self, *hosts: int) -> None:
        """The coordinator looks at its runs; all hosts, or some, receive their orders and carry them out."""
        self.c.expire()
        for i in hosts or tuple(self.hosts):
            self.hosts[i].heartbeat()
            self.hosts[i].exports._pool.submit(lambda: None).result(PATIENCE)

    def heartbeat_until(self, is_so: Callable[[], bool]) -> None:
        """All hosts receive their orders again and again: loads in the background take their time."""
        deadline = time.monotonic() + PATIENCE
        while not is_so():
            assert time.monotonic() < deadline, is_so
            self.heartbeat()
            time.sleep(0.01)

    def status(self, request: str = "r1") -> SavepointStatus:
        return self.c.savepoint_status(request)

    def is_pending(self, request: str = "r1") -> bool:
        status = self.status(request)
        return status.known and status.path is None and status.failure is None

    def finish(self, request: str = "r1") -> str:
        self.copy_spark_files()
        self.heartbeat()
        path = self.status(request).path
        assert path is not None, self.status(request)
        return path

    def reason(self, request: str = "r1") -> tuple[str, str]:
        failure = self.status(request).failure
        assert failure is not None, self.status(request)
        return failure.error, failure.message

    def savepoint_rows(self, path: str) -> Rows:
        """What others read in it."""
        storage = self.world.storage(path, {})
        metadata = read_metadata(storage)
        read_stored_savepoint(path, is_verified=True)
        found: Rows = {}
        for file in metadata.operators[0].variables[0].files:
            for row in pq.read_table(Path(path) / file.path).to_pylist():
                assert row["k"] not in found
                found[row["k"]] = row["n"]
        return found

    def rows(self) -> Rows:
        """Return the rows of the last completed version as query clients read them, once the hosts know of it."""
        self.heartbeat()
        stored_keys = {stored({i: 0}).keys[0].as_py(): i for i in range(60)}
        found: Rows = {}
        for p in range(self.n):
            owner = self.c.open_for_read(self.registration.run_id, "op", p).owner
            (host,) = (h for h in self.hosts.values() if h.info == owner)
            names = [k for k in stored_keys if partition_of(int.from_bytes(k[:2], "big"), G, self.n) == p]
            values = host.reads.get_many(GetCommand(self.registration.run_id, "op", p), pa.array(names, pa.binary()))
            held = [(stored_keys[k], v) for k, v in zip(names, values, strict=True) if v.is_valid]
            numbers = decode_values(pa.array([v.as_py() for _, v in held], pa.binary()), VALUES).column(0).to_pylist()
            found.update(zip([k for k, _ in held], numbers, strict=True))
        return found

    def log(self) -> ManifestLog:
        log = ManifestLog(self.world.storage(self.registration.state_location, {}), "reader")
        log.refresh()
        return log

    def close(self) -> None:
        for host in self.hosts.values():
            host.close()


def run_and_clean(s: Stream, first: int, end: int) -> None:
    """Batches with snapshots, and maintenance of hosts and coordinator after each."""
    for batch in range(first, end):
        s.batch(batch)
        for host in s.hosts.values():
            for order in s.c.heartbeat_host(host.info.host_id, host.info.incarnation, {"run1": 0}).completed:
                host.loader.complete(order)
            for uploaded in host.maintenance.do_maintenance():
                uploaded.result(PATIENCE)
        s.world.now += 2
        s.c.maintain()
