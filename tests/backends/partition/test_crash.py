"""Processes die at every step of commits, snapshots, maintenance and loads; the state stays whole and usable."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from backends.formats.manifest import version_in
from tests.backends.partition.crash_child import CLASSES, CONF, MADE_BEFORE, content_of, make_version, provider_in
from tests.effort import effort
from tests.patience import PATIENCE

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[3]
BACKENDS = sorted(CLASSES)
LITTLE_KEPT = replace(CONF, min_versions_to_retain=1, deltas_per_snapshot=1)


class Server:
    """A process that forks those that are to die; see ``crash_child``."""

    def __init__(self):
        self.process = None
        self.is_busy = False

    def run(self, mode, backend, directory, *every):
        """The lines of the answer, as they come."""
        if self.is_busy:  # a test has failed in the middle of an answer
            self.process.kill()
            self.close()
        if self.process is None:
            command = [sys.executable, "-m", "tests.backends.partition.crash_child"]
            pipe = subprocess.PIPE
            self.process = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True, bufsize=1)
        self.is_busy = True
        print(mode, backend, directory, *every, file=self.process.stdin)
        for line in self.process.stdout:
            if line == "end\n":
                self.is_busy = False
                return
            yield line.rstrip("\n")
        raise AssertionError("the server of forks has died itself")

    def close(self):
        if self.process is not None:
            self.process.stdin.close()
            self.process.wait(PATIENCE)
            self.process.stdout.close()
        self.process, self.is_busy = None, False


@pytest.fixture(scope="module")
def server():
    server = Server()
    yield server
    if server.is_busy:
        server.process.kill()
    server.close()


@pytest.fixture(scope="module")
def before(server, tmp_path_factory):
    """What ``maintain`` and ``copies`` begin with; they copy it, and so it is made once."""
    made = {}

    def put(backend, directory):
        if backend not in made:
            made[backend] = tmp_path_factory.mktemp(backend) / "before"
            assert not list(server.run("prepare", backend, made[backend]))
        (directory / "before").symlink_to(made[backend])

    return put


def files_in(directory):
    return [path for path in Path(directory).rglob("*") if path.is_file()]


def traces(directory):
    """Return what distinguishes two ends: names without their random parts, and sizes."""
    names = (
        (re.sub(r"[0-9a-f]{32}|[0-9a-f]{8}$|#\d+", "*", str(p.relative_to(directory))), p) for p in files_in(directory)
    )
    return sorted((name, path.stat().st_size) for name, path in names if not re.search(r"/LOG|/OPTIONS", name))


def check_durable(backend, directory, at_least, at_most):
    """Check that exactly what was acknowledged is in the checkpoint location; return the newest version."""
    with provider_in(backend, directory, local="fresh") as provider:
        latest = provider.latest_version()
        assert at_least <= latest <= at_most
        oldest = provider._manifests.oldest_version()
        assert oldest <= max(0, latest - CONF.min_versions_to_retain - 1)
        for version in range(oldest, latest + 1):
            assert dict(provider.get_read_store(version).iterator()) == content_of(version)
    return latest


def check_goes_on(backend, directory, latest, *, conf=CONF, local="local", more=3):
    """Check that the local directory is right as well, and that further commits and maintenance succeed."""
    with provider_in(backend, directory, conf=conf, local=local) as provider:
        for version in range(latest, latest + more):
            assert dict(provider.get_store(version).iterator()) == content_of(version)
            make_version(provider, version + 1)
            if version != latest + 1:
                provider.do_maintenance()
        assert dict(provider.get_store(latest + more).iterator()) == content_of(latest + more)
        if conf is LITTLE_KEPT and more == 3:
            check_no_litter(provider, directory, latest + 1)
    assert [path.name for path in (directory / local).iterdir()] == ["current"]


def check_no_litter(provider, directory, oldest):
    """Every file is one that something kept refers to, and every such file is there."""
    log = provider._manifests
    assert log.oldest_version() >= oldest, "the dead process left files of versions that are no longer kept"
    needed = {log._path(m.id) for m in log._chain.values()}
    for version in range(log.oldest_version(), log.latest_version() + 1):
        lineage = log.lineage(version)
        needed |= {ref.file.path for ref in lineage.changelogs if ref.version > log.oldest_version()}
        needed |= {path for s in lineage.snapshots for path in (s.file.path, *provider._files_of(s))}
    root = Path(directory) / "ck" / "statestore"
    there = {path.relative_to(root).as_posix() for path in files_in(directory / "ck")}
    assert there == needed
    assert all(version_in(path) >= oldest for path in needed if path.endswith((".changelog", ".snapshot")))


def check_ends(server, mode, backend, tmp_path, acknowledged):
    """After each death, all is well; returns the steps there are, and the newest version found after some of them."""
    ends = {}
    looks, seen = 0, None
    answer = server.run(mode, backend, tmp_path, effort(24, 1))
    kinds = next(answer).split()
    for line in answer:
        number = int(re.search(r"(\d+) (?:killed|done)", line)[1])
        directory = tmp_path / str(number)
        now = line.startswith("acknowledged"), traces(directory)
        if now != seen:  # a step that changed no file needs no second look
            latest = check_durable(backend, directory, acknowledged + now[0], acknowledged + 1)
            looks += 1
            again = "fresh" if looks % 5 == 4 else "local"
            more = 1 if backend == "rocksdb" and looks % 2 else 3  # it takes three versions to be rid of everything
            check_goes_on(backend, directory, latest, conf=LITTLE_KEPT, local=again, more=more)
            print(number, line)
        seen = now
        assert line.endswith(f"killed before {kinds[number]}" if number < len(kinds) else "done")
        ends[number] = latest
    assert ends[len(kinds)] == acknowledged + 1
    return kinds, ends


def check_commit(kinds, ends, before):
    """Changelog and manifest are each written, synced, named, and synced by their directory; then the engine is."""
    assert kinds.count("link") == 2 and kinds.count("write") == 2 and kinds.count("fsync") >= 4
    assert kinds.count("apply") == 1
    named = [i for i, kind in enumerate(kinds) if kind == "link"]
    expected = {step: before if step <= named[1] else before + 1 for step in ends}
    assert ends == expected, "the manifest's name is the commit, and nothing undoes it"


def test_a_process_killed_at_any_step_of_the_first_commit_leaves_nothing_or_the_version(server, tmp_path):
    check_commit(*check_ends(server, "commit", "file", tmp_path, 0), 0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_process_killed_at_any_step_loses_and_leaves_nothing(server, before, tmp_path, backend):
    before(backend, tmp_path)
    kinds, ends = check_ends(server, "maintain", backend, tmp_path, MADE_BEFORE)
    last = kinds.index("apply")
    check_commit(kinds[: last + 1], {step: latest for step, latest in ends.items() if step <= last}, MADE_BEFORE)
    assert {latest for step, latest in ends.items() if step > last} == {MADE_BEFORE + 1}
    others = {f"{other}.py" for other in BACKENDS if other != backend}
    source = "".join(p.read_text() for p in (ROOT / "backends").rglob("*.py") if p.name not in others)
    calls = re.findall(r'fault_points\.reached\((?:"([a-z:]+)")?', source)
    assert len(calls) >= 13 and "" not in calls
    # A provider on its own is never rescaled; test_rescaling.py kills there.
    points = set(calls) - {"load:rescaling", "load:ingest"}
    assert points <= set(kinds), f"never reached: {points - set(kinds)}"
    assert kinds.count("snapshot:file") == (2 if backend == "rocksdb" else 1)
    links = 4 + kinds.count("snapshot:file")  # of two commits' files, descriptor, and manifest
    assert kinds.count("link") == links + (backend == "rocksdb"), "and of the file with the database's id"
    assert kinds.count("maintenance:delete") >= 8 and kinds.count("load:downloaded") >= 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_process_killed_at_any_moment_loses_nothing_it_reported(server, tmp_path, backend):
    moments = random.Random(backend)
    reached = 0
    for _ in range(effort(2, 3)):
        answer = server.run("forever", backend, tmp_path)
        process = int(next(answer))
        reported = int(next(answer))
        assert reported == reached + 1
        time.sleep(moments.uniform(0.0, 0.15))
        os.kill(process, signal.SIGKILL)
        reported = int([reported, *answer][-1])
        latest = check_durable(backend, tmp_path, reported, reported + 1)
        check_goes_on(backend, tmp_path, latest)
        reached = latest + 3
    with provider_in(backend, tmp_path, conf=LITTLE_KEPT) as provider:
        for version in range(reached + 1, reached + 4):
            make_version(provider, version)
            provider.do_maintenance()
        check_no_litter(provider, tmp_path, reached + 1)


def dead_between_write_and_link(files, path):
    """Leave the files of a process that dies while it writes a file."""
    child = os.fork()
    if child == 0:
        os.link = lambda *names: os._exit(9)
        files.put_new(path, b"unfinished")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


def test_unfinished_files_are_removed_as_well(tmp_path):
    with provider_in("file", tmp_path, conf=LITTLE_KEPT) as provider:
        make_version(provider, 1)
        log = provider._manifests
        for name in ("2-0.changelog", "2-1.pairs", "manifests/00000000000000000002.json"):
            dead_between_write_and_link(provider._storage._files, f"{log.directory}/{name}")
        for version in range(2, 6):
            make_version(provider, version)
            provider.do_maintenance()
        check_no_litter(provider, tmp_path, 3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_next_process_removes_copies_that_a_dead_one_has_left(server, before, tmp_path, backend):
    before(backend, tmp_path)
    list(server.run("copies", backend, tmp_path, 1))
    assert len(list((tmp_path / "0/local").glob("at-*"))) == 1
    with provider_in(backend, tmp_path / "0") as provider:
        make_version(provider, provider.latest_version() + 1)
        provider.do_maintenance()
        assert [path.name for path in (tmp_path / "0/local").iterdir()] == ["current"]
