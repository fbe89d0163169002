"""Random operations on variables of state, and the rows that tables of them must have.

An aggregate by session windows: its schema, its logic, and the schema of its rows.
"""

from __future__ import annotations

import random
from typing import Any

import pyarrow as pa

from backends.encoding.operator_schema import OperatorSchema
from spark_bridge.aggregates.aggregator import Aggregator, Output
from spark_bridge.operators.session_task import SessionLogic
from spark_bridge.state_format.layouts import session_schema
from tests.spark_bridge.operators.operator_runs import TS, WINDOW
from tests.spark_bridge.state_flows import Key, Operation

Row = tuple[Any, ...]


def note(text: str | None) -> Any:
    return None if text is None else (text,)


def random_operation(rng: random.Random) -> Operation:
    """Something with every variable; small and large lists and maps, and removals."""
    n, wide = rng.randrange(100), rng.choice([1, 1, 3, 30, 90, 150])
    visits = [(rng.choice(["/", "/a", None]), rng.randrange(9)) for _ in range(wide)]
    entries = [((f"/{rng.randrange(150)}", rng.choice("xyz")), (i, note(rng.choice(["t", None])))) for i in range(wide)]
    timers = [rng.randrange(10**6, 2 * 10**6, 1000) for _ in range(rng.randrange(4))]
    what = rng.choice(["add", "add", "add", "put", "clear", "take"])

    def operation(of: Any) -> None:
        if what in ("add", "put"):
            of.total.update((n, f"u{n}"))
            (of.visits.appendList if what == "add" else of.visits.put)(visits)
            for key, value in entries:
                of.pages.updateValue(key, value)
            for timer in timers:
                of.timers.registerTimer(timer)
        if what == "clear":
            of.total.clear()
            of.visits.clear()
            of.pages.clear()
        if what == "take":
            for key, _ in entries[::2]:
                of.pages.removeKey(key)
            for timer in timers[:1]:
                of.timers.deleteTimer(timer)

    return operation


def random_batch(rng: random.Random) -> dict[Key, Operation]:
    keys = [(user, shard) for user in ("a", "b", "ab", "", "é") for shard in (0, 1)]
    return {key: random_operation(rng) for key in rng.sample(keys, 4)}


def flat(name: str, of: dict[Key, Any]) -> list[Row]:
    """The rows that a table must have, sorted."""
    rows: list[Row] = []
    for key, held in of.items():
        if name == "total":
            rows.append((*key, *held))
        elif name == "visits":
            rows += [(*key, *element) for element in held]
        elif name == "pages":
            rows += [(*key, *k, n, None if t is None else {"text": t[0]}) for k, (n, t) in held.items()]
        else:
            rows += [(*key, expiry) for expiry in held]
    return rows


def in_order(rows: list[Row]) -> list[Row]:
    return sorted(rows, key=repr)


def one_key(operation: Operation) -> dict[Key, Operation]:
    return {("a", 0): operation}


class Expiring:
    def init(self, handle: Any) -> None:
        self.seen = handle.getValueState("seen", "n LONG", 10_000)
        self.log = handle.getListState("log", "n LONG", 10_000)
        self.by_page = handle.getMapState("by_page", "page STRING", "n LONG", 10_000)


AGGREGATOR = Aggregator([Output("n", "count", None, None, None), Output("mean", "mean", "v", None, pa.float64())])


def session_operator() -> tuple[OperatorSchema, SessionLogic, pa.Schema]:
    """Return count and mean by ``k`` and ``session_window`` of rows with a value ``v``."""
    by_key = pa.schema([pa.field("k", pa.string())])
    schema = session_schema(by_key, TS, AGGREGATOR.state_schema)
    output = pa.schema([*by_key, pa.field("session_window", WINDOW), *AGGREGATOR.result_fields])
    logic = SessionLogic(schema, AGGREGATOR, output, "session_window", "update")
    return schema, logic, pa.schema([*by_key, pa.field("session_window", WINDOW), pa.field("v", pa.float64())])
