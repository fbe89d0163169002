"""How fast columns are encoded to stored keys and values, and decoded again.

    python benchmarks/encoding.py                     a million rows of every case, the best and median of 5
    python benchmarks/encoding.py --rows 100000 --rounds 9 --only string

All figures are milliseconds per million rows: the best, then the median. All cases come from one seed, in one batch
each, and the decoded columns are compared with the originals before anything is timed. A tenth of the
strings have a zero byte in them, which keys must escape, and a tenth are not ASCII; "nulls" are a tenth of each
column. "sort" is what a store does with keys that do not come in order.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from rich.console import Console
from rich.table import Table

from backends.encoding.keys import decode_keys, encode_keys
from backends.encoding.values import decode_values, encode_values

KEY_GROUPS = 1024
ALPHABET = np.array(list("abcdefghijklmnopqrstuvwxyz"))


class Columns:
    """Random columns of one length."""

    def __init__(self, rows: int, seed: int) -> None:
        self._rows = rows
        self._rng = np.random.default_rng(seed)

    def nulls(self, column: pa.Array) -> pa.Array:
        """The column with a tenth of it null."""
        return pc.if_else(pa.array(self._rng.random(len(column)) < 0.1), pa.scalar(None, column.type), column)

    def long(self, count: int | None = None) -> pa.Array:
        return pa.array(self._rng.integers(-(2**63), 2**63 - 1, count or self._rows))

    def double(self) -> pa.Array:
        return pa.array(self._rng.normal(size=self._rows))

    def timestamp(self) -> pa.Array:
        return pa.array(self._rng.integers(0, 2**51, self._rows), pa.timestamp("us", tz="UTC"))

    def string(self, count: int | None = None) -> pa.Array:
        """5 to 20 characters."""
        count = count or self._rows
        lengths = self._rng.integers(5, 21, count)
        letters = "".join(self._rng.choice(ALPHABET, int(lengths.sum())))
        ends = np.cumsum(lengths)
        kinds = self._rng.integers(0, 10, count)
        made = []
        for start, end, kind in zip((ends - lengths).tolist(), ends.tolist(), kinds.tolist(), strict=True):
            text = letters[start:end]
            if kind == 0:
                text = f"{text[:2]}\0{text[3:]}"
            elif kind == 1:
                text = f"{text[:2]}é漢{text[4:]}"
            made.append(text)
        return pa.array(made)

    def decimal(self) -> pa.Array:
        """Of 20 digits, two behind the point."""
        return self.long().cast(pa.decimal128(19, 0)).cast(pa.decimal128(21, 2))

    def array(self, column: Callable[[int], pa.Array]) -> pa.Array:
        """0 to 4 elements."""
        offsets = np.concatenate([[0], np.cumsum(self._rng.integers(0, 5, self._rows))])
        return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), column(int(offsets[-1])))

    def map(self) -> pa.Array:
        """0 to 4 entries."""
        offsets = np.concatenate([[0], np.cumsum(self._rng.integers(0, 5, self._rows))])
        count = int(offsets[-1])
        return pa.MapArray.from_arrays(pa.array(offsets, pa.int32()), self.string(count), self.long(count))


def make_cases(rows: int, seed: int) -> dict[str, Callable[[], list[pa.Array]]]:
    """Yield the cases, each made when its turn comes."""
    make = Columns(rows, seed)

    def with_nulls(columns: Callable[[], list[pa.Array]]) -> Callable[[], list[pa.Array]]:
        return lambda: [make.nulls(column) for column in columns()]

    def struct() -> pa.Array:
        return pa.StructArray.from_arrays([make.long(), make.string()], names=["a", "b"])

    cases: dict[str, Callable[[], list[pa.Array]]] = {
        "long, double, timestamp": lambda: [make.long(), make.double(), make.timestamp()],
        "string": lambda: [make.string()],
        "string, long, string": lambda: [make.string(), make.long(), make.string()],
    }
    cases |= {f"{name}; nulls": with_nulls(columns) for name, columns in cases.items()}
    return cases | {
        "decimal(21,2)": lambda: [make.decimal()],
        "struct<long, string>": lambda: [struct()],
        "struct<long, string>; nulls": with_nulls(lambda: [struct()]),
        "array<long>": lambda: [make.array(make.long)],
        "array<long>; nulls": with_nulls(lambda: [make.array(make.long)]),
        "array<string>": lambda: [make.array(make.string)],
        "map<string, long>": lambda: [make.map()],
    }


def measure(table: Table, name: str, columns: list[pa.Array], rounds: int) -> None:
    """Measure one case: print a line for keys, unless keys cannot have the type, and a line for values."""
    batch = pa.record_batch(columns, names=[f"c{i}" for i in range(len(columns))])
    rows = batch.num_rows

    def time_of(work: Callable[[], object]) -> str:
        times = []
        for _ in range(rounds):
            started = time.perf_counter()
            work()
            times.append((time.perf_counter() - started) * 1e3 * (1e6 / rows))
        return f"{min(times):.0f} / {statistics.median(times):.0f}"

    def check(decoded: pa.RecordBatch) -> None:
        if not decoded.equals(batch):
            raise AssertionError(f"{name} did not come back as it was.")

    if not any(pa.types.is_map(column.type) for column in columns):
        groups = np.random.default_rng(1).integers(0, KEY_GROUPS, rows).astype(np.int32)
        keys = encode_keys(batch, groups)
        check(decode_keys(keys, batch.schema))
        encode, decode = time_of(lambda: encode_keys(batch, groups)), time_of(lambda: decode_keys(keys, batch.schema))
        table.add_row("key", name, encode, decode, time_of(lambda: pc.sort_indices(keys)))
    values = encode_values(batch)
    check(decode_values(values, batch.schema))
    encode, decode = time_of(lambda: encode_values(batch)), time_of(lambda: decode_values(values, batch.schema))
    table.add_row("value", name, encode, decode, "")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows per batch (default 1000000)")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds (default 5)")
    parser.add_argument("--only", default="", help="only cases with this in their name")
    options = parser.parse_args()
    title = f"Encoding {options.rows:,} rows at once (ms per million rows, best / median of {options.rounds})"
    table = Table(title=title, title_justify="left")
    for heading in ("as", "columns", "encode", "decode", "sort"):
        table.add_column(heading, justify="left" if heading in ("as", "columns") else "right")
    for name, columns in make_cases(options.rows, 20130101).items():
        if options.only in name:
            measure(table, name, columns(), options.rounds)
    Console().print(table)


if __name__ == "__main__":
    main()
