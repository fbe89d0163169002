"""The options of the state store, whose unknown values are rejected at once; ids of stores; durations."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from importlib import import_module
from typing import NamedTuple

from backends.exceptions import InvalidStateStoreArgument

PROVIDERS = {
    "rocksdb": "backends.providers.rocksdb.RocksDBStateStoreProvider",
    "file": "backends.providers.standalone_provider.FileStateStoreProvider",
}
MOVED_PROVIDERS = {
    "backends.rocksdb.RocksDBStateStoreProvider": PROVIDERS["rocksdb"],
    "backends.file.FileStateStoreProvider": PROVIDERS["file"],
    "backends.providers.file.FileStateStoreProvider": PROVIDERS["file"],
}
"""Maps earlier import paths of providers, which manifests and savepoints may name, to the current ones."""
COMPRESSIONS = ("none", "lz4", "zstd")
_MIB = 1 << 20


MAX_SECONDS_TO_RETAIN = 31 * 24 * 3600
MAX_STANDBY_REPLICAS = 8


@dataclass(frozen=True)
class StateStoreConf:
    """The options of a state store, validated when they are given.

    Which backend, and where:

    - ``provider``: the backend that keeps the state: "rocksdb" (on local disk, for any size), "file"
      (in memory, for state that fits), or the import path of a subclass of
      ``backends.providers.standalone_provider.LocalStateStoreProvider``.
    - ``storage_options``: the options of the checkpoint location: Spark's ``spark.hadoop.fs.s3a.*`` and
      ``spark.hadoop.dfs.*``, or those of obstore and Hadoop.

    Durability and retention:

    - ``fsync``: on local disk and HDFS, sync each file before a commit is acknowledged. False is faster, and
      loses the last commits at a power cut. A killed process loses nothing either way.
    - ``commit_linger``: the first commit of a host waits at most this many seconds for those of other partitions in
      the same batch: their changelogs go into one object. The linger is as long as recent writes took. On object
      storage it is extended while others come; on a local disk it is at most 10 ms. 0: each changelog is a separate
      file.
    - ``compression``: of changelogs and of the file provider's snapshots: "none", "lz4" or "zstd".
    - ``min_versions_to_retain``: how many versions before the newest can always be opened (Spark:
      ``spark.sql.streaming.minBatchesToRetain``). Files that only older versions need are removed.
    - ``min_seconds_to_retain``: streams also keep the versions that were the newest one within so many seconds, up to
      31 days and 20,000 versions, for ``state_as_of`` and ``read_state(as_of=...)``. Each version costs storage and
      memory of the coordinator.
    - ``deltas_per_snapshot``: a snapshot is taken when this many versions have been made since the last one (Spark:
      ``spark.sql.streaming.stateStore.minDeltasForSnapshot``). A lower number loads faster, a higher one writes less.
      A partition without a commit between two rounds of maintenance has one for 8 MiB of changes, too.
    - ``standby_replicas``: streams keep so many copies of each partition up to date on hosts of other machines, in
      other zones if Ray's node labels (``ray.io/availability-zone``) name some. If a machine is lost, the hosts with
      copies go on without loading the state (Kafka Streams: ``num.standby.replicas``).
    - ``maintenance_interval``: seconds between two rounds of maintenance.
    - ``maintenance_threads``: providers maintained at once. If the uploads of other queries take all threads for 10 s,
      as their storage may hang, a query gets one more.

    Memory and work:

    - ``host_memory``: the memory of all stores of the process together, in bytes: RocksDB's caches and write buffers,
      changes of running batches, older versions, last reads, scans. A process is one host. The state that the file
      provider keeps in memory is not included.
    - ``max_versions_in_memory``: how many versions before the newest are read as fast as the newest. The pairs that
      were replaced since are kept in memory for them. Older versions are loaded into a copy for a read. (Spark has the
      same option.)
    - ``versions_in_memory_bytes``: the most memory for the replaced pairs, per store.
    - ``track_total_number_of_rows``: count keys exactly. This needs a look-up of each written key that the batch has
      not read. False shows the backend's estimate. (Spark has the same option.)
    - ``load_threads``, ``upload_threads``: how many files of one store are fetched, or uploaded, at once.
    - ``file_snapshot_part_bytes``: the file provider cuts its snapshots into files of about this size.

    Local disk:

    - ``local_disk_bytes``: the most bytes of a host's local copies. Partitions that do not fit are evicted when they
      are not used, and are loaded again from the checkpoint. None: what the file system has free.

    RocksDB:

    - ``rocksdb_row_cache_bytes``: memory for pairs that were read, shared by all stores of the process. With it, bulk
      reads are many times as fast. 0 for none. None: an eighth of ``host_memory``.
    - ``rocksdb_block_cache_bytes``: memory for blocks that were read, shared by all stores of the process. None: a
      sixteenth of ``host_memory``.
    - ``rocksdb_write_buffer_bytes``: memory for recent writes, shared by all stores of the process. None: a sixteenth
      of ``host_memory``.
    - ``rocksdb_memtable_bytes``: recent writes that one column family collects before it writes a file.
    - ``rocksdb_bloom_filter_bits``: bits per key of the Bloom filters, which skip reads of absent keys; 0 for none.
    - ``rocksdb_compression``: of RocksDB's local files, and so of its snapshots: "none", "lz4" or "zstd".
    """

    provider: str = "rocksdb"
    storage_options: Mapping[str, str] = field(default_factory=dict, hash=False)
    fsync: bool = True
    commit_linger: float = 0.4
    compression: str = "lz4"
    min_versions_to_retain: int = 100
    min_seconds_to_retain: int = 0
    deltas_per_snapshot: int = 10
    standby_replicas: int = 0
    maintenance_interval: float = 60.0
    maintenance_threads: int = 2
    host_memory: int = 2048 * _MIB
    max_versions_in_memory: int = 2
    versions_in_memory_bytes: int = 32 * _MIB
    track_total_number_of_rows: bool = True
    load_threads: int = 4
    upload_threads: int = 2
    file_snapshot_part_bytes: int = 64 * _MIB
    local_disk_bytes: int | None = None
    rocksdb_row_cache_bytes: int | None = None
    rocksdb_block_cache_bytes: int | None = None
    rocksdb_write_buffer_bytes: int | None = None
    rocksdb_memtable_bytes: int = 32 * _MIB
    rocksdb_bloom_filter_bits: int = 10
    rocksdb_compression: str = "lz4"

    def __post_init__(self) -> None:
        if not isinstance(self.provider, str) or (self.provider not in PROVIDERS and "." not in self.provider):
            raise InvalidStateStoreArgument(
                f"provider={self.provider!r} is unknown: choose one of {', '.join(PROVIDERS)}, or the import path of a "
                "provider class, 'package.module.Class'."
            )
        self._check_choice("compression", self.compression, COMPRESSIONS)
        self._check_choice("rocksdb_compression", self.rocksdb_compression, COMPRESSIONS)
        for name in ("fsync", "track_total_number_of_rows"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidStateStoreArgument(f"{name} must be True or False, not {getattr(self, name)!r}.")
        options = self.storage_options
        if not isinstance(options, Mapping) or not all(isinstance(t, str) for kv in options.items() for t in kv):
            raise InvalidStateStoreArgument("storage_options must map names to values, all of them strings.")
        interval = self.maintenance_interval
        if isinstance(interval, bool) or not isinstance(interval, int | float) or not interval > 0:
            raise InvalidStateStoreArgument(f"maintenance_interval={interval!r} must be a number of seconds above 0.")
        linger = self.commit_linger
        if isinstance(linger, bool) or not isinstance(linger, int | float) or not 0 <= linger <= 1:
            raise InvalidStateStoreArgument(f"commit_linger={linger!r} must be a number of seconds from 0 to 1.")
        self._check_range("min_versions_to_retain", 1, None)
        self._check_range("min_seconds_to_retain", 0, MAX_SECONDS_TO_RETAIN)
        self._check_range("deltas_per_snapshot", 1, None)
        self._check_range("standby_replicas", 0, MAX_STANDBY_REPLICAS)
        self._check_range("maintenance_threads", 1, 64)
        self._check_range("max_versions_in_memory", 0, None)
        self._check_range("versions_in_memory_bytes", 0, None)
        self._check_range("load_threads", 1, 256)
        self._check_range("upload_threads", 1, 256)
        self._check_range("file_snapshot_part_bytes", 4 << 10, None)
        self._check_range("host_memory", 16 * _MIB, None)
        if self.local_disk_bytes is not None:
            self._check_range("local_disk_bytes", _MIB, None)
        for name, low in (
            ("rocksdb_row_cache_bytes", 0),
            ("rocksdb_block_cache_bytes", _MIB),
            ("rocksdb_write_buffer_bytes", _MIB),
        ):
            if getattr(self, name) is not None:
                self._check_range(name, low, None)
        caches = self.row_cache_bytes + self.block_cache_bytes + self.write_buffer_bytes
        if caches >= self.host_memory:
            raise InvalidStateStoreArgument(
                f"host_memory={self.host_memory:,} must be more than RocksDB's row cache, block cache and write "
                f"buffers together, {caches:,}: raise it, or leave the rocksdb_..._bytes out."
            )
        self._check_range("rocksdb_memtable_bytes", 64 << 10, None)
        self._check_range("rocksdb_bloom_filter_bits", 0, 64)

    @property
    def row_cache_bytes(self) -> int:
        """The memory of all row caches."""
        nbytes = self.rocksdb_row_cache_bytes
        return self.host_memory // 8 if nbytes is None else nbytes

    @property
    def block_cache_bytes(self) -> int:
        """The memory of RocksDB's block cache."""
        nbytes = self.rocksdb_block_cache_bytes
        return self.host_memory // 16 if nbytes is None else nbytes

    @property
    def write_buffer_bytes(self) -> int:
        """The memory of RocksDB's write buffers."""
        nbytes = self.rocksdb_write_buffer_bytes
        return self.host_memory // 16 if nbytes is None else nbytes

    def provider_class(self) -> type:
        """Return the class that ``provider`` names. Raises ``InvalidStateStoreArgument`` if there is none."""
        path = PROVIDERS.get(self.provider) or MOVED_PROVIDERS.get(self.provider, self.provider)
        module, _, name = path.replace(":", ".").rpartition(".")
        try:
            provider = getattr(import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise InvalidStateStoreArgument(f"provider={self.provider!r} cannot be imported: {error}") from error
        if not isinstance(provider, type):
            raise InvalidStateStoreArgument(f"provider={self.provider!r} names {provider!r}, which is not a class.")
        return provider

    @staticmethod
    def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
        if value not in choices:
            raise InvalidStateStoreArgument(f"{name}={value!r} is unknown: choose one of {', '.join(choices)}.")

    def _check_range(self, name: str, low: int, high: int | None) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
            limits = f"an int of {low} or more" if high is None else f"an int from {low} to {high}"
            raise InvalidStateStoreArgument(f"{name}={value!r} must be {limits}.")


# Names: of a state store, of its loaded instances, of operators and column families, and the rules for them.
#
# Spark has ``StateStoreId`` and ``StateStoreProviderId`` as well.


_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,199}")


