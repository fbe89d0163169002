"""The query whose state is in storage, as coordinators, hosts and clients describe queries."""

from __future__ import annotations

from backends.storage.checkpoint_storage import CheckpointStorage, OpenStorage
from coordinator_actor.durable.spark_commits import query_id_of
from coordinator_actor.messages import OperatorSpec, QueryRegistration
from coordinator_actor.reading.stored_versions import StateVersions
from spark_bridge.state_data.metadata import operator_kind


def query_in_storage(
    versions: StateVersions,
    version: int,
    name: str | None = None,
    session_id: str = "",
    *,
    open_storage: OpenStorage = CheckpointStorage.open,
) -> QueryRegistration:
    """Return the query with its operators as they are at a version. Its run is the one that has claimed the state last.

    Storage does not say the query's ``name``, nor a session.
    """
    place = versions.place
    specs = []
    for operator, entry in sorted(versions.operators(version).items()):
        schema = versions.schema(entry)
        specs.append(
            OperatorSpec(operator, entry.num_partitions, schema.to_json(), entry.backend, operator_kind(schema))
        )
    query_id = query_id_of(open_storage(place.checkpoint_location, place.options))
    epoch = versions.log.epochs.newest()
    return QueryRegistration(
        query_id,
        query_id if epoch is None else epoch.run_id,
        name,
        session_id,
        place.checkpoint_location,
        place.state_location,
        tuple(specs),
        versions.key_groups,
        dict(place.options),
        ended=True,
    )
