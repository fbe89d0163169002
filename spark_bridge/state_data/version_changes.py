"""The changes of single versions, in the order of versions: a change feed from storage alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa

from backends.formats.changelog import read_changelog
from backends.storage.checkpoint_storage import OpenStorage
from coordinator_actor.reading.stored_versions import Piece, Reading
from spark_bridge.queryable.reads.changes.key_filter import GroupingKeyFilter
from spark_bridge.state_format.stored_changes import VariableChanges
from spark_bridge.state_format.stored_rows import VariableRows


def changes_by_version(
    rows: VariableRows, readings: Sequence[Reading], wanted: GroupingKeyFilter | None, open_storage: OpenStorage
) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """Return the columns, and the changes of some grouping keys or of all; each reading is that of one version.

    A partition is loaded only if its changelog has a pair that passes. One changelog is held in memory at a time.
    """
    changes = VariableChanges(rows)

    def batches() -> Iterator[pa.RecordBatch]:
        for reading in readings:
            for piece in reading.pieces:
                if not _touches(reading, piece, rows, wanted, open_storage):
                    continue
                for batch in changes.changes(reading.place, piece, open_storage):
                    passing = batch if wanted is None else wanted.of_changes(batch)
                    if passing.num_rows:
                        yield passing

    return changes.output, batches()


def _touches(
    reading: Reading, piece: Piece, rows: VariableRows, wanted: GroupingKeyFilter | None, open_storage: OpenStorage
) -> bool:
    """Return whether a changelog after ``piece.since`` has pairs of the variable, and perhaps of the keys."""
    storage = open_storage(reading.place.state_location, reading.place.options)
    since = piece.lineage.version if piece.since is None else piece.since
    for ref in piece.lineage.changelogs:
        if ref.version <= since:
            continue
        _, written = read_changelog(storage.read(ref.file), storage.full_location(ref.file.path))
        for family in rows.families:
            pairs = written.families.get(family)
            if pairs is None or not len(pairs):
                continue
            passing = None if wanted is None else wanted.of_pairs(family, pairs.keys)
            if passing is None or passing.true_count:
                return True
    return False
