"""The number of times that Ray has started this process's actor again."""

from __future__ import annotations

import ray


def restarts_of_this_actor() -> int:
    """Return how many times Ray had started this process's actor before: of two incarnations, the higher one counts."""
    actor_id = ray.get_runtime_context().get_actor_id()
    assert actor_id is not None, "only an actor has restarts"
    return int(ray._private.state.actors(actor_id)["NumRestarts"])
