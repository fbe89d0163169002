"""The scope of a token where state is read: which operators it finds, and which requests a host answers it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from msgspec.structs import replace

from coordinator_actor.access_tokens import Scope
from coordinator_actor.exceptions import RetiredRunError
from coordinator_actor.messages import OperatorLocation
from spark_bridge.exceptions import (
    OutOfScopeError,
    QueryEndedError,
    RequestError,
    UnknownOperatorError,
    WrongOperatorError,
)
from spark_bridge.queryable import protocol


def is_in_scope(scope: Scope, operator: dict[str, Any]) -> bool:
    """Return whether a token may read an operator of ``StateReads.operators``."""
    return scope.allows(operator["operator"], operator["query_name"], operator["query_id"], operator["run_id"])


def require_view(scope: Scope, view: str) -> None:
    """Raise ``OutOfScopeError`` unless a token with ``scope`` may read a feature view."""
    if not scope.allows_view(view):
        raise OutOfScopeError(
            f"This token is not for view {view!r} ({scope.in_words()}); ask for one that is (statestore token issue "
            "--view)."
        )


@contextmanager
def view_errors(view: str | None) -> Iterator[None]:
    """Replace errors about a feature view whose messages name other views, other operators, or other columns."""
    try:
        yield
    except (QueryEndedError, RequestError, UnknownOperatorError) as error:
        raise type(error)(f"Feature view {view!r} {NOT_READABLE}") from None


NOT_READABLE = (
    "cannot be read as it is asked for: it is not declared, one of its queries does not run, or the request does not "
    "fit it. Its owner can see more (statestore features)."
)


def views_within(
    scope: Scope, views: Callable[[protocol.ViewsRequest], list[protocol.ViewLocation]], request: protocol.ViewsRequest
) -> list[protocol.ViewLocation]:
    """Return those of ``views`` that a token with ``scope`` may read. Raises ``OutOfScopeError`` for another one."""
    if request.view is not None:
        require_view(scope, request.view)
    with view_errors(request.view):
        return [
            replace(view, problem=f"Feature view {view.view.name!r} {NOT_READABLE}") if view.problem else view
            for view in views(request)
            if scope.allows_view(view.view.name)
        ]


@dataclass(eq=False, repr=False)
class ScopedOperators:
    """The operators that a token with ``scope`` may find. Errors name no other operator, and no other query.

    ``operators`` and ``locate`` are those of ``StateReads``, without a scope.
    """

    _scope: Scope
    _operators: Callable[[], list[dict[str, Any]]]
    _locate: Callable[[str, str | None], OperatorLocation]

    def visible(self) -> list[dict[str, Any]]:
        return [operator for operator in self._operators() if is_in_scope(self._scope, operator)]

    def locate(self, operator: str, query: str | None) -> OperatorLocation:
        """Return the location of an operator; among several queries that have it, those in the scope count.

        Raises ``OutOfScopeError`` for a name that the scope does not include, and otherwise the errors of ``locate``.
        """
        self._require_name(operator)
        visible = self.visible()
        runs = {
            o["run_id"]: o["query_name"] or o["query_id"]
            for o in visible
            if o["operator"] == operator and query in (None, o["query_name"], o["query_id"], o["run_id"])
        }
        if len(runs) > 1:
            names = ", ".join(f"{name} (run {run_id})" for run_id, name in runs.items())
            raise WrongOperatorError(f"Several running queries have an operator {operator!r}; name one of: {names}.")
        queries: tuple[str | None, ...] = tuple(runs)
        if not runs:
            # Perhaps it has ended, or the coordinator has just been started: the error says so.
            queries = (query,) if query is not None else self._scope.queries or (None,)
        kind: type[UnknownOperatorError] = UnknownOperatorError
        for name in queries:
            if not runs and name is not None and not self._scope.allows_query(name):
                continue
            try:
                return self._locate(operator, name)
            except UnknownOperatorError as error:
                kind = type(error)
        names = ", ".join(sorted({repr(o["operator"]) for o in visible})) or "none"
        of = "No running query" if query is None else f"No running query {query!r}"
        raise kind(f"{of} that this token is for has an operator {operator!r}; operators that it may read: {names}.")

    def require(self, run_id: str, operator: str | None) -> None:
        """Raise unless the token may read an operator of a run; None means any operator of it.

        Raises the same ``RetiredRunError`` for a run that is over and for a run of another query.
        """
        if operator is None:
            if any(o["run_id"] == run_id for o in self.visible()):
                return
        else:
            self._require_name(operator)
            try:
                location = self._locate(operator, run_id)
                names = (location.query_name, location.query_id, location.run_id)
                if location.run_id == run_id and self._scope.allows_query(*names):
                    return
            except (QueryEndedError, UnknownOperatorError):
                pass
        raise RetiredRunError(
            f"Run {run_id} is not one that this token may read, or is over; locate the operator again."
        )

    def _require_name(self, operator: str) -> None:
        if not self._scope.allows_operator(operator):
            raise OutOfScopeError(
                f"This token is not for operator {operator!r} ({self._scope.in_words()}); ask for one that is "
                "(statestore token issue --operator)."
            )


MAX_READABLE = 10_000
"""Operators of runs that one connection has proved it may read."""


class ScopedReads:
    """The ``ServedReads`` of a client whose token has ``scope``: each request is checked before ``reads`` answers it.

    Each request passes it on the way to ``reads``, also one that ``reads`` forwards to other hosts. A method that it
    does not have cannot be asked for. ``locating`` admits a look-up of the run that a request names. For the thread of
    one connection.
    """

    def __init__(
        self, scope: Scope, reads: protocol.ServedReads, locating: Callable[[], AbstractContextManager[object]]
    ) -> None:
        self._scope = scope
        self._reads = reads
        self._locating = locating
        self._operators = ScopedOperators(scope, reads.operators, reads.locate)
        self._readable: set[tuple[str, str | None]] = set()

    def prepare(self, request: protocol.Request) -> None:
        """Look up the run that a request names, before the request takes a place among those that are worked on."""
        of = request.scan if isinstance(request, protocol.CountRequest) else request
        run_id = getattr(of, "run_id", None)
        if run_id is not None:
            self._require(run_id, getattr(of, "operator", None))

    def _require(self, run_id: str, operator: str | None) -> None:
        if (run_id, operator) in self._readable:
            return
        with self._locating():
            self._operators.require(run_id, operator)
        if len(self._readable) >= MAX_READABLE:
            self._readable.clear()
        self._readable.add((run_id, operator))

    def locate(self, operator: str, query: str | None) -> OperatorLocation:
        return self._operators.locate(operator, query)

    def lookup(self, request: protocol.LookupRequest, keys: pa.BinaryArray) -> tuple[int, pa.BinaryArray]:
        self._require(request.run_id, request.operator)
        return self._reads.lookup(request, keys)

    def lookup_one(self, request: protocol.LookupRequest, key: bytes) -> tuple[int, bytes | None]:
        self._require(request.run_id, request.operator)
        return self._reads.lookup_one(request, key)

    def key_rows(self, request: protocol.KeyRowsRequest, keys: pa.BinaryArray) -> protocol.StateAnswer:
        self._require(request.run_id, request.operator)
        return self._reads.key_rows(request, keys)

    def scan(self, request: protocol.ScanRequest) -> protocol.StateAnswer:
        self._require(request.run_id, request.operator)
        return self._reads.scan(request)

    def count(self, request: protocol.ScanRequest) -> tuple[int, int]:
        self._require(request.run_id, request.operator)
        return self._reads.count(request)

    def changes(self, request: protocol.ChangesRequest, keys: pa.BinaryArray | None) -> protocol.StateAnswer:
        self._require(request.run_id, request.operator)
        return self._reads.changes(request, keys)

    def await_completed(self, run_id: str, after: int, seconds: float) -> int:
        self._require(run_id, None)
        return self._reads.await_completed(run_id, after, seconds)

    def lag_ms(self, run_id: str) -> int:
        """See ``StateReads``. It comes with an answer, so the run was checked."""
        return self._reads.lag_ms(run_id)

    def views(self, request: protocol.ViewsRequest) -> list[protocol.ViewLocation]:
        return views_within(self._scope, self._reads.views, request)

    def features(self, request: protocol.FeaturesRequest, keys: pa.BinaryArray | bytes) -> protocol.FeatureAnswer:
        require_view(self._scope, request.view)
        with view_errors(request.view):
            return self._reads.features(request, keys)

    def operators(self) -> list[dict[str, Any]]:
        return self._operators.visible()

    def described(
        self, describe: Callable[[protocol.DescribeRequest], dict[str, Any]], request: protocol.DescribeRequest
    ) -> dict[str, Any]:
        """Return what ``describe`` answers, without the operators and statistics of requests that are out of scope."""
        if request.operator is not None:
            return describe(replace(request, query=self.locate(request.operator, request.query).run_id))
        description, names = describe(request), {operator["operator"] for operator in self._operators.visible()}
        operators = [operator for operator in description["operators"] if is_in_scope(self._scope, operator)]
        requests = {name: verbs for name, verbs in description["requests"].items() if name in names}
        return {**description, "operators": operators, "requests": requests}
