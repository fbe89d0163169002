"""The query whose state is in storage, as coordinators, hosts and clients describe queries."""

from __future__ import annotations

from backends.exceptions import VersionNotFoundError
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
    is_followed: bool = False,
    open_storage: OpenStorage = CheckpointStorage.open,
) -> QueryRegistration:
    """Return the query with its operators as they are at a version. Its run is the one that has claimed the state last.

    Storage does not say the query's ``name``, nor a session. ``is_followed``: later versions of the run are read, too.
    Then raises ``VersionNotFoundError`` while the run has made no version with its own partitions and backends: hosts
    keep the layout with which they begin a run.
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
    if is_followed and epoch is not None:
        made = {(spec.name, spec.num_partitions, spec.backend) for spec in specs}
        declared = {(x.operator, x.num_partitions, x.backend) for x in epoch.layouts}
        if declared and {one for one in made if one[0] in {name for name, *_ in declared}} - declared:
            raise VersionNotFoundError(
                f"Run {epoch.run_id} has claimed the state at {place.state_location} with other partitions or "
                "backends, and has completed no version yet: wait for its first batch."
            )
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
