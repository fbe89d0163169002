"""Queries whose hosts are read, all in the test's own process: a key is an int, its state the ints ``n`` and ``w``.

A host with some versions, as tests of its reads begin.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from backends.conf import StateStoreConf
from backends.encoding.key_groups import key_groups
from backends.encoding.keys import encode_keys
from backends.encoding.operator_schema import OperatorSchema
from backends.encoding.schema import StateSchema
from backends.encoding.sorted_pairs import SortedPairs
from backends.formats.changelog import Changes
from coordinator_actor.coordinator import Coordinator
from coordinator_actor.messages import OperatorSpec
from spark_bridge.host.host import Host
from spark_bridge.queryable.protocol import At, LookupRequest, ScanRequest
from spark_bridge.queryable.reads.host_reads import HostReads
from spark_bridge.transport.protocol import TaskIdentity
from tests.coordinator_actor.coordinator_world import World
from tests.spark_bridge.host.host_steps import opened

G = 16
KEY = pa.schema([("k", pa.int64())])
STATE = StateSchema(KEY, pa.schema([("n", pa.int64()), ("w", pa.int64())]))
COMPLETED = At()


class Port:
    """The coordinator as hosts reach it; ``calls`` counts the messages."""

    def __init__(self, c: Coordinator) -> None:
        self.c = c
        self.calls: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        self.calls[name] = self.calls.get(name, 0) + 1
        return getattr(self.c, name)


class HostWorld:
    """A query with the operator ``op`` on some hosts, run batch by batch.

    ``wait_seconds`` is long enough for a slow machine to load a partition; a test that expects a timeout sets less.
    """

    def __init__(
        self,
        root: Path,
        hosts: int = 1,
        n: int = 2,
        backend: str = "file",
        *,
        wait_seconds: float = 20.0,
        **conf: Any,
    ) -> None:
        self.root = root
        self.n = n
        self.run = "run1"
        self.version = 0
        self.backend = backend
        self.conf = conf
        self.ahead = 0.0
        self.world = World(root)
        self.c = self.world.coordinator(0)
        self.port = Port(self.c)
        self.hosts: list[Any] = [self.host(i) for i in range(hosts)]
        self.reads = [HostReads(h, wait_seconds=wait_seconds) for h in self.hosts]
        self.register(self.run)

    def host(self, i: int, incarnation: str = "a") -> Any:
        conf = StateStoreConf(provider=self.backend, fsync=False, **self.conf)
        info, local = self.world.host(i, incarnation), self.root / f"local{i}{incarnation}"
        port: Any = self.port
        made = Host(info, port, local, conf=conf, open_storage=self.world.storage, clock=self.clock)
        made.register()
        return made

    def clock(self) -> float:
        """The hosts' clock: the machine's time plus the seconds that a test adds."""
        return time.monotonic() + self.ahead

    def register(self, run: str, **changes: Any) -> None:
        spec = OperatorSpec("op", self.n, OperatorSchema.of_rows(STATE).to_json(), self.backend)
        answer = self.c.register_query(self.world.registration(run, self.n, operators=(spec,), key_groups=G, **changes))
        assert answer.refusal is None, answer.refusal
        self.run, self.version = run, answer.completed_version

    def task(self, p: int, attempt: str | None = None) -> TaskIdentity:
        return TaskIdentity(self.run, "op", p, self.version, attempt or uuid.uuid4().hex[:6], uuid.uuid4().hex)

    def write(self, values: Mapping[int, int | None], partitions: Iterable[int] | None = None) -> None:
        """The tasks of a batch: their changes are acknowledged. A value of None removes a key."""
        self.world.plan_spark(self.version)
        for p in range(self.n) if partitions is None else partitions:
            task = self.task(p)
            for host in self.hosts:
                if opened(host, task).redirect is None:
                    host.commit(task, changes_of(values, p, self.n), {})
                    break
            else:
                raise AssertionError(f"no host owns partition {p}")

    def complete(self, *, tell: bool = True) -> None:
        """Commit the batch in Spark and, with ``tell``, inform the hosts."""
        self.world.commit_spark(self.version)
        self.c.batch_committed(self.run, self.version)
        self.version += 1
        for host in self.hosts if tell else ():
            host.heartbeat()

    def batch(self, values: Mapping[int, int | None], *, tell: bool = True) -> None:
        self.write(values)
        self.complete(tell=tell)

    def lookup(
        self, keys: Iterable[int], at: At = COMPLETED, i: int = 0, run: str | None = None
    ) -> tuple[int, list[Any]]:
        """The version and the values of keys, of one host."""
        version, values = self.reads[i].lookup(LookupRequest(run or self.run, "op", at), stored(keys))
        return version, STATE.decode_values(values).column("n").to_pylist()

    def one(self, key: int, at: At = COMPLETED, i: int = 0) -> tuple[int, Any]:
        version, value = self.reads[i].lookup_one(LookupRequest(self.run, "op", at), stored([key])[0].as_py())
        return version, STATE.decode_values(pa.array([value], pa.binary())).column("n")[0].as_py()

    def scan(self, at: At = COMPLETED, i: int = 0, **asked: Any) -> tuple[int, dict[int, int]]:
        """The version and all that one host has."""
        answer = self.reads[i].scan(ScanRequest(self.run, "op", at=at, **asked))
        table = pa.Table.from_batches(list(answer.batches), answer.schema)
        return answer.version, dict(zip(table.column("k").to_pylist(), table.column("n").to_pylist(), strict=True))

    def instance(self, p: int, i: int = 0) -> Any:
        return self.hosts[i].cache.instance(self.run, "op", p)

    def close(self) -> None:
        for host in self.hosts:
            host.close()


def partitions_of(keys: Iterable[int], n: int) -> list[int]:
    return (key_groups(columns(keys), G) * n // G).tolist()  # type: ignore[no-any-return]


def columns(keys: Iterable[int]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array(list(keys), pa.int64())], schema=KEY)


def stored(keys: Iterable[int]) -> pa.BinaryArray:
    batch = columns(keys)
    return encode_keys(batch, key_groups(batch, G))


def changes_of(values: Mapping[int, int | None], p: int, n: int) -> Changes:
    own = [k for k, of in zip(values, partitions_of(values, n), strict=True) if of == p]
    amounts = [values[k] for k in own]
    states = [pa.array([a or 0 for a in amounts], pa.int64())] * 2
    encoded = STATE.encode_values(pa.RecordBatch.from_arrays(states, schema=STATE.value))
    is_there = pa.array([a is not None for a in amounts], pa.bool_())
    encoded = pc.if_else(is_there, encoded, None)
    return Changes({"default": SortedPairs.of(stored(own), encoded)})


KEYS = range(40)


def exactly(version: int, *, held_only: bool = False) -> At:
    return At("version", version, held_only)


def filled(value: int) -> dict[int, int]:
    return dict.fromkeys(KEYS, value)


def table(w: HostWorld, **asked: Any) -> pa.Table:
    answer = w.reads[0].scan(ScanRequest(w.run, "op", **asked))
    return pa.Table.from_batches(list(answer.batches), answer.schema)
