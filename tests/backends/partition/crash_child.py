"""Processes that die in the middle of their work. The tests of crashes run this module as one server of forks.

It reads jobs from its input, a line each, and ends every answer with a line ``end``:

``prepare <provider> <directory>``: makes the versions that ``maintain`` begins with.
``commit <provider> <directory> <every>``: lists in order the steps of a process that commits the very first version.
Then it forks such processes in ``<directory>/<k>``, which die by ``os._exit`` just before step k: one for every
<every>-th step, and one each for the steps that give a file its name and the steps just behind those. At last it forks
one that lives.
``maintain <provider> <directory>``: the same with a commit, maintenance that takes a snapshot and removes
files, the loading of an older version into a copy, and going back to it; ``<directory>/before`` is copied first.
``copies <provider> <directory>``: the same while an older version is read.
``forever <provider> <directory>``: says its process id, commits version after version, with maintenance,
and reports each, until it is killed.

A step is a fault point, or a call to the operating system through ``os``. Within ``shutil.rmtree`` only a few count,
and after the commit only calls that change files which may outlive the process: neither syncs nor scratch files.
"""

import os
import random
import shutil
import sys
import traceback
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

from backends import (
    FileStateStoreProvider,
    RocksDBStateStoreProvider,
    StateStoreConf,
    StateStoreId,
    fault_points,
    spans,
)
from backends.decoders import keep_pandas_out
from backends.engines import rocksdb_files

KILLED, DONE = 9, 7
SAY = os.write
CALLS = ("open", "write", "fsync", "link", "unlink", "rename", "mkdir", "rmdir")
FEW = ("CURRENT", "IDENTITY", "MANIFEST", "engine")
CLASSES = {"rocksdb": RocksDBStateStoreProvider, "file": FileStateStoreProvider}
BLOB = random.Random(0).randbytes(70_000)  # too large to be kept in a snapshot's descriptor
CONF = StateStoreConf(
    fsync=False, deltas_per_snapshot=2, min_versions_to_retain=2, max_versions_in_memory=0, upload_threads=1
)
ALL_KEPT = replace(CONF, min_versions_to_retain=100)
SYNCED = replace(CONF, fsync=True)
MADE_BEFORE = 7


def content_of(version):
    """What version ``version`` holds."""
    pairs = {b"version": str(version).encode() * 500, b"blob": BLOB} if version else {}
    pairs.update({b"k%d" % v: b"x" for v in range(max(1, version - 2), version + 1)})
    return pairs


def make_version(provider, version):
    """Commit ``version`` on top of the one below it."""
    store = provider.get_store(version - 1)
    old, new = content_of(version - 1), content_of(version)
    for key in old.keys() - new.keys():
        store.remove(key)
    for key, value in new.items():
        if old.get(key) != value:
            store.put(key, value)
    store.commit()


def provider_in(backend, directory, *, local="local", conf=CONF):
    """The provider under test; its local directory stays for the next process."""
    return CLASSES[backend](StateStoreId(f"{directory}/ck", "op", 3), conf, local_dir=f"{directory}/{local}")


def die_before(step):
    """End the process at the ``step``-th step from now on; at none if it is None, but say what the steps are."""
    seen, is_committed = 0, False

    def reach(name):
        nonlocal seen, is_committed
        if step is None:
            SAY(1, f"{name} ".encode())
        if seen == step:
            SAY(1, f"{step} killed before {name}\n".encode())
            os._exit(KILLED)
        seen += 1
        is_committed = is_committed or name == "apply"

    def guard(name, real):
        def call(*args, **kwargs):
            in_tree = kwargs.get("dir_fd") is not None
            is_reading = name == "fsync" or (name == "open" and not args[1] & os.O_CREAT)
            is_minor = is_reading or "/scratch/" in str(args[0])
            if not (is_minor and is_committed) and (not in_tree or str(args[0]).startswith(FEW)):
                reach(name)
            return real(*args, **kwargs)

        return call

    os.fsync = lambda descriptor: None  # for who dies, but not the machine, a sync changes nothing
    for name in CALLS:
        setattr(os, name, guard(name, getattr(os, name)))
    fault_points.set_hook(reach)
    spans.Pool.submit = at_once  # else the steps of threads would come in another order each time, or two at once


def at_once(pool, work, *args, **kwargs):
    """Do the work of a pool where it is submitted."""
    future = Future()
    try:
        future.set_result(work(*args, **kwargs))
    except Exception as error:  # noqa: BLE001 - result() raises it
        future.set_exception(error)
    return future


