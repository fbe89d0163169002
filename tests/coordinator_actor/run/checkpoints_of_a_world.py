"""Batches of a ``World``: what tests of the history and of metrics share."""

from __future__ import annotations

from typing import Any

import msgspec

from coordinator_actor.coordinator import Coordinator
from coordinator_actor.messages import Acknowledge, CommitFigures
from tests.coordinator_actor.coordinator_world import World


def begin(world: World, run: str = "run1", **changes: Any) -> Coordinator:
    c = world.coordinator()
    answer = c.register_query(world.registration(run, **changes))
    assert answer.refusal is None, answer.refusal
    return c


def staged(world: World, c: Coordinator, batch: int, p: int, figures: CommitFigures, run: str = "run1") -> Acknowledge:
    return msgspec.structs.replace(world.stage(world.open(c, batch, p, run), p, batch, "t", run), figures=figures)


def batches(world: World, c: Coordinator, first: int, last: int, run: str = "run1") -> None:
    for batch in range(first, last + 1):
        world.plan_spark(batch)
        world.run_batch(c, batch, run=run)
        c.batch_committed(run, batch)
