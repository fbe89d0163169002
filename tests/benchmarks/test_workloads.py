"""numpy computes the expected output of the streams; these tests compute it again with pandas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from totals import FIVE, Expected, Workload

from backends.encoding.key_groups import spark_xxhash64

WORKLOADS = [
    Workload(300, 40),
    Workload(300, 40, key="string"),
    Workload(3000, 200_000, key="columns", aggregates=FIVE),
    Workload(300, 40, aggregates=FIVE),
    Workload(50, 40, hot_rows=500),
]
HOW = {np.add: "sum", np.minimum: "min", np.maximum: "max"}


def check_of(frame: pd.DataFrame, workload: Workload) -> tuple[int, int]:
    figures: Any = {
        a.name: (a.column, HOW[a.combine]) if a.column else (workload.value_names[0], "count")
        for a in workload.aggregates
    }
    totals = pa.Table.from_pandas(
        frame.groupby(workload.key_names, as_index=False).agg(**figures), preserve_index=False
    )
    hashes = spark_xxhash64(totals.combine_chunks().to_batches()[0])
    return totals.num_rows, int(np.bitwise_xor.reduce(hashes))


@pytest.mark.thorough  # otherwise: make bench-smoke, which compares the results of all contestants
@pytest.mark.parametrize("workload", WORKLOADS, ids=["long", "string", "columns", "five", "hot"])
def test_totals_are_those_of_pandas(workload: Workload) -> None:
    rng, expected = np.random.default_rng(5), Expected(workload)
    frames: list[pd.DataFrame] = []
    for i in range(4):
        batch = workload.draw(rng)
        frames.append(batch.table(workload).to_pandas())
        expected.add(batch)
        touched = frames[-1][workload.key_names].drop_duplicates()
        so_far = pd.concat(frames).merge(touched, on=workload.key_names)
        assert expected.checks["totals"][i] == check_of(so_far, workload)
        assert expected.checks["rows"][i][0] == len(frames[-1])
    assert expected.of_all() == check_of(pd.concat(frames), workload)


@pytest.mark.parametrize("kind", ["long", "string", "columns"])
def test_different_keys_differ(kind: Any) -> None:
    workload = Workload(1, 1, key=kind)
    frame = pa.table(workload.key_columns(np.arange(200_000))).to_pandas()
    assert len(frame.drop_duplicates()) == 200_000


def test_a_hot_key_has_its_rows() -> None:
    batch = Workload(100, 50, hot_rows=900).draw(np.random.default_rng(1))
    assert len(batch.ids) == 1000 and (batch.ids == 0).sum() >= 900


def test_types_are_written_as_spark_does() -> None:
    workload = Workload(1, 1, key="columns", aggregates=FIVE)
    assert workload.input == "shop long, country string, day int, amount long, pieces long"
    assert (
        workload.output == "shop long, country string, day int, n long, spent long, least long, most long, pieces long"
    )
