"""Threads that play tasks, and helpers that wait for their results."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from tests.patience import PATIENCE


def wait_until(holds: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.001)


class Threads:
    """A daemon thread for each task: one that waits forever fails its test, and holds up nothing else."""

    @staticmethod
    def submit(call: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(call(*args))
            except BaseException as error:  # noqa: BLE001 - the caller of result() gets it
                future.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return future
