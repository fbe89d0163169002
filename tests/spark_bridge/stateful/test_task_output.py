"""The output of a processor: rows and DataFrames that fit, and errors that say what does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pandas as pd
import pytest
from pyspark.sql import Row

from spark_bridge.exceptions import StatefulProcessorError
from spark_bridge.stateful.stateful_processor import StatefulProcessor, TimerValues
from tests.spark_bridge.stateful.task_runs import NO_TIME, TINY, process, rows


class Giving(StatefulProcessor):
    """Emits the given output."""

    def __init__(self, answer: Callable[[], Any]) -> None:
        self.answer = answer

    def init(self, handle: Any) -> None:
        pass

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: TimerValues) -> Any:
        return self.answer()


ONE = {"user": "a", "n": 1, "total": 2}


@pytest.mark.parametrize(
    "answer",
    [
        lambda: iter([Row(**ONE)]),
        lambda: [Row("total", "user", "n")(2, "a", 1)],
        lambda: (["a", 1, 2] for _ in range(1)),
        lambda: {("a", 1, 2)},
        lambda: [Row("a", 1, 2)],
        lambda: [Row(more=0, **ONE)],
    ],
)
def test_rows_go_by_name_and_tuples_by_position(answer: Callable[[], Any]) -> None:
    assert process(Giving(answer)).batch(rows(("k", 1)), NO_TIME) == [ONE]


def test_rows_of_several_makers_may_be_mixed() -> None:
    in_order, turned = Row("user", "n", "total"), Row("total", "more", "user", "n")
    given = [in_order("a", 1, 2), turned(2, 0, "a", 1), turned(2, 1, "a", 1), ("a", 1, 2), in_order("a", 1, 2)]
    given += [Row(**ONE), turned(2, 2, "a", 1), Row(total=2, n=1, user="a")]
    assert process(Giving(lambda: given)).batch(rows(("k", 1)), NO_TIME) == [ONE] * len(given)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda: Row(**ONE), ["returned Row(user='a'", "iterator of Rows"]),
        (lambda: 5, ["returned 5 (int)", "iterator"]),
        (lambda: "text", ["'text' (str)"]),
        (lambda: [5], ["5 (int) is not a Row", "user:string,n:bigint,total:bigint"]),
        (lambda: [ONE], ["(dict) is not a Row"]),
        (lambda: [Row(user="a", n=1)], ["Row(user='a', n=1) has the fields user, n"]),
        (lambda: [Row(user="a", n=1, totals=2)], ["has the fields user, n, totals"]),
        (lambda: [Row("total", "user", "n")(2, "a")], ["(2, 'a') has 2 values for total, user, n"]),
        (lambda: [Row("user", "n", "total")("a", 1)], ["has 2 values", "3 fields (user, n, total)"]),
        (lambda: [("a", 1)], ["('a', 1) has 2 values", "3 fields (user, n, total)"]),
        (lambda: [("a", 1, 2), ("b", "x", 3)], ["'n'", "long", "'x' (str)"]),
        (lambda: [pd.DataFrame([ONE])], ["(DataFrame) is not a Row"]),
    ],
)
def test_rows_that_do_not_fit_are_an_error(answer: Callable[[], Any], words: list[str]) -> None:
    with pytest.raises(StatefulProcessorError) as raised:
        process(Giving(answer)).batch(rows(("k", 1)), NO_TIME)
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda: pd.DataFrame([ONE]), ["iterator of pandas DataFrames"]),
        (lambda: [Row(**ONE)], ["(Row) for output: give pandas DataFrames"]),
        (lambda: [pd.DataFrame({"user": ["a"], "n": [1]})], ["has the columns user, n", "total:bigint"]),
        (lambda: [pd.DataFrame([["a", 1]])], ["has 2 columns"]),
        (lambda: [pd.DataFrame([["a", "x", 1]])], ["'n'", "'x' (str)"]),
        (lambda: [pd.DataFrame([["a", 1.5, 1]])], ["'n'", "1.5"]),
    ],
)
def test_frames_that_do_not_fit_are_an_error(answer: Callable[[], Any], words: list[str]) -> None:
    with pytest.raises(StatefulProcessorError) as raised:
        process(Giving(answer), "pandas").batch(rows(("k", 1)), NO_TIME)
    for word in words:
        assert word in str(raised.value)


def test_frames_without_rows_or_columns_are_nothing() -> None:
    given = [pd.DataFrame(), pd.DataFrame(columns=["total", "n", "user"]), pd.DataFrame([ONE]).assign(more=0)]
    assert process(Giving(lambda: iter(given)), "pandas").batch(rows(("k", 1)), NO_TIME) == [ONE]


def test_later_changes_to_emitted_objects_do_not_reach_the_output() -> None:
    def growing() -> Iterator[Any]:
        items: list[int] = []
        by_name: dict[str, list[int]] = {"i": items}
        for i in range(3):
            items.append(i)
            yield Row(items=items, deep=Row(inner=by_name))

    output = "items array<int>, deep struct<inner:map<string,array<int>>>"
    found = process(Giving(growing), output=output).batch(rows(("k", 1)), NO_TIME)
    assert [r["items"] for r in found] == [[0], [0, 1], [0, 1, 2]]
    assert [dict(r["deep"]["inner"])["i"] for r in found] == [[0], [0, 1], [0, 1, 2]]

    def one_frame() -> Iterator[Any]:
        frame = pd.DataFrame([ONE])
        for i in range(3):
            frame.loc[0, "n"] = i
            yield frame

    assert [r["n"] for r in process(Giving(one_frame), "pandas").batch(rows(("k", 1)), NO_TIME)] == [0, 1, 2]


def test_a_key_may_emit_more_than_fits_at_once() -> None:
    run = process(Giving(lambda: (("a", i, 0) for i in range(20_000))), limits=TINY)
    found = run.batch(rows(("k", 1), ("l", 1)), NO_TIME)
    assert [r["n"] for r in found] == [*range(20_000)] * 2
