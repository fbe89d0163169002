"""The overview of a running cluster, built from the descriptions of coordinator and hosts."""

from __future__ import annotations

import time
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import repeat
from statistics import median
from typing import Any

import ray
from msgspec import structs
from ray.exceptions import RayError

from backends.encoding.operator_schema import OperatorSchema
from coordinator_actor.coordinator_conf import COORDINATOR_NAME, NAMESPACE
from coordinator_actor.durable.records import StepTime
from coordinator_actor.messages import InputPace
from spark_bridge.exceptions import EnvironmentProblemError
from spark_bridge.host.instances import INSTANCE_COLUMNS
from spark_bridge.overview import model
from spark_bridge.overview.faults import COORDINATOR_PROCESS, faults_of

Description = Mapping[str, Any]
_RECORDED = model.Checkpoint.__struct_fields__
MAX_SCHEMAS = 1_000
"""The variables of at most this many schemas are kept from one look to the next."""
_OF_HOST = (
    *("host_id", "address", "node_id", "query_address", "incarnation", "pid", "memory", "row_cache", "disk"),
    *("storage_requests", "requests", "restarts"),
)
_OF_QUERY = (
    *("query_id", "run_id", "name", "checkpoint_location", "state_location", "epoch", "completed_version"),
    *("prepared_version", "oldest_version", "failure", "is_mirror", "standby_replicas"),
)
_OF_LOST_DRIVER = ("query", "run_id", "checkpoint_location", "query_id", "state_location")
_OF_LOOP = ("what", "failures", "error", "remedy")
"""The fields that hosts and the coordinator name as the model does."""
_COUNTERS = ("opens", "commits", "keys_written", "keys_read", "loads", "snapshots")


@dataclass
class _OfRun:
    """The known checkpoints of one run; ``mark`` is that of the last answer. Versions in ``kept`` can be read."""

    mark: str = ""
    kept: range = range(0)
    by_id: dict[int, model.Checkpoint] = field(default_factory=dict)
    checkpoints: tuple[model.Checkpoint, ...] = ()


class KnownCheckpoints:
    """The checkpoints of the last overview. The next one asks the coordinator only for those that are new or changed.

    A query has hundreds of checkpoints. A caller that looks repeatedly passes the same object to each look, one look
    after the other.
    """

    def __init__(self) -> None:
        self._of_runs: dict[str, _OfRun] = {}

    def mark(self, run_id: str) -> str:
        """Return the ``history_since`` to ask ``checkpoint_stats`` with."""
        of_run = self._of_runs.get(run_id)
        return "" if of_run is None else of_run.mark

    def of(self, query: Description, stats: Description) -> tuple[model.Checkpoint, ...]:
        """Add the checkpoints of an answer to ``checkpoint_stats`` to the known ones of a run, and return all.

        ``stats`` is {} if the answer has not come in time.
        """
        of_run = self._of_runs.setdefault(query["run_id"], _OfRun())
        records, first = stats.get("history", ()), stats.get("history_first")
        is_all = stats.get("history_is_all", False)
        of_run.mark = stats.get("history_mark", of_run.mark)
        kept = range(query["oldest_version"], query["completed_version"] + 1)
        if records or is_all or kept != of_run.kept:
            by_id = {} if is_all else of_run.by_id
            by_id = {**by_id, **{record["id"]: _checkpoint(record) for record in records}}
            of_run.by_id = {
                i: one if one.is_kept == (one.version in kept) else structs.replace(one, is_kept=not one.is_kept)
                for i, one in sorted(by_id.items())
                if first is None or i >= first
            }
            of_run.kept = kept
            of_run.checkpoints = tuple(of_run.by_id.values())
        return of_run.checkpoints

    def forget_all_but(self, runs: Container[str]) -> None:
        """Forget the runs that are not there any more."""
        self._of_runs = {run: of_run for run, of_run in self._of_runs.items() if run in runs}


