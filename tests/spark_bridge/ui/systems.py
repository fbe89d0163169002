"""Systems for the page: a model of any size with faults, and real hosts without Ray.

``HOSTILE`` are malicious names and values, and ``Forms`` finds what a page must not have because of them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from coordinator_actor.durable.records import StepTime
from coordinator_actor.messages import InputPace, SavepointStatus
from coordinator_actor.savepoints.savepoint_format import SavepointInfo
from spark_bridge.exceptions import AccessDeniedError, EnvironmentProblemError, RequestError
from spark_bridge.host.instances import in_columns
from spark_bridge.overview.faults import faults_of
from spark_bridge.overview.from_cluster import overview_of_cluster
from spark_bridge.overview.model import (
    Checkpoint,
    CoordinatorInfo,
    HostOverview,
    Operator,
    Overview,
    Partition,
    Query,
    SchemaUse,
    Variable,
)
from spark_bridge.queryable.server.tokens import Grant
from spark_bridge.ui.live import LiveSystem
from tests.effort import IS_THOROUGH
from tests.spark_bridge.queryable.client_world import Cluster

LOOK, ACT, PROCESSES = "may-look", "may-act", "the-cluster's"
NOW = 1_763_900_000_000


@dataclass
class Tokens:
    """A verifier of three tokens; some may be revoked."""

    revoked: set[str] = field(default_factory=set)

    def verify(self, token: str) -> Grant:
        grants = {
            LOOK: Grant("0a", read_only=True),
            ACT: Grant("0b", read_only=True, admin=True),
            PROCESSES: Grant("cluster", read_only=False, admin=True),
        }
        if token not in grants or token in self.revoked:
            raise AccessDeniedError("The token is unknown." if token else "No token was given.")
        return grants[token]


@dataclass
class ModelSystem:
    """A system that is a model alone."""

    shown: Overview
    is_live: bool = True
    place: str = "namespace statestore"
    status: SavepointStatus = field(default_factory=lambda: SavepointStatus(known=True))
    triggered: list[tuple[str, str | None]] = field(default_factory=list)
    problem: str | None = None

    def overview(self) -> Overview:
        if self.problem is not None:
            raise EnvironmentProblemError(self.problem)
        return self.shown

    def client(self) -> Any:
        raise RequestError("A model has no state.")

    def recent_changes(self, *_: Any) -> Iterator[Any]:
        return iter(())

    def savepoints(self, query: Query, base: str | None = None) -> list[SavepointInfo]:
        return []

    def describe_savepoint(self, path: str, *, check_files: bool = False) -> SavepointInfo:
        return SavepointInfo(path, None, "damaged")

    def trigger_savepoint(self, request_id: str, query: str, path: str | None) -> None:
        self.triggered.append((query, path))

    def savepoint_status(self, request_id: str) -> SavepointStatus:
        return self.status


@cache
def checkpoints(n: int, seed: int, slow: float = 1.0, storage: float = 1.0) -> tuple[Checkpoint, ...]:
    """The last batches of a query, one every ten seconds."""
    random_ = random.Random(seed)
    made = []
    for v in range(1, n + 1):
        phases = {
            "tasks": int(random_.uniform(300, 500) + 60 * (storage - 1)),
            "acknowledge": int(random_.uniform(80, 220) * slow),
            "manifest": random_.randint(8, 30),
            "commit": random_.randint(30, 90),
        }
        steps = {
            "input_wait": StepTime(900, 150),
            "merge_ms": StepTime(500 * slow, 90 * slow),
            "get_ms": StepTime(260, 40),
            "put_ms": StepTime(150, 30),
            "changelog_ms": StepTime(400 * storage, 60 * storage),
        }
        ended = NOW - (n - v) * 10_000
        duration = sum(phases.values()) - phases["commit"]
        made.append(
            Checkpoint(
                v,
                v,
                1,
                "run-1",
                is_kept=v > n - 100,
                begun_ms=ended - duration,
                prepared_ms=ended - phases["commit"],
                completed_ms=ended,
                duration_ms=duration,
                phases=phases,
                steps=steps,
                partitions=16,
                delta_bytes=random_.randint(200_000, 900_000),
                full_bytes=40_000_000 + v * 10_000,
                retried=2 if v == n - 4 and seed % 3 == 0 else 0,
                rows=random_.randint(40_000, 60_000),
                updated=20_000,
                removed=random_.randint(0, 900),
                late=random_.choice([0, 0, 0, 12]),
                duplicates=random_.choice([0, 0, 7]),
                requests=34,
                storage={"put": 20, "get": 10, "list": 1, "delete": 3, "sent_bytes": 900_000},
            )
        )
    return tuple(made)


def operator(name: str, n: int, hosts: int, seed: int, hot: float = 1.0) -> Operator:
    random_ = random.Random(seed)
    partitions = []
    for p in range(n):
        factor = hot if p == 3 % n else 1.0
        keys = int(random_.uniform(11_000, 13_000) * factor)
        work = random_.uniform(60, 110) * factor
        partitions.append(
            Partition(
                name,
                p,
                version=300,
                owner=f"host-{p % hosts}",
                keys=keys,
                memory_bytes=keys * 96,
                snapshot_version=296,
                snapshot_lag=4,
                commit_ms={"merge_ms": work, "changelog_ms": 40.0, "input_wait": 100.0},
                rows=int(random_.uniform(2_900, 3_300) * factor),
            )
        )
    variable = Variable(
        "default",
        "rows",
        {"user": "int64", "country": "string"},
        {"n": "int64", "spent": "double"},
        ttl_ms=86_400_000,
        index=["country"],
    )
    total = sum(p.keys or 0 for p in partitions)
    memory = sum(p.memory_bytes or 0 for p in partitions)
    return Operator(
        name,
        n,
        "rocksdb",
        "5d2e",
        total,
        memory,
        max(p.keys or 0 for p in partitions) / sorted(p.keys or 0 for p in partitions)[n // 2],
        tuple(partitions),
        (variable,),
        (SchemaUse("41aa", 201, 250), SchemaUse("5d2e", 251, 300, (variable,))),
    )


def query(name: str, operators: tuple[Operator, ...], seed: int, **changes: Any) -> Query:
    made = Query(
        f"q-{name}",
        f"run-{name}",
        name,
        "running",
        f"s3://bucket/{name}",
        f"s3://bucket/{name}/statestore",
        2,
        300,
        300,
        201,
        operators,
        checkpoints(300, seed),
        counts={"completed": 300, "failed": 0},
        watermark_ms=NOW - 42_000,
        watermark_rose_ms=NOW,
        input=InputPace(5_000.0, 14_000.0, 1_250 * seed),
        batch_time_ms=NOW - 5_000,
    )
    return replace(made, **changes)


def host(i: int, **changes: Any) -> HostOverview:
    mib = 1 << 20
    return replace(
        HostOverview(
            f"host-{i}",
            f"grpc://10.0.0.{i + 1}:41000",
            "node",
            f"10.0.0.{i + 1}:7070",
            "a",
            4_100 + i,
            heartbeat_ms=600 + i,
            up_ms=93_600_000 + i,
            partitions=8,
            memory={
                "host_memory": 2_048 * mib,
                "rocksdb": 700 * mib,
                "running_batches": 90 * mib,
                "row_cache": (200 + 40 * i) * mib,
                "older_versions": 60 * mib,
            },
            counters={"opens": 4_800, "commits": 4_800, "keys_written": 9_000_000, "keys_read": 11_000_000, "loads": 8},
            row_cache={"asked": 11_000_000, "hits": 8_700_000},
            storage_requests={"put": 9_000, "get": 120},
            requests={"totals": {"get": _requests(91_000, 0, 0.2), "scan": _requests(12, 1, 80.0)}},
        ),
        **changes,
    )


def _requests(n: int, failures: int, p50: float) -> dict[str, float]:
    times = {"p50_ms": p50, "p90_ms": 2 * p50, "p99_ms": 9.3 * p50, "max_ms": 31 * p50}
    return {"requests": n, "failures": failures, **times}


def with_faults(overview: Overview) -> Overview:
    return replace(overview, faults=faults_of(overview))


@cache
def healthy() -> Overview:
    """Three queries on four hosts."""
    queries = (
        query("clicks", (operator("totals", 16, 4, 1), operator("sessions", 16, 4, 2)), 1),
        query("orders", (operator("spent", 16, 4, 3),), 2),
        query("devices", (operator("last_seen", 8, 4, 4),), 4),
    )
    return with_faults(
        Overview("cluster", NOW + 3_000, CoordinatorInfo("c", "statestore", "10.0.0.1", 4_000), queries, hosts(4))
    )


@cache
def quiet(minutes: int = 12) -> Overview:
    """Three queries that have had no new input for so many minutes."""
    return with_faults(replace(healthy(), taken_ms=NOW + minutes * 60_000, faults=()))


@cache
def hosts(n: int) -> tuple[HostOverview, ...]:
    return tuple(host(i) for i in range(n))


@cache
def in_trouble() -> Overview:
    """A skewed key, a slow disk, a host that was killed."""
    made = healthy()
    clicks = query("clicks", (operator("totals", 16, 4, 1, hot=38.0), operator("sessions", 16, 4, 2)), 1, batch_ms=921)
    orders = query(
        "orders",
        made.queries[1].operators,
        2,
        checkpoints=checkpoints(300, 3, storage=40.0),
        pending_partitions=4,
        batch_ms=94_000,
    )
    silent = host(2, answered=False, heartbeat_ms=14_000, memory={}, counters={}, requests={}, partitions=0)
    there = (made.hosts[0], replace(made.hosts[1], restarts=1, up_ms=95_000), silent, made.hosts[3])
    return with_faults(replace(made, queries=(clicks, orders, made.queries[2]), hosts=there, faults=()))


# -- real hosts --------------------------------------------------------------------------------


@dataclass
class Served:
    """Real hosts, coordinator and client, as the page sees them, without Ray."""

    cluster: Cluster
    system: LiveSystem


def served(root: Path, make: Callable[..., Cluster] = Cluster, **options: Any) -> Served:
    """A query of the aggregate ``totals`` by ``user``, with savepoints in the directory of its state."""
    cluster = make(root, **options)
    (root / "ck" / "metadata").write_text('{"id":"q"}')
    client = cluster.client()

    def overview() -> Overview:
        c = cluster.c
        described = {**c.describe(), "namespace": "statestore", "node_ip": "192.0.2.1", "pid": 11}
        proxies = [
            {**in_columns(h.host.describe()), "query_address": h.address, "requests": h.proxy.statistics.snapshot()}
            for h in cluster.hosts
        ]
        stats = {q["run_id"]: c.checkpoint_stats(q["run_id"]) for q in described["queries"]}
        return overview_of_cluster(described, proxies, stats, now_ms=int(time.time() * 1000))

    def call(method: str, *args: Any) -> Any:
        answer: Callable[..., Any] = getattr(cluster.c, method)
        made = answer(*args)
        for h in cluster.hosts:
            h.host.heartbeat()  # orders of the coordinator come with the answer
        return made

    return Served(cluster, LiveSystem("statestore", overview, lambda: client, call))


_MARKUP = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' autofocus onfocus='alert(1)",
    "</textarea></title><svg onload=alert(1)>",
    "{{ 7 * 191 }}{% include 'signin.html' %}",
]
_PATHS = ["../../etc/passwd", "a/b%2F?c=d&e#f"]
_CELLS = ["\u202edrawkcab\x00\x1b[31m", "=cmd|' /C calc'!A0"]
HOSTILE = [
    *(text for kind in (_MARKUP, _PATHS, _CELLS) for text in (kind if IS_THOROUGH else ["".join(kind)])),
    "javascript:alert(1)",
    "x" * 1_500,
]
"""A usual run joins the strings of a kind into one: each of them closes any context that surrounds it."""
ADDRESSES = ("href", "src", "action", "formaction", "data-watch")


class Forms(HTMLParser):
    """The hidden fields of a page, and whatever could run or look as another site wants."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.hidden: dict[str, str] = {}
        self.suspect: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        if tag == "input" and named.get("type") == "hidden":
            self.hidden[named["name"] or ""] = named.get("value") or ""
        if tag in ("style", "iframe", "object", "embed", "base", "marquee", "img", "b0"):
            self.suspect.append(tag)
        if tag == "script" and not (named.get("src") or "").endswith("/static/page.js"):
            self.suspect.append("script")
        for name, value in attrs:
            runs = name in ADDRESSES and (value or "").strip().lower().startswith("javascript:")
            if name.startswith("on") or name == "style" or runs:
                self.suspect.append(f"{tag} {name}={value}")
