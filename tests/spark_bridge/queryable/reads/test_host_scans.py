"""Scans of a host: their version, bounds, comparisons, limits and columns."""

from __future__ import annotations

import pytest

from spark_bridge.exceptions import NotOwnerError, RequestError
from spark_bridge.queryable.protocol import Comparison, ScanRequest
from spark_bridge.queryable.reads import scans
from tests.spark_bridge.queryable.host_world import COMPLETED, KEYS, exactly, filled, partitions_of, stored, table


@pytest.mark.parametrize("backend", ["file", "rocksdb"])
def test_a_scan_shows_its_version_however_long_it_takes(make, monkeypatch, backend):
    monkeypatch.setattr("spark_bridge.state_format.partition_rows.DECODE_STEP_ROWS", 3)
    monkeypatch.setattr("spark_bridge.queryable.reads.scans.STREAM_BATCH_ROWS", 3)
    w = make(backend=backend, n=3)
    w.batch(filled(1))
    w.batch({**filled(2), 5: None})
    w.write({**filled(3), 6: None, 100: 3})
    w.complete(tell=False)
    w.hosts[0].completed.note(w.c.completed(w.run, "h0"))  # base and delta
    at_three = {**{k: 3 for k in KEYS if k != 6}, 100: 3}
    answers = [w.reads[0].scan(ScanRequest(w.run, "op", at=at)) for at in (COMPLETED, exactly(2, held_only=True))]
    rows: list[dict[int, int]] = [{}, {}]
    for value in range(4, 9):
        w.batch({**filled(value), 7: None, 200 + value: 1})
        for answer, found in zip(answers, rows, strict=True):
            batch = next(answer.batches)
            found.update(zip(batch.column(0).to_pylist(), batch.column(1).to_pylist(), strict=True))
    for answer, found, expected in zip(answers, rows, (at_three, {k: 2 for k in KEYS if k != 5}), strict=True):
        for batch in answer.batches:
            found.update(zip(batch.column(0).to_pylist(), batch.column(1).to_pylist(), strict=True))
        assert found == expected
    assert [a.version for a in answers] == [3, 2]


def test_scan_of_a_leaving_partition_ends_with_an_error(make, monkeypatch):
    monkeypatch.setattr("spark_bridge.queryable.reads.scans.STREAM_BATCH_ROWS", 1)
    w = make()
    w.batch(filled(1))
    answer = w.reads[0].scan(ScanRequest(w.run, "op"))
    for p in (0, 1):
        w.hosts[0].cache.unload(w.instance(p))
    with pytest.raises(NotOwnerError, match="left this host while it was read"):
        list(answer.batches)
    with pytest.raises(StopIteration):
        next(answer.batches)
    assert w.scan() == (1, filled(1)), "it is loaded again"


def key_bytes(key: int) -> bytes:
    return stored([key])[0].as_py()[2:]  # type: ignore[no-any-return]


@pytest.mark.parametrize("most", [4096, 2])
def test_bounds_of_keys_within_every_key_group(make, monkeypatch, most):
    monkeypatch.setattr(scans, "MAX_RANGES", most)
    w = make(n=3)
    values = {k: k for k in range(-20, 200)}
    w.batch(values)
    w.write({**{k: k + 1000 for k in range(30, 60)}, 42: None})
    w.complete(tell=False)
    w.hosts[0].completed.note(w.c.completed(w.run, "h0"))
    values.update({k: k + 1000 for k in range(30, 60)})
    del values[42]
    for low, high in ((-5, 50), (40, None), (None, 3), (7, 7), (300, 400), (None, None)):
        bounds = {
            "start": None if low is None else key_bytes(low),
            "end": None if high is None else key_bytes(high),
        }
        expected = {k: v for k, v in values.items() if (low is None or k >= low) and (high is None or k < high)}
        assert w.scan(**bounds) == (2, expected), (low, high)
        assert w.reads[0].count(ScanRequest(w.run, "op", **bounds)) == (2, len(expected))
    with pytest.raises(RequestError, match="is below its start"):
        w.scan(start=key_bytes(5), end=key_bytes(4))


def test_comparisons_limits_and_columns(make):
    w = make()
    w.batch({k: k * 10 for k in KEYS})
    assert table(w).column_names == ["k", "n", "w"]
    for where, expected in (
        ([Comparison("n", ">=", [100]), Comparison("k", "<", [13])], range(10, 13)),
        ([Comparison("n", "in", [50, 60, 70, 5])], range(5, 8)),
        ([Comparison("w", "=", ["70"])], [7]),
        ([Comparison("k", "!=", [0]), Comparison("n", "<=", [20])], [1, 2]),
        ([Comparison("n", "is null")], []),
        ([Comparison("n", "is not null"), Comparison("k", ">", [37])], [38, 39]),
        ([Comparison("partition_id", "=", [5])], []),
    ):
        assert sorted(table(w, where=where).column("k").to_pylist()) == list(expected), where
        assert w.reads[0].count(ScanRequest(w.run, "op", where=where)) == (1, len(expected))
    assert table(w, limit=7).num_rows == 7
    assert table(w, limit=0).num_rows == 0
    assert w.reads[0].count(ScanRequest(w.run, "op", limit=7)) == (1, 7)
    chosen = table(w, columns=["w", "partition_id", "k"], where=[Comparison("n", "<", [20])])
    assert chosen.column_names == ["w", "partition_id", "k"]
    assert sorted(chosen.to_pylist(), key=lambda r: r["k"]) == [
        {"w": 10 * k, "partition_id": partitions_of([k], 2)[0], "k": k} for k in (0, 1)
    ]
    assert set(table(w, columns=["key_group"]).column(0).to_pylist()) <= set(range(16))
    for wrong, message in (
        ({"columns": ["x"]}, r"no column 'x'; there are 'k', 'n', 'w', 'key_group', 'partition_id'"),
        ({"columns": []}, "asks for no columns"),
        ({"where": [Comparison("x", "=", [1])]}, "no column 'x'"),
        ({"where": [Comparison("n", "=", ["many"])]}, "'many' cannot be compared with column 'n', which is int64"),
        ({"where": [Comparison("n", "=", ["x"])]}, "'x' cannot be compared"),
        ({"where": [Comparison("n", "=", [True])]}, "True cannot be compared"),
        ({"where": [Comparison("n", "<", [])]}, "takes one value, not 0"),
        ({"where": [Comparison("n", "is null", [1])]}, "takes no values"),
        ({"partitions": [0, 2]}, "must be among 0 to 1"),
        ({"partitions": [0, 0]}, "each once"),
    ):
        with pytest.raises(RequestError, match=message):
            table(w, **wrong)


def test_count_needs_no_scan_if_the_number_of_keys_is_known(make, monkeypatch):
    w = make()
    w.batch(filled(1))
    w.batch({100: 1, 3: None})
    opened: list[int] = []
    real = scans.pairs_of
    monkeypatch.setattr(scans, "pairs_of", lambda *a: (opened.append(1), real(*a))[1])
    w.hosts[0].heartbeat()
    assert w.reads[0].count(ScanRequest(w.run, "op")) == (2, len(KEYS))
    assert w.reads[0].count(ScanRequest(w.run, "op", at=exactly(1))) == (1, len(KEYS))
    assert opened == []
    w.write({200: 1, 4: None, 5: None})
    w.complete(tell=False)
    w.hosts[0].completed.note(w.c.completed(w.run, "h0"))
    assert w.reads[0].count(ScanRequest(w.run, "op")) == (3, len(KEYS) - 1)
    assert opened
