"""Storage whose changelogs come one by one, as a test lets them through."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from backends.exceptions import StorageError
from backends.storage.checkpoint_storage import CheckpointStorage
from backends.storage.locations import FileRef
from tests.coordinator_actor.coordinator_world import World
from tests.patience import HANG


class GatedWorld(World):
    """Changelogs of partition 0 can be read when they are let through, one by one; ``read`` counts them."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.is_gated = False
        self.gate = threading.Semaphore(0)
        self.arrived = threading.Semaphore(0)
        self.fails = False
        self.read: Counter[str] = Counter()

    def storage(self, location: str, options: Mapping[str, str]) -> CheckpointStorage:
        storage = super().storage(location, options)
        read = storage.read

        def gated(ref: FileRef) -> bytes:
            if self.is_gated and "/2/0/" in ref.path and ref.path.endswith(".changelog"):
                self.arrived.release()
                assert self.gate.acquire(timeout=HANG)
                if self.fails:
                    raise StorageError(f"{ref.path}: throttled")
                self.read[ref.path] += 1
            return read(ref)

        storage.read = gated  # type: ignore[method-assign]
        return storage

    def open_gate(self) -> None:
        self.is_gated = False
        self.gate.release(1000)
