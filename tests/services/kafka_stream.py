"""A stream that a test feeds through a Kafka topic, in place of files."""

from __future__ import annotations

import base64
import datetime
import json
import re
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType

from tests.services.kafka import KafkaTopics, Record
from tests.spark_bridge.conftest import Stream


def json_value(value: Any) -> Any:
    """Convert a value that JSON lacks to the form that Spark's ``from_json`` reads."""
    if isinstance(value, datetime.datetime):
        return value.isoformat()
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


@dataclass
class KafkaStream(Stream):
    """A stream whose batches are records of a topic with one partition: one record is one micro-batch.

    So it replaces ``Stream`` in tests that count on batches. ``address`` is the broker's, and ``options`` are those of
    the source.
    """

    address: str = field(kw_only=True)
    options: dict[str, str] = field(kw_only=True, default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.topic = re.sub("[^A-Za-z0-9._-]", "-", self.root.as_posix())[-200:]
        self._topics = KafkaTopics(self.address)
        if self.topic not in self._topics.names():
            self._topics.create(self.topic, partitions=1)

    def add(self, rows: list[tuple[Any, ...]] | pd.DataFrame) -> None:
        """Append one record with all these rows."""
        names = self.arrow_schema.names
        if isinstance(rows, pd.DataFrame):
            table = pa.Table.from_pandas(rows, schema=self.arrow_schema, preserve_index=False).to_pylist()
        else:
            table = [dict(zip(names, row, strict=True)) for row in rows]
        self._topics.send(self.topic, [Record(None, json.dumps(table, default=json_value).encode())])
        self.files += 1

    def read(self, name: str | None = None) -> DataFrame:
        """Return the stream; Spark 4.2 takes the ``name`` of its source, if sources have names."""
        options = {
            "kafka.bootstrap.servers": self.address,
            "subscribe": self.topic,
            "startingOffsets": "earliest",
            "maxOffsetsPerTrigger": "1",
            **self.options,
        }
        reader = self.spark.readStream.format("kafka").options(**options)
        records = (reader if name is None else reader.name(name)).load()
        schema = self.spark.createDataFrame([], self.schema).schema
        rows = F.from_json(F.col("value").cast("string"), ArrayType(schema))
        return records.select(F.inline(rows))