def overview_of_cluster(
    coordinator: Description | None,
    hosts: Sequence[Description],
    stats: Mapping[str, Description] | None = None,
    *,
    silent: Sequence[Description] = (),
    known: KnownCheckpoints | None = None,
    now_ms: int,
) -> model.Overview:
    """Return the overview.

    ``coordinator`` is the answer to ``describe``; None means that no stream with state has run. ``hosts`` are the
    answers of hosts to ``describe_in_columns``. ``silent`` is Ray's description of the actors of hosts that have not
    answered. ``stats`` are the answers to ``checkpoint_stats`` by run id; each request passed the mark that ``known``
    has of the run. ``known`` has the checkpoints of the last look.
    """
    known = known or KnownCheckpoints()
    if coordinator is None:
        return model.Overview(model.CLUSTER, now_ms)
    partitions: dict[tuple[str, str], list[model.Partition]] = {}
    for host in hosts:
        for run_id, partition in _partitions(host):
            partitions.setdefault((run_id, partition.operator), []).append(partition)
    overview = model.Overview(
        model.CLUSTER,
        now_ms,
        model.CoordinatorInfo(
            coordinator["coordinator_id"],
            coordinator["namespace"],
            coordinator.get("node_ip"),
            coordinator.get("pid"),
            dict(coordinator.get("storage_requests", {})),
            tuple(coordinator["problems"]),
            coordinator.get("restarts", 0),
            _ms(coordinator.get("up_seconds")),
            _trouble(coordinator),
            tuple(
                model.LostDriver(lost_ms=_ms(lost["at"]) or 0, **{name: lost[name] for name in _OF_LOST_DRIVER})
                for lost in coordinator.get("lost", ())
            ),
            (
                *_failing(COORDINATOR_PROCESS, coordinator.get("failing_loops", ()), now_ms),
                *(
                    failing
                    for of_driver in coordinator.get("failing_drivers", ())
                    for failing in _failing(f"driver {of_driver['process']}", (of_driver,), now_ms)
                ),
            ),
        ),
        tuple(
            _query(query, partitions, (stats or {}).get(query["run_id"], {}), known, now_ms)
            for query in coordinator["queries"]
        ),
        tuple(_hosts(coordinator, hosts, silent, now_ms)),
    )
    known.forget_all_but({query.run_id for query in overview.queries})
    return replace(overview, faults=faults_of(overview))


def _query(
    query: Description,
    partitions: Mapping[tuple[str, str], Sequence[model.Partition]],
    stats: Description,
    known: KnownCheckpoints,
    now_ms: int,
) -> model.Query:
    run_id = query["run_id"]
    if query["retired_by"] is not None:
        status = model.RETIRED
    else:
        status = model.RUNNING if query["ended_at"] is None else model.ENDED
    # The batch in which a query was stopped is no longer running.
    begun = query.get("batch_begun_ms") if status == model.RUNNING else None
    times = query.get("batch_times") or {}
    return model.Query(
        **{name: query[name] for name in _OF_QUERY if name in query},
        status=status,
        operators=tuple(
            _operator(name, n, partitions.get((run_id, name), ()), query) for name, n in query["operators"].items()
        ),
        checkpoints=known.of(query, stats),
        pending_partitions=query["pending_partitions"] if status == model.RUNNING else 0,
        batch_ms=None if begun is None else max(0, now_ms - begun),
        replaced_by=query["retired_by"],
        counts=dict(query["checkpoints"]),
        watermark_ms=times.get("watermark_ms") or None,
        batch_time_ms=times.get("timestamp_ms") or None,
        ended_ms=_ms(query["ended_at"]),
        driver_ms=_ms(query.get("seconds_since_driver")),
        lag_ms=_ms(query.get("lag_seconds")) or 0,
        watermark_rose_ms=_ms(query.get("watermark_rose_at")),
        input=None if query.get("input") is None else InputPace(**query["input"]),
        given_up=tuple(
            model.GivenUp(failed["id"], _ms(failed["trigger_timestamp"]) or 0, failed["reason"])
            for failed in stats.get("checkpoints", {}).get("failures", ())
        ),
    )


def _checkpoint(record: Description) -> model.Checkpoint:
    plain = {name: record[name] for name in _RECORDED if name in record}
    plain["steps"] = {name: StepTime(**step) for name, step in record["steps"].items()}
    return model.Checkpoint(**plain)