def check_name(kind: str, name: str) -> str:
    """Return ``name`` if it can be a directory's name on every storage; raise ``InvalidStateStoreArgument`` otherwise.

    ``kind`` says in the message what the name is of, such as "a store".
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidStateStoreArgument(
            f"{name!r} cannot be the name of {kind}: use 1 to 200 letters of a to z or A to Z, digits, '_', "
            "'-' or '.', not starting with '.' or '-'."
        )
    return name


@dataclass(frozen=True)
class StateStoreId:
    """A partition of an operator's state, below a checkpoint location."""

    checkpoint_location: str
    operator_id: str
    partition_id: int
    store_name: str = "default"

    def __post_init__(self) -> None:
        if not self.checkpoint_location:
            raise InvalidStateStoreArgument("checkpoint_location is empty: give the directory to keep the state in.")
        check_name("an operator", self.operator_id)
        check_name("a store", self.store_name)
        if isinstance(self.partition_id, bool) or not isinstance(self.partition_id, int) or self.partition_id < 0:
            raise InvalidStateStoreArgument(f"partition_id must be an int of 0 or more, not {self.partition_id!r}.")

    def __str__(self) -> str:
        return (
            f"StateStoreId[location={self.checkpoint_location}, operator={self.operator_id}, "
            f"partition={self.partition_id}, store={self.store_name}]"
        )


