"""Storage that hangs for one query, for as long as a test likes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from backends.storage.checkpoint_storage import CheckpointStorage, OpenStorage
from tests.patience import HANG, PATIENCE

CALLS = ("put_new", "get", "exists", "list", "delete")


class HangingStorage:
    """Opens real storage. While ``hangs(location)`` lasts, no call to files below that location comes back."""

    def __init__(self, open_storage: OpenStorage) -> None:
        self._open_storage = open_storage
        self._location: str | None = None
        self._goes_on = threading.Event()
        self._waiting = threading.Semaphore(0)

    def open(self, location: str, options: Mapping[str, str]) -> CheckpointStorage:
        storage = self._open_storage(location, options)
        for name in CALLS:
            setattr(storage, name, self._gated(location, getattr(storage, name)))
        return storage

    def _gated(self, location: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def gated(*args: Any, **kwargs: Any) -> Any:
            if self._location is not None and location.startswith(self._location):
                self._waiting.release()
                assert self._goes_on.wait(HANG), "the storage was never released"
            return call(*args, **kwargs)

        return gated

    @contextmanager
    def hangs(self, location: str) -> Iterator[None]:
        """Storage below a location hangs until the end of the block."""
        self._goes_on.clear()
        self._location = location
        try:
            yield
        finally:
            self._location = None
            self._goes_on.set()

    def wait_for_call(self) -> None:
        """Wait until one more call hangs."""
        assert self._waiting.acquire(timeout=PATIENCE), "the storage got no call"
