"""Loads and uploads: each use of a partition's files begins, lasts and ends separately."""

from __future__ import annotations

import math
from pathlib import Path

from backends.formats.manifest_chain import Layout
from coordinator_actor.run.holds import BUSY_SECONDS, FILES_RENEW_SECONDS, UPLOAD, FilesInUse
from tests.coordinator_actor.coordinator_world import World, run_of

LAYOUTS = {"op": Layout("op", 2, "file")}
TASK = ("op", 0)
OWN = ("operators/op/2/0/default/",)
EVERYTHING = ("operators/", "groups/")


def test_uses_of_one_partition_end_none_but_themselves() -> None:
    files = FilesInUse()
    for use in ("h0", "copy", UPLOAD):
        files.begin(TASK, use, 0.0, is_rescaling=False, oldest=7)
    for use in ("h0", UPLOAD, "unknown"):
        files.end(TASK, use)
        assert files.directories(LAYOUTS, 1.0) == OWN
    files.end(TASK, "copy")
    assert files.directories(LAYOUTS, 1.0) == ()


def test_a_renewed_use_lasts_and_another_one_expires() -> None:
    files = FilesInUse()
    files.begin(TASK, "long", 0.0, is_rescaling=False, oldest=7)
    files.begin(("op", 1), "dead", 0.0, is_rescaling=True, oldest=3)
    now = 0.0
    assert files.directories(LAYOUTS, now) == EVERYTHING
    assert files.oldest(now) == 3
    while now < 10 * BUSY_SECONDS:
        now += FILES_RENEW_SECONDS
        assert files.renew(TASK, "long", now)
    assert files.oldest(now) == files.oldest(now + BUSY_SECONDS - 1) == 7
    assert files.oldest(now + BUSY_SECONDS) == math.inf
    assert files.directories(LAYOUTS, now + BUSY_SECONDS - 1) == OWN
    assert files.directories(LAYOUTS, now + BUSY_SECONDS) == ()
    assert not files.renew(TASK, "long", now + BUSY_SECONDS), "its files may be gone"
    assert not files.renew(("op", 1), "dead", now) and not files._uses


def test_a_renewal_keeps_files_of_a_version_that_is_given_up(tmp_path: Path) -> None:
    world = World(tmp_path)
    c = world.coordinator()
    assert c.register_query(world.registration()).refusal is None
    world.run_batch(c, 0)
    c.batch_committed("run1", 0)
    c.lineage("run1", "op", 0, 1, "copy")
    run = run_of(c, "run1")
    world.now += FILES_RENEW_SECONDS
    assert c.renew_files("run1", "op", 0, "copy") and not c.renew_files("run1", "op", 1, "copy")
    assert run.files_in_use.directories(run.versions.layouts, world.now + BUSY_SECONDS - 1)
    c.release_files("run1", "op", 0, "copy")
    assert not run.files_in_use.directories(run.versions.layouts, world.now)
    c.release_files("gone", "op", 0, "copy")


def test_changes_and_uploads_end_no_load_of_anybody_else(tmp_path: Path) -> None:
    world = World(tmp_path)
    c = world.coordinator()
    assert c.register_query(world.registration()).refusal is None
    world.run_batch(c, 0)
    c.batch_committed("run1", 0)
    run, owner = run_of(c, "run1"), world.open_owner(c, 0)
    c.lineage("run1", "op", 0, 1, "copy")
    c.lineage("run1", "op", 0, 1, owner.host_id)
    world.run_batch(c, 1)
    assert {use for _, use in run.files_in_use._uses} == {"copy"}


def test_a_restarted_coordinator_removes_no_file_before_it_knows_of_the_loads(tmp_path: Path) -> None:
    world = World(tmp_path)
    c = world.coordinator()
    assert c.register_query(world.registration()).refusal is None
    world.run_batch(c, 0)
    c.batch_committed("run1", 0)
    assert not run_of(c, "run1").files_in_use.directories(LAYOUTS, world.now)
    again = world.coordinator()
    assert again.register_query(world.registration()).refusal is None
    files = run_of(again, "run1").files_in_use
    assert files.directories(LAYOUTS, world.now + BUSY_SECONDS - 1) == EVERYTHING
    assert not again.renew_files("run1", "op", 0, "copy"), "a loading host asks for the lineage again"
    again.lineage("run1", "op", 0, 1, "copy")
    assert again.renew_files("run1", "op", 0, "copy")
    again.release_files("run1", "op", 0, "copy")
    assert not files.directories(LAYOUTS, world.now + BUSY_SECONDS)
