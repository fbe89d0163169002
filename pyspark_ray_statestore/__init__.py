"""The format ``ray_statestore`` of Spark 4: Spark finds data sources in packages whose names begin with ``pyspark_``.

Spark imports this package in a Python process of its own when it looks for any Python data source, so that nothing is
imported here before the format is used. It needs PySpark 4.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from spark_bridge.state_data.source_options import SourceOptions

NAME = "ray_statestore"


class DefaultSource(DataSource):  # type: ignore[misc]
    """The state of a query, or its changes, as a table or as a stream; see ``SourceOptions`` for the options."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return NAME

    def _options(self) -> SourceOptions:
        from spark_bridge.state_data.source_options import SourceOptions

        return SourceOptions.of(self.options)

    def schema(self) -> StructType:
        """Return the columns: of rows, or of changes."""
        from spark_bridge.state_data.frames import spark_schema
        from spark_bridge.state_data.source_options import source_schema

        return spark_schema(source_schema(self._options()))

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader of a table."""
        from spark_bridge.state_data.state_reader import reader_of

        return reader_of(self._options(), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """Return the reader of a stream of changes."""
        from spark_bridge.state_data.state_reader import stream_reader_of

        return stream_reader_of(self._options(), schema)
