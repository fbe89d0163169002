"""The cache of a host's partitions: pins of copies, and the rule by which each kind of copy is evicted."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from spark_bridge.exceptions import TooManyRequestsError
from spark_bridge.host import partition_cache
from spark_bridge.host.partition_cache import COPY_IDLE_SECONDS, Copy, CopyKey, Kind, PartitionCache


class State:
    """A partition's state, as far as the cache knows it."""

    def __init__(self, version: int = 0) -> None:
        self.version = version
        self.is_destroyed = False

    def destroy(self) -> None:
        self.is_destroyed = True


class World:
    def __init__(self) -> None:
        self.now = 0.0
        self.cache: Any = PartitionCache(None, lambda: self.now)  # type: ignore[arg-type]
        self.loads: list[Future[Any]] = []

    def start_load(self, copy: Copy) -> Future[Any]:
        self.loads.append(Future())
        return self.loads[-1]

    def follow(self, state: State, at_most: int = 9, run: str = "run1") -> Any:
        key = CopyKey(Kind.FOLLOWER, run, ("operators/op", "b"), 0)
        return self.cache.pinned(key, lambda: state, at_most)

    def pin(self, version: int, run: str = "run1", partition: int = 0) -> Copy:
        key = CopyKey(Kind.VERSION, run, ("op", version), partition)
        copy: Copy = self.cache.pin_version(key, self.start_load)
        return copy

    def end_load(self, state: Any) -> None:
        self.loads.pop().set_result(state)


@pytest.fixture
def world() -> World:
    return World()


def test_a_version_is_loaded_once_and_stays_until_it_was_idle(world: World) -> None:
    first, second = world.pin(3), world.pin(3)
    assert first is second and len(world.loads) == 1
    state = State()
    world.end_load(state)
    world.cache.unpin(first)
    world.now += COPY_IDLE_SECONDS
    world.cache.evict_copies()
    assert not state.is_destroyed, "it has a pin"
    world.cache.unpin(second)
    world.now += COPY_IDLE_SECONDS - 1
    world.cache.evict_copies()
    assert not state.is_destroyed
    world.now += 1
    world.cache.evict_copies()
    assert state.is_destroyed and not world.cache._copies


def test_another_version_needs_one_that_no_reader_has(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition_cache, "MAX_VERSIONS", 2)
    states = []
    for version in (1, 2):
        world.pin(version)
        states.append(State(version))
        world.end_load(states[-1])
    world.pin(2, partition=1)  # of a version that is there
    with pytest.raises(TooManyRequestsError, match="2 older versions from storage already: 1 of 'op', 2 of 'op'"):
        world.pin(3)
    world.cache.unpin(world.cache._copies[CopyKey(Kind.VERSION, "run1", ("op", 1), 0), 0])
    world.pin(3)
    assert states[0].is_destroyed and not states[1].is_destroyed


def test_a_failed_load_is_tried_again_by_the_next_reader(world: World) -> None:
    copy = world.pin(3)
    world.loads.pop().set_exception(ValueError("no such file"))
    assert world.pin(3) is not copy and len(world.loads) == 1
    world.cache.unpin(copy)


@pytest.mark.parametrize("run", ["run1", None])
def test_copies_of_a_run_that_is_over_go_with_their_last_pin(world: World, run: str | None) -> None:
    states = [State(), State(), State()]
    copy = world.pin(3)
    world.end_load(states[0])
    with world.follow(states[1]):
        pass
    with world.follow(states[2], run="run2"):
        world.cache.end_run(run)
        assert [s.is_destroyed for s in states] == [False, True, False]
        assert copy.is_dropped, "its load would end"
    world.cache.unpin(copy)
    assert [s.is_destroyed for s in states] == [True, True, run is None]


def test_a_follower_has_one_reader_and_is_not_ahead_of_it(world: World) -> None:
    old, new = State(2), State(5)
    with world.follow(old) as first, world.follow(new) as second:
        assert (first, second) == (old, new)
    with world.follow(State(), at_most=7) as latest:
        assert latest is new, "the one with the least to apply"
    with world.follow(State(), at_most=4) as latest:
        assert latest is old
    with world.follow(fresh := State(), at_most=1) as latest:
        assert latest is fresh


def test_of_too_many_unused_followers_the_oldest_go(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition_cache, "MAX_IDLE_FOLLOWERS", 2)
    states = [State(9) for _ in range(3)]
    for i, state in enumerate(states):
        world.now = i
        with world.follow(state, at_most=-1, run=f"run{i}"):
            pass
    assert [s.is_destroyed for s in states] == [True, False, False]


def test_the_copy_of_an_export_goes_with_the_export(world: World) -> None:
    state = State()
    with world.cache.pinned(CopyKey(Kind.SAVEPOINT, "run1", ("op", 3), 0), lambda: state):
        world.now += 10 * COPY_IDLE_SECONDS
        world.cache.evict_copies()
        assert not state.is_destroyed
    assert state.is_destroyed and not world.cache._copies
