"""Binds the state of a moved checkpoint to its new place, or copies the state of a copied checkpoint. This is for state
that is stored outside its checkpoint.

Both functions can be called again if a process dies in them. ``move_checkpoint`` writes one record. ``fork_checkpoint``
copies all files of the state to that of a new query id. At the end it gives the checkpoint that id. Until then the
checkpoint is rejected, because the state of its old id belongs to the original. The new id is derived from the old id
and the checkpoint's location, so that a second attempt continues the copy of the first one.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import msgspec
from msgspec import Struct

from backends.exceptions import FileExistsInStorageError, MissingFileError
from backends.formats.changelog import GROUPS_DIRECTORY
from backends.storage.checkpoint_storage import CheckpointStorage, OpenStorage
from coordinator_actor.durable.fencing import EPOCHS, MANIFESTS, epoch_path
from coordinator_actor.durable.manifests import (
    QUERY_FILE,
    REWRITTEN,
    ManifestLog,
    QueryFile,
    checkpoint_command,
    values_in_words,
)
from coordinator_actor.durable.records import AUDIT, HISTORY
from coordinator_actor.durable.spark_commits import METADATA, SparkCommits, query_id_of, write_query_id
from coordinator_actor.exceptions import CheckpointPlaceError

_COPIED = ("schemas", EPOCHS, "operators", GROUPS_DIRECTORY, "savepoint-ids", HISTORY, AUDIT, REWRITTEN, MANIFESTS)
"""In this order: the files that manifests name are copied before the manifests."""
_THREADS = 8


class BoundCheckpoint(Struct, frozen=True):
    """A checkpoint and its state. ``is_new``: False if it was a no-op."""

    checkpoint_location: str
    state_location: str
    query_id: str
    is_new: bool


def move_checkpoint(
    checkpoint_location: str, state_location: str, options: Mapping[str, str] | None = None
) -> BoundCheckpoint:
    """Bind the state of a checkpoint that has been moved to ``checkpoint_location`` to that place.

    ``state_location`` is the base directory of ``spark.statestore.location``. Raises ``CheckpointPlaceError`` if the
    checkpoint is still, or again, at its old place, or was moved without its last batch; ``MissingFileError`` if there
    is no checkpoint or no state of it.
    """
    opened = _Opened(checkpoint_location, state_location, dict(options or {}), CheckpointStorage.open)
    place = opened.log.newest_place()
    if place is not None and place.is_at(opened.checkpoint.location):
        return opened.bound(is_new=False)
    if place is not None:
        old = CheckpointStorage.open(place.checkpoint_location, dict(options or {}))
        left = [METADATA] if old.exists(METADATA) else []
        left += [name for name in ("offsets", "commits") if old.list(name)]
        if left:
            raise CheckpointPlaceError(
                f"{old.location} still has {', '.join(left)}, so that {opened.checkpoint.location} is a copy, or the "
                "query still runs there. Stop the query and remove that directory, or give the copy its own state:"
                f"\n  {checkpoint_command('fork', checkpoint_location, state_location, options or {})}"
                f"{values_in_words(options or {})}"
            )
    head = opened.log.head()
    if head is not None and head.version > 0 and not SparkCommits(opened.checkpoint).has_begun(head.version - 1):
        raise CheckpointPlaceError(
            f"{opened.checkpoint.location} has no offsets/{head.version - 1}, and the state at "
            f"{opened.state.location} is at version {head.version}: the checkpoint was not moved completely. "
            "Move its other files as well."
        )
    recorded = opened.log.record_place(opened.checkpoint.location, place)
    if not recorded.is_at(opened.checkpoint.location):
        raise CheckpointPlaceError(
            f"Another process has just moved the checkpoint of {opened.state.location} to "
            f"{recorded.checkpoint_location}."
        )
    return opened.bound(is_new=True)


def fork_checkpoint(
    checkpoint_location: str,
    state_location: str,
    options: Mapping[str, str] | None = None,
    *,
    open_storage: OpenStorage = CheckpointStorage.open,
    progress: Callable[[str], None] = lambda step: None,
) -> BoundCheckpoint:
    """Give the copy of a checkpoint at ``checkpoint_location`` a new query id, and a copy of the state.

    The original stays as it is. ``state_location`` is as for ``move_checkpoint``. Raises ``CheckpointPlaceError`` if
    the original keeps running, if the copy is not complete, or if its state is no longer kept; ``MissingFileError`` if
    there is no checkpoint or no state of it.
    """
    opened = _Opened(checkpoint_location, state_location, dict(options or {}), open_storage)
    place = opened.log.newest_place()
    if place is not None and place.is_at(opened.checkpoint.location):
        return opened.bound(is_new=False)
    spark = SparkCommits(opened.checkpoint)
    begun, done = spark.last_begun(), spark.last_committed()
    if done is not None and (begun is None or begun < done):
        raise CheckpointPlaceError(
            f"{opened.checkpoint.location} has commits/{done} and no offsets/{done}, which Spark writes first: it was "
            "not copied completely. Copy the checkpoint again."
        )
    begins = spark.next_batch()
    kept = opened.log.chain()
    oldest = max(min(kept), kept[max(kept)].oldest) if kept else 0  # those before only lead to it
    if begins < oldest:
        raise CheckpointPlaceError(
            f"{opened.checkpoint.location} begins with batch {begins}, and of the state at {opened.state.location} the "
            f"versions {oldest} to {max(kept)} are kept: the copy is too old. Copy the checkpoint again."
        )
    query_id = str(uuid.uuid5(uuid.NAMESPACE_URL, f"{opened.query_id} {opened.checkpoint.location}"))
    state = open_storage(f"{state_location.rstrip('/')}/{query_id}", dict(options or {}))
    copied = ManifestLog(state, "fork")
    if copied.query_file() is None:
        _copy(opened, state, progress)
        copied.record_place(opened.checkpoint.location, None)
        copied.ensure_query_file(msgspec.structs.replace(opened.query_file, query_id=query_id))
    else:
        _check_own_copy(opened, copied)
    write_query_id(opened.checkpoint, query_id)
    return BoundCheckpoint(opened.checkpoint.location, state.location, query_id, True)


class _Opened:
    """A checkpoint, and the state that belongs to the query id in its metadata."""

    def __init__(
        self, checkpoint_location: str, state_location: str, options: dict[str, str], open_storage: OpenStorage
    ) -> None:
        self.checkpoint = open_storage(checkpoint_location, options)
        self.query_id = query_id_of(self.checkpoint)
        self.state = open_storage(f"{state_location.rstrip('/')}/{self.query_id}", options)
        self.log = ManifestLog(self.state, "checkpoint")
        query = self.log.query_file()
        if query is None:
            raise MissingFileError(
                f"{self.state.full_location(QUERY_FILE)} does not exist: there is no state of {checkpoint_location} "
                f"below {state_location}. Give the directory of spark.statestore.location (state_location=). A "
                "checkpoint that contains its state is moved and copied without this."
            )
        if query.query_id != self.query_id:
            raise CheckpointPlaceError(
                f"The state at {self.state.location} belongs to query {query.query_id}, and the checkpoint at "
                f"{checkpoint_location} belongs to query {self.query_id}: another query made this state."
            )
        self.query_file: QueryFile = query
        self.log.refresh()

    def bound(self, *, is_new: bool) -> BoundCheckpoint:
        return BoundCheckpoint(self.checkpoint.location, self.state.location, self.query_id, is_new)


def _copy(opened: _Opened, target: CheckpointStorage, progress: Callable[[str], None]) -> None:
    """Copy the remaining files. Raises ``CheckpointPlaceError`` if the original advances during the copy."""
    source, before = opened.state, _progress_of(opened.log)

    def copy(path: str) -> None:
        try:
            target.put_new(path, source.get(path))
        except FileExistsInStorageError:
            return  # files are never changed: another process that does the same has copied it

    try:
        for directory in _COPIED:
            copied = {path for path, _ in target.list(directory)}
            missing = [path for path, _ in source.list(directory) if path not in copied]
            progress(f"copying {len(missing)} files of {source.full_location(directory)}")
            with ThreadPoolExecutor(_THREADS) as pool:
                for _ in pool.map(copy, missing):
                    pass
    except MissingFileError as error:
        raise _still_running(opened) from error  # only a running query removes files
    opened.log.refresh()
    if _progress_of(opened.log) != before:
        raise _still_running(opened)


def _progress_of(log: ManifestLog) -> tuple[int, int]:
    """Return the newest epoch and the last checkpoint id. A query that runs increases one of them."""
    newest = log.epochs.newest()
    return (0 if newest is None else newest.epoch, log.last_id())


def _still_running(opened: _Opened) -> CheckpointPlaceError:
    """Return the error for an original that runs while its state is copied."""
    return CheckpointPlaceError(
        f"The query of {opened.state.location} advances while its state is copied. Stop it, and run this again."
    )


def _check_own_copy(opened: _Opened, copied: ManifestLog) -> None:
    """Raise ``CheckpointPlaceError`` if a query has run on an earlier fork: its newest epoch is not a copy."""
    newest = copied.epochs.newest()
    path = None if newest is None else epoch_path(newest.epoch)
    if path is not None and not (opened.state.exists(path) and opened.state.get(path) == copied.storage.get(path)):
        raise CheckpointPlaceError(
            f"A query has run on an earlier fork at {opened.checkpoint.location}, with the state at "
            f"{copied.storage.location}. If that state is no longer needed, remove it and run this again; "
            "else copy the checkpoint to another place."
        )
