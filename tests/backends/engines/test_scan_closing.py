"""A store that is closed by one thread while another one scans it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from backends.conf import StateStoreConf
from backends.engines import rocksdb, rocksdb_files
from backends.exceptions import StoreClosedError
from backends.formats.changelog import Changes
from backends.formats.local_state import LocalState
from tests.patience import HANG, PATIENCE


@pytest.mark.parametrize("kind", [rocksdb_files.RocksDBScan, rocksdb_files.RocksDBRangesScan])
def test_closing_waits_for_the_batch_that_is_being_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Any]
) -> None:
    engine = rocksdb.LocalRocksDB(tmp_path / "db", StateStoreConf())
    engine.prepare(Changes.of(pa.array([b"a", b"b"]), pa.array([b"1", b"2"])))(LocalState(1, "head", 2))
    one = kind is rocksdb_files.RocksDBScan
    scan: Any = engine.scan(None, None) if one else engine.scan_ranges([(b"", None)], "default")
    reading, go_on = threading.Event(), threading.Event()
    check: Callable[[Any], None] = kind._check_end

    def slow(self: Any) -> None:
        reading.set()
        assert go_on.wait(HANG)
        check(self)

    monkeypatch.setattr(kind, "_check_end", slow)
    batches: list[Any] = []
    reader = threading.Thread(target=lambda: batches.append(next(scan)))
    reader.start()
    assert reading.wait(PATIENCE)
    closer = threading.Thread(target=engine.close)
    closer.start()
    closer.join(0.1)
    assert closer.is_alive()
    go_on.set()
    reader.join(PATIENCE)
    closer.join(PATIENCE)
    assert [batch.num_rows for batch in batches] == [2]
    with pytest.raises(StoreClosedError):
        next(scan)
