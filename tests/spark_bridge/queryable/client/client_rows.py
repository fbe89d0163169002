"""Rows that clients ask for, windows among them, and a wait for what ends."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from backends.encoding.key_groups import key_groups
from backends.encoding.keys import encode_keys
from backends.encoding.operator_schema import OperatorSchema
from backends.encoding.schema import StateSchema
from coordinator_actor.messages import OperatorFigures
from spark_bridge.queryable.routing.scatter_gather import FINAL_ERRORS, Attempts
from tests.spark_bridge.operators.operator_runs import WINDOW
from tests.spark_bridge.state_flows import G, HostAccess, Query


class UntilGone(Attempts):
    """Attempts that have as much time as they need until they have found the query gone three times, and none then."""

    found_gone = 0

    def delay(self, error: Exception) -> float:
        self.found_gone += isinstance(error, FINAL_ERRORS)
        if self.found_gone == 3:
            self.deadline = 0.0
        return super().delay(error)


UTC = dt.timezone.utc
NINE = dt.datetime(2024, 3, 9, 9, tzinfo=UTC)
MINUTE = dt.timedelta(minutes=1)


def bounds(minute: int, length: int = 1) -> dict[str, dt.datetime]:
    return {"start": NINE + minute * MINUTE, "end": NINE + (minute + length) * MINUTE}


def windowed(root: Path, order: tuple[str, ...], by: tuple[str, ...], rows: list[tuple[Any, ...]]) -> Any:
    """A query of windows: rows are of user, window and count."""
    types = {"user": pa.int64(), "window": WINDOW}
    state = StateSchema(pa.schema([pa.field(n, types[n]) for n in order]), pa.schema([("n.count.count", pa.int64())]))
    query = Query(root, OperatorSchema.of_rows(state, by), "aggregate")
    given = {"user": pa.array([r[0] for r in rows], pa.int64()), "window": pa.array([r[1] for r in rows], WINDOW)}
    keys = pa.record_batch([given[n] for n in order], schema=state.key)
    groups = key_groups(keys, G)
    encoded = encode_keys(keys, groups)
    values = state.encode_values(pa.record_batch([pa.array([r[2] for r in rows])], schema=state.value))

    def work(access: HostAccess, p: int) -> None:
        own = pa.array(groups.astype(np.int64) * query.n // G == p)
        access.stage(encoded.filter(own), values.filter(own))
        access.commit(OperatorFigures())

    query.run_batch(1000, 0, work)
    return query


ROWS = [(1, bounds(1), 11), (1, bounds(0), 10), (2, bounds(1), 21)]
