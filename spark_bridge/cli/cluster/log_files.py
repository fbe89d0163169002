"""The logs of coordinator, hosts and drivers, as Ray's state API finds them. The process has joined the cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from spark_bridge.exceptions import EnvironmentProblemError

COORDINATOR_ACTOR, HOST_ACTOR = "StateStoreCoordinator", "StateStoreHost"
HOST_PREFIX = f"{HOST_ACTOR}-"
WHOLE = -1
MOST_LOOKED_AT = 500
"""At most this many logs of other processes on a machine are checked for an actor that was started again."""


@dataclass(frozen=True)
class LogFile:
    """A log that can be read: ``source`` says whose it is, and ``read`` gives its last lines."""

    source: str
    read: Callable[[], Iterable[str]]


def log_files(namespace: str, coordinator: str, tail: int) -> tuple[list[LogFile], list[str]]:
    """Return the logs of a namespace, each read to its last ``tail`` lines, and what is not there.

    Raises ``EnvironmentProblemError`` if Ray's state API does not answer.
    """
    import ray
    from ray.util.state.exception import RayStateApiException

    # Without an address Ray refuses where a machine has several heads.
    address = ray.get_runtime_context().gcs_address
    try:
        return _log_files(address, namespace, coordinator, tail)
    except (RayStateApiException, OSError) as error:
        raise EnvironmentProblemError(
            f"Ray's state API does not answer: {error}. It needs Ray's dashboard (ray[default]) on the head node."
        ) from error


def _log_files(address: str, namespace: str, coordinator: str, tail: int) -> tuple[list[LogFile], list[str]]:
    from ray.util.state import list_actors, list_jobs

    actors = [
        actor
        for name in (COORDINATOR_ACTOR, HOST_ACTOR)
        for actor in list_actors(
            address,
            filters=[("class_name", "=", name), ("ray_namespace", "=", namespace)],
            limit=10_000,
            detail=True,
        )
    ]
    jobs = {job.job_id: job for job in list_jobs(address, limit=10_000)}
    files, missing, drivers = list[LogFile](), list[str](), set[str]()
    for actor in actors:
        is_coordinator = actor.class_name == COORDINATOR_ACTOR
        if is_coordinator and actor.name != coordinator:
            continue
        if not is_coordinator:
            drivers.add(actor.job_id)
        source = "coordinator" if is_coordinator else f"host {actor.name.removeprefix(HOST_PREFIX)}"
        named: list[dict[str, Any]] = [{"actor_id": actor.actor_id, "suffix": suffix} for suffix in ("err", "out")]
        named += _of_earlier_processes(address, actor, missing)
        files += [LogFile(source, _reader(tail, address=address, **one)) for one in named]
    for job_id in sorted(drivers):
        job = jobs.get(job_id)
        if job is not None and job.submission_id and job.driver_info is not None:
            # Ray takes no submission's id without its node.
            where = {"submission_id": job.submission_id, "node_ip": job.driver_info.node_ip_address}
            files.append(LogFile("driver", _reader(tail, address=address, **where)))
        elif job is not None and job.status == "RUNNING":
            missing.append(f"The driver (job {job_id}) was not started with 'ray job submit': look where it writes.")
    return files, missing


def _of_earlier_processes(address: str, actor: Any, missing: list[str]) -> Iterator[dict[str, Any]]:
    """Name the logs of the processes that an actor had on its machine before Ray started it again.

    Ray itself finds the log of the last process only. Why the one before ended stands in that one's log. What cannot be
    looked at is told in ``missing``.
    """
    from ray.util.state import list_logs

    if not actor.num_restarts or not actor.repr_name:
        return
    found = list_logs(address, node_id=actor.node_id, glob_filter="worker-*.err")
    names = [name for of in found.values() for name in of if not name.endswith(f"-{actor.pid}.err")]
    if len(names) > MOST_LOOKED_AT:
        missing.append(f"Only {MOST_LOOKED_AT} of {len(names)} logs were looked at for earlier ones of {actor.name}.")
    for name in names[:MOST_LOOKED_AT]:
        read = _reader(WHOLE, address=address, node_id=actor.node_id, filename=name, is_begin=True)
        try:
            begin = list(islice(read(), 10))
        except RuntimeError as error:
            missing.append(f"Whether {name} is an earlier log of {actor.name} is not known: {error}")
            continue
        if is_log_of(actor.repr_name, begin):
            for suffix in ("err", "out"):
                yield {"node_id": actor.node_id, "filename": name.removesuffix("err") + suffix}


def is_log_of(actor: str, begin: Iterable[str]) -> bool:
    """Return whether a log whose first lines are given was written for an actor that describes itself so.

    The ports that the actor names after its place are those of one process.
    """
    mark = f":actor_name:{actor.partition(' on ')[0]} on "
    return any(line.startswith(mark) for line in begin)


def _reader(tail: int, *, is_begin: bool = False, **named: Any) -> Callable[[], Iterator[str]]:
    """Return the function that reads the last lines of a log; with ``is_begin`` only the first part of these."""

    def read() -> Iterator[str]:
        from ray.util.state import get_log
        from ray.util.state.exception import RayStateApiException

        try:
            parts = get_log(tail=tail, filter_ansi_code=True, errors="replace", **named)
            text = next(iter(parts), "") if is_begin else "".join(parts)
        except RayStateApiException as error:
            raise RuntimeError(str(error).splitlines()[0]) from error
        yield from text.splitlines()

    return read
