"""The query client on a path in storage, which is a checkpoint or a savepoint."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from backends.storage.checkpoint_storage import CheckpointStorage, OpenStorage
from coordinator_actor.savepoints.restore import restore_into_checkpoint
from coordinator_actor.savepoints.savepoint_format import METADATA_FILE
from spark_bridge.state_data.checkpoint_client import CheckpointClient

log = logging.getLogger(__name__)


@contextmanager
def client_of_path(
    location: str,
    state_location: str | None = None,
    storage_options: Mapping[str, str] | None = None,
    *,
    progress: Callable[[str], None] = lambda step: None,
    damaged: Callable[[str], None] = log.warning,
    open_storage: OpenStorage = CheckpointStorage.open,
) -> Iterator[CheckpointClient]:
    """Give a client that reads the checkpoint or savepoint at ``location``.

    A savepoint is restored to a temporary directory first, of which ``progress`` is told, and has one version: that of
    the savepoint. ``damaged`` is that of ``CheckpointClient.open``. Raises what ``open`` and
    ``restore_into_checkpoint`` raise.
    """
    options = dict(storage_options or {})
    if not open_storage(location, options).exists(METADATA_FILE):
        yield CheckpointClient.open(location, state_location, options, damaged=damaged, open_storage=open_storage)
        return
    progress(f"{location} is a savepoint; it is restored to a temporary directory to be read.")
    with TemporaryDirectory(prefix="statestore-savepoint-") as scratch:
        checkpoint = str(Path(scratch) / "checkpoint")
        restore_into_checkpoint(location, checkpoint, storage_options=options, open_storage=open_storage)
        yield CheckpointClient.open(checkpoint, None, options, open_storage=open_storage)
