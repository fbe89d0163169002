"""The input of the benchmarks' streams, rows of random keys, and the expected output: running totals by numpy.

A key is a number below ``keys``; ``Workload.key_columns`` makes of it what the rows carry. All values are whole
numbers, so that results are compared exactly, by the number of rows of each batch and a hash of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from backends.encoding.key_groups import spark_xxhash64

Longs = npt.NDArray[np.int64]
Gives = Literal["totals", "totals of the batch", "rows"]
"""The output of a contestant: running totals, totals of each batch alone, or the input."""
SUM, LEAST, MOST = np.add, np.minimum, np.maximum


@dataclass(frozen=True)
class Aggregate:
    """One running figure: how it is made of a column (of ones if there is none), and how two are combined."""

    name: str
    combine: Any
    column: str = ""


TWO = (Aggregate("n", SUM), Aggregate("spent", SUM, "amount"))
FIVE = (
    *TWO,
    Aggregate("least", LEAST, "amount"),
    Aggregate("most", MOST, "amount"),
    Aggregate("pieces", SUM, "pieces"),
)


@dataclass(frozen=True)
class Workload:
    """Rows of a batch: so many of ``keys``, each key as likely as any other; and ``hot_rows`` more, all of key 0."""

    name: str
    label: str
    rows: int
    keys: int
    key: Literal["long", "string", "columns"] = "long"
    aggregates: tuple[Aggregate, ...] = TWO
    hot_rows: int = 0

    @property
    def key_names(self) -> list[str]:
        """Return the names of the key's columns."""
        return [name for name, _ in KEY_SCHEMAS[self.key]]

    @property
    def key_schema(self) -> str:
        """Return the key's columns with types, as Spark writes them."""
        return ", ".join(f"{name} {kind}" for name, kind in KEY_SCHEMAS[self.key])

    @property
    def value_names(self) -> list[str]:
        """Return the columns that are added up."""
        return list(dict.fromkeys(a.column for a in self.aggregates if a.column))

    @property
    def state(self) -> str:
        """Return the types of the totals."""
        return ", ".join(f"{a.name} long" for a in self.aggregates)

    @property
    def output(self) -> str:
        """Return the types of a contestant's output."""
        return f"{self.key_schema}, {self.state}"

    @property
    def input(self) -> str:
        """Return the types of a contestant's input."""
        return ", ".join([self.key_schema, *(f"{name} long" for name in self.value_names)])

    def key_columns(self, ids: Longs) -> dict[str, pa.Array]:
        """Return the key columns of these keys; they differ for different keys."""
        return dict(zip(self.key_names, KEY_COLUMNS[self.key](ids), strict=True))

    def draw(self, rng: np.random.Generator) -> Batch:
        """Return the next batch of random rows."""
        ids = rng.integers(0, self.keys, self.rows)
        if self.hot_rows:
            ids = rng.permutation(np.concatenate([ids, np.zeros(self.hot_rows, np.int64)]))
        return self.batch_of(ids, rng)

    def batch_of(self, ids: Longs, rng: np.random.Generator) -> Batch:
        """Return a batch with a row for each of these keys, and random values."""
        values = {name: rng.integers(1, LARGEST[name], len(ids)) for name in self.value_names}
        return Batch(ids.astype(np.int64), values)


LARGEST = {"amount": 100_000, "pieces": 10}
KEY_SCHEMAS = {
    "long": [("user", "long")],
    "string": [("user", "string")],
    "columns": [("shop", "long"), ("country", "string"), ("day", "int")],
}


def _padded(prefix: str, ids: Longs, width: int) -> pa.Array:
    return pc.binary_join_element_wise(prefix, pc.utf8_lpad(pa.array(ids).cast(pa.string()), width, "0"), "")


KEY_COLUMNS: dict[str, Callable[[Longs], list[pa.Array]]] = {
    "long": lambda ids: [pa.array(ids)],
    "string": lambda ids: [_padded("user-", ids, 12)],
    "columns": lambda ids: [
        pa.array(ids // 1500),
        _padded("c", ids % 50, 2),
        pa.array((ids // 50 % 30).astype(np.int32)),
    ],
}


@dataclass(frozen=True)
class Batch:
    """Rows: the key of each, and its values."""

    ids: Longs
    values: Mapping[str, Longs]

    def table(self, workload: Workload, rows: slice = slice(None)) -> pa.Table:
        """Return the rows, or some of them, as columns."""
        columns = {name: pa.array(values[rows]) for name, values in self.values.items()}
        return pa.table({**workload.key_columns(self.ids[rows]), **columns})


@dataclass
class Expected:
    """Running totals by numpy, and the expected output of each batch, (rows, hash), by kind of output."""

    workload: Workload
    checks: dict[Gives, list[tuple[int, int]]] = field(
        default_factory=lambda: {"totals": [], "totals of the batch": [], "rows": []}
    )
    _totals: dict[str, Longs] = field(default_factory=dict)
    _seen: npt.NDArray[np.bool_] | None = None

    def __post_init__(self) -> None:
        keys = self.workload.keys
        self._totals = {a.name: np.zeros(keys, np.int64) for a in self.workload.aggregates}
        self._seen = np.zeros(keys, bool)

    def add(self, batch: Batch) -> None:
        """Add the next batch."""
        order = np.argsort(batch.ids, kind="stable")
        ids = batch.ids[order]
        starts = np.flatnonzero(np.concatenate([[True], ids[1:] != ids[:-1]]))
        touched = ids[starts]
        assert self._seen is not None
        old = self._seen[touched]
        of_batch, totals = {}, {}
        for a in self.workload.aggregates:
            values = batch.values[a.column][order] if a.column else np.ones(len(ids), np.int64)
            made = of_batch[a.name] = a.combine.reduceat(values, starts)
            totals[a.name] = np.where(old, a.combine(self._totals[a.name][touched], made), made)
            self._totals[a.name][touched] = totals[a.name]
        self._seen[touched] = True
        keys = self.workload.key_columns(touched)
        self.checks["totals"].append(_check({**keys, **totals}))
        self.checks["totals of the batch"].append(_check({**keys, **of_batch}))
        self.checks["rows"].append(_check({**self.workload.key_columns(batch.ids), **batch.values}))

    def of_all(self) -> tuple[int, int]:
        """Return the expected output of all batches at once."""
        assert self._seen is not None
        keys = np.flatnonzero(self._seen)
        return _check({**self.workload.key_columns(keys), **{name: v[keys] for name, v in self._totals.items()}})


def _check(columns: Mapping[str, Any]) -> tuple[int, int]:
    arrays = [values if isinstance(values, pa.Array) else pa.array(values) for values in columns.values()]
    hashes = spark_xxhash64(pa.RecordBatch.from_arrays(arrays, list(columns)))
    return len(hashes), int(np.bitwise_xor.reduce(hashes))
