"""The announcements of a run's completed version to its hosts."""

from __future__ import annotations

from coordinator_actor.messages import Completed
from coordinator_actor.query.owners.current_assignment import RunAssignment
from coordinator_actor.query.versions.query_versions import QueryVersions


class Announcements:
    """The completed version as hosts are told of it. The lock of the run guards ``prepare`` alone."""

    def __init__(self, run_id: str, versions: QueryVersions, assignment: RunAssignment) -> None:
        self._run_id = run_id
        self._versions = versions
        self._assignment = assignment
        self._of_all: Completed | None = None
        self._by_host: dict[str, Completed] = {}

    def prepare(self, rewritten: str) -> None:
        """Prepare the announcements: for each host the heads of its own partitions.

        ``rewritten`` is the path of the record of the last exchange of files, or "".
        """
        assignment, completed = self._assignment.current, self._versions.completed
        of_host = {} if assignment is None else assignment.of_host
        by_host = {
            host: Completed(self._run_id, completed, self._versions.heads(completed, tasks), rewritten=rewritten)
            for host, tasks in of_host.items()
        }
        # In this order: readers without the lock look at ``_of_all`` first.
        self._by_host = by_host
        self._of_all = Completed(self._run_id, completed, {}, rewritten=rewritten)

    def to(self, host_id: str) -> Completed | None:
        """Return the announcement for a host; None while the run is being registered. Needs no lock."""
        of_all = self._of_all
        return None if of_all is None else self._by_host.get(host_id, of_all)