def _operator(
    name: str, num_partitions: int, own_partitions: Sequence[model.Partition], query: Description
) -> model.Operator:
    # A partition that has moved may be held by its last host as well: the newer version counts.
    newest: dict[int, model.Partition] = {}
    for one in sorted(own_partitions, key=lambda p: p.version or 0):
        newest[one.partition] = one
    partitions = tuple(newest.get(p, model.Partition(name, p)) for p in range(num_partitions))
    lags = query.get("copy_lags", {}).get(name, ())
    if lags:
        partitions = tuple(structs.replace(p, copy_lags=tuple(lag)) for p, lag in zip(partitions, lags, strict=True))
    keys = [p.keys for p in partitions if p.keys is not None]
    dropped = [p.dropped_elements for p in partitions if p.dropped_elements is not None]
    middle = median(keys) if keys else 0
    schema = query.get("schemas", {}).get(name)
    variables = () if schema is None else _variables(schema)
    used = [model.SchemaUse(i, first, last) for i, first, last in query.get("schema_history", {}).get(name, ())]
    if used:
        used[-1] = replace(used[-1], variables=variables)
    return model.Operator(
        name,
        num_partitions,
        query.get("backends", {}).get(name),
        schema_id=used[-1].schema_id if used else None,
        keys=sum(keys) if len(keys) == num_partitions else None,
        memory_bytes=sum(p.memory_bytes or 0 for p in partitions),
        skew=max(keys) / max(middle, 1) if any(keys) else None,
        partitions=partitions,
        variables=variables,
        schemas=tuple(used),
        dropped_elements=sum(dropped) if dropped else None,
    )


def _partitions(host: Description) -> Iterator[tuple[str, model.Partition]]:
    """Yield the partitions of a host, each with its run id."""
    columns, owner = host["partitions"], host["host_id"]
    names = tuple(columns["steps"])
    steps = zip(*columns["steps"].values(), strict=True) if names else repeat(())
    each = zip(*(columns[name] for name in (*INSTANCE_COLUMNS, "rows")), strict=True)
    for (run_id, operator, partition, version, keys, memory_bytes, snapshot, dropped, rows), ms in zip(
        each, steps, strict=False
    ):
        yield (
            run_id,
            model.Partition(
                operator,
                partition,
                version=version,
                owner=owner,
                keys=keys,
                memory_bytes=memory_bytes,
                snapshot_version=snapshot,
                snapshot_lag=None if snapshot is None else max(0, version - snapshot),
                commit_ms={name: value for name, value in zip(names, ms, strict=False) if value is not None},
                rows=rows,
                dropped_elements=dropped,
            ),
        )


@lru_cache(maxsize=MAX_SCHEMAS)
def _variables(schema: str) -> tuple[model.Variable, ...]:
    return model.variables_in_use(OperatorSchema.from_json(schema))


def _hosts(
    coordinator: Description, hosts: Sequence[Description], silent: Sequence[Description], now_ms: int
) -> list[model.HostOverview]:
    leases = {lease["host_id"]: lease for lease in coordinator["hosts"]}
    overviews = [
        model.HostOverview(
            **{name: host[name] for name in _OF_HOST if name in host},
            heartbeat_ms=_heartbeat(leases.get(host["host_id"])),
            partitions=len(host["partitions"]["partition"]),
            counters={name: host[name] for name in _COUNTERS if name in host},
            loading=tuple(host.get("loading", ())),
            up_ms=_ms(host.get("up_seconds")),
            storage_trouble=_trouble(host),
            failing_loops=_failing(f"host {host['host_id']}", host.get("failing_loops", ()), now_ms),
        )
        for host in hosts
    ]
    actors = {actor["host_id"]: actor for actor in silent}
    for host_id in sorted({*leases, *actors} - {host.host_id for host in overviews}):
        lease, actor = leases.get(host_id), actors.get(host_id, {})
        overviews.append(
            model.HostOverview(
                host_id,
                f"grpc://{actor.get('node_ip', '')}:0" if lease is None else lease["address"],
                actor.get("node_id") if lease is None else lease["node_id"],
                pid=actor.get("pid") or None,
                answered=False,
                heartbeat_ms=_heartbeat(lease),
                restarts=actor.get("restarts", 0),
                actor_state=actor.get("state"),
            )
        )
    return sorted(overviews, key=lambda host: (host.machine, host.host_id))


def _heartbeat(lease: Description | None) -> int | None:
    return None if lease is None else _ms(lease["seconds_since_heartbeat"])


def _ms(seconds: float | None) -> int | None:
    return None if seconds is None else int(seconds * 1000)


def _failing(process: str, loops: Iterable[Description], now_ms: int) -> tuple[model.LoopFailures, ...]:
    return tuple(
        model.LoopFailures(
            process, failing_ms=max(0, now_ms - int(loop["since"] * 1000)), **{name: loop[name] for name in _OF_LOOP}
        )
        for loop in loops
    )


