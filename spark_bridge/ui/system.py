"""The interface of the page to the system that it shows: a running cluster (``live``) or a checkpoint (``stored``)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from coordinator_actor.messages import SavepointStatus
from coordinator_actor.savepoints.savepoint_format import SavepointInfo
from spark_bridge.overview.model import Overview, Query
from spark_bridge.queryable.client.calls.watch import StateChange
from spark_bridge.queryable.client.client import QueryableStateClient


class System(Protocol):
    """The data behind the page. All calls block, and may come from several threads."""

    is_live: bool
    """Whether a cluster is asked, where somebody may act."""
    place: str
    """What is looked at, in words: the namespace of a cluster, or the location of a checkpoint."""

    def overview(self) -> Overview:
        """Return the overview as it is now."""

    def client(self) -> QueryableStateClient:
        """Return the client, made when it is needed first."""

    def recent_changes(self, table: StateTable, since: int, until: int) -> Iterator[StateChange]:
        """Give the changes of the completed versions after ``since`` up to ``until``, in any order."""

    def savepoints(self, query: Query, base: str | None = None) -> list[SavepointInfo]:
        """Return the savepoints below a directory, by default the one beside the state of the query."""

    def describe_savepoint(self, path: str, *, check_files: bool = False) -> SavepointInfo:
        """Describe a savepoint, and with ``check_files`` read all of its files."""

    def trigger_savepoint(self, request_id: str, query: str, path: str | None) -> None:
        """Begin a savepoint of a running query."""

    def savepoint_status(self, request_id: str) -> SavepointStatus:
        """Return how far a savepoint is."""


@dataclass(frozen=True)
class StateTable:
    """One state variable of an operator of a query, as the page names it. ``id`` names it in addresses.

    ``schema_version`` is the version that tells the columns; None stands for the newest.
    """

    query: str
    query_title: str
    operator: str
    state: str
    kind: str
    key: tuple[str, ...]
    window: str | None
    versions: range
    types: dict[str, str] = field(default_factory=dict, hash=False)
    schema_version: int | None = None

    @property
    def id(self) -> str:
        """Return the name in addresses."""
        return state_id(self.query, self.operator, self.state)

    @property
    def title(self) -> str:
        """Return the name of the table for people."""
        of = self.operator if self.state == "default" else f"{self.operator}.{self.state}"
        return f"{of} of {self.query_title}"


def reference(query: Query, queries: Iterable[Query]) -> str:
    """Return how addresses name a query: by its id, which stays, or by its run if several runs have that id."""
    return query.query_id if sum(q.query_id == query.query_id for q in queries) == 1 else query.run_id


def tables_of(overview: Overview) -> list[StateTable]:
    """Return the state variables of all queries."""
    return [
        StateTable(
            reference(query, overview.queries),
            query.title,
            operator.name,
            variable.name,
            variable.kind,
            tuple(name for name in variable.key if name != variable.window),
            variable.window,
            _readable(query),
            {**variable.key, **variable.inner, **variable.value},
            # Where a manifest is damaged, the newest version may not be there.
            query.readable[-1][-1] if query.readable else None,
        )
        for query in overview.queries
        for operator in query.operators
        for variable in operator.variables
    ]


def _readable(query: Query) -> range:
    first, last = query.readable[-1] if query.readable else (query.oldest_version or 0, query.completed_version)
    return range(first, last + 1)


def state_id(query: str, operator: str, state: str) -> str:
    """Return how addresses name a state variable: three parts, in which slashes are escaped."""
    return "/".join(part.replace("%", "%25").replace("/", "%2F") for part in (query, operator, state))
