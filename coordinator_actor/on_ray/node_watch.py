"""Watches which nodes Ray has declared dead: a process that goes on there, behind a cut cable, must not act."""

from __future__ import annotations

import ray

from backends.background_loop import BackgroundLoop

NODE_WATCH_SECONDS = 1.0
"""Seconds between two questions to Ray. One question is one message, and grows with the nodes."""


class NodeWatch:
    """Asks Ray for its nodes in a thread of its own, so that nobody waits while Ray does not answer.

    ``dead`` has the ids of the dead nodes, as far as Ray remembers them (1,000 by default).
    """

    def __init__(self) -> None:
        self.dead: frozenset[str] = _dead_nodes()
        BackgroundLoop(
            self._look,
            NODE_WATCH_SECONDS,
            name="statestore-nodes",
            what="ask Ray which nodes are dead: hosts there are given up only when their leases are over",
            remedy="See whether Ray's head answers ('ray status').",
        ).start()

    def _look(self) -> None:
        self.dead = _dead_nodes()


def _dead_nodes() -> frozenset[str]:
    return frozenset(str(node["NodeID"]) for node in ray.nodes() if not node["Alive"])
