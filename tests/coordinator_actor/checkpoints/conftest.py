"""The clock and the coordinators of a test."""

from __future__ import annotations

import pytest

from tests.coordinator_actor.checkpoints.checkpoint_world import World


@pytest.fixture
def world() -> World:
    return World()
