"""``forget_keys``: removes keys from a query's state, and every trace of them from its checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from backends.exceptions import MissingFileError
from backends.storage.checkpoint_storage import CheckpointStorage
from coordinator_actor.coordinator_port import CoordinatorPort
from coordinator_actor.durable.manifests import ManifestLog
from coordinator_actor.exceptions import RetiredRunError, UnknownQueryError
from coordinator_actor.messages import RunningOperator
from coordinator_actor.reading.stored_versions import StatePlace, find_state
from coordinator_actor.surgery.forgetting import (
    ForgetRequest,
    ForgottenReport,
    await_hosts,
    forget_in_running,
    forget_in_storage,
)
from spark_bridge.exceptions import SessionError
from spark_bridge.session.current import current_cluster
from spark_bridge.state_surgery.keys_to_forget import keys_to_forget

if TYPE_CHECKING:
    from pyspark.sql.streaming import StreamingQuery

log = logging.getLogger(__name__)


def forget_keys(
    query_or_checkpoint: StreamingQuery | str,
    operator: str,
    keys: Any,
    *,
    reference: str | None = None,
    state_location: str | None = None,
    storage_options: Mapping[str, str] | None = None,
    progress: Callable[[str], None] | None = None,
    coordinator: CoordinatorPort | None = None,
) -> ForgottenReport:
    """Remove keys from an operator: from the running state, and from every version, snapshot and changelog.

    When the call returns, no version that can be read has a row of the keys, and no file of the state has their bytes.
    All versions stay. A row that comes later makes a key anew. What other operators have, savepoints, and what sinks
    were given, stays as it is.

    ``query_or_checkpoint``: a ``StreamingQuery``, or the name, id or run id of a query that runs in this session; or
    the checkpoint location of one that does not run. Of a running query most files are written anew beside the stream;
    then its next batch waits for the last ones, and hosts load what has changed. Queries are answered meanwhile.

    ``keys`` are as in ``QueryableStateClient.get_many``: values, tuples or dicts, or a table. Of a windowed aggregate
    all windows of a key go. ``reference`` stands in the audit log of the checkpoint (``statestore audit``), as the
    number of a request; keys do not. ``state_location`` and ``storage_options`` are as in ``read_state``. ``progress``
    is told of each step. ``coordinator`` is that of the session by default.

    Reads and writes the partitions of the keys with all their changelogs; where windows are kept, those of the whole
    operator. Raises before anything is changed: ``UnknownQueryError``, ``MissingFileError`` (no checkpoint),
    ``InvalidStateStoreArgument`` (no such operator, no keys), ``UnknownKeyOrNamespaceError`` (values that are no keys).
    Raises as early ``VersionNotFoundError`` (the last version must be recovered first: start the query once) and
    ``InvalidRequestError`` (somebody else writes its files anew, or it stops with a savepoint). Raises ``StorageError``
    and ``DamagedFileError`` later: call it again then.
    """
    say = progress or log.info
    request = ForgetRequest(
        operator, lambda schema, groups: keys_to_forget(operator, schema, groups, keys), reference, say
    )
    port = _coordinator() if coordinator is None else coordinator
    if not isinstance(query_or_checkpoint, str):
        return forget_in_running(_required(port), str(query_or_checkpoint.runId), request)
    if not _is_location(query_or_checkpoint):
        return forget_in_running(_required(port), query_or_checkpoint, request)
    options = dict(storage_options or {})
    place = find_state(query_or_checkpoint, state_location, options)
    served = [] if port is None else _served(port, place)
    if port is not None and any(not o.ended for o in served):
        try:
            return forget_in_running(port, served[0].run_id, request)
        except (RetiredRunError, UnknownQueryError) as error:
            say(f"the query has ended meanwhile: {error}")
            served = _served(port, place)
    report = forget_in_storage(place, request)
    for run_id in {o.run_id for o in served}:
        assert port is not None
        port.take_up_versions(run_id)  # an ended query is answered on, from the files as they are now
        await_hosts(port, run_id, say)
    return report


def _served(port: CoordinatorPort, place: StatePlace) -> list[RunningOperator]:
    """Return the operators of the query with that state that this cluster runs, or reads on after its end."""
    file = ManifestLog(CheckpointStorage.open(place.state_location, place.options), "reader").query_file()
    return [o for o in port.operators() if file is not None and o.query_id == file.query_id]


def _is_location(text: str) -> bool:
    """Return whether a text is a checkpoint location, and no name of a query: it has a slash, or a checkpoint."""
    if "/" in text:
        return True
    try:
        return CheckpointStorage.open(text).exists("metadata")
    except MissingFileError:
        return False


def _coordinator() -> CoordinatorPort | None:
    try:
        return current_cluster().coordinator
    except SessionError:
        return None


def _required(port: CoordinatorPort | None) -> CoordinatorPort:
    if port is None:
        raise SessionError(
            "This process has no state store session, so it cannot ask a running query to forget keys: call this where "
            "init_spark or attach was called, or give the checkpoint location of a query that does not run."
        )
    return port
