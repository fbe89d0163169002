"""The changes between two versions (Spark: the change feed of its state data source)."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from backends.encoding import lists
from backends.encoding.sorted_pairs import SortedPairs
from backends.formats.changelog import read_changelog
from backends.formats.manifest import Lineage
from backends.providers.overlay import VersionReader
from backends.storage.checkpoint_storage import CheckpointStorage
from backends.store import CHANGE_FEED_SCHEMA


def read(storage: CheckpointStorage, base: VersionReader, lineage: Lineage) -> Iterator[pa.RecordBatch]:
    """Return a batch per version and column family, from the version after ``base`` to that of ``lineage``.

    The batches are of ``CHANGE_FEED_SCHEMA``. ``base`` is closed at the end.
    """
    try:
        families = base.column_families()
        since: dict[str, SortedPairs] = {}
        for ref in lineage.changelogs:
            if ref.version <= base.version:
                continue
            _, changes = read_changelog(storage.read(ref.file), storage.full_location(ref.file.path))
            for family, pairs in sorted(changes.families.items()):
                if not len(pairs):
                    continue
                seen = since.get(family, SortedPairs.empty())
                there = base.get_many(pairs.keys, family) if family in families else pa.nulls(len(pairs), pa.binary())
                before = seen.overlay(pairs.keys, there)
                keys = lists.user_keys_of_lists(pairs.keys) if lists.is_list(family) else pairs.keys
                since[family] = seen.under(pairs)
                yield pa.RecordBatch.from_arrays(
                    [
                        pa.repeat(pa.scalar(ref.version, pa.int64()), len(pairs)),
                        pa.repeat(pa.scalar(lists.user_name(family), pa.string()), len(pairs)),
                        keys,
                        before,
                        pairs.values,
                    ],
                    schema=CHANGE_FEED_SCHEMA,
                )
    finally:
        base.close()
