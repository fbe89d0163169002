"""Commits are atomic: processes die at every step of one, and what is found afterwards is one whole version."""

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from backends import RocksDBStateStoreProvider, StateStoreId
from tests.backends.crash_child import content_of, make_version, provider_in

ROOT = Path(__file__).parents[2]
MOST_STEPS = 40


def child(*args):
    command = [sys.executable, "-m", "tests.backends.crash_child", *map(str, args)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def check(directory, at_least, at_most):
    """What is there is whole, from the checkpoint location alone and with the local directory; and it goes on."""
    fresh = RocksDBStateStoreProvider(StateStoreId(f"{directory}/ck", "op", 3))
    latest = fresh.latest_version()
    assert at_least <= latest <= at_most
    for version in range(max(0, latest - 2), latest + 1):
        expected = content_of(version) if version else {}
        assert dict(fresh.get_read_store(version).iterator()) == expected
    fresh.close()
    again = provider_in(directory)
    assert dict(again.get_store(latest).iterator()) == content_of(latest)
    make_version(again, latest + 1)
    assert dict(again.get_store(latest + 1).iterator()) == content_of(latest + 1)
    again.close()
    return latest


@pytest.fixture(scope="module")
def deaths(tmp_path_factory):
    """How each process ended, by the step before which it was to die."""
    directory = tmp_path_factory.mktemp("crash")
    with child("steps", directory, MOST_STEPS) as process:
        lines = process.communicate(timeout=60)[0].splitlines()
    assert process.returncode == 0
    return directory, lines


def test_every_step_of_a_commit_was_reached(deaths):
    _, lines = deaths
    assert lines[-1].endswith("committed")
    kinds = [line.rsplit(" ", 1)[1] for line in lines[:-1]]
    assert all("killed before" in line for line in lines[:-1])
    # Changelog and manifest are each written, synced, named, and synced by their directory; then RocksDB is.
    assert kinds.count("link") == 2 and kinds.count("write") == 2 and kinds.count("fsync") >= 4
    assert kinds.count("apply") == 1 and len(lines) < MOST_STEPS


def test_a_process_killed_at_any_step_leaves_the_old_version_or_the_new(deaths):
    directory, lines = deaths
    found = [check(directory / line.split(" ", 1)[0], 4 if line.endswith("committed") else 3, 4) for line in lines]
    assert found == sorted(found), "once a commit is durable, dying later must not undo it"
    named = [i for i, line in enumerate(lines) if line.endswith("before link")]
    assert found[named[1]] == 3 and found[named[1] + 1] == 4, "the manifest's name is the commit"


@pytest.mark.parametrize("seed", [0])
def test_a_process_killed_at_any_moment_loses_nothing_it_reported(tmp_path, seed):
    reported = 0
    for _ in range(2):
        process = child("forever", tmp_path)
        assert process.stdout is not None
        first = process.stdout.readline()
        time.sleep(random.Random(seed).uniform(0.0, 0.3))
        process.kill()
        lines = [first, *process.stdout.read().splitlines()]
        process.wait()
        process.stdout.close()
        reported = int([line for line in lines if line.strip()][-1])
        reported = check(tmp_path, reported, reported + 1) + 1
