"""Handles messages that ask where state is: those of query clients, and of hosts that ask for clients."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone

from coordinator_actor.exceptions import QueryEndedError, UnknownOperatorError, UnknownRunError, WrongOperatorError
from coordinator_actor.handlers.owners import assigned
from coordinator_actor.handlers.registries.registries import Registries
from coordinator_actor.location_oracle import KvStateLocationOracle
from coordinator_actor.messages import OperatorLocation, RunningOperator
from coordinator_actor.query.query_state import QueryState


class Locations:
    """Finds the owners of operators' partitions.

    Takes the lock of no run: that may be held while storage is asked, and clients must not wait for it.
    """

    def __init__(self, registries: Registries) -> None:
        self._registries = registries
        self._runs = registries.runs

    def locate(self, operator: str, query: str | None = None) -> OperatorLocation:
        """See ``CoordinatorPort``."""
        served = self._runs.served()
        named = [run for run in served if query is None or run.is_named(query)]
        found = [run for run in named if run.operator(operator) is not None]
        found = _meant(found)
        if not found:
            is_final = query is not None and any(run.lifetime.is_current for run in named)
            if not is_final:
                self._require_not_ended(operator, query, served)
            if self._registries.expects_reports() and not is_final:
                age = self._registries.clock() - self._registries.started
                raise UnknownRunError(
                    f"No query with an operator {operator!r} has been reported yet to this coordinator, which has been "
                    "there for "
                    f"{age:.1f} s; ask again."
                )
            exist = ", ".join(sorted({f"{o.name!r}" for r in named for o in r.registration.operators})) or "none"
            where = "No running query" if query is None else f"No running query {query!r}"
            message = f"{where} has an operator {operator!r}; operators that exist: {exist}."
            raise WrongOperatorError(message) if is_final else UnknownOperatorError(message)
        if len(found) > 1:
            names = ", ".join(
                f"{r.registration.name or 'unnamed'} ({r.registration.query_id}, run {r.run_id})" for r in found
            )
            raise WrongOperatorError(
                f"Several running queries have an operator {operator!r}; say which with query=, by its name, query id "
                f"or run id: {names}."
            )
        run = found[0]
        spec = run.operator(operator)
        assert spec is not None
        assignment = assigned(self._registries, run)
        return OperatorLocation(
            run.registration.query_id,
            run.run_id,
            run.registration.name,
            spec,
            run.registration.key_groups,
            run.versions.completed,
            tuple(assignment.owner(operator, p) for p in range(spec.num_partitions)),
        )

    def _require_not_ended(self, operator: str, query: str | None, running: Sequence[QueryState]) -> None:
        """Raise ``QueryEndedError`` if the last query with that operator has ended and does not run again."""
        again = {run.registration.state_location for run in running}
        ended = [
            e
            for e in self._runs.ended()
            if e.has(operator, query) and (e.registration.state_location not in again or query == e.registration.run_id)
        ]
        if not ended:
            return
        last = max(ended, key=lambda e: e.at)
        at = datetime.fromtimestamp(last.at, timezone.utc).isoformat(sep=" ", timespec="seconds")
        of = last.registration
        raise QueryEndedError(
            f"Query {of.name or 'unnamed'} ({of.query_id}, run {of.run_id}), which had the operator {operator!r}, "
            f"ended at {at} "
            f"({last.why}). Start it again, or read its state from the checkpoint with read_state."
        )

    def operators(self) -> tuple[RunningOperator, ...]:
        """See ``CoordinatorPort``."""
        served = self._runs.served()
        having: dict[str, list[QueryState]] = {}
        for run in served:
            for operator in run.registration.operators:
                having.setdefault(operator.name, []).append(run)
        meant = {name: {run.run_id for run in _meant(runs)} for name, runs in having.items()}
        return tuple(
            RunningOperator(
                run.registration.query_id,
                run.run_id,
                run.registration.name,
                operator,
                run.registration.key_groups,
                run.versions.readable[0],
                run.versions.completed,
                run.lifetime.stopped_at is not None,
            )
            for run in served
            for operator in run.registration.operators
            if run.run_id in meant[operator.name]
        )

    def get_kv_state_location_oracle(self, job_id: str) -> KvStateLocationOracle | None:
        """See ``CoordinatorPort``."""
        served = self._runs.served()
        location = next((r.registration.state_location for r in served if r.run_id == job_id), job_id)
        found = _meant([r for r in served if location in (r.registration.state_location, r.registration.query_id)])
        if not found:
            return None
        run = found[0]
        assignment = assigned(self._registries, run)
        registration = run.registration
        owners = {
            name: [assignment.owner(name, p) for p in range(len(places))] for name, places in assignment.owners.items()
        }
        return KvStateLocationOracle.of(
            registration.query_id,
            run.run_id,
            registration.name,
            registration.key_groups,
            run.versions.completed,
            owners,
            registration.state_location,
        )


def _meant(having: Sequence[QueryState]) -> list[QueryState]:
    """Return the runs that a caller means who names only an operator that they all have.

    Queries that run come first. Of ended ones the last counts, as where one is started again and again.
    """
    running = [run for run in having if run.lifetime.is_current]
    return running or sorted(having, key=lambda run: run.lifetime.stopped_at or 0.0)[-1:]
