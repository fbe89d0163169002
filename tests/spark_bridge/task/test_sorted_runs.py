"""Rows in key order in bounded memory: the same rows, whole keys, the order of arrival, and nothing left on disk."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.encoding.key_groups import key_groups
from backends.encoding.keys import encode_keys
from spark_bridge.task.external_sort import Limits, RowSorter, RowStep, with_keys
from spark_bridge.task.task_store import Spool
from tests.effort import examples

KEYS = pa.schema([("k", pa.string())])
KEY_GROUPS = 16
TINY = Limits(memory=4200, step_rows=40, step_bytes=1 << 20, fan_in=3)


@pytest.fixture(autouse=True)
def local_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where sorted runs go; nothing may stay there, nor stay open."""
    monkeypatch.setenv("SPARK_LOCAL_DIRS", f"/nowhere,{tmp_path}")
    yield tmp_path
    assert list(tmp_path.iterdir()) == []
    assert open_files(tmp_path) == []


def open_files(directory: Path) -> list[str]:
    """Files there that this process has open, also removed ones. What others open or close is not looked at."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # closed by now
            found.append(str(descriptor.readlink()))
    return [name for name in found if name.startswith(f"{directory}/")]


def batch_of(keys: list[str | None], first: int = 0) -> pa.RecordBatch:
    """Rows with their position."""
    return pa.record_batch(
        {"at": pa.array(range(first, first + len(keys)), pa.int64()), "k": pa.array(keys, pa.string())}
    )


def encoded(keys: list[str | None]) -> pa.BinaryArray:
    columns = pa.record_batch({"k": pa.array(keys, pa.string())})
    return encode_keys(columns, key_groups(columns, KEY_GROUPS))


def collected(steps: Iterator[RowStep], limits: Limits) -> list[tuple[str | None, list[int]]]:
    """Each key and its rows, in the order given; checks what steps promise."""
    found: list[tuple[str | None, list[int]]] = []
    last, goes_on = b"", None
    for step in steps:
        bounds = step.offsets.tolist()
        assert len(bounds) == len(step.keys) + 1
        assert (bounds[0], bounds[-1]) == (0, step.rows.num_rows)
        assert step.rows.num_rows <= limits.step_rows
        assert step.rows.schema.names in (["at", "k"], [])
        for i, key in enumerate(step.keys.to_pylist()):
            rows = step.rows.slice(bounds[i], bounds[i + 1] - bounds[i])
            at = rows.column("at").to_pylist() if rows.num_rows else []
            if goes_on is not None:
                assert (len(step.keys), key) == (1, goes_on)
                found[-1][1].extend(at)
                continue
            assert key > last
            last = key
            if not at:
                found.append((key.hex(), at))
                continue
            (name,) = set(rows.column("k").to_pylist())
            assert encoded([name])[0].as_py() == key
            found.append((name, at))
        assert not step.is_part or len(step.keys) == 1
        goes_on = last if step.is_part else None
    assert goes_on is None
    return found


def expected(keys: list[str | None]) -> list[tuple[str | None, list[int]]]:
    rows = defaultdict(list)
    for at, key in enumerate(keys):
        rows[key].append(at)
    return sorted(rows.items(), key=lambda item: encoded([item[0]])[0].as_py())


@settings(max_examples=examples(40), deadline=None)
@given(
    keys=st.lists(
        st.sampled_from([None, "", "a", "b", "ab", "a\0", "\uffff", *(f"key{i}" for i in range(30))]), max_size=400
    ),
    size=st.integers(1, 60),
    limits=st.builds(
        Limits,
        memory=st.sampled_from([200, 1500, 6000, 1 << 20]),
        step_rows=st.integers(1, 50),
        step_bytes=st.just(1 << 20),
        fan_in=st.integers(2, 4),
    ),
)
def test_rows_come_by_key_in_their_order(keys: list[str | None], size: int, limits: Limits) -> None:
    with RowSorter(KEYS, KEY_GROUPS, limits) as sorter:
        for start in range(0, len(keys), size):
            sorter.add(batch_of(keys[start : start + size], start))
        assert collected(sorter.steps(), limits) == expected(keys)
        assert sorter.num_rows == len(keys)


def test_rows_that_fit_are_sorted_in_memory() -> None:
    keys: list[str | None] = [f"k{i * 7 % 100}" for i in range(1000)]
    with RowSorter(KEYS, KEY_GROUPS, Limits()) as sorter:
        for start in range(0, 1000, 100):
            sorter.add(batch_of(keys[start : start + 100], start))
        (step,) = sorter.steps()
        assert len(step.keys) == 100
        assert sorter.num_spills == 0


def test_rows_beyond_memory_are_spilled_and_merged_few_files_at_a_time() -> None:
    keys: list[str | None] = [f"k{i * 7 % 100}" for i in range(2400)]
    with RowSorter(KEYS, KEY_GROUPS, TINY) as sorter:
        for start in range(0, 2400, 50):
            sorter.add(batch_of(keys[start : start + 50], start))
            assert len(sorter._runs()) <= 3 * 4, "as many as the fan-in on each level"
        assert (sorter.num_spills, len(sorter._runs())) == (10, 4), "eight, and two merges of three"
        steps = sorter.steps()
        first = next(steps)
        assert len(sorter._runs()) <= 3, "no more are open for the last merge"
        assert collected(chain([first], steps), TINY) == expected(keys)


def test_runs_of_several_levels_are_merged_in_the_order_of_arrival() -> None:
    keys: list[str | None] = [f"k{i * 7 % 100}" for i in range(1250)]
    with RowSorter(KEYS, KEY_GROUPS, TINY) as sorter:
        for start in range(0, 1250, 50):
            sorter.add(batch_of(keys[start : start + 50], start))
        assert [len(runs) for runs in sorter._levels] == [1, 1], "three are one run, and one came later"
        assert collected(sorter.steps(), TINY) == expected(keys)


def test_a_key_that_is_most_of_the_rows_comes_in_parts() -> None:
    limits = Limits(memory=4000, step_rows=7, fan_in=3)
    keys: list[str | None] = [f"k{i}" if i % 5 == 0 else "hot" for i in range(1503)]
    with RowSorter(KEYS, KEY_GROUPS, limits) as sorter:
        for start in range(0, 1503, 50):  # the last three rows wait in memory
            sorter.add(batch_of(keys[start : start + 50], start))
        steps = list(sorter.steps())
        assert sum(step.is_part for step in steps) > 100
        assert collected(iter(steps), limits) == expected(keys)


def test_files_go_where_spark_wants_them(local_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RowSorter(KEYS, KEY_GROUPS, TINY) as sorter:
        sorter.add(batch_of(["a"] * 1000))
        (run,) = sorter._runs()
        assert Path(f"/proc/self/fd/{run.file.fileno()}").readlink().parent == local_directory
        monkeypatch.setenv("SPARK_LOCAL_DIRS", "/nowhere")
        sorter.add(batch_of(["a"] * 1000))
        assert sorter._runs()[1].file.seekable()


def test_leaving_early_removes_the_files(local_directory: Path) -> None:
    with RowSorter(KEYS, KEY_GROUPS, TINY) as sorter:
        sorter.add(batch_of(["a", "b"] * 500))
        sorter.add(batch_of(["a", "b"] * 500))
        assert next(sorter.steps()).rows.num_rows == 40
    with pytest.raises(OSError, match="disk full"), RowSorter(KEYS, KEY_GROUPS, TINY) as sorter:
        sorter.add(batch_of(["a"] * 1000))
        raise OSError("disk full")


@pytest.mark.skipif(os.environ.get("ARROW_DEFAULT_MEMORY_POOL") == "system", reason="cannot count")
def test_many_rows_of_one_key_take_little_memory() -> None:
    limits = Limits(memory=1 << 20, step_rows=10_000, step_bytes=1 << 20)

    def batch(start: int) -> pa.RecordBatch:
        positions = pa.array(np.arange(start, start + 20_000))
        columns = {"at": positions, "k": pa.repeat("hot", 20_000), "text": pa.repeat("x" * 20, 20_000)}
        return pa.record_batch(columns)

    pa.default_memory_pool().release_unused()
    before, most, at = pa.total_allocated_bytes(), 0, 0
    with RowSorter(KEYS, KEY_GROUPS, limits) as sorter:
        for start in range(0, 200_000, 20_000):
            sorter.add(batch(start))
            most = max(most, pa.total_allocated_bytes() - before)
        for step in sorter.steps():
            most = max(most, pa.total_allocated_bytes() - before)
            positions = step.rows.column("at")
            assert (positions[0].as_py(), len(step.keys)) == (at, 1)
            at += step.rows.num_rows
            assert pc.sum(positions).as_py() == (positions[0].as_py() + at - 1) * step.rows.num_rows // 2
    assert at == 200_000
    assert most < 4 << 20, "the rows have 10 MB"


@settings(max_examples=examples(25), deadline=None)
@given(
    keys=st.lists(st.sampled_from(["a", "c", "e", "g", "hot"]), max_size=60),
    others=st.sets(st.sampled_from(["", "a", "b", "c", "d", "e", "f", "g", "h", "hot", "z"])),
    step_rows=st.integers(1, 20),
)
def test_keys_without_rows_come_between_the_others(keys: list[str | None], others: set[str], step_rows: int) -> None:
    limits = Limits(step_rows=step_rows)
    due = encoded(sorted(others, key=lambda k: encoded([k])[0].as_py()))
    with RowSorter(KEYS, KEY_GROUPS, limits) as sorter:
        sorter.add(batch_of(keys))
        found = collected(with_keys(sorter.steps(), due, limit=2), limits)
    with_rows = {k: at for k, at in found if at}
    assert sorted(with_rows.items()) == sorted(expected(keys))
    without = [k for k, at in found if not at]
    assert without == [k.hex() for k in due.to_pylist() if k not in encoded(keys).to_pylist()]


def test_a_spool_gives_back_what_it_took_from_memory_or_disk() -> None:
    batches = [batch_of(["a", None], i) for i in range(0, 200, 2)]
    for memory, is_on_disk in ((1 << 20, False), (500, True), (0, True)):
        with Spool(batches[0].schema, memory) as spool:
            for batch in batches:
                spool.add(batch)
            spool.add(batch_of([]))
            assert spool.is_on_disk is is_on_disk
            assert spool.num_rows == 200
            assert pa.Table.from_batches(spool.batches()) == pa.Table.from_batches(batches)


def test_abandoned_spool_leaves_nothing() -> None:
    with pytest.raises(RuntimeError, match="gone"), Spool(batch_of([]).schema, 0) as spool:
        spool.add(batch_of(["a"]))
        raise RuntimeError("gone")


@pytest.mark.parametrize("limit", [1, 7, 1000])
def test_a_step_takes_only_so_many_other_keys(limit: int) -> None:
    rows = pa.record_batch({"x": [1, 2, 3]})
    step = RowStep(pa.array([b"a", b"z"]), np.array([0, 2, 3]), rows)
    others = pa.array([b"b%03d" % i for i in range(100)])
    made = list(with_keys(iter([step]), others, limit))
    assert [k for s in made for k in s.keys.to_pylist()] == [b"a", *others.to_pylist(), b"z"]
    assert [x for s in made for x in (s.rows.column(0).to_pylist() if s.rows.num_columns else [])] == [1, 2, 3]
    assert all(len(s.keys) <= limit + 2 and s.offsets[0] == 0 and s.offsets[-1] == s.rows.num_rows for s in made)


@pytest.mark.slow
def test_rows_of_two_gigabytes_are_sorted_beside_those_that_wait() -> None:
    """Together they would not fit into one array of Arrow. Takes 2 GB of memory."""
    width = 10 << 20

    def large(first: int, n: int) -> pa.RecordBatch:
        offsets = pa.array(np.arange(n + 1, dtype=np.int64) * width, pa.int32()).buffers()[1]
        values = pa.Array.from_buffers(pa.binary(), n, [None, offsets, pa.py_buffer(np.zeros(n * width, np.uint8))])
        return pa.record_batch({"k": [str(i) for i in range(first, first + n)], "v": values})

    with RowSorter(KEYS, KEY_GROUPS) as sorter:
        sorter.add(large(0, 12))
        sorter.add(large(12, 200))
        rows = [row for step in sorter.steps() for row in step.rows.column(step.rows.schema.get_field_index("k"))]
    assert sorted(int(str(row)) for row in rows) == list(range(212))