def commit(backend, directory, step):
    """Death within the first commit of all, which makes the directories as well."""
    provider = provider_in(backend, directory, conf=SYNCED)
    die_before(step)
    make_version(provider, 1)
    SAY(1, b"acknowledged ")


def copy(source, target):
    """What never changes may be shared."""
    if Path(source).suffix in (".changelog", ".json", ".pairs", ".snapshot", ".sst"):
        os.link(source, target)
    else:
        shutil.copyfile(source, target)


def maintain(backend, directory, step):
    """Death within a commit, maintenance or a load."""
    shutil.copytree(directory.parent / "before", directory, copy_function=copy)
    provider = provider_in(backend, directory, conf=SYNCED)
    die_before(step)
    make_version(provider, MADE_BEFORE + 1)
    SAY(1, b"acknowledged ")
    provider.do_maintenance()
    assert dict(provider.get_read_store(MADE_BEFORE).iterator()) == content_of(MADE_BEFORE)
    assert dict(provider.get_store(MADE_BEFORE - 2).iterator()) == content_of(MADE_BEFORE - 2)


def copies(backend, directory, step):
    """Death while an older version is read from a copy."""
    shutil.copytree(directory.parent / "before", directory, copy_function=copy)
    provider = provider_in(backend, directory)
    provider.get_store(MADE_BEFORE)
    store = provider.get_read_store(MADE_BEFORE - 2)
    assert dict(store.iterator()) == content_of(MADE_BEFORE - 2)
    die_before(step)
    fault_points.reached("read")


def prepare(backend, directory):
    """Versions with two snapshots, all kept so far. The local directory is some versions behind."""
    for local, first, last in (("local", 1, MADE_BEFORE - 2), ("other", MADE_BEFORE - 1, MADE_BEFORE)):
        with provider_in(backend, directory, local=local, conf=ALL_KEPT) as provider:
            for version in range(first, last + 1):
                make_version(provider, version)
                if version in (2, MADE_BEFORE - 2):  # few enough that RocksDB does not begin to compact
                    provider.do_maintenance()
    shutil.rmtree(directory / "other")
    for log in directory.rglob("LOG*"):
        log.unlink()


def forever(backend, directory):
    """Until the end of the world."""
    SAY(1, f"{os.getpid()}\n".encode())
    provider = provider_in(backend, directory)
    version = provider.latest_version()
    while True:
        version += 1
        make_version(provider, version)
        SAY(1, f"{version}\n".encode())
        provider.do_maintenance()


def run_fork(call, *args):
    """Call in a fork of this process, which has no threads: neither RocksDB nor thread pools live on in a fork."""
    child = os.fork()
    if child == 0:
        try:
            call(*args)
            os._exit(DONE)
        finally:
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def heard(call, *args):
    """Return how a fork has ended, and its output."""
    answer = os.dup(1)
    said, into = os.pipe()
    os.dup2(into, 1)
    os.close(into)
    ended = run_fork(call, *args)
    os.dup2(answer, 1)
    os.close(answer)
    line = os.read(said, 1 << 16).decode()
    os.close(said)
    return ended, line


def run_steps(call, backend, directory, every):
    """Say what the steps are, and how each fork has ended, once it has."""
    ended, said = heard(call, backend, directory / "whole", None)
    steps = [word for word in said.split() if word != "acknowledged"]
    SAY(1, f"{' '.join(steps)}\n".encode())
    assert ended == DONE
    named = [i for i, step in enumerate(steps) if step == "link"]
    for step in sorted({*range(0, len(steps), every), *named, *(i + 1 for i in named)}):
        ended, line = heard(call, backend, directory / str(step), step)
        SAY(1, line.encode() if ended == KILLED else f"{line}{step} not killed\n".encode())
    ended, line = heard(call, backend, directory / str(len(steps)), len(steps))
    SAY(1, f"{line}{len(steps)} {'done' if ended == DONE else 'failed'}\n".encode())


def main():
    """See the module."""
    keep_pandas_out()  # else Arrow would import it, here or in every fork
    # A version takes several write batches here. Not where this module is imported: the tests there would write so too.
    rocksdb_files.WRITE_ROWS = 2
    for job in sys.stdin:
        mode, backend, directory, *every = job.split()
        if mode in ("prepare", "forever"):
            run_fork(globals()[mode], backend, Path(directory))
        else:
            run_steps(globals()[mode], backend, Path(directory), *map(int, every))
        SAY(1, b"end\n")


if __name__ == "__main__":
    main()
