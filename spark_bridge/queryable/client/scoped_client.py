"""Clients of an application whose callers have separate tokens: each sees what the scope of its token names."""

from __future__ import annotations

import pyarrow as pa

from coordinator_actor.access_tokens import Scope
from spark_bridge.queryable.client.client import QueryableStateClient
from spark_bridge.queryable.client.discovery import KnownView, ScopedDiscovery
from spark_bridge.queryable.protocol import At, FeatureAnswer
from spark_bridge.queryable.routing.scopes import view_errors, views_within


def scoped_client(client: QueryableStateClient, scope: Scope) -> QueryableStateClient:
    """Return a client that sees only the part of the state in ``scope``, over the connections of ``client``.

    For an application whose callers have separate tokens. It is not closed: the connections are shared.
    """
    if scope.is_all:
        return client
    discovery = ScopedDiscovery(scope, client._discovery, lambda seconds: client.operators(timeout=seconds))
    scoped = _ScopedClient(discovery, client._connections, client._router, client.timeout)
    find = client._access.find_views
    scoped._access.find_views = lambda request, deadline: views_within(scope, lambda one: find(one, deadline), request)
    return scoped


class _ScopedClient(QueryableStateClient):
    """A client for callers who must not learn of other views and operators from errors."""

    def _ask_features(
        self, target: KnownView, at: list[At], defaults: bool, keys: pa.BinaryArray | bytes, deadline: float
    ) -> FeatureAnswer:
        with view_errors(target.location.view.name):
            return super()._ask_features(target, at, defaults, keys, deadline)
