"""The options of a RocksDB database, what all databases of a process share, and what one takes for itself."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from rocksdict import BlockBasedOptions, Cache, DBCompressionType, Options, WriteBufferManager

from backends.conf import StateStoreConf
from backends.engines.row_cache import CacheBudget
from backends.host_memory import BLOCK_CACHE, WRITE_BUFFERS, HostMemory, host_memory

ARENA_BYTES = 4 << 10
"""What a column family takes of the write buffers with its first write, and again whenever that is full.

RocksDB takes 1 MiB if it is not told. All column families of all partitions of a process share the write buffers, and
who writes while they are full writes files. So with 1 MiB a host of a hundred partitions wrote files in every batch.
"""
DATABASE_BYTES = 128 << 10
FAMILY_BYTES = 72 << 10
"""What an open database takes for itself, and each of its column families, the project's own (``META_FAMILY``)
included.

RocksDB has no figure for it. Measured is the growth of a process's resident memory from 150 to 450 open databases,
without write buffers and block cache. It is 268 KiB with 2 column families, 397 with 4, and 622 with 7, the project's
own among them (RocksDB of rocksdict 0.3, x86-64, glibc).
"""

_shared_lock = threading.Lock()
_shared: dict[HostMemory, SharedMemory] = {}


@dataclass(frozen=True)
class SharedMemory:
    """The block cache, the write buffers, and the budget of the row caches; None if there are none."""

    blocks: Cache
    buffers: WriteBufferManager
    rows: CacheBudget | None


def shared_memory(conf: StateStoreConf) -> SharedMemory:
    """Return the block cache, write buffers and row-cache budget that stores of the process with equal limits share."""
    memory = host_memory(conf)
    with _shared_lock:
        if memory not in _shared:
            # RocksDB's other cache has up to 64 shards, and none holds a block larger than itself. The shards of a
            # cache of 64 MiB are smaller than the filter of a large file, which was then read anew for every key, at 70
            # µs.
            blocks = Cache.new_hyper_clock_cache(conf.block_cache_bytes, 0)
            buffers = WriteBufferManager(conf.write_buffer_bytes, False)
            rows = CacheBudget(conf.row_cache_bytes, memory.row_cache_room) if conf.row_cache_bytes else None
            memory.measure(BLOCK_CACHE, blocks.get_usage)
            memory.measure(WRITE_BUFFERS, buffers.get_usage)
            if rows is not None:
                memory.share_row_caches(rows)
            _shared[memory] = SharedMemory(blocks, buffers, rows)
        return _shared[memory]


def database_options(conf: StateStoreConf) -> Options:
    """Return the options of a database and of each column family in it."""
    shared = shared_memory(conf)
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.create_missing_column_families(True)
    options.set_atomic_flush(True)
    # RocksDB would start 15 threads for each column family that it opens, be there one file to open or hundreds.
    options.set_max_file_opening_threads(1)
    options.set_write_buffer_manager(shared.buffers)
    options.set_write_buffer_size(conf.rocksdb_memtable_bytes)
    options.set_arena_block_size(ARENA_BYTES)
    options.set_keep_log_file_num(1)
    options.set_compression_type(getattr(DBCompressionType, conf.rocksdb_compression)())
    table = BlockBasedOptions()
    table.set_block_cache(shared.blocks)
    table.set_cache_index_and_filter_blocks(True)
    table.set_pin_l0_filter_and_index_blocks_in_cache(True)
    if conf.rocksdb_bloom_filter_bits:
        table.set_bloom_filter(conf.rocksdb_bloom_filter_bits, False)
    options.set_block_based_table_factory(table)
    return options


def own_bytes(num_families: int) -> int:
    """Return about what an open database takes for itself, without write buffers and caches."""
    return DATABASE_BYTES + num_families * FAMILY_BYTES
