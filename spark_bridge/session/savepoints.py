"""Savepoints for users (Flink's savepoints): make one of a running query, and start a query from one."""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

from backends.tracing import set_up, setting_of_environment
from coordinator_actor.exceptions import CoordinatorError, SavepointFailedError
from coordinator_actor.messages import OperatorSpec, SavepointStatus
from coordinator_actor.savepoints import restore as savepoint_restore
from coordinator_actor.savepoints import savepoint_format
from coordinator_actor.savepoints.restore import RestoredSavepoint
from coordinator_actor.savepoints.savepoint_format import SavepointInfo
from spark_bridge.exceptions import rebuilt_error
from spark_bridge.session.current import current_cluster, current_spark, session_options, session_state_location

if TYPE_CHECKING:
    from pyspark.sql.streaming import StreamingQuery

log = logging.getLogger(__name__)

SAVEPOINT_POLL_SECONDS = 0.1
SAVEPOINT_ATTEMPTS = 5
"""At most this many attempts to make a savepoint, if its coordinator dies."""


def trigger_savepoint(query: StreamingQuery | str, path: str | None = None, stop: bool = False) -> Future[str]:
    """Save the state of a running query as of its last committed batch; return a future of the savepoint's path.

    The query keeps running. ``query``: a ``StreamingQuery``, or its name, id or run id. ``path``: the directory
    in which the savepoint gets a new subdirectory, by default ``savepoints`` next to the state. With ``stop`` the
    query is stopped when the savepoint is done, and no sink sees a later batch. It is stopped as by
    ``StreamingQuery.stop()``: if the sink is a Python ``foreachBatch`` function that waits for its own job,
    ``query.exception()`` may say that this job was cancelled.

    The future fails with ``UnknownQueryError``, ``InvalidRequestError`` (no batch is committed yet),
    ``SavepointExpiredError``, ``SavepointDeclinedError`` or ``SavepointFailedError``. The query then continues, also
    with ``stop``.
    """
    cluster = current_cluster()
    name = query if isinstance(query, str) else str(query.runId)
    running = _running(name)
    if stop and running is None:
        raise SavepointFailedError(_why_not_stopped(query))
    base = None if path is None else _absolute(path)
    request_id = uuid.uuid4().hex
    future: Future[str] = Future()
    # A savepoint cannot be cancelled, and with stop= the query is held for it from now on: ``cancel`` must say so.
    future.set_running_or_notify_cancel()

    def begin() -> SavepointStatus:
        return cluster.coordinator.trigger_savepoint(request_id, name, base, stop=stop)

    def follow() -> None:
        run_id = str(running.runId) if stop and running is not None else ""
        cluster.stopping.append(run_id)
        try:
            savepoint = _wait(begin, lambda: cluster.coordinator.savepoint_status(request_id))
            if stop and running is not None:
                running.stop()
        except Exception as error:  # noqa: BLE001 - the caller gets it from the future
            future.set_exception(error)
        else:
            future.set_result(savepoint)
        finally:
            cluster.stopping.remove(run_id)

    threading.Thread(target=follow, name="statestore-savepoint", daemon=True).start()
    return future


def _wait(begin: Callable[[], SavepointStatus], ask: Callable[[], SavepointStatus]) -> str:
    for _ in range(SAVEPOINT_ATTEMPTS):
        status = begin()
        while status.known:
            if status.path is not None:
                return status.path
            if status.failure is not None:
                raise rebuilt_error(status.failure.error, status.failure.message, CoordinatorError)
            time.sleep(SAVEPOINT_POLL_SECONDS)
            status = ask()
        log.warning("The coordinator has been restarted: restarting the savepoint")
    raise SavepointFailedError(
        f"The coordinator was lost {SAVEPOINT_ATTEMPTS} times while the savepoint was made; look at its logs."
    )


def _active() -> list[StreamingQuery]:
    spark = current_spark()
    return [] if spark is None else list(spark.streams.active)


def _running(name: str) -> StreamingQuery | None:
    return next((q for q in _active() if name in (q.name, str(q.id), str(q.runId))), None)


