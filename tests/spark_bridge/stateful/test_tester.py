"""Processors in a ``ProcessorTester``; where PySpark has a ``TwsTester``, both must say the same."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import pytest
from pyspark.errors import IllegalArgumentException, PySparkValueError
from pyspark.errors.exceptions.base import PySparkAssertionError
from pyspark.sql import Row

from spark_bridge.exceptions import IllegalStateValueError, ProcessorTesterError, TimeModeError
from spark_bridge.stateful.declaration import DeletedStateError
from spark_bridge.stateful.stateful_processor import ExpiredTimerInfo, StatefulProcessor, TimerValues
from spark_bridge.stateful.testing import LocalStateAccess, ProcessorTester

try:
    from pyspark.sql.streaming.stateful_processor import StatefulProcessor as PySparkProcessor
except ImportError:
    PySparkProcessor = StatefulProcessor
try:
    from pyspark.sql.streaming.tws_tester import TwsTester
except ImportError:
    TwsTester = None

TESTERS = [ProcessorTester] + ([TwsTester] if TwsTester is not None else [])


class Visits(PySparkProcessor):
    """Counts visits by page, keeps the last ones, and says goodbye some time after the last visit."""

    def __init__(self, ttl_ms: int | None = None, goodbye_after_ms: int | None = None) -> None:
        self.ttl_ms = ttl_ms
        self.goodbye_after_ms = goodbye_after_ms

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.count = handle.getValueState("count", "n INT", self.ttl_ms)
        self.pages = handle.getMapState("pages", "page STRING", "n INT", self.ttl_ms)
        self.last = handle.getListState("last", "page STRING", self.ttl_ms)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        n = 0
        for row in rows:
            n += 1
            seen = self.pages.getValue((row.page,))
            self.pages.updateValue((row.page,), ((seen[0] if seen else 0) + 1,))
            self.last.appendValue((row.page,))
        before = self.count.get()
        self.count.update((n + (before[0] if before else 0),))
        if self.goodbye_after_ms is not None:
            now = max(timerValues.getCurrentProcessingTimeInMs(), timerValues.getCurrentWatermarkInMs())
            for timer in self.handle.listTimers():
                self.handle.deleteTimer(timer)
            self.handle.registerTimer(now + self.goodbye_after_ms)
        yield Row(key=key[0], n=self.count.get()[0])

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        yield Row(key=key[0], goodbye=expiredTimerInfo.getExpiryTimeInMs())
        self.last.clear()

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        self.count.update((initialState.n,))


def rows(*pages: str) -> list[Row]:
    return [Row(page=page, at=i) for i, page in enumerate(pages)]


@pytest.mark.parametrize("tester_class", TESTERS)
class TestAsPySparkHasIt:
    """What both testers do alike."""

    def test_rows_and_state(self, tester_class: type[ProcessorTester]) -> None:
        tester = tester_class(Visits())
        assert tester.test("ann", rows("a", "b", "a")) == [Row(key="ann", n=3)]
        assert tester.test("bob", rows("a")) == [Row(key="bob", n=1)]
        assert tester.test("ann", rows("c")) == [Row(key="ann", n=4)]
        assert tester.peekValueState("count", "ann") == (4,)
        assert tester.peekValueState("count", "eve") is None
        assert tester.peekMapState("pages", "ann") == {("a",): (2,), ("b",): (1,), ("c",): (1,)}
        assert tester.peekMapState("pages", "eve") == {}
        assert tester.peekListState("last", "bob") == [("a",)]
        assert tester.peekListState("last", "eve") == []

    def test_state_can_be_set_and_removed(self, tester_class: type[ProcessorTester]) -> None:
        tester = tester_class(Visits())
        tester.updateValueState("count", "ann", (5,))
        tester.updateMapState("pages", "ann", {("a",): (7,)})
        tester.updateListState("last", "ann", [("x",), ("y",)])
        assert tester.test("ann", rows("a")) == [Row(key="ann", n=6)]
        assert tester.peekMapState("pages", "ann") == {("a",): (8,)}
        assert tester.peekListState("last", "ann") == [("x",), ("y",), ("a",)]
        for name in ("count", "pages", "last"):
            tester.deleteState(name, "ann")
        assert tester.peekValueState("count", "ann") is None
        assert tester.peekMapState("pages", "ann") == {}
        assert tester.peekListState("last", "ann") == []

    def test_initial_state(self, tester_class: type[ProcessorTester]) -> None:
        tester = tester_class(Visits(), initialStateRow=[("ann", Row(n=10)), ("bob", Row(n=20))])
        assert tester.test("ann", rows("a")) == [Row(key="ann", n=11)]
        assert tester.peekValueState("count", "bob") == (20,)

    def test_processing_time_timers(self, tester_class: type[ProcessorTester]) -> None:
        tester = tester_class(Visits(goodbye_after_ms=100), timeMode="ProcessingTime")
        tester.test("ann", rows("a"))
        assert tester.setProcessingTime(50) == []
        tester.test("ann", rows("a"))
        tester.test("bob", rows("a"))
        assert tester.setProcessingTime(149) == []
        assert sorted(tester.setProcessingTime(150)) == [Row(key="ann", goodbye=150), Row(key="bob", goodbye=150)]
        assert tester.setProcessingTime(500) == []
        assert tester.peekListState("last", "ann") == []
        with pytest.raises(Exception, match="must move forward"):
            tester.setProcessingTime(500)
        with pytest.raises(ValueError, match="UNSUPPORTED_OPERATION"):
            tester.setWatermark(1000)

    def test_event_time(self, tester_class: type[ProcessorTester]) -> None:
        processor = Visits(goodbye_after_ms=10)
        tester = tester_class(processor, timeMode="EventTime", eventTimeExtractor=lambda row: row.at)
        assert tester.test("ann", rows("a", "b", "c")) == [Row(key="ann", n=2)]  # at 0 is not after the watermark
        assert tester.setWatermark(1) == []
        assert tester.test("ann", rows("a", "b", "c")) == [Row(key="ann", n=3)]
        assert tester.setWatermark(11) == [Row(key="ann", goodbye=11)]
        with pytest.raises(Exception, match="must move forward"):
            tester.setWatermark(11)
        with pytest.raises(ValueError, match="UNSUPPORTED_OPERATION"):
            tester.setProcessingTime(1000)
        with pytest.raises(ValueError, match="eventTimeExtractor"):
            tester_class(processor, timeMode="EventTime")

    def test_pandas(self, tester_class: type[ProcessorTester]) -> None:
        class Sums(PySparkProcessor):
            def init(self, handle: Any) -> None:
                self.sum = handle.getValueState("sum", "total DOUBLE, n BIGINT")
                self.handle = handle

            def handleInputRows(
                self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any
            ) -> Iterator[pd.DataFrame]:
                total, n = self.sum.get() or (0.0, 0)
                for frame in rows:
                    total, n = total + frame["x"].sum(), n + len(frame)
                self.sum.update((total, n))
                self.handle.registerTimer(100)
                yield pd.DataFrame({"key": [key[0]], "total": [total]})

            def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[pd.DataFrame]:
                yield pd.DataFrame({"key": [key[0]], "n": [self.sum.get()[1]]})

            def handleInitialState(self, key: Any, initialState: pd.DataFrame, timerValues: Any) -> None:
                self.sum.update((float(initialState["x"].sum()), 0))

        tester = tester_class(
            Sums(),
            initialStatePandas=[(7, pd.DataFrame({"x": [0.5, 0.5]}))],
            timeMode="EventTime",
            eventTimeExtractor=lambda row: int(row["at"]),
        )
        given = pd.DataFrame({"x": [100.0, 1.0, 2.0], "at": [0, 1, 2]})
        output = tester.testInPandas(7, given)
        pd.testing.assert_frame_equal(output, pd.DataFrame({"key": [7], "total": [4.0]}))
        assert tester.peekValueState("sum", 7) == (4.0, 2)
        pd.testing.assert_frame_equal(tester.setWatermark(100), pd.DataFrame({"key": [7], "n": [2]}))
        assert tester.setWatermark(101).empty

    def test_init_is_called_once(self, tester_class: type[ProcessorTester]) -> None:
        class Counting(Visits):
            inits = 0

            def init(self, handle: Any) -> None:
                self.inits += 1
                super().init(handle)

        processor = Counting()
        tester = tester_class(processor, initialStateRow=[("ann", Row(n=10))])
        tester.test("ann", rows("a"))
        tester.peekValueState("count", "ann")
        assert processor.inits == 1

    @pytest.mark.parametrize("key", [(1, 2), None, 1.5, "x", dt.date(2024, 1, 1), Row(a=1), frozenset([1])])
    def test_a_key_is_one_column_of_any_type(self, tester_class: type[ProcessorTester], key: Any) -> None:
        tester = tester_class(Visits(goodbye_after_ms=10), timeMode="ProcessingTime")
        assert tester.test(key, rows("a")) == [Row(key=key, n=1)]
        assert tester.test("other", rows("a")) == [Row(key="other", n=1)]
        assert tester.test(key, rows("a")) == [Row(key=key, n=2)]
        fired = tester.setProcessingTime(10)
        assert sorted(row.goodbye for row in fired) == [10, 10]
        assert {row.key for row in fired} == {key, "other"}

    def test_the_handle_between_calls(self, tester_class: type[ProcessorTester]) -> None:
        processor = Visits()
        tester = tester_class(processor, timeMode="ProcessingTime")
        tester.test("bob", rows("a"))
        tester.handle.setGroupingKey("ann")
        tester.handle.registerTimer(200)
        tester.handle.registerTimer(100)
        tester.handle.registerTimer(300)
        tester.handle.deleteTimer(200)
        processor.count.update((5,))
        assert list(tester.handle.listTimers()) == [100, 300]
        tester.handle.setGroupingKey("bob")
        assert list(tester.handle.listTimers()) == []
        assert processor.count.get() == (1,)
        assert tester.test("ann", rows("a")) == [Row(key="ann", n=6)]
        assert tester.setProcessingTime(100) == [Row(key="ann", goodbye=100)]
        tester.handle.deleteIfExists("count")
        with pytest.raises(AssertionError):
            tester.peekValueState("count", "ann")
        assert tester.peekListState("last", "bob") == [("a",)]

    def test_the_handle_has_the_variables_of_init(self, tester_class: type[ProcessorTester]) -> None:
        tester = tester_class(Visits())
        tester.test("ann", rows("a"))
        tester.handle.setGroupingKey("ann")
        assert tester.handle.getValueState("count", "n INT").get() == (1,)
        assert list(tester.handle.getListState("last", "page STRING").get()) == [("a",)]
        pages = tester.handle.getMapState("pages", "page STRING", "n INT")
        assert dict(pages.iterator()) == {("a",): (1,)}
        pages.clear()
        assert tester.peekMapState("pages", "ann") == {}

    def test_there_are_no_timers_without_a_time_mode(self, tester_class: type[ProcessorTester]) -> None:
        handle = tester_class(Visits()).handle
        for call in (lambda: handle.registerTimer(5), lambda: handle.deleteTimer(5), lambda: list(handle.listTimers())):
            with pytest.raises(PySparkValueError, match="UNSUPPORTED_OPERATION"):
                call()

    def test_errors_are_of_pysparks_classes(self, tester_class: type[ProcessorTester]) -> None:
        tester = tester_class(Visits(), timeMode="ProcessingTime")
        tester.setProcessingTime(5)
        with pytest.raises(IllegalArgumentException, match="must move forward"):
            tester.setProcessingTime(5)
        with pytest.raises(PySparkValueError, match="UNSUPPORTED_OPERATION"):
            tester.setWatermark(5)
        with pytest.raises(PySparkValueError, match="ARGUMENT_REQUIRED"):
            tester_class(Visits(), timeMode="EventTime")
        with pytest.raises(PySparkAssertionError, match="STATE_NOT_EXISTS"):
            tester.deleteState("nothing", "ann")
        with pytest.raises(AssertionError):
            tester.updateValueState("nothing", "ann", (1,))
        with pytest.raises(AssertionError):
            tester_class(Visits(), timeMode="Now")
        with pytest.raises(AssertionError):
            tester_class(Visits(), initialStateRow=[("a", Row(n=1))], initialStatePandas=[])


def test_state_expires() -> None:
    tester = ProcessorTester(Visits(ttl_ms=100), timeMode="processingtime")
    tester.test("ann", rows("a"))
    tester.setProcessingTime(60)
    tester.test("ann", rows("b"))
    tester.setProcessingTime(100)
    assert tester.peekValueState("count", "ann") == (2,)
    assert tester.peekMapState("pages", "ann") == {("b",): (1,)}
    assert tester.peekListState("last", "ann") == [("b",)]
    tester.setProcessingTime(160)
    assert tester.peekValueState("count", "ann") is None
    assert tester.test("ann", rows("a")) == [Row(key="ann", n=1)]


def test_expired_state_is_removed_by_any_batch() -> None:
    """The key is not handled again, so only a sweep can remove its rows."""
    tester = ProcessorTester(Visits(ttl_ms=100), timeMode="processingtime")

    def stored() -> int:
        store = LocalStateAccess(tester._provider, tester._schema, tester._times, (0, 1), 1)
        families = [family for variable in tester._schema.variables for family in variable.families]
        return sum(pairs.num_rows for family in families for pairs in store.scan([(b"", None)], family))

    tester.test("ann", rows("a"))
    of_one = stored()
    tester.test("bob", rows("a"))
    assert stored() > of_one > 0
    tester.setProcessingTime(200)
    tester.test("cal", rows("a"))
    assert stored() == of_one


def test_names_of_parameters_that_a_query_cannot_call_are_refused() -> None:
    class OtherNames(Visits):
        def handleExpiredTimer(self, key: Any, timers: Any, info: Any) -> Iterator[Any]:  # type: ignore[override]
            return iter(())

    with pytest.raises(ProcessorTesterError, match=r"handleExpiredTimer\(self, key, timerValues, expiredTimerInfo\)"):
        ProcessorTester(OtherNames(), timeMode="ProcessingTime")
    ProcessorTester(OtherNames())  # no timer will fire


def test_keys_of_several_columns_and_of_given_types() -> None:
    tester = ProcessorTester(Visits(), keySchema="user STRING, n BIGINT, at TIMESTAMP, is_new BOOLEAN, id BINARY")
    moment = dt.datetime(2024, 1, 1, 12)
    key = ("ann", np.int64(3), moment, True, b"x")
    assert tester.test(key, rows("a")) == [Row(key="ann", n=1)]
    assert tester.test(("ann", 3, moment, True, b"x"), rows("a")) == [Row(key="ann", n=2)]
    with pytest.raises(ProcessorTesterError, match=r"'bob'.*keySchema, struct<user:string,n:bigint"):
        tester.test("bob", rows("a"))
    tester = ProcessorTester(Visits(), keySchema="user STRING, day INT")
    assert tester.test((None, 1), rows("a")) == [Row(key=None, n=1)]
    with pytest.raises(ProcessorTesterError, match=r"\[1\] has no hash: give keySchema"):
        ProcessorTester(Visits()).test([1], rows("a"))


class Days(StatefulProcessor):
    """Keeps missing values in every kind of variable, and gives them for output."""

    def init(self, handle: Any) -> None:
        self.day = handle.getValueState("day", "d DATE, n INT, tags ARRAY<DATE>")
        self.days = handle.getListState("days", "d DATE")
        self.by_day = handle.getMapState("by_day", "d DATE", "d DATE")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        self.day.update((pd.NaT, pd.NA, [pd.NaT, np.datetime64("2024-01-01")]))
        self.days.put([(pd.NaT,), (np.datetime64("2024-01-01"),)])
        self.by_day.updateValue((pd.NaT,), (pd.NaT,))
        yield Row(key=key[0], day=pd.NaT, n=pd.NA, days=[pd.NaT], at=(pd.NaT, 1))


def test_missing_values_are_null_in_state_keys_and_output() -> None:
    tester = ProcessorTester(Days(), keySchema="d DATE")
    (row,) = tester.test(pd.NaT, rows("a"))
    assert row == Row(key=None, day=None, n=None, days=[None], at=(None, 1))
    day = dt.date(2024, 1, 1)
    for key in (pd.NaT, None):
        assert tester.peekValueState("day", key) == (None, None, [None, day])
        assert tester.peekListState("days", key) == [(None,), (day,)]
        assert tester.peekMapState("by_day", key) == {(None,): (None,)}


def test_a_key_of_a_schema_without_a_hash() -> None:
    tester = ProcessorTester(Visits(), keySchema="users ARRAY<STRING>")
    assert tester.test(["ann"], rows("a"))[0].n == 1
    assert tester.test(["bob"], rows("a"))[0].n == 1
    assert tester.test(["ann"], rows("a"))[0].n == 2


def test_deleted_variable_is_missing_in_the_processor() -> None:
    processor = Visits()
    tester = ProcessorTester(processor)
    tester.test("ann", rows("a"))
    tester.handle.deleteIfExists("count")
    tester.handle.deleteIfExists("count")
    with pytest.raises(DeletedStateError, match="count"):
        tester.test("ann", rows("a"))
    assert tester.peekListState("last", "ann") == [("a",)], "the call that failed is kept"


def test_changes_between_calls_are_kept_by_the_next_call() -> None:
    processor = Visits()
    tester = ProcessorTester(processor, timeMode="ProcessingTime")
    with pytest.raises(ProcessorTesterError, match="setGroupingKey"):
        tester.handle.registerTimer(1)
    tester.handle.setGroupingKey("ann")
    processor.count.update((5,))
    assert tester.peekValueState("count", "bob") is None
    assert tester.peekValueState("count", "ann") == (5,)


@pytest.mark.parametrize("tester_class", TESTERS)
def test_the_handle_knows_its_key_removes_state_and_moves_the_watermark(tester_class: Any) -> None:
    processor = Visits(goodbye_after_ms=10)
    tester = tester_class(processor, timeMode="EventTime", eventTimeExtractor=lambda row: 5_000)
    tester.test("ann", rows("a"))
    assert tester.peekValueState("count", "ann") == (1,)
    tester.handle.setGroupingKey("ann")
    assert tester.handle.grouping_key == "ann"
    tester.handle.deleteState("count")
    with pytest.raises((ProcessorTesterError, PySparkAssertionError)):
        tester.handle.deleteState("nothing")
    assert tester.peekValueState("count", "ann") is None and tester.peekListState("last", "ann") == [("a",)]
    tester.handle.setWatermark(5)
    tester.handle.setGroupingKey("ann")
    assert list(tester.handle.listTimers()) == [10], "no timer has fired"
    assert len(tester.setWatermark(20)) == 1


def test_differences_from_the_tester_of_pyspark() -> None:
    """Each of these is in the page of differences."""
    processor = Visits()
    tester = ProcessorTester(processor)
    tester.test("ann", rows("a"))
    tester.handle.setGroupingKey("ann")
    assert isinstance(processor.pages.getValue(("a",)), Row) and processor.pages.getValue(("a",)) == (1,)
    processor.pages.removeKey(("a",))
    assert not processor.pages.exists()
    with pytest.raises(ProcessorTesterError, match="has no hash: give keySchema="):
        tester.test(["ann"], rows("a"))
    with pytest.raises(ProcessorTesterError, match="no key is current"):
        ProcessorTester(Visits()).handle.deleteState("count")

    class Silent(Visits):
        def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Any:
            return None

    assert ProcessorTester(Silent()).test("ann", rows("a")) == []


def test_a_call_that_fails_changes_nothing() -> None:
    class Hasty(StatefulProcessor):
        def init(self, handle: Any) -> None:
            self.seen = handle.getListState("seen", "x INT")

        def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: TimerValues) -> Iterator[Row]:
            for row in rows:
                self.seen.appendValue((row.x,))
                if row.x < 0:
                    raise ArithmeticError("negative")
            return iter(())

        def handleExpiredTimer(
            self, key: Any, timerValues: TimerValues, expiredTimerInfo: ExpiredTimerInfo
        ) -> Iterator[Row]:
            raise AssertionError

    tester = ProcessorTester(Hasty())
    assert tester.test(1, [Row(x=1), Row(x=2)]) == []
    with pytest.raises(ArithmeticError, match="negative"):
        tester.test(1, [Row(x=3), Row(x=-1)])
    with pytest.raises(IllegalStateValueError, match=r"2147483648"):
        tester.test(1, [Row(x=2**31)])
    assert tester.peekListState("seen", 1) == [(1,), (2,)]
    tester.updateListState("seen", 1, [])
    assert tester.peekListState("seen", 1) == []


def test_mistakes_raise_errors_with_the_remedy() -> None:
    tester = ProcessorTester(Visits())
    with pytest.raises(
        ProcessorTesterError, match=r"no value state 'pages'; it declares 'count' \(value state\), 'pages' \(map"
    ):
        tester.peekValueState("pages", "ann")
    with pytest.raises(ProcessorTesterError, match="no list state 'pages'"):
        tester.handle.getListState("pages", "page STRING")
    with pytest.raises(ProcessorTesterError, match="no state variable 'x'"):
        tester.deleteState("x", "ann")
    with pytest.raises(ProcessorTesterError, match="'Now' is unknown"):
        ProcessorTester(Visits(), timeMode="Now")
    with pytest.raises(ProcessorTesterError, match="'None' is unknown"):
        ProcessorTester(Visits(), outputMode="None")
    with pytest.raises(ProcessorTesterError, match="not both"):
        ProcessorTester(Visits(), initialStateRow=[], initialStatePandas=[])
    with pytest.raises(TimeModeError, match="INCORRECT_TIME_MODE_TO_ASSIGN_TTL"):
        ProcessorTester(Visits(ttl_ms=5))
