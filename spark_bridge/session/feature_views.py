"""Declaring feature views next to the stream whose state they name."""

from __future__ import annotations

import time

import msgspec

from backends.conf import check_name
from backends.decoders import json_decoder
from backends.exceptions import InvalidStateStoreArgument
from coordinator_actor.feature_views import FeatureView
from coordinator_actor.messages import LocatedView
from spark_bridge.exceptions import RequestError, UnknownFeatureViewError
from spark_bridge.queryable.routing.feature_reads import ResolvedView
from spark_bridge.queryable.routing.scatter_gather import Attempts, retrying
from spark_bridge.session.current import current_cluster

DECLARE_SECONDS = 30.0
"""A coordinator that was just started may not know the queries yet for this many seconds."""


def declare_feature_view(view: FeatureView) -> None:
    """Declare a feature view over the operators of running queries, or declare it again.

        query = totals.writeStream.option("checkpointLocation", ck).outputMode("update").start()
        declare_feature_view(
            FeatureView("card_fraud", entity="card", features=[Feature("n", "card_totals", default=0)], owner="fraud")
        )
        client.features("card_fraud", ["4711", "4712"]).to_numpy()

    Call it after the queries have been started; it changes nothing if the view is the same. The declaration is stored
    with the state of the query that has the operator of the first feature, so later runs of the query have it. It does
    not go into savepoints, nor into a fork of the checkpoint.

    Raises ``RequestError`` for a view that its operators cannot give, before anything changes: an unknown column,
    another key, a default of another type, two features of one name. Raises ``UnknownOperatorError`` for an operator
    of no running query, and ``InvalidRequestError`` for a wrong ``max_age``, or if another query has a view of that
    name.
    """
    check_declaration(view)
    coordinator = current_cluster().coordinator
    attempts = Attempts(f"The declaration of feature view {view.name!r}", time.monotonic() + DECLARE_SECONDS)
    operators = retrying(lambda: tuple(coordinator.locate(*source) for source in view.sources), attempts)
    ResolvedView.of(LocatedView(view, operators))
    coordinator.declare_view(operators[0].run_id, view)


def drop_feature_view(name: str) -> None:
    """Drop a feature view. Clients can read it for about two more seconds.

    Raises ``UnknownFeatureViewError``.
    """
    coordinator = current_cluster().coordinator
    having = [running.run_id for running in coordinator.feature_views() if running.view.name == name]
    dropped = [coordinator.drop_view(run_id, name) for run_id in having]
    if not any(dropped):
        raise UnknownFeatureViewError(f"No running query has a feature view {name!r}: there is nothing to drop.")


def check_declaration(view: FeatureView) -> None:
    """Raise ``RequestError`` for a view that no operators could give, and ``InvalidRequestError`` for its max_age."""
    for feature in view.features:
        if isinstance(getattr(feature, "default", None), (list, tuple, dict, set)):
            raise RequestError(f"Feature {feature.name!r} is a list or a map and cannot have a default: omit default=.")
    try:
        stored = json_decoder(FeatureView).decode(msgspec.json.encode(view))
    except (TypeError, msgspec.MsgspecError) as error:
        raise RequestError(
            f"Feature view {view.name!r} cannot be stored: {error}. features is a list of Feature(name, operator), "
            "max_age is a duration such as '5 minutes' or None, on_stale is 'error' or 'null', and names are strings."
        ) from error
    for feature, as_stored in zip(view.features, stored.features, strict=True):
        # JSON has no infinity and no NaN, and makes text of a Decimal: after a restart it would be another default.
        if as_stored.default != feature.default:
            raise RequestError(
                f"Feature {feature.name!r} has default={feature.default!r}, which cannot be stored with its view: give "
                "a finite number, a string or a boolean, or omit default=."
            )
    names = [feature.name for feature in view.features]
    twice = sorted({name for name in names if names.count(name) > 1})
    parts = {"a name": view.name, "an entity": view.keys, "features": names}
    if missing := [part for part, value in parts.items() if not value]:
        raise RequestError(f"Feature view {view.name!r} needs {' and '.join(missing)}.")
    try:
        check_name("a feature view", view.name)
    except InvalidStateStoreArgument as error:
        raise RequestError(str(error)) from error
    if twice:
        raise RequestError(f"View {view.name!r} has two features of one name: {', '.join(map(repr, twice))}.")
    if both := sorted(set(names) & set(view.keys)):
        raise RequestError(
            f"View {view.name!r} has features named like its entity: {', '.join(map(repr, both))}. Give the feature "
            "another name, and its column as column=."
        )
    _ = view.max_age_seconds
