"""A row cache over a dict, and the keys that tests fill the cache with."""

import random
import threading

import numpy as np
import pyarrow as pa

from backends.conf import StateStoreConf
from backends.engines import row_cache_table
from backends.engines.row_cache import RowCache
from backends.host_memory import ROW_CACHE, HostMemory

MIB = 1 << 20


def binary(values):
    return pa.array(values, pa.binary())


def row_memory(limit=MIB):
    """Memory of which row caches may have ``limit`` bytes."""
    return HostMemory(StateStoreConf(host_memory=256 * MIB, rocksdb_row_cache_bytes=limit))


def used(memory):
    return memory.held()[ROW_CACHE]


class Below:
    """A dict, and the cache over it."""

    def __init__(self, limit=MIB):
        self.pairs = {}
        self.memory = limit if isinstance(limit, HostMemory) else row_memory(limit)
        self.cache = RowCache(self.memory)
        self.num_read = 0

    def read(self, keys):
        self.num_read += len(keys)
        return binary([self.pairs.get(key) for key in keys.to_pylist()])

    def get(self, keys):
        return self.cache.get_many(binary(keys), self.read).to_pylist()

    def put(self, changes):
        for key, value in changes.items():
            if value is None:
                self.pairs.pop(key, None)
            else:
                self.pairs[key] = value
        keys = binary(list(changes))
        self.cache.update(keys, row_cache_table.hash_keys(keys), binary(list(changes.values())))


def key_sets():
    """Keys of one width as they mostly are, of many widths, and long ones that differ at the end or in the middle."""
    return {
        "one width": [b"\x00\x07\x01" + i.to_bytes(8, "big") for i in range(300)],
        "narrow": [i.to_bytes(2, "big") for i in range(300)],
        "one word": [i.to_bytes(8, "big") for i in range(300)],
        "many widths": [b"ab" * (i % 23) + str(i).encode() * (i % 3) for i in range(300)],
        "long": [b"x" * 400 + str(i).encode() + b"y" * (i % 500) for i in range(300)],
    }


def forced_hashes(number, seed=0):
    """Return a hash function with only a few values: it differs from the real one, and many keys share each value."""
    return lambda keys, even=None: (
        np.array([hash((seed, key)) % number for key in keys.to_pylist()], np.uint64) << np.uint64(60)
    )


def are_unique(cache):
    """Whether no two entries are of one bucket and one tag."""
    held = cache.rows.buckets
    buckets, _ = np.nonzero(held >= 0)
    tags = held[held >= 0] >> row_cache_table.TAG_SHIFT
    return len(set(zip(buckets.tolist(), tags.tolist(), strict=True))) == len(tags)


def check_while_read(below, keys, rng, steps, value_of, before_step=lambda step: None):
    """Write ascending values while threads read: a reader must see the value of the moment it asked, or a later one."""
    written = {key: int(below.pairs.get(key) or 0) for key in keys}
    failures, done = [], threading.Event()

    def keep_reading(seed):
        own = random.Random(seed)
        while not done.is_set():
            asked = own.sample(keys, 50)
            before = [written[key] for key in asked]
            found = below.get(asked)
            if not all(int(value or 0) >= least for value, least in zip(found, before, strict=True)):
                failures.append((asked, before, found))
                return

    threads = [threading.Thread(target=keep_reading, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for step in range(1, steps):
        before_step(step)
        changes = dict.fromkeys(rng.sample(keys, rng.choice((3, 100))), value_of(step))
        below.put(changes)
        written.update(dict.fromkeys(changes, step))
    done.set()
    for thread in threads:
        thread.join()
    assert not failures
    assert below.get(keys) == [below.pairs.get(key) for key in keys]
