"""Processes that die in the middle of their work; run as a module by the tests of crashes.

``commit <provider> <directory> <count>``: for k = 0, 1, ... forks a process that makes three versions in
``<directory>/<k>`` and dies by ``os._exit`` just before the k-th step of the fourth commit: a call to the
operating system, or the write to the engine.
``maintain <provider> <directory> <count>``: the same with a commit, maintenance that takes a snapshot and
removes files, and the loading of an older version; the steps are the fault points and the naming of files.
Both print per process how it ended, and at which step.
``forever <provider> <directory>``: commits version after version, with maintenance, and reports each,
until it is killed.
"""

import os
import random
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from backends import FileStateStoreProvider, RocksDBStateStoreProvider, StateStoreConf, StateStoreId, fault_points

KILLED, DONE = 9, 7
SAY = os.write
CLASSES = {"rocksdb": RocksDBStateStoreProvider, "file": FileStateStoreProvider}
BLOB = random.Random(0).randbytes(70_000)  # too large to be kept in a snapshot's descriptor
CONF = StateStoreConf(
    fsync=False, deltas_per_snapshot=3, min_versions_to_retain=3, max_versions_in_memory=0, upload_threads=1
)
MADE_BEFORE = 8


def content_of(version):
    """What version ``version`` holds."""
    pairs = {b"version": str(version).encode() * 500, b"blob": BLOB}
    pairs.update({b"k%d" % v: b"x" for v in range(max(1, version - 2), version + 1)})
    return pairs


def make_version(provider, version):
    """Commit ``version`` on top of the one below it."""
    store = provider.get_store(version - 1)
    new = content_of(version)
    for key, _ in list(store.iterator()):
        if key not in new:
            store.remove(key)
    for key, value in new.items():
        if store.get(key) != value:
            store.put(key, value)
    store.commit()


def provider_in(backend, directory, *, local="local", conf=CONF):
    """The provider under test; its local directory stays for the next process."""
    return CLASSES[backend](StateStoreId(f"{directory}/ck", "op", 3), conf, local_dir=f"{directory}/{local}")


def die_before(step, calls, points=False):
    """Make the ``step``-th of these calls, or fault points, the process's last moment."""
    seen = [0]

    def reach(name):
        if seen[0] == step:
            SAY(1, f"{step} killed before {name}\n".encode())
            os._exit(KILLED)
        seen[0] += 1

    def guard(name, real):
        def call(*args, **kwargs):
            reach(name)
            return real(*args, **kwargs)

        return call

    for name in calls:
        setattr(os, name, guard(name, getattr(os, name)))
    if points:
        fault_points.set_hook(reach)
    else:
        fault_points.set_hook(lambda name: reach(name) if name == "apply" else None)


def commit(backend, directory, step):
    """Three versions, then death within the fourth commit, or just behind it."""
    provider = provider_in(backend, directory, conf=replace(CONF, fsync=True))
    for version in (1, 2, 3):
        make_version(provider, version)
    store = provider.get_store(3)
    for key, value in content_of(4).items():
        store.put(key, value)
    store.remove(b"k1")
    die_before(step, ("open", "write", "fsync", "link", "unlink"))
    store.commit()


def maintain(backend, directory, step):
    """Versions with maintenance, made before, then death within a commit, maintenance or a load."""
    shutil.copytree(directory.parent / "before", directory)
    provider = provider_in(backend, directory)
    die_before(step, ("link", "unlink"), points=True)
    make_version(provider, MADE_BEFORE + 1)
    SAY(1, b"acknowledged ")
    provider.do_maintenance()
    assert dict(provider.get_read_store(MADE_BEFORE - 1).iterator()) == content_of(MADE_BEFORE - 1)


def prepare(backend, directory):
    """The versions that ``maintain`` begins with."""
    with provider_in(backend, directory) as provider:
        for version in range(1, MADE_BEFORE + 1):
            make_version(provider, version)
            if version != MADE_BEFORE - 1:
                provider.do_maintenance()


def main():
    """See the module."""
    mode, backend, directory = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    if mode == "forever":
        provider = provider_in(backend, directory)
        version = provider.latest_version()
        while True:
            version += 1
            make_version(provider, version)
            SAY(1, f"{version}\n".encode())
            provider.do_maintenance()
    if mode == "maintain" and os.fork() == 0:  # neither RocksDB nor a thread pool lives on in a fork
        prepare(backend, directory / "before")
        os._exit(0)
    elif mode == "maintain":
        os.wait()
    pa.array([b""])  # makes Arrow import pandas, once instead of in every fork
    for step in range(int(sys.argv[4])):
        child = os.fork()
        if child == 0:
            {"commit": commit, "maintain": maintain}[mode](backend, directory / str(step), step)
            SAY(1, f"{step} done\n".encode())
            os._exit(DONE)
        _, status = os.waitpid(child, 0)
        if os.waitstatus_to_exitcode(status) != KILLED:
            return


if __name__ == "__main__":
    main()
