"""The coordinator's orders about runs, carried out apart from the heartbeat that brings it.

To unload a partition is to wait for the commit or the load that is under way, and so perhaps for the storage of that
query. The heartbeat must not: the host would be given up, with the partitions of all other queries.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

log = logging.getLogger(__name__)

CARRY_OUT_SECONDS = 1.0
"""How long a heartbeat waits for all orders of its answer."""

Order = Callable[[], None]


class RunOrders:
    """Carries out orders, those about one run after each other in one thread. Thread-safe: ``_lock`` guards the table.

    While the orders about a run are being carried out, no more of that run are taken: they come again with each
    heartbeat until they are done. A thread is made only where there are orders.
    """

    def __init__(self, wait_seconds: float = CARRY_OUT_SECONDS) -> None:
        self._wait_seconds = wait_seconds
        self._lock = threading.Lock()
        self._threads: dict[str, threading.Thread] = {}

    def carry_out(self, orders: Mapping[str, Sequence[Order]]) -> None:
        """Carry out orders, by run id, or by parts of one. Return when all are done, or after ``wait_seconds``."""
        begun = []
        with self._lock:
            self._threads = {r: t for r, t in self._threads.items() if t.is_alive()}
            for run_id, of_run in orders.items():
                if run_id not in self._threads:
                    thread = threading.Thread(
                        target=_carry_out, args=(run_id, of_run), name=f"statestore-orders-{run_id[:8]}", daemon=True
                    )
                    self._threads[run_id] = thread
                    thread.start()
                    begun.append(thread)
        deadline = time.monotonic() + self._wait_seconds
        for thread in begun if self._wait_seconds else ():
            thread.join(timeout=max(0.0, deadline - time.monotonic()))


def _carry_out(run_id: str, orders: Sequence[Order]) -> None:
    for order in orders:
        try:
            order()
        except Exception:  # the order comes again with the next heartbeat; the others are carried out
            log.warning("An order about run %s could not be carried out", run_id, exc_info=True)
