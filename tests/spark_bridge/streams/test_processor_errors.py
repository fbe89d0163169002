"""Mistakes of processors: each is refused with Spark's error condition, and told what to do."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkRuntimeError
from pyspark.sql import Row
from pyspark.sql.types import IntegerType, StructField, StructType

from spark_bridge import ProcessorTester, StatefulProcessor
from spark_bridge.exceptions import (
    HandleStateError,
    IllegalStateValueError,
    InvalidOperatorError,
    StateDeclarationError,
    StatefulProcessorError,
    TimeModeError,
)
from spark_bridge.stateful.process_task import ProcessorState
from tests.spark_bridge.host.local_partition import KEY_SCHEMA, LocalPartition, run_step

PROCESSING_TIME = "processingtime"
INVALID_HANDLE = "STATEFUL_PROCESSOR_CANNOT_PERFORM_OPERATION_WITH_INVALID_HANDLE_STATE"
INVALID_TIME_MODE = "STATEFUL_PROCESSOR_CANNOT_PERFORM_OPERATION_WITH_INVALID_TIME_MODE"
INVALID_NAME = "STATE_STORE_CANNOT_USE_COLUMN_FAMILY_WITH_INVALID_NAME"
DUPLICATE = "STATEFUL_PROCESSOR_DUPLICATE_STATE_VARIABLE_DEFINED"


def _twice(handle: Any) -> None:
    handle.getValueState("n", "x INT")
    handle.getValueState("n", "x INT")


def _as_another(handle: Any) -> None:
    handle.getValueState("n", "x INT")
    handle.getMapState("n", "k INT", "x INT")


Declare = Callable[[Any], Any]
DECLARATIONS: list[tuple[str, Declare, str, type[Exception], list[str]]] = [
    ("twice", _twice, "none", StateDeclarationError, [DUPLICATE, "'n'", "different name"]),
    ("as another", _as_another, "none", StateDeclarationError, [DUPLICATE, "value state", "map state"]),
    (
        "default",
        lambda h: h.getValueState("default", "x INT"),
        "none",
        StateDeclarationError,
        [INVALID_NAME, "default"],
    ),
    (
        "blank",
        lambda h: h.getListState(" a", "x INT"),
        "none",
        StateDeclarationError,
        [INVALID_NAME, "' a'", "blank"],
    ),
    ("no name", lambda h: h.getListState("", "x INT"), "none", StateDeclarationError, [INVALID_NAME, "''"]),
    ("deleted name", lambda h: h.deleteIfExists("a "), "none", StateDeclarationError, [INVALID_NAME]),
    ("half a character", lambda h: h.getValueState("\ud800", "x INT"), "none", StateDeclarationError, [INVALID_NAME]),
    ("long name", lambda h: h.getListState("ü" * 70, "x INT"), "none", StateDeclarationError, ["too long", "1 to 200"]),
    (
        "ttl none",
        lambda h: h.getValueState("n", "x INT", 1),
        "none",
        TimeModeError,
        ["INCORRECT_TIME_MODE_TO_ASSIGN_TTL"],
    ),
    (
        "ttl event",
        lambda h: h.getListState("n", "x INT", 1),
        "eventtime",
        TimeModeError,
        ["EventTime", "processingTime"],
    ),
    (
        "ttl -1",
        lambda h: h.getValueState("n", "x INT", -1),
        PROCESSING_TIME,
        StateDeclarationError,
        ["MUST_BE_POSITIVE"],
    ),
    (
        "ttl negative",
        lambda h: h.getMapState("n", "k INT", "x INT", -5),
        PROCESSING_TIME,
        StateDeclarationError,
        ["STATEFUL_PROCESSOR_TTL_DURATION_MUST_BE_POSITIVE", "-5 ms"],
    ),
    (
        "ttl text",
        lambda h: h.getValueState("n", "x INT", "1"),
        PROCESSING_TIME,
        StateDeclarationError,
        ["'1'", "int of ms"],
    ),
    ("no ddl", lambda h: h.getValueState("n", "x"), "none", StateDeclarationError, ["'x'", "name TYPE"]),
    ("no type", lambda h: h.getValueState("n", "x FOO"), "none", StateDeclarationError, ["'foo'", "not a type"]),
    ("no schema", lambda h: h.getValueState("n", 3), "none", StateDeclarationError, ["3", "StructType"]),
    ("no fields", lambda h: h.getValueState("n", ""), "none", StateDeclarationError, ["'n'", "without fields"]),
    ("two fields", lambda h: h.getValueState("n", "x INT, x INT"), "none", StateDeclarationError, ["'n'", "same name"]),
    ("map key", lambda h: h.getMapState("n", "k MAP<INT,INT>", "x INT"), "none", StateDeclarationError, ["'k'", "map"]),
    (
        "ttl field",
        lambda h: h.getValueState("n", "__ttl_expiration_ms LONG"),
        "none",
        StateDeclarationError,
        ["__ttl_expiration_ms", "Rename"],
    ),
]


@pytest.mark.parametrize(
    ("declare", "time_mode", "kind", "words"), [d[1:] for d in DECLARATIONS], ids=[d[0] for d in DECLARATIONS]
)
def test_wrong_declarations(declare: Declare, time_mode: str, kind: type[Exception], words: list[str]) -> None:
    state = ProcessorState(KEY_SCHEMA, time_mode, None)
    with pytest.raises(kind) as caught:
        declare(state.handle)
    for word in words:
        assert word in str(caught.value)
    # Handlers for invalid operators, values or PySpark's runtime errors catch this error as well.
    assert isinstance(caught.value, InvalidOperatorError)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, RuntimeError)


def test_an_unknown_time_mode_is_refused() -> None:
    with pytest.raises(InvalidOperatorError, match="'ProcessingTime' is unknown: choose one of none, processingtime"):
        ProcessorState(KEY_SCHEMA, "ProcessingTime", None)


def variables(handle: Any) -> tuple[Any, Any, Any]:
    schema = StructType([StructField("x", IntegerType(), False), StructField("s", IntegerType())])
    return (
        handle.getValueState("value", schema),
        handle.getListState("list", "x INT, s STRING"),
        handle.getMapState("map", "k INT", "x DOUBLE"),
    )


USES: list[Callable[[Any, Any, Any, Any], Any]] = [
    lambda value, *_: value.get(),
    lambda value, *_: value.exists(),
    lambda value, *_: value.update((1, 2)),
    lambda value, *_: value.clear(),
    lambda _, a_list, *__: a_list.get(),
    lambda _, a_list, *__: a_list.exists(),
    lambda _, a_list, *__: a_list.put([(1, "a")]),
    lambda _, a_list, *__: a_list.appendValue((1, "a")),
    lambda _, a_list, *__: a_list.appendList([(1, "a")]),
    lambda _, a_list, *__: a_list.clear(),
    lambda _, __, a_map, *___: a_map.getValue((1,)),
    lambda _, __, a_map, *___: a_map.containsKey((1,)),
    lambda _, __, a_map, *___: a_map.updateValue((1,), (1.0,)),
    lambda _, __, a_map, *___: a_map.removeKey((1,)),
    lambda _, __, a_map, *___: a_map.iterator(),
    lambda _, __, a_map, *___: a_map.keys(),
    lambda _, __, a_map, *___: a_map.values(),
    lambda _, __, a_map, *___: a_map.exists(),
    lambda _, __, a_map, *___: a_map.clear(),
    lambda *args: args[3].registerTimer(1),
    lambda *args: args[3].deleteTimer(1),
    lambda *args: args[3].listTimers(),
]


@pytest.mark.parametrize("use", USES)
def test_state_and_timers_are_used_only_while_a_key_is_handled(tmp_path: Path, use: Callable[..., Any]) -> None:
    held: dict[str, Any] = {}

    def init(handle: Any) -> None:
        held["variables"] = (*variables(handle), handle)
        with pytest.raises(HandleStateError) as caught:
            use(*held["variables"])
        held["phase"] = str(caught.value)

    partition = LocalPartition(tmp_path, init, PROCESSING_TIME)
    assert INVALID_HANDLE in held["phase"]
    assert "PRE_INIT" in held["phase"]
    with partition.batch() as state:
        assert "CREATED" in held["phase"]
        assert "handleInputRows" in held["phase"]
        run_step(state, [("a", 1)], lambda _: use(*held["variables"]))
        with pytest.raises(HandleStateError, match="INITIALIZED"):
            use(*held["variables"])
    with pytest.raises(HandleStateError, match="CLOSED"):
        use(*held["variables"])


def test_state_is_declared_in_init_only(tmp_path: Path) -> None:
    held: dict[str, Any] = {}

    def declare_late(_: Any) -> None:
        for declare in (
            lambda h: h.getValueState("late", "x INT"),
            lambda h: h.getListState("late", "x INT"),
            lambda h: h.getMapState("late", "x INT", "x INT"),
            lambda h: h.deleteIfExists("late"),
        ):
            with pytest.raises(HandleStateError, match=f"{INVALID_HANDLE}.*INITIALIZED.*init"):
                declare(held["handle"])

    partition = LocalPartition(tmp_path, lambda handle: held.update(handle=handle))
    partition.handle([("a", 1)], declare_late)


def test_init_declares_the_same_whenever_it_is_called(tmp_path: Path) -> None:
    partition = LocalPartition(tmp_path, lambda handle: handle.getValueState("v", "x INT"))
    for declare, words in (
        (lambda handle: handle.getValueState("w", "x INT"), "'w'.*'v'.*same variables"),
        (lambda handle: handle.getValueState("v", "x LONG"), "int32.*int64|int64.*int32"),
        (lambda handle: handle.getListState("v", "x INT"), "list state.*value state"),
    ):
        partition.init = declare
        with pytest.raises(StateDeclarationError, match=words), partition.batch():
            pass
    partition.init, partition.time_mode = lambda handle: handle.getValueState("v", "x INT"), PROCESSING_TIME
    with pytest.raises(StateDeclarationError, match="without a time mode"), partition.batch():
        pass


def test_timers_need_a_time_mode(tmp_path: Path) -> None:
    held: dict[str, Any] = {}

    def use_timers(_: Any) -> None:
        for use in USES[-3:]:
            with pytest.raises(TimeModeError, match=f"{INVALID_TIME_MODE}.*timeMode=NoTime.*processingTime"):
                use(None, None, None, held["handle"])

    LocalPartition(tmp_path, lambda handle: held.update(handle=handle)).handle([("a", 1)], use_timers)


NULL, EMPTY = "ILLEGAL_STATE_STORE_VALUE.NULL_VALUE", "ILLEGAL_STATE_STORE_VALUE.EMPTY_LIST_VALUE"
VALUES: list[tuple[str, Callable[[Any, Any, Any, Any], Any], list[str]]] = [
    ("None", lambda v, *_: v.update(None), [NULL, "'value'", "clear()"]),
    ("scalar", lambda v, *_: v.update(1), ["'value'", "1 (int)", "tuple"]),
    ("text", lambda v, *_: v.update("ab"), ["'ab'", "tuple"]),
    ("too few", lambda v, *_: v.update((1,)), ["'value'", "1 fields, not 2", "x:int"]),
    ("too many", lambda v, *_: v.update((1, 2, 3)), ["3 fields"]),
    ("string", lambda v, *_: v.update((1, "2")), ["'value'", "'s'", "'2' (str)"]),
    ("fraction", lambda v, *_: v.update((1, 1.5)), ["'s'", "1.5"]),
    ("bool", lambda v, *_: v.update((1, True)), ["'s'", "True (bool)"]),
    ("None element", lambda _, a, *__: a.appendValue(None), [NULL, "'list'"]),
    ("None in list", lambda _, a, *__: a.put([(1, "a"), None]), [NULL, "'list'"]),
    ("None for list", lambda _, a, *__: a.appendList(None), [NULL, "'list'"]),
    ("empty put", lambda _, a, *__: a.put([]), [EMPTY, "'list'", "clear()"]),
    ("empty append", lambda _, a, *__: a.appendList(iter([])), [EMPTY, "'list'"]),
    ("element", lambda _, a, *__: a.appendValue(("a", "a")), ["'list'", "element", "'x'"]),
    ("None key", lambda _, __, m, ___: m.getValue(None), [NULL, "'map'", "key"]),
    ("None key update", lambda _, __, m, ___: m.updateValue(None, (1.0,)), [NULL, "key"]),
    ("None value", lambda _, __, m, ___: m.updateValue((1,), None), [NULL, "value"]),
    ("key", lambda _, __, m, ___: m.containsKey(("a",)), ["'map'", "key", "'k'"]),
    ("value", lambda _, __, m, ___: m.updateValue((1,), ("a",)), ["'map'", "value", "'x'"]),
    ("remove", lambda _, __, m, ___: m.removeKey(1), ["'map'", "tuple"]),
    ("timer", lambda *args: args[3].registerTimer(1.5), ["1.5", "int of ms"]),
    ("no timer", lambda *args: args[3].deleteTimer(None), ["None", "int of ms"]),
    ("far timer", lambda *args: args[3].registerTimer(2**63), ["64-bit"]),
]


@pytest.mark.parametrize(("use", "words"), [v[1:] for v in VALUES], ids=[v[0] for v in VALUES])
def test_wrong_values(tmp_path: Path, use: Callable[..., Any], words: list[str]) -> None:
    held: dict[str, Any] = {}

    def work(_: Any) -> None:
        value, a_list, a_map, handle = held["variables"]
        with pytest.raises(IllegalStateValueError) as caught:
            use(*held["variables"])
        for word in words:
            assert word in str(caught.value)
        assert isinstance(caught.value, (ValueError, TypeError))
        assert (value.get(), list(a_list.get()), a_map.exists(), list(handle.listTimers())) == (None, [], False, [])

    partition = LocalPartition(
        tmp_path, lambda handle: held.update(variables=(*variables(handle), handle)), PROCESSING_TIME
    )
    partition.handle([("a", 1)], work)


@pytest.mark.parametrize(
    ("use", "words"),
    [
        (lambda v, *_: v.update((2**31, 1)), "'value'.*'x'.*2147483648"),
        (lambda _, a, *__: a.appendValue((-(2**31) - 1, "a")), "'list'.*'x'"),
        (lambda _, __, m: m.updateValue((2**31,), (math.nan,)), "'map'.*key.*'k'"),
    ],
)
def test_values_out_of_range_are_refused_before_anything_is_committed(
    tmp_path: Path, use: Callable[..., Any], words: str
) -> None:
    held: dict[str, Any] = {}
    partition = LocalPartition(tmp_path, lambda handle: held.update(variables=variables(handle)))
    with pytest.raises(IllegalStateValueError, match=words):
        partition.handle([("a", 1)], lambda _: use(*held["variables"]))
    assert partition.provider.latest_version() == 0


def test_errors_are_of_one_family() -> None:
    for kind in (HandleStateError, IllegalStateValueError, StateDeclarationError, TimeModeError):
        assert issubclass(kind, StatefulProcessorError)


@pytest.mark.parametrize("kind", ["Value", "List"])
def test_a_variable_that_init_deletes_again_is_not_to_be_used(kind: str) -> None:
    class Temporary(StatefulProcessor):
        def init(self, handle: Any) -> None:
            self.kept = handle.getValueState("kept", "x INT")
            self.temporary = getattr(handle, f"get{kind}State")("temporary", "x INT")
            handle.deleteIfExists("temporary")

        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
            for use, doing in (
                (self.temporary.exists, "checking"),
                (self.temporary.get, "getting"),
            ):
                with pytest.raises(
                    PySparkRuntimeError, match=f"Error {doing} {kind.lower()} state.*temporary is not initialized"
                ):
                    use()
            self.kept.update((1,))
            yield Row(x=1)

    tester = ProcessorTester(Temporary())
    assert tester.test("a", [Row(x=5)]) == [Row(x=1)]
    assert tester.peekValueState("kept", "a") == (1,)
