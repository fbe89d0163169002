"""Restarts of ``transform_with_state`` with another schema, and errors of processors, end to end on RayDP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pyspark.sql import DataFrame, Row

from spark_bridge import (
    StatefulProcessor,
    transform_with_state,
)
from tests.spark_bridge.conftest import Stream
from tests.spark_bridge.streams.processors import (
    based_on,
    error_of,
    process_all,
)

pytestmark = pytest.mark.spark


class Totals:
    """Sums up; ``schema`` and ``others`` are its state."""

    schema = "total int, last string"
    others: tuple[str, ...] = ()
    deleted: tuple[str, ...] = ()
    bad: Any = None

    def init(self, handle: Any) -> None:
        self.total = handle.getValueState("total", self.schema)
        self.other = [handle.getListState(name, "n long") for name in self.others]
        for name in self.deleted:
            handle.deleteIfExists(name)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        names = [part.split()[0] for part in self.schema.split(", ")]
        state = dict(zip(names, self.total.get() or (None,) * len(names), strict=True))
        seen = repr((state, [[n for (n,) in other.get()] for other in self.other]))
        for row in rows:
            if row.v == self.bad:
                raise ValueError(f"Not {self.bad} again.")
            state |= {"total": (state["total"] or 0) + row.v, "last": f"{row.v}"}
            for other in self.other:
                other.appendValue((row.v,))
        self.total.update(tuple(state[name] for name in names))
        yield Row(k=key[0], seen=seen)

    def close(self) -> None:
        pass


def totals_on(stream: Stream, **attributes: Any) -> DataFrame:
    return transform_with_state(
        stream.read(),
        "k",
        based_on(StatefulProcessor, Totals, **attributes),
        "k long, seen string",
        operator="totals",
        num_partitions=2,
    )


def test_state_keeps_its_meaning_when_its_schema_evolves(make_stream: Callable[..., Stream]) -> None:
    stream = make_stream("k long, v int")

    def next_batch(**attributes: Any) -> str:
        stream.add([(1, 2)])
        ((row,),) = process_all(totals_on(stream, **attributes), stream)
        return str(row[1])

    wider = "extra double, last string, total long"
    assert next_batch(others=("old",)) == "({'total': None, 'last': None}, [[]])"
    # A field and a variable more, another order, a wider type.
    seen = next_batch(schema=wider, others=("old", "new"))
    assert seen == "({'extra': None, 'last': '2', 'total': 2}, [[2], []])"
    # A field less; a variable deleted.
    seen = next_batch(schema="total long, last string", others=("new",), deleted=("old",))
    assert seen == "({'total': 4, 'last': '2'}, [[2]])"
    # What was deleted does not come back.
    seen = next_batch(schema="total long, last string", others=("new", "old"))
    assert seen == "({'total': 6, 'last': '2'}, [[2, 2], []])"
    stream.add([(1, 2)])
    error = error_of(totals_on(stream, schema="total int, last string", others=("new", "old")), stream)
    assert "'total' was long, which cannot be read as integer" in error, error
    assert "total long)" in error and "(total integer, last string)" in error, error


@pytest.mark.spark42_only
def test_an_error_of_the_processor_ends_the_query_and_changes_nothing(make_stream: Callable[..., Stream]) -> None:
    stream = make_stream("k long, v int")
    stream.add([(1, 5)])
    stream.add([(1, 13), (2, 1), (3, 1)])
    error = error_of(totals_on(stream, bad=13), stream)
    assert "ValueError: Not 13 again." in error
    # After a fix and a restart, it continues from the failed batch.
    (found,) = process_all(totals_on(stream, bad=None), stream)
    assert [(k, seen) for k, seen in found] == [
        (1, "({'total': 5, 'last': '5'}, [])"),
        (2, "({'total': None, 'last': None}, [])"),
        (3, "({'total': None, 'last': None}, [])"),
    ]


class Wrong:
    """Gives what does not fit the output schema."""

    def init(self, handle: Any) -> None:
        pass

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        yield Row(k=key[0], seen={"a": 1})

    def close(self) -> None:
        pass


def test_output_that_does_not_fit_is_named(make_stream: Callable[..., Stream]) -> None:
    stream = make_stream("k long, v int")
    stream.add([(1, 5)])
    df = transform_with_state(
        stream.read(), "k", based_on(StatefulProcessor, Wrong), "k long, seen int", operator="wrong"
    )
    error = error_of(df, stream)
    assert "seen" in error and "{'a': 1}" in error, error
