"""Processes that die in the middle of commits; run as a module by the tests of crashes.

``steps <directory> <count>``: for k = 0, 1, ... forks a process that makes three versions in
``<directory>/<k>`` and dies by ``os._exit`` just before the k-th step of the fourth commit. Prints per
process how it ended, and at which step.
``forever <directory>``: commits version after version and reports each, until it is killed.
"""

import os
import sys
from pathlib import Path

import pyarrow as pa

from backends import RocksDBStateStoreProvider, StateStoreId
from backends.rocksdb import LocalRocksDB

KILLED, COMMITTED = 9, 7
SAY = os.write


def content_of(version):
    """What version ``version`` holds."""
    pairs = {b"version": str(version).encode() * 500}
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


def provider_in(directory):
    """The provider under test; its local directory stays for the next process."""
    return RocksDBStateStoreProvider(StateStoreId(f"{directory}/ck", "op", 3), local_dir=f"{directory}/local")


def die_before(step):
    """Make the ``step``-th call to the operating system or to RocksDB's write the process's last moment."""
    seen = [0]

    def guard(name, real):
        def call(*args, **kwargs):
            if seen[0] == step:
                SAY(1, f"{step} killed before {name}\n".encode())
                os._exit(KILLED)
            seen[0] += 1
            return real(*args, **kwargs)

        return call

    for name in ("open", "write", "fsync", "link", "unlink"):
        setattr(os, name, guard(name, getattr(os, name)))
    LocalRocksDB._apply = guard("apply", LocalRocksDB._apply)


def one_life(directory, step):
    """Three versions, then death within the fourth commit, or just behind it."""
    provider = provider_in(directory)
    for version in (1, 2, 3):
        make_version(provider, version)
    store = provider.get_store(3)
    for key, value in content_of(4).items():
        store.put(key, value)
    store.remove(b"k1")
    die_before(step)
    store.commit()
    SAY(1, f"{step} committed\n".encode())
    os._exit(COMMITTED)


def main():
    """See the module."""
    mode, directory = sys.argv[1], Path(sys.argv[2])
    if mode == "forever":
        provider = provider_in(directory)
        version = provider.latest_version()
        while True:
            version += 1
            make_version(provider, version)
            SAY(1, f"{version}\n".encode())
    pa.array([b""])  # makes Arrow import pandas, once instead of in every fork
    for step in range(int(sys.argv[3])):
        child = os.fork()
        if child == 0:
            one_life(directory / str(step), step)
        _, status = os.waitpid(child, 0)
        if os.waitstatus_to_exitcode(status) == COMMITTED:
            return


if __name__ == "__main__":
    main()
