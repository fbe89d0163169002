"""Makes a version of one partition from nothing but its pairs: for restored savepoints and initial states."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from backends.conf import StateStoreConf
from backends.encoding.sorted_pairs import SortedPairs
from backends.engines.backend import backend_of
from backends.formats import snapshot
from backends.formats.changelog import ChangelogMeta, Changes, write_changelog
from backends.formats.file_names import changelog_path
from backends.formats.local_state import LocalState
from backends.formats.partition_entries import PartitionEntry
from backends.formats.snapshot import StoredSnapshot
from backends.storage.checkpoint_storage import CheckpointStorage
from backends.tracing.spans import Pool

STORE = "default"


def build_partition(
    storage: CheckpointStorage,
    meta: ChangelogMeta,
    families: Collection[str],
    pairs: Iterable[tuple[str, SortedPairs]],
    conf: StateStoreConf,
    *,
    is_distinct: bool = False,
    scratch: Path | None = None,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> tuple[PartitionEntry, int]:
    """Write the version ``meta.version`` of a partition: a changelog without changes as its head, and a snapshot.

    ``pairs`` come by column family, each batch sorted. If a key comes several times, the last pair counts, and a null
    value removes the key; ``is_distinct`` says that no key comes twice. ``meta.base`` must name no changelog: nobody
    may take this changelog for changes to the empty version 0. ``scratch`` is a local directory for temporary files.
    Also returns the number of pairs. Raises ``StorageError``.
    """
    path = changelog_path(meta.operator, meta.num_partitions, meta.partition, STORE, meta.version, uuid.uuid4().hex)
    empty = Changes({family: SortedPairs.empty() for family in families})
    changelog = storage.put_new(path, write_changelog(empty, meta, conf.compression))
    made, rows = build_snapshot(
        storage,
        path,
        meta.version,
        families,
        pairs,
        conf,
        is_distinct=is_distinct,
        scratch=scratch,
        is_cancelled=is_cancelled,
    )
    return PartitionEntry(meta.attempt, changelog, (made.ref,)), rows


def build_snapshot(
    storage: CheckpointStorage,
    head: str,
    version: int,
    families: Collection[str],
    pairs: Iterable[tuple[str, SortedPairs]],
    conf: StateStoreConf,
    *,
    is_distinct: bool = False,
    scratch: Path | None = None,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> tuple[StoredSnapshot, int]:
    """Write a snapshot of a partition at ``version``, which the changelog at the path ``head`` has made.

    The files lie beside that changelog. Nothing but ``pairs`` is in them. See ``build_partition`` for the rest.
    """
    backend = backend_of(conf)
    empty = Changes({family: SortedPairs.empty() for family in families})
    with TemporaryDirectory(prefix="statestore-build-", dir=scratch) as directory:
        captured = Path(directory) / "snapshot"
        captured.mkdir()
        engine = backend.engine(Path(directory) / "engine", conf)
        try:
            rows = 0

            def counted() -> Iterator[tuple[str, SortedPairs]]:
                nonlocal rows
                for family, batch in pairs:
                    rows += len(batch)
                    yield family, batch

            if is_distinct:
                engine.load_sorted(counted(), LocalState.unfinished(head))
            else:
                for family, batch in pairs:
                    engine.prepare(Changes({family: batch}))(LocalState())
                engine.prepare(empty)(LocalState())
                rows = sum(batch.num_rows for family in families for batch in engine.scan(None, None, family))
            held = LocalState(version, head, rows)
            engine.prepare(empty)(held)
            engine.capture(captured)()
        finally:
            engine.close()
        with Pool(conf.upload_threads, thread_name_prefix="statestore-upload") as pool:
            made = snapshot.upload(
                storage,
                head.rpartition("/")[0],
                backend.name,
                captured,
                held,
                earlier=None,
                digests=snapshot.Digests(),
                pool=pool,
                is_cancelled=is_cancelled,
            )
    return made, rows
