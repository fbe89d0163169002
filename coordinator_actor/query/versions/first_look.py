"""Reads a query's records for the first time, at the registration, with requests side by side where possible."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from backends.exceptions import UnsupportedLocationError
from backends.storage.checkpoint_storage import CheckpointStorage
from backends.tracing.spans import Pool
from coordinator_actor.durable.checkpoint_place import CheckpointPlace, is_inside
from coordinator_actor.durable.fencing import EpochFile
from coordinator_actor.durable.manifests import ManifestLog, QueryFile
from coordinator_actor.durable.spark_commits import SparkCommits
from coordinator_actor.messages import QueryRegistration

REQUESTS_AT_ONCE = 8


@dataclass(frozen=True)
class FirstLook:
    """The newest claim, the query that the state belongs to, where its checkpoint is, and what Spark has committed.

    ``place`` is None also where the state lies in its checkpoint.
    """

    newest: EpochFile | None
    query: QueryFile | None
    place: CheckpointPlace | None
    completed: int


def first_look(
    registration: QueryRegistration,
    manifests: ManifestLog,
    commits: SparkCommits,
    prove: Callable[[CheckpointStorage], None],
) -> FirstLook:
    """Read what decides about a registration, and all manifests. Raises what reading raises.

    Changes nothing. A state that is the query's own is given to ``prove`` meanwhile, which says by
    ``UnsupportedLocationError`` that a query cannot be kept there: it is for the caller to ask again.
    """

    def prove_own() -> None:
        stored = query.result()
        if stored is not None and stored.query_id == registration.query_id:
            with suppress(UnsupportedLocationError):
                prove(manifests.storage)

    with Pool(REQUESTS_AT_ONCE, thread_name_prefix="statestore-look") as pool:
        query = pool.submit(manifests.query_file)
        newest = pool.submit(manifests.epochs.newest)
        folded = pool.submit(manifests.folds.read)
        is_apart = not is_inside(registration.state_location, registration.checkpoint_location)
        place = pool.submit(manifests.places.newest) if is_apart else None
        proof = pool.submit(prove_own)
        # Spark's commits before the manifests: an older run may go on meanwhile, and a committed batch has a manifest.
        completed = commits.next_batch()
        manifests.refresh(folded.result)
        proof.result()
        return FirstLook(newest.result(), query.result(), None if place is None else place.result(), completed)
