"""The objects that the classes of one partition share."""

from __future__ import annotations

from dataclasses import dataclass

from backends.conf import StateStoreConf
from backends.engines.engine import StateEngine
from backends.partition.local_directory import Scratch
from backends.storage.checkpoint_storage import CheckpointStorage


@dataclass(frozen=True)
class PartitionContext:
    """An engine and the durable files that it is loaded from.

    ``directory`` is the partition's own in the ``storage``, ``backend`` the name of the engine's backend, and
    ``scratch`` gives local directories for files on their way.
    """

    engine: StateEngine
    backend: str
    storage: CheckpointStorage
    directory: str
    conf: StateStoreConf
    scratch: Scratch
