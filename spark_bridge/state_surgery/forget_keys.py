"""``forget_keys``: removes keys from a query's state, and every trace of them from its checkpoint."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from backends.encoding.operator_schema import OperatorSchema
from backends.exceptions import InvalidStateStoreArgument, MissingFileError, UnsupportedLocationError
from backends.storage.checkpoint_storage import CheckpointStorage
from coordinator_actor import forgetting
from coordinator_actor.coordinator_port import CoordinatorPort
from coordinator_actor.exceptions import RetiredRunError, UnknownQueryError
from coordinator_actor.forgetting import ForgottenReport
from coordinator_actor.reading.stored_versions import StatePlace, find_state
from coordinator_actor.rewriting import ForgottenKeys
from spark_bridge.exceptions import SessionError
from spark_bridge.queryable.client.arguments import KeyCodec, names_in_order
from spark_bridge.session.current import current_cluster
from spark_bridge.state_format.layouts import family_of, window_place

if TYPE_CHECKING:
    from pyspark.sql.streaming import StreamingQuery

# Keys as users give them, converted to the columns of stored keys, which find rows in every column family.


def keys_to_forget(operator: str, schema: OperatorSchema, num_groups: int, keys: Any) -> ForgottenKeys:
    """Return the rows of these keys. A window is not part of a key: all windows of a key go.

    ``keys`` may be a function that makes them from the schema of the key's columns, for callers with only strings.

    Raises ``UnknownKeyOrNamespaceError`` for values that cannot be a key, ``InvalidStateStoreArgument`` for no keys,
    and for an operator whose only key is a window.
    """
    variable = schema.in_use[0]
    stored = family_of(variable)[1].key
    window = window_place(variable)
    key_columns = stored if window is None else stored.remove(window)
    if not len(key_columns):
        raise InvalidStateStoreArgument(
            f"Operator {operator!r} has no key but its window, so its rows belong to no key: nothing was changed."
        )
    codec = KeyCodec(operator, key_columns, names_in_order(key_columns, schema.key_columns), num_groups)
    columns = codec.columns(keys(codec.schema) if callable(keys) else keys).select(key_columns.names)
    if not columns.num_rows:
        raise InvalidStateStoreArgument("keys= is empty: nothing was changed. Give at least one key.")
    columns = pa.RecordBatch.from_arrays(columns.columns, schema=key_columns.remove_metadata())
    return ForgottenKeys(columns, schema.families, num_groups, is_whole=window is None)


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
    All versions stay. A later row of such a key starts with new state. The state of other operators, savepoints, and
    the output of sinks stay unchanged.

    ``query_or_checkpoint``: a ``StreamingQuery``, or the name, id or run id of a query that runs in this session; or
    the checkpoint location of one that does not run. Most files of a running query are rewritten while the stream
    runs; then its next batch waits for the last ones, and hosts load the changed files. Hosts keep answering queries.

    ``keys`` are as in ``QueryableStateClient.get_many``: values, tuples or dicts, or a table. All windows of a key of
    a windowed aggregate go. ``reference`` is recorded in the audit log of the checkpoint (``statestore audit``), as the
    number of a request; keys are not. ``state_location`` and ``storage_options`` are as in ``read_state``. ``progress``
    is called with each step. ``coordinator`` is that of the session by default.

    Reads and writes the partitions of the keys with all their changelogs; for windows, those of the whole
    operator. Raises before anything is changed: ``UnknownQueryError``, ``MissingFileError`` (no checkpoint),
    ``InvalidStateStoreArgument`` (unknown operator, no keys), ``UnknownKeyOrNamespaceError`` (values that cannot be
    keys), ``VersionNotFoundError`` (the last version must be recovered first: start the query once) and
    ``InvalidRequestError`` (another caller rewrites its files, or it stops with a savepoint). Raises ``StorageError``
    and ``DamagedFileError`` later: then call it again.
    """
    say = progress or log.info
    request = forgetting.ForgetRequest(
        operator, lambda schema, groups: keys_to_forget(operator, schema, groups, keys), reference, say
    )
    port = _coordinator() if coordinator is None else coordinator
    if not isinstance(query_or_checkpoint, str):
        return forgetting.forget_in_running(_required(port), str(query_or_checkpoint.runId), request)
    if _is_running(port, query_or_checkpoint) or not _is_location(query_or_checkpoint):
        return forgetting.forget_in_running(_required(port), query_or_checkpoint, request)
    options = dict(storage_options or {})
    place = find_state(query_or_checkpoint, state_location, options)
    served = [] if port is None else _served(port, place, say)
    for _ in range(forgetting.FORGET_ATTEMPTS):
        running = [query for query in served if query["ended_at"] is None]
        if port is None or not running:
            break
        try:
            return forgetting.forget_in_running(port, running[0]["run_id"], request)
        except (RetiredRunError, UnknownQueryError) as error:
            say(f"looks whether the query still runs: {error}")
            served = _served(port, place, say)
    report = forgetting.forget_in_storage(place, request)
    for query in served:
        assert port is not None
        port.take_up_versions(query["run_id"])  # hosts still answer from an ended query: now from the new files
        forgetting.await_hosts(port, query["run_id"], say)
    return report


def _served(port: CoordinatorPort, place: StatePlace, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Return the queries with that state which this cluster runs, or answers from after their end.

    A coordinator that has just started may not have heard from the driver yet. So this waits for the driver: a query
    that is taken for an ended one is fenced.
    """
    deadline: float | None = None
    while True:
        described = port.describe()
        served = [
            query
            for query in described["queries"]
            if query["retired_by"] is None
            and CheckpointStorage.open(query["state_location"], place.options).location == place.state_location
        ]
        if deadline is None:
            is_young = described["expects_reports"]
            deadline = time.monotonic() + (forgetting.UNKNOWN_QUERY_SECONDS if is_young else 0)
            if is_young:
                say("waits for the drivers' reports to a coordinator that has just started")
        if any(query["ended_at"] is None for query in served) or time.monotonic() >= deadline:
            return served
        time.sleep(forgetting.FORGET_POLL_SECONDS)


def _is_running(port: CoordinatorPort | None, text: str) -> bool:
    """Return whether a string is the name of a running query. Spark allows any name, such as one with a slash."""
    if port is None:
        return False
    queries = port.describe()["queries"]
    return any(q["name"] == text and q["ended_at"] is None and q["retired_by"] is None for q in queries)


def _is_location(text: str) -> bool:
    """Return whether a string is a checkpoint location, not a query's name: it has a slash, or a checkpoint."""
    if "/" in text:
        return True
    try:
        return CheckpointStorage.open(text).exists("metadata")
    except (MissingFileError, InvalidStateStoreArgument, UnsupportedLocationError):
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