def _trouble(process: Description) -> tuple[model.LocationTrouble, ...]:
    return tuple(
        model.LocationTrouble(
            trouble["location"],
            trouble["failures"],
            trouble["error"],
            int(trouble["failed_seconds"] * 1000),
            trouble["answered_since"],
            trouble["waiting"],
            int(trouble["waiting_seconds"] * 1000),
        )
        for trouble in process.get("storage_trouble", ())
    )


# Asks coordinator and hosts of a Ray cluster for the overview. The process has joined the cluster.


HOST_NAME_PREFIX = "StateStoreHost-"
"""A host's actor is named by this prefix, a session and a number; the id of the host is ``host-`` and the same two."""
RAY_ANSWER_SECONDS = 10.0
MAX_SILENT = 50
"""Ray is asked about at most this many hosts that do not answer."""


def cluster_overview(
    namespace: str = NAMESPACE,
    coordinator_name: str = COORDINATOR_NAME,
    timeout: float = RAY_ANSWER_SECONDS,
    known: KnownCheckpoints | None = None,
) -> model.Overview:
    """Describe the queries and hosts of a namespace. Hosts that do not answer in ``timeout`` seconds are marked so.

    A caller that looks repeatedly passes ``known`` to each look, so that only changes are sent and built.

    Without a coordinator the overview is empty. Raises ``EnvironmentProblemError`` if the coordinator does not answer.
    """
    deadline = time.monotonic() + timeout
    names = {
        actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True) if actor["namespace"] == namespace
    }
    if coordinator_name not in names:
        return overview_of_cluster(None, (), now_ms=_now())
    actor = ray.get_actor(coordinator_name, namespace=namespace)
    description = actor.describe.remote()
    of_hosts: dict[str, Any] = {}
    for name in sorted(name for name in names if name.startswith(HOST_NAME_PREFIX)):
        with suppress(ValueError):  # it has ended since
            of_hosts[name] = ray.get_actor(name, namespace=namespace).describe_in_columns.remote()
    coordinator = _answers([description], deadline).get(description)
    if coordinator is None:
        raise EnvironmentProblemError(
            f"The coordinator {coordinator_name!r} (namespace {namespace!r}) did not answer within {timeout:.0f} s; it "
            "may be restarting, so try again."
        )
    # All requests are sent before any host is waited for: a host that hangs would use up the whole timeout.
    known = known or KnownCheckpoints()
    runs = [q["run_id"] for q in coordinator["queries"]]
    of_runs = {run_id: actor.checkpoint_stats.remote(run_id, known.mark(run_id)) for run_id in runs}
    answers = _answers([*of_runs.values(), *of_hosts.values()], deadline)
    silent = [name for name, request in of_hosts.items() if request not in answers]
    return overview_of_cluster(
        coordinator,
        [answers[request] for request in of_hosts.values() if request in answers],
        {run_id: answers[request] for run_id, request in of_runs.items() if request in answers},
        silent=[_actor(name, namespace) for name in silent[:MAX_SILENT]],
        known=known,
        now_ms=_now(),
    )


def _actor(name: str, namespace: str) -> dict[str, Any]:
    """Return Ray's record of a host that has not answered."""
    description: dict[str, Any] = {"host_id": f"host-{name.removeprefix(HOST_NAME_PREFIX)}"}
    with suppress(ValueError, KeyError):  # it has ended since
        actor = ray._private.state.actors(ray.get_actor(name, namespace=namespace)._actor_id.hex())
        address = actor["Address"]
        description |= {"state": actor["State"], "pid": actor["Pid"], "restarts": int(actor["NumRestarts"])}
        description |= {"node_ip": address["IPAddress"], "node_id": address["NodeID"]}
    return description


def _answers(requests: list[Any], deadline: float) -> dict[Any, Any]:
    """Return the answers that come in time, by request. Dead actors and runs that have ended have none."""
    if not requests:
        return {}
    ready, _ = ray.wait(requests, num_returns=len(requests), timeout=max(0.0, deadline - time.monotonic()))
    answers = {}
    for request in ready:
        with suppress(RayError):
            answers[request] = ray.get(request)
    return answers


def _now() -> int:
    return int(time.time() * 1000)