def _why_not_stopped(query: StreamingQuery | str) -> str:
    """Return why a query cannot be stopped here, and the remedy."""
    if isinstance(query, str):
        here = [repr(q.name or str(q.id)) for q in _active()]
        return (
            f"No query {query!r} runs in this process, so it cannot be stopped here; there run: "
            f"{', '.join(here) or 'none'}. Call trigger_savepoint(stop=True) in the driver of the query."
        )
    title = query.name or str(query.id)
    if (newer := _running(str(query.id))) is not None:
        return (
            f"Run {query.runId} of query {title!r} has ended, and run {newer.runId} of this process has replaced it: "
            "the query was started again. Give the StreamingQuery that the last start() has returned, or "
            f"trigger_savepoint({title!r}, stop=True)."
        )
    return (
        f"Run {query.runId} of query {title!r} has ended, and no other run of it is in this process: there is nothing "
        "to stop. Its checkpoint has the state of its last batch; to make a savepoint, start the query again first. If "
        "it runs in another process, call trigger_savepoint(stop=True) there."
    )


def _absolute(path: str) -> str:
    """Return a path or URL that does not depend on the working directory: hosts and coordinator have others."""
    return path if ":" in path.partition("/")[0] else str(Path(path).absolute())


def restore_savepoint(
    path: str,
    checkpoint_location: str,
    num_partitions: int | Mapping[str, int] | None = None,
    backend: str | None = None,
    operators: Sequence[OperatorSpec | str] | None = None,
    *,
    state_only: bool = False,
    allow_non_restored_state: bool = False,
    storage_options: Mapping[str, str] | None = None,
    progress: Callable[[str], None] | None = None,
) -> RestoredSavepoint:
    """Make the new ``checkpoint_location`` from the savepoint at ``path``; a query started there continues after it.

    With ``state_only`` a new query starts there at batch 0, with this state. Storage settings and
    ``spark.statestore.location`` are the Spark session's, if there is one. See
    ``coordinator_actor.savepoints.restore.restore_into_checkpoint`` for the arguments and the errors.
    """
    set_up(setting_of_environment(), {"role": "driver"})  # often before there is a session
    return savepoint_restore.restore_into_checkpoint(
        _absolute(path),
        _absolute(checkpoint_location),
        num_partitions=num_partitions,
        backend=backend,
        operators=operators,
        state_only=state_only,
        allow_non_restored_state=allow_non_restored_state,
        storage_options=session_options(storage_options),
        state_location=session_state_location(),
        threads=os.cpu_count() or 1,
        progress=progress,
    )


def list_savepoints(base_path: str, storage_options: Mapping[str, str] | None = None) -> list[SavepointInfo]:
    """Return the savepoints directly below a directory, the oldest first."""
    return savepoint_format.read_stored_savepoints(_absolute(base_path), session_options(storage_options))


def describe_savepoint(
    path: str, storage_options: Mapping[str, str] | None = None, *, check_files: bool = False
) -> SavepointInfo:
    """Return the description of a savepoint: query, version, operators with their schemas and rows.

    With ``check_files`` every file is read and compared with its checksums. Raises ``SavepointError``, and
    ``DamagedFileError`` that names all files that are missing or damaged.
    """
    options = session_options(storage_options)
    return savepoint_format.read_stored_savepoint(_absolute(path), options, is_verified=check_files)


def delete_savepoint(path: str, storage_options: Mapping[str, str] | None = None) -> None:
    """Remove a savepoint. Raises ``SavepointError`` if there is none at ``path``."""
    savepoint_format.remove_stored_savepoint(_absolute(path), session_options(storage_options))


def rebalance(query: str | None = None) -> dict[str, int]:
    """Give every host its share of the partitions now, of one query or of all; return how many have moved, by run id.

    Without this call, partitions move once their new owners have loaded them. With it, the next batch waits for the
    loads. A host that would keep no partition gives them away as without this call.
    """
    return current_cluster().coordinator.rebalance(query)
