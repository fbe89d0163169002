"""Completes the versions whose batches Spark has committed. The lock of the run is held in all calls."""

from __future__ import annotations

from backends.tracing import spans, trace_ids
from coordinator_actor.exceptions import InvalidRequestError, StaleBatchError
from coordinator_actor.handlers.registries.run_registry import RunRegistry
from coordinator_actor.query.query_state import QueryState


def catch_up(runs: RunRegistry, run: QueryState) -> None:
    """Complete the prepared version if Spark has committed its batch, even if nobody has said so yet.

    Raises ``FencedError`` if another coordinator has taken over.
    """
    completed, chain = run.versions.completed, run.versions.chain
    following = chain.get(completed + 1)
    if following is not None and following.run_id == run.run_id and run.spark_logs.has(completed):
        _require_own(run)
        _complete(runs, run, completed + 1)


def advance(runs: RunRegistry, run: QueryState, batch_id: int, *, is_own: bool = False) -> None:
    """Complete version ``batch_id``, as Spark's commits say. Raises ``StaleBatchError`` or ``InvalidRequestError``.

    ``is_own``: the run's driver or a task of its next batch says so. Else the commit was only seen, and it may be that
    of a run in another cluster which has replaced this one: raises ``FencedError`` if there is such a run.
    """
    completed = run.versions.completed
    if batch_id == completed:
        return
    if batch_id < completed:
        raise StaleBatchError(
            f"Batch {batch_id} of run {run.run_id} is committed already; version {completed} is completed."
        )
    if batch_id != completed + 1:
        raise InvalidRequestError(
            f"Version {batch_id} of run {run.run_id} cannot be completed: version {completed} is the last completed "
            "one."
        )
    if not run.spark_logs.has(batch_id - 1):
        raise InvalidRequestError(
            f"Version {batch_id} of run {run.run_id} cannot be completed: Spark's commits/{batch_id - 1} does not "
            "exist in "
            f"{run.registration.checkpoint_location}, or no longer."
        )
    if not is_own:
        _require_own(run)
    _complete(runs, run, batch_id)


def _require_own(run: QueryState) -> None:
    """Raise ``FencedError`` unless a commit that was seen is surely this run's: others claim an epoch before theirs."""
    run.manifests.epochs.check()


def _complete(runs: RunRegistry, run: QueryState, version: int) -> None:
    with spans.span("coordinator.complete", trace_ids.batch(run.run_id, version)):
        run.complete(version)
    savepoints = runs.savepoints_of(run.run_id)
    if savepoints is not None:
        savepoints.on_completed()
