"""The version that a batch looks up is recorded once, found again, kept while needed, and never another one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from backends.exceptions import InvalidStateStoreArgument, VersionNotFoundError
from backends.storage.checkpoint_storage import CheckpointStorage
from coordinator_actor.coordinator import Coordinator
from coordinator_actor.durable.records import LookupRecord, LookupRecords
from coordinator_actor.exceptions import FencedError, QueryEndedError
from coordinator_actor.messages import LookedUp
from coordinator_actor.run.holds import LISTED_EVERY
from coordinator_actor.run.versions import KEPT_BATCHES, LOOKUP_RECORD_SECONDS, PIN_SECONDS
from tests.coordinator_actor.coordinator_world import World, acknowledge
from tests.coordinator_actor.run.retention_steps import upload

KEEP = 3


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture
def c(world: World) -> Coordinator:
    made = world.coordinator()
    register(world, made, "run1")
    return made


def register(world: World, c: Coordinator, run: str) -> None:
    registration = world.registration(run, min_versions_to_retain=KEEP, maintenance_interval=1.0)
    assert c.register_query(registration).refusal is None


def batch(world: World, c: Coordinator, run: str = "run1") -> int:
    number = c.registries.runs.get(run).versions.completed
    world.plan_spark(number)
    for partition in (0, 1):
        grant = world.open(c, number, partition, run)
        acknowledge(c, world.stage(grant, partition, number, f"{run}{partition}", run))
    world.commit_spark(number)
    c.batch_committed(run, number)
    return number + 1


def look_up(c: Coordinator, batch_id: int, by: str = "other") -> LookedUp:
    answer: LookedUp = c.look_up("op", "q", by, batch_id)
    return answer


def go_on(world: World, c: Coordinator, versions: int, run: str = "run1") -> int:
    """Complete versions with snapshots and maintenance; return the oldest version that is kept then."""
    for _ in range(versions):
        batch(world, c, run)
        for partition in (0, 1):
            upload(world, c, partition, run)
        world.now += 2
        for i in range(2):
            c.heartbeat_host(f"h{i}", "a")
        c.renew_leases([run])
        c.maintain()
    return c.operators()[0].oldest_version


def records(world: World) -> list[str]:
    place = world.root / "ck/statestore/lookups"
    return sorted(str(p.relative_to(place)) for p in place.rglob("*.json"))


def test_a_batch_gets_the_same_version_for_every_caller_and_after_any_crash(world: World, c: Coordinator) -> None:
    batch(world, c)
    first = look_up(c, 7)
    assert (first.version, first.location.run_id, first.at_ms) == (1, "run1", int(world.now * 1000))
    batch(world, c)
    world.now += 5
    assert look_up(c, 7) == look_up(c, 7)
    assert (look_up(c, 7).version, look_up(c, 7).at_ms) == (1, first.at_ms)
    assert look_up(c, 8).version == 2
    assert look_up(c, 7, by="third").version == 2, "every query by itself"
    another = world.coordinator()
    register(world, another, "run1")
    assert [look_up(another, n).version for n in (7, 8)] == [1, 2]
    register(world, another, "run2")
    batch(world, another, "run2")
    assert [look_up(another, n).version for n in (7, 8, 9)] == [1, 2, 3], "the next run of the same history"


def test_of_two_tasks_that_make_the_record_at_once_one_counts_for_all(
    world: World, c: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch(world, c)
    looked_up = c.registries.runs.get("run1").looked_up
    make, others = looked_up._records.make, list[int]()

    def last(by: str, batch_id: int, record: LookupRecord) -> LookupRecord:
        """The second task, which has found no record either, comes behind the first, and a third one in between."""
        monkeypatch.undo()
        first = LookupRecord(1, "run1", 5)
        assert record.version == 2 and make(by, batch_id, first) == first
        others.append(look_up(c, batch_id).version)
        return make(by, batch_id, record)

    batch(world, c)
    monkeypatch.setattr(looked_up._records, "make", last)
    assert (look_up(c, 3).version, look_up(c, 3).at_ms, others) == (1, 5, [1])


def test_only_versions_that_may_be_read_again_are_kept(world: World, c: Coordinator) -> None:
    batch(world, c)
    assert go_on(world, c, LISTED_EVERY + 1) > 2, "without lookups old versions go"
    looked_up = look_up(c, 0).version
    assert go_on(world, c, 3 * KEEP) == looked_up
    later = look_up(c, 1).version
    assert go_on(world, c, KEEP) == looked_up, "batch 0 may still be run again"
    assert look_up(c, 0).version == looked_up
    look_up(c, 2)
    assert go_on(world, c, KEEP) == later
    assert look_up(c, 2).version > look_up(c, 1).version == later
    with pytest.raises(VersionNotFoundError, match=r"Batch 0 of query other has looked up version.*Remove .*/lookups/"):
        look_up(c, 0)


def test_versions_recorded_by_a_reader_of_storage_are_kept(world: World, c: Coordinator) -> None:
    """The reader sends nothing to the coordinator; a record holds its version at every moment."""
    batch(world, c)
    go_on(world, c, LISTED_EVERY + 1)
    looked_up = c.registries.runs.get("run1").versions.completed
    made = LookupRecord(looked_up, "run1", int(world.now * 1000))
    LookupRecords(CheckpointStorage.open(str(world.root / "ck/statestore"))).make("reader", 0, made)
    assert go_on(world, c, 3 * KEEP) == looked_up


def test_a_restarted_coordinator_keeps_it_too(world: World, c: Coordinator) -> None:
    batch(world, c)
    looked_up = look_up(c, 0).version
    another = world.coordinator()
    register(world, another, "run2")
    assert go_on(world, another, 3 * KEEP, "run2") <= looked_up
    assert look_up(another, 0).version == looked_up


def test_a_query_that_is_gone_keeps_nothing_forever(world: World, c: Coordinator) -> None:
    batch(world, c)
    looked_up = look_up(c, 0).version
    assert go_on(world, c, 3 * KEEP) <= looked_up
    world.now += PIN_SECONDS
    another = world.coordinator()
    register(world, another, "run2")
    assert go_on(world, another, 3 * KEEP, "run2") > looked_up


def test_a_batch_that_is_run_again_after_long_is_in_use(world: World, c: Coordinator) -> None:
    batch(world, c)
    looked_up = look_up(c, 0).version
    world.now += 2 * PIN_SECONDS
    another = world.coordinator()
    register(world, another, "run2")
    assert look_up(another, 0).version == looked_up
    assert go_on(world, another, 3 * KEEP, "run2") <= looked_up
    assert look_up(another, 0).version == looked_up


def test_the_records_of_a_query_that_is_gone_go_too_and_are_read_once(
    world: World, c: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch(world, c)
    for number in range(3):
        look_up(c, number)
    another = world.coordinator()
    register(world, another, "run2")
    looked_up = another.registries.runs.get("run2").looked_up
    find, found = looked_up._records.find, list[tuple[str, int]]()
    monkeypatch.setattr(looked_up._records, "find", lambda *key: (found.append(key), find(*key))[1])
    go_on(world, another, 3 * LISTED_EVERY, "run2")
    assert found == [("other", 1), ("other", 2)]
    world.now += LOOKUP_RECORD_SECONDS
    third = world.coordinator()
    register(world, third, "run3")
    look_up(third, 0, by="new")
    go_on(world, third, 1, "run3")
    assert [name.split("/")[0] for name in records(world)] == ["new"]


def test_a_replaced_coordinator_says_so_and_not_that_the_version_of_a_record_is_gone(
    world: World, c: Coordinator
) -> None:
    batch(world, c)
    newer = world.coordinator()
    register(world, newer, "run2")
    batch(world, newer, "run2")
    assert look_up(newer, 3).version == 2
    with pytest.raises(FencedError, match="taken over by another coordinator"):
        look_up(c, 3)


def test_old_records_go(world: World, c: Coordinator) -> None:
    batch(world, c)
    for number in (0, 12, 13, 111, 112):
        look_up(c, number)
    assert KEPT_BATCHES == 100
    assert [int(name[-8:-5]) for name in records(world)] == [13, 111, 112]


def test_a_version_that_was_made_again_is_another_one(world: World, c: Coordinator) -> None:
    for _ in range(3):
        batch(world, c)
    assert look_up(c, 0).version == 3
    for number in (2,):
        (world.root / f"ck/commits/{number}").unlink()
        (world.root / f"ck/offsets/{number}").unlink()
    another = world.coordinator()
    register(world, another, "run2")
    with pytest.raises(VersionNotFoundError, match="versions 0 to 2 are kept"):
        look_up(another, 0)
    batch(world, another, "run2")
    with pytest.raises(VersionNotFoundError, match=r"as run run1 had made it.*run run2 has replaced it"):
        look_up(another, 0)
    assert look_up(another, 1).version == 3


@pytest.mark.parametrize("is_made_anew", [False, True])
def test_the_remedy_for_a_version_that_is_gone_works(world: World, c: Coordinator, is_made_anew: bool) -> None:
    """The error names a file; without it, the batch looks up the version that is completed then."""
    for _ in range(3):
        batch(world, c)
    look_up(c, 0)
    (world.root / "ck/commits/2").unlink()
    (world.root / "ck/offsets/2").unlink()
    another = world.coordinator()
    register(world, another, "run2")
    if is_made_anew:
        batch(world, another, "run2")
    for _ in range(2):
        with pytest.raises(VersionNotFoundError) as refused:
            look_up(another, 0)
    named = re.search(r"Remove (\S+\.json),", str(refused.value))
    assert named is not None
    Path(named[1]).unlink()
    assert [look_up(another, 0).version for _ in range(2)] == [3 if is_made_anew else 2] * 2
    assert Path(named[1]).exists()


def test_a_pin_goes_with_its_record(world: World, c: Coordinator) -> None:
    """A user removes the record of a batch that will not run again: its version is not kept for a day."""
    batch(world, c)
    look_up(c, 0)
    assert go_on(world, c, 8) <= 1
    for name in records(world):
        (world.root / "ck/statestore/lookups" / name).unlink()
    assert go_on(world, c, 2) > 1
    assert go_on(world, c, 8) > 8, "retention continues where no record is left"


def test_ended_queries_are_looked_up_and_those_that_are_over_are_not(world: World, c: Coordinator) -> None:
    batch(world, c)
    assert c.serve_ended(c.registries.runs.get("run1").registration).refusal is None
    assert look_up(c, 0).version == 1
    c.deactivate_instances("run1")
    with pytest.raises(QueryEndedError):
        look_up(c, 1)


def test_the_version_0_and_ids_that_cannot_be(world: World, c: Coordinator) -> None:
    assert look_up(c, 0).version == 0
    batch(world, c)
    assert look_up(c, 0).version == 0
    for by in ("../epochs", "", "a/b"):
        with pytest.raises(InvalidStateStoreArgument):
            look_up(c, 0, by=by)
