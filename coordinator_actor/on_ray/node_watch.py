"""Watches which nodes Ray has declared dead: a process that goes on there, behind a cut cable, must not act."""

from __future__ import annotations

import logging
import threading
import time

import ray

log = logging.getLogger(__name__)

NODE_WATCH_SECONDS = 1.0
"""Seconds between two questions to Ray. One question is one message, and grows with the nodes."""


class NodeWatch:
    """Asks Ray for its nodes in a thread of its own, so that nobody waits while Ray does not answer.

    ``dead`` has the ids of the dead nodes, as far as Ray remembers them (1,000 by default).
    """

    def __init__(self) -> None:
        self.dead: frozenset[str] = _dead_nodes()
        threading.Thread(target=self._run, name="statestore-nodes", daemon=True).start()

    def _run(self) -> None:
        while True:
            time.sleep(NODE_WATCH_SECONDS)
            try:
                self.dead = _dead_nodes()
            except Exception:  # the thread must go on; what is dead stays dead
                log.warning("Ray did not say which nodes are dead", exc_info=True)


def _dead_nodes() -> frozenset[str]:
    return frozenset(str(node["NodeID"]) for node in ray.nodes() if not node["Alive"])
