"""State variables, timers, windows, sessions and seen keys, as a client sees them."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest

from spark_bridge.exceptions import RequestError, UnknownKeyOrNamespaceError, UnknownKvStateIdError
from spark_bridge.operators.deduplicate import DeduplicateLogic
from spark_bridge.queryable.client.client import QueryableStateClient
from spark_bridge.queryable.client.json_values import rows_to_json, to_json, window_of_text
from spark_bridge.state_format.layouts import deduplicate_schema
from tests.spark_bridge.operators.operator_runs import WINDOW
from tests.spark_bridge.queryable.client.client_rows import MINUTE, NINE, ROWS, bounds, windowed
from tests.spark_bridge.queryable.client_world import served
from tests.spark_bridge.state_flows import Flow, Query
from tests.spark_bridge.variable_operations import session_operator

# -- lists, maps, timers -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[QueryableStateClient]:
    """User a of shard 1 has something in every variable; b of 2 only a value."""

    def fill(of: Any) -> None:
        of.total.update((3, "u3"))
        of.visits.appendList([("/", 1), (None, 2)])
        of.pages.updateValue(("/a", "x"), (1, ("text",)))
        of.pages.updateValue(("/b", "y"), (2, None))
        of.timers.registerTimer(5000)
        of.timers.registerTimer(4000)

    flow = Flow(tmp_path_factory.mktemp("processor"))
    flow.batch({("a", 1): fill, ("b", 2): lambda of: of.total.update((4, None))})
    with served(flow) as client:
        yield client
    flow.close()


VISITS = [{"page": "/", "at": 1}, {"page": None, "at": 2}]


def test_state_variables_by_key(processor: QueryableStateClient) -> None:
    assert processor.get("op", ("a", 1), state="total") == {"n": 3, "user": "u3"}
    assert processor.get("op", ("a", 1), state="visits") == VISITS
    assert processor.get("op", {"shard": 1, "user": "a"}, state="pages") == {
        ("/a", "x"): {"n": 1, "note": {"text": "text"}},
        ("/b", "y"): {"n": 2, "note": None},
    }
    assert processor.get("op", ("a", 1), state="timers") == [4000, 5000]
    for state in ("visits", "pages", "timers"):
        assert processor.get("op", ("b", 2), state=state) is None
    with pytest.raises(UnknownKvStateIdError, match=r"'total'.*'visits'.*'pages'"):
        processor.get("op", ("a", 1))


def test_state_variables_of_many_keys(processor: QueryableStateClient) -> None:
    keys = [("b", 2), ("a", 1), ("c", 3), ("a", 1)]
    table = processor.get_many("op", keys, state="total")
    assert table.to_pydict() == {
        "user": ["b", "a", "c", "a"],
        "shard": [2, 1, 3, 1],
        "n": [4, 3, None, 3],
        "user__value": [None, "u3", None, "u3"],
    }
    visits = processor.get_many("op", keys, state="visits")
    assert visits.schema.names == ["user", "shard", "list_value"]
    assert visits.column("list_value").to_pylist() == [None, VISITS, None, VISITS]
    pages = processor.get_many("op", pl.DataFrame({"user": ["a"], "shard": [1]}), state="pages")
    ((first, _),) = [dict(enumerate(row)).values() for row in pages.column("map_value").to_pylist()]
    assert first == ({"page": "/a", "user": "x"}, {"n": 1, "note": {"text": "text"}})
    assert processor.get_many("op", keys, state="timers").column("timers").to_pylist()[:2] == [None, [4000, 5000]]
    empty = processor.get_many("op", [], state="visits")
    assert (empty.num_rows, empty.schema) == (0, visits.schema)


def test_state_variables_are_scanned_row_by_row(processor: QueryableStateClient) -> None:
    assert processor.scan("op", "visits", prefix=("a",)).to_pylist() == [{"user": "a", "shard": 1, **v} for v in VISITS]
    assert processor.scan("op", "pages", prefix="a", columns=["page"]).to_arrow().column(0).to_pylist() == ["/a", "/b"]
    assert processor.count("op", "timers") == 2
    rows = processor.key_rows("op", [("a", 1)], "visits")
    assert rows.to_pylist() == [{"user": "a", "shard": 1, **v} for v in VISITS]


# -- windows ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("order", "by"),
    [
        (("window", "user"), ("user", "window")),
        (("window", "user"), ()),
        (("user", "window"), ()),
    ],
)
def test_windows_by_key(tmp_path: Path, order: tuple[str, ...], by: tuple[str, ...]) -> None:
    query = windowed(tmp_path, order, by, ROWS)
    with served(query) as client:
        assert client.get("op", 1) == [{"window": bounds(0), "n": 10}, {"window": bounds(1), "n": 11}]
        assert client.get("op", 3) is None
        assert client.get("op", 1, window=NINE) == {"n": 10}
        assert client.get("op", 1, window=NINE.replace(tzinfo=None)) == {"n": 10}
        assert client.get("op", 1, window=(NINE + MINUTE, NINE + 2 * MINUTE)) == {"n": 11}
        assert client.get("op", 2, window=NINE) is None
        whole = {"user": 1, "window": (NINE, NINE + MINUTE)}
        assert client.get("op", tuple(whole[n] for n in by or order)) == {"n": 10}
        assert client.get("op", whole) == {"n": 10}
        one = client.get_many("op", [2, 1], window=NINE + MINUTE)
        assert one.schema.names == [*(by or order), "n"]
        assert one.column("n").to_pylist() == [21, 11]
        each = client.get_many("op", [1, 1, 2], window=[NINE, NINE + MINUTE, NINE])
        assert each.column("n").to_pylist() == [10, 11, None]
        every = client.get_many("op", [2, 3, 1])
        assert every.schema.names == ["user", "windows"]
        found = every.column("windows").to_pylist()
        assert found == [
            [{"window": bounds(1), "n": 21}],
            None,
            [{"window": bounds(0), "n": 10}, {"window": bounds(1), "n": 11}],
        ]
        pairs = pa.table({"user": [1, 2], "window": pa.array([bounds(1), bounds(1)], WINDOW)})
        assert client.get_many("op", pairs).column("n").to_pylist() == [11, 21]
        assert client.count("op", where=[("user", "=", 1)]) == 2
        assert client.scan("op", where=[("user", "=", 2)], columns=["n"]).to_pylist() == [{"n": 21}]
        if (by or order)[0] == "user":
            assert sorted(client.scan("op", prefix=(1,)).to_arrow().column("n").to_pylist()) == [10, 11]
        else:
            assert client.scan("op", prefix=((NINE, NINE + MINUTE),), columns=["n"]).to_pylist() == [{"n": 10}]
        with pytest.raises(UnknownKeyOrNamespaceError, match="is not a window"):
            client.get("op", 1, window="nine")
    query.close()


def test_windows_beyond_the_year_9999_leave_the_others_readable(tmp_path: Path) -> None:
    minute = np.timedelta64(60_000_000, "us")
    new_year = np.datetime64("10000-01-01", "us")
    last = dt.datetime(9999, 12, 31, 23, 59, tzinfo=dt.timezone.utc)
    ends_beyond = {"start": last, "end": new_year}
    beyond = {"start": new_year, "end": new_year + minute}
    far = [(1, {**ends_beyond, "end": int(new_year.astype(int))}, 8)]
    far.append((1, {name: int(time.astype(int)) for name, time in beyond.items()}, 9))
    query = windowed(tmp_path, ("window", "user"), ("user", "window"), [*ROWS, *far])
    with served(query) as client:
        every = [{"window": w, "n": n} for w, n in ((bounds(0), 10), (bounds(1), 11), (ends_beyond, 8), (beyond, 9))]
        assert client.get("op", 1) == every
        assert client.get("op", 1, window=NINE) == {"n": 10}
        assert client.get("op", 1, window=last) == client.get("op", 1, window=(last, new_year)) == {"n": 8}
        assert client.get("op", 1, window=new_year) == client.get("op", (1, beyond)) == {"n": 9}
        assert client.get_many("op", [1, 1], window=[last, new_year]).column("n").to_pylist() == [8, 9]
        rows = [{"user": 1, **row} for row in every]
        by_n = [("user", "=", 1)]
        assert sorted(client.scan("op", where=by_n).to_pylist(), key=lambda r: r["n"]) == sorted(
            rows, key=lambda r: r["n"]
        )
        frame = client.scan("op", where=by_n).to_pandas().sort_values("n", ignore_index=True)
        assert frame["n"].tolist() == [8, 9, 10, 11] and frame["window"][1] == beyond
        in_json = {row["n"]: row["window"] for row in rows_to_json(client.scan("op", where=by_n).to_arrow())}
        assert in_json[8] == {"start": "9999-12-31T23:59:00Z", "end": "+10000-01-01T00:00:00"}
        assert to_json(every[3]) == {"window": in_json[9], "n": 9}
        assert client.get("op", 1, window=window_of_text(in_json[9]["start"])) == {"n": 9}
        assert client.sql("select n from op where user = 1 order by n").fetchall() == [(8,), (9,), (10,), (11,)]
    query.close()


def test_windows_that_are_all_of_the_key(tmp_path: Path) -> None:
    query = windowed(tmp_path, ("window",), (), [(0, bounds(0), 10), (0, bounds(1), 11)])
    with served(query) as client:
        assert (
            client.get("op", NINE)
            == client.get("op", (NINE, NINE + MINUTE))
            == client.get("op", bounds(0))
            == {"n": 10}
        )
        assert client.get("op", {"window": bounds(1)}) == {"n": 11}
        assert client.get("op", NINE - MINUTE) is None
        table = client.get_many("op", [NINE + MINUTE, bounds(0), (NINE, NINE), (NINE,)])
        assert table.column("n").to_pylist() == [11, 10, None, 10]
        assert client.get_many("op", pa.array([bounds(1)], WINDOW)).column("n").to_pylist() == [11]
        with pytest.raises(RequestError, match="all of the key"):
            client.get("op", NINE, window=NINE)
    query.close()


def test_windows_of_several_lengths_need_both_ends(tmp_path: Path) -> None:
    query = windowed(tmp_path, ("user", "window"), (), [*ROWS, (1, bounds(0, 5), 99)])
    with served(query) as client:
        with pytest.raises(RequestError, match="different lengths"):
            client.get("op", 1, window=NINE)
        assert client.get("op", 1, window=(NINE, NINE + 5 * MINUTE)) == {"n": 99}
    query.close()


def test_sessions_and_deduplicated_keys(tmp_path: Path) -> None:
    schema, logic, rows = session_operator()
    query = Query(tmp_path, schema, "session_aggregate")
    given = [("a", bounds(40, 2), 2.0), ("a", bounds(5, 10), 1.0), ("b", bounds(5, 10), 3.0)]
    columns = [pa.array([row[i] for row in given], f.type) for i, f in enumerate(rows)]
    query.process(logic, ["k"], pa.record_batch(columns, schema=rows))
    with served(query) as client:
        first, second = {"n": 1, "mean": 1.0}, {"n": 1, "mean": 2.0}
        assert client.get("op", "a") == [
            {"session_window": bounds(5, 10), **first},
            {"session_window": bounds(40, 2), **second},
        ]
        assert client.get("op", "c") is None
        assert client.get("op", "a", window=NINE + 40 * MINUTE) == second
        assert client.get("op", "a", window=(NINE + 5 * MINUTE, NINE + 15 * MINUTE)) == first
        assert client.get("op", "a", window=NINE) is None
        table = client.get_many("op", ["b", "c", "a"])
        assert table.schema.names == ["k", "sessions"]
        assert [len(found or ()) for found in table.column("sessions").to_pylist()] == [1, 0, 2]
        with pytest.raises(RequestError, match="window"):
            client.get_many("op", ["a"], window=NINE)
        assert client.scan("op", prefix="b", columns=["session_window"]).to_pylist() == [
            {"session_window": bounds(5, 10)}
        ]
    query.close()


def test_keys_that_were_seen(tmp_path: Path) -> None:
    keys = pa.schema([pa.field("k", pa.string())])
    schema = deduplicate_schema(keys, ("k",), None)
    query = Query(tmp_path, schema, "deduplicate")
    logic = DeduplicateLogic(schema, ("k",), (), None, None, None)
    query.process(logic, ["k"], pa.record_batch([pa.array(["a", "b"])], schema=keys))
    with served(query) as client:
        assert client.get("op", "a") == {"present": True}
        assert client.get("op", "c") is None
        assert client.get_many("op", ["a", "c"]).column("present").to_pylist() == [True, None]
        assert sorted(client.scan("op").to_arrow().column("k").to_pylist()) == ["a", "b"]
    query.close()
