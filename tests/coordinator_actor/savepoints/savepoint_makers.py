"""Savepoints made and read by hand, and checkpoints that are restored from them."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset

from backends.conf import StateStoreConf
from backends.encoding.key_groups import key_groups, partition_of, partition_range
from backends.encoding.keys import encode_keys
from backends.encoding.schema import StateSchema
from backends.encoding.sorted_pairs import SortedPairs
from backends.encoding.values import encode_values
from backends.formats import manifest_chain as chains
from backends.partition.partition_state import open_partition
from backends.storage.checkpoint_storage import CheckpointStorage
from coordinator_actor.durable.manifests import ManifestLog
from coordinator_actor.savepoints.export import copy_spark_files, export_partition
from coordinator_actor.savepoints.restore import RestoredSavepoint, restore_into_checkpoint
from coordinator_actor.savepoints.savepoint_format import (
    SavepointMetadata,
    SavepointOperator,
    SavepointVariable,
    write_metadata,
)

G = 32
BATCH = 4
INTS = StateSchema(pa.schema([("k", pa.int64())]), pa.schema([("n", pa.int64()), ("word", pa.string())]))


def storage(path: Path | str, options: Any = None) -> CheckpointStorage:
    return CheckpointStorage.open(str(path), options, fsync=False, retry_seconds=0.0)


def stored(keys: pa.RecordBatch, values: pa.RecordBatch) -> SortedPairs:
    """Rows as a store holds them; of equal keys the last."""
    return SortedPairs.last_wins(encode_keys(keys, key_groups(keys, G)), encode_values(values))


def numbers(n: int, first: int = 0) -> SortedPairs:
    keys = pa.array(range(first, first + n), pa.int64())
    words = pa.array([None if i % 7 == 0 else f"w{i}" for i in range(first, first + n)])
    return stored(pa.record_batch([keys], names=["k"]), pa.record_batch([keys, words], names=["n", "word"]))


def cut(pairs: SortedPairs, first: int, end: int, rows: int = 1000) -> Iterator[pa.RecordBatch]:
    """What ``VersionReads.scan`` gives of key groups ``first`` to ``end`` (not included)."""
    upper = end.to_bytes(2, "big") if end < 1 << 16 else None
    part = pairs.between(first.to_bytes(2, "big"), upper)
    for at in range(0, len(part), rows):
        piece = part.slice(at, rows)
        yield pa.RecordBatch.from_arrays([piece.keys, piece.values], names=["key", "value"])


def spark_checkpoint(root: Path, batch: int = BATCH) -> Path:
    for name in ("offsets", "commits"):
        (root / name).mkdir(parents=True)
        for b in range(batch + 1):
            (root / name / str(b)).write_text(f"v1\n{name} {b}")
            (root / name / f".{b}.crc").write_bytes(b"crc")
    (root / "sources/0").mkdir(parents=True)
    (root / "sources/0/0").write_text("v1\nfiles 0")
    (root / "sources/0/.0.crc").write_bytes(b"crc")
    (root / "sources/0/9.compact").write_text("v1\nfiles 1 to 9")
    (root / "metadata").write_text('{"id":"old"}')
    return root


@dataclass
class Savepoint:
    """One that is made of given pairs."""

    path: Path
    operators: dict[str, tuple[StateSchema, SortedPairs]]
    num_partitions: int = 4
    batch: int = BATCH
    variables: dict[str, dict[str, tuple[StateSchema, SortedPairs]]] = field(default_factory=dict)

    def make(self, checkpoint: Path, changes: Callable[[SavepointMetadata], SavepointMetadata] = lambda m: m) -> str:
        target = storage(self.path)
        operators = []
        for name, own in self.operators.items():
            variables = []
            for variable, (schema, pairs) in {"default": own, **self.variables.get(name, {})}.items():
                files = []
                for p in range(self.num_partitions):
                    first, end = partition_range(p, self.num_partitions, G)
                    rows = cut(pairs, first, end)
                    scratch = self.path.parent / "scratch"
                    files.append(
                        export_partition(target, name, variable, schema, first, end - 1, rows, scratch=scratch)
                    )
                variables.append(SavepointVariable(variable, schema.to_json(), tuple(files)))
            operators.append(SavepointOperator(name, "aggregate", "rocksdb", self.num_partitions, tuple(variables)))
        spark = copy_spark_files(storage(checkpoint), target, self.batch)
        metadata = SavepointMetadata(
            7,
            "11112222-aaaa",
            "clicks",
            self.batch + 1,
            self.batch,
            1000,
            G,
            str(checkpoint),
            tuple(operators),
            tuple(spark),
        )
        write_metadata(target, changes(metadata))
        return str(self.path)


def small(tmp_path: Path) -> Savepoint:
    """Two operators of four partitions, one of them empty."""
    empty = (INTS, SortedPairs.empty())
    savepoint = Savepoint(tmp_path / "sp/savepoint-1", {"op": (INTS, numbers(500)), "none": empty})
    savepoint.make(spark_checkpoint(tmp_path / "old"))
    return savepoint


def restore(made: Savepoint, target: Path, **how: Any) -> RestoredSavepoint:
    return restore_into_checkpoint(str(made.path), str(target), open_storage=storage, clock=lambda: 5.0, **how)


def loaded(target: Path, operator: str, scratch: Path, num_groups: int = G) -> dict[str, SortedPairs]:
    """All pairs by column family, as hosts load them: along the manifests."""
    state = storage(target / "statestore")
    logs = ManifestLog(state, "reader")
    logs.refresh()
    chain = logs.chain()
    version = max(chain)
    entry = chain[version].operators[operator]
    layout = chains.layout_of(operator, entry)
    conf = StateStoreConf(provider=entry.backend, fsync=False)
    found: dict[str, list[pa.RecordBatch]] = {}
    counted = 0
    for p in range(entry.num_partitions):
        lineage = chains.lineage(chain, version, layout, p, num_groups)
        local = scratch / uuid.uuid4().hex
        partition = open_partition(local, state, layout.directory(p), conf)
        try:
            partition.load(lineage)
            assert (partition.version, partition.head) == (version, lineage.head)
            for family in partition.reads.column_families():
                rows = list(partition.reads.scan(column_family=family))
                for batch in rows:
                    groups = {int.from_bytes(k.as_py()[:2], "big") for k in batch.column(0)}
                    assert {partition_of(g, num_groups, entry.num_partitions) for g in groups} <= {p}
                found.setdefault(family, []).extend(rows)
            counted += partition.metrics().num_keys
        finally:
            partition.destroy()
    pairs = {family: joined(rows) for family, rows in found.items()}
    assert counted == sum(map(len, pairs.values()))
    return pairs


def joined(rows: Sequence[pa.RecordBatch]) -> SortedPairs:
    keys = [batch.column(0) for batch in rows]
    values = [batch.column(1) for batch in rows]
    if not keys:
        return SortedPairs.empty()
    return SortedPairs.of(pa.concat_arrays(keys), pa.concat_arrays(values))


def assert_same(found: SortedPairs, expected: SortedPairs) -> None:
    assert found.keys.equals(expected.keys)
    assert found.values.equals(expected.values)


def tree(root: Path) -> set[str]:
    return {str(p.relative_to(root)) for p in root.rglob("*") if p.is_file()}
