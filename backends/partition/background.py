"""Two threads that prepare changes while their changelog is written. All partitions of the process share them."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

_pool: ThreadPoolExecutor


def submit(function: Callable[..., T], *arguments: Any) -> Future[T]:
    """Call ``function`` in one of the threads. No call may wait long: the other partitions need the threads too."""
    return _pool.submit(function, *arguments)


def _start() -> None:
    global _pool
    _pool = ThreadPoolExecutor(2, thread_name_prefix="statestore-prepare")


_start()
os.register_at_fork(after_in_child=_start)  # a forked process does not inherit the threads