@dataclass(frozen=True)
class StateStoreProviderId:
    """A store as it is loaded for one run of a query. A restarted query never meets its older instances.

    ``query_run_id`` may be given as a ``uuid.UUID``, and is converted to a string.
    """

    store_id: StateStoreId
    query_run_id: str

    def __post_init__(self) -> None:
        run_id: object = self.query_run_id
        if isinstance(run_id, uuid.UUID):
            object.__setattr__(self, "query_run_id", str(run_id))
        elif not isinstance(run_id, str):
            raise InvalidStateStoreArgument(f"query_run_id must be a string or a uuid.UUID, not {run_id!r}.")

    def __str__(self) -> str:
        return f"StateStoreProviderId[{self.store_id}, queryRunId={self.query_run_id}]"


DEFAULT_FAMILY = "default"
"""The column family of a store that has no other."""


# Durations as users write them: "10 minutes", "1 hour 30 minutes", "90s", "1h30m". No months, no years.


SECOND, MINUTE, HOUR, DAY = 1_000_000, 60_000_000, 3_600_000_000, 86_400_000_000
"""In microseconds."""
_UNITS = {
    **dict.fromkeys(("us", "microsecond", "microseconds"), ("us", 1)),
    **dict.fromkeys(("ms", "millisecond", "milliseconds"), ("ms", 1_000)),
    **dict.fromkeys(("s", "second", "seconds"), ("s", SECOND)),
    **dict.fromkeys(("m", "min", "minute", "minutes"), ("m", MINUTE)),
    **dict.fromkeys(("h", "hour", "hours"), ("h", HOUR)),
    **dict.fromkeys(("d", "day", "days"), ("d", DAY)),
    **dict.fromkeys(("w", "week", "weeks"), ("w", 7 * DAY)),
}
_PART = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*")


class Duration(NamedTuple):
    """A duration in microseconds, and its short spelling, such as "1h30m"."""

    us: Fraction
    name: str


def parse_duration(text: object) -> Duration | None:
    """Return the duration of numbers with units, such as "1 hour 30 minutes"; None for other text, and for 0."""
    if not isinstance(text, str):
        return None
    us, name, end = Fraction(0), "", 0
    for match in _PART.finditer(text.lower()):
        unit = _UNITS.get(match[2])
        if match.start() != end or unit is None:
            return None
        short, length = unit
        us, name, end = us + Fraction(match[1]) * length, f"{name}{match[1]}{short}", match.end()
    return Duration(us, name) if us and end == len(text) else None
