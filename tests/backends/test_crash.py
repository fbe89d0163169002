"""Processes die at every step of commits, snapshots and maintenance; what is found afterwards is whole, and goes on."""

import random
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from backends import chain
from tests.backends.crash_child import CLASSES, CONF, MADE_BEFORE, content_of, make_version, provider_in

ROOT = Path(__file__).parents[2]
MOST_STEPS = 80
BACKENDS = sorted(CLASSES)


def child(*args):
    command = [sys.executable, "-m", "tests.backends.crash_child", *map(str, args)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def deaths(mode, backend, directory):
    """How each process ended, by the step before which it was to die."""
    with child(mode, backend, directory, MOST_STEPS) as process:
        lines = process.communicate(timeout=120)[0].splitlines()
    assert process.returncode == 0 and lines[-1].endswith(" done"), lines[-3:]
    return lines


def check(backend, directory, at_least, at_most, *, depth=1):
    """What is there is whole, from the checkpoint location alone and with the local directory; and it goes on."""
    with provider_in(backend, directory, local="fresh") as fresh:
        latest = fresh.latest_version()
        assert at_least <= latest <= at_most
        for version in range(max(0, latest - depth), latest + 1):
            expected = content_of(version) if version else {}
            assert dict(fresh.get_read_store(version).iterator()) == expected
    with provider_in(backend, directory) as again:
        assert dict(again.get_store(latest).iterator()) == content_of(latest)
        make_version(again, latest + 1)
        assert dict(again.get_store(latest + 1).iterator()) == content_of(latest + 1)
        again.do_maintenance()
    return latest


def check_no_litter(backend, directory):
    """Some versions later, every file is one that something kept refers to."""
    with provider_in(backend, directory) as provider:
        for version in range(provider.latest_version() + 1, MADE_BEFORE + 12):
            make_version(provider, version)
            provider.do_maintenance()
        log = provider._log
        needed = {log._path(m.id) for m in log._chain.values()}
        for version in range(log.oldest_version(), log.latest_version() + 1):
            lineage = log.lineage(version)
            needed |= {ref.file.path for ref in lineage.changelogs}
            needed |= {path for s in lineage.snapshots for path in (s.file.path, *provider._files_of(s))}
        assert {path for path, _ in provider._storage.list(log.directory)} <= needed
        oldest = log.oldest_version()
        assert oldest >= MADE_BEFORE, "and what the crash has left is of versions that are no longer kept"
        assert all(chain.version_in(path) >= oldest for path in needed if not path.endswith((".json", ".sst")))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_process_killed_at_any_step_of_a_commit_leaves_the_old_version_or_the_new(tmp_path, backend):
    lines = deaths("commit", backend, tmp_path)
    kinds = [line.rsplit(" ", 1)[1] for line in lines[:-1]]
    # Changelog and manifest are each written, synced, named, and synced by their directory; then the engine is.
    assert kinds.count("link") == 2 and kinds.count("write") == 2 and kinds.count("fsync") >= 4
    assert kinds.count("apply") == 1
    found = [check(backend, tmp_path / str(i), 4 if line.endswith("done") else 3, 4) for i, line in enumerate(lines)]
    assert found == sorted(found), "once a commit is durable, dying later must not undo it"
    named = [i for i, line in enumerate(lines) if line.endswith("before link")]
    assert found[named[1]] == 3 and found[named[1] + 1] == 4, "the manifest's name is the commit"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_process_killed_at_any_step_of_maintenance_loses_and_leaves_nothing(tmp_path, backend):
    lines = deaths("maintain", backend, tmp_path)
    source = "".join(p.read_text() for p in (ROOT / "backends").glob("*.py"))
    points = set(re.findall(r'fault_points\.reached\("([a-z:]+)"\)', source))
    reached = {line.rsplit(" ", 1)[1] for line in lines}
    assert len(points) >= 10 and points <= reached, f"never reached: {points - reached}"
    for i, line in enumerate(lines):
        acknowledged = line.startswith("acknowledged")
        directory = tmp_path / str(i)
        is_sample = i % 4 == 0 or line.endswith("done")
        depth = CONF.min_versions_to_retain if is_sample else 0
        check(backend, directory, MADE_BEFORE + acknowledged, MADE_BEFORE + 1, depth=depth)
        if is_sample:
            check_no_litter(backend, directory)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_process_killed_at_any_moment_loses_nothing_it_reported(tmp_path, backend):
    moments = random.Random(backend)
    reported = 0
    for _ in range(2):
        process = child("forever", backend, tmp_path)
        assert process.stdout is not None
        first = process.stdout.readline()
        time.sleep(moments.uniform(0.0, 0.4))
        process.kill()
        lines = [first, *process.stdout.read().splitlines()]
        process.wait()
        process.stdout.close()
        reported = int([line for line in lines if line.strip()][-1])
        reported = check(backend, tmp_path, reported, reported + 1) + 1
