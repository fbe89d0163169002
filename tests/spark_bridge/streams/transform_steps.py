"""Streams of commands, and the answers of a processor to them."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql import DataFrame

from spark_bridge import (
    StatefulProcessor,
    transform_with_state,
    transform_with_state_in_pandas,
)
from tests.spark_bridge.conftest import Stream
from tests.spark_bridge.streams.processors import (
    BY,
    DELAY_MS,
    OUTPUT,
    Commands,
    PandasCommands,
    based_on,
    drain,
    gather,
    ordered,
)


def commands_on(stream: Stream, processor: type = Commands, time_mode: str = "none", **options: Any) -> DataFrame:
    """A stream of commands, watermark included, through their processor."""
    transform = transform_with_state_in_pandas if issubclass(processor, PandasCommands) else transform_with_state
    return transform(
        stream.read().withWatermark("ts", f"{DELAY_MS} milliseconds"),
        BY,
        based_on(StatefulProcessor, processor, time_mode=time_mode),
        OUTPUT,
        operator="commands",
        time_mode=time_mode,
        **{"num_partitions": 3, **options},
    )


def process_all(df: DataFrame, stream: Stream) -> list[list[tuple[Any, ...]]]:
    """Run until all is processed, and stop; the output of each batch that gave some."""
    query, found = gather(df, stream.checkpoint)
    drain(query, stream.checkpoint, stream.files)
    query.stop()
    return [ordered(found[n]) for n in sorted(found) if found[n]]


def error_of(df: DataFrame, stream: Stream) -> str:
    """Run a query that must fail, and return its error."""
    with pytest.raises(Exception) as raised:
        process_all(df, stream)
    return str(raised.value)


def answers(rows: list[tuple[Any, ...]]) -> list[tuple[int, str]]:
    return sorted((seq, found) for _, _, seq, found in rows)
