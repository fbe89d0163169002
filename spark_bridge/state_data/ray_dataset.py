"""State as a Ray ``Dataset``: the tasks of Ray Data read one partition of the state each, from storage alone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import ray
from ray.data import Datasource, ReadTask, read_datasource
from ray.data.block import BlockMetadata

from coordinator_actor.reading.stored_versions import find_state
from spark_bridge.exceptions import RequestError
from spark_bridge.queryable.client.arguments import WhereCondition
from spark_bridge.state_data.state_sources import StateSource, selected, state_source

if TYPE_CHECKING:
    from ray.data import Dataset

log = logging.getLogger(__name__)


def read_state_dataset(
    checkpoint_location: str,
    operator: str,
    state: str | None = None,
    version: int | None = None,
    *,
    columns: Sequence[str] | None = None,
    where: Sequence[WhereCondition] | None = None,
    flatten: bool = True,
    state_columns: bool = False,
    state_location: str | None = None,
    storage_options: Mapping[str, str] | None = None,
    concurrency: int | None = None,
    ray_remote_args: Mapping[str, Any] | None = None,
) -> Dataset:
    """Return the rows of a state variable at a retained version, by default the last completed one, as a ``Dataset``.

    A read task reads one partition, which is a range of key groups, and yields its rows as blocks. ``columns`` are the
    columns wanted (None: all of ``state_batches``). ``where`` are conditions as in ``QueryableStateClient.scan``, as
    ``("user", ">=", 100)``; all must hold. Conditions on all key columns leave out partitions, and conditions on the
    first key columns leave out ranges of keys. See ``state_batches`` for the other arguments, the columns and the
    errors; ``concurrency`` and ``ray_remote_args`` are those of ``ray.data.read_datasource``. The version is fixed by
    this call. Also raises ``RequestError`` naming a column that does not exist, or a value that is not of a column's
    type. Logs a warning if no CPU of the Ray cluster is free, since the tasks of Ray Data wait until one is.
    """
    place = find_state(checkpoint_location, state_location, storage_options)
    source = state_source(place, operator, state, version, collect=not flatten, raw=state_columns)
    if columns is not None and not columns:
        raise RequestError("columns=[] asks for no columns; name at least one, or leave it out.")
    datasource = StateDatasource(source, columns, where)
    remote_args = None if ray_remote_args is None else dict(ray_remote_args)
    dataset = read_datasource(datasource, concurrency=concurrency, ray_remote_args=remote_args)
    if ray.available_resources().get("CPU", 0) < 1:
        log.warning(
            "No CPU of the Ray cluster is free: Ray Data waits until one is. Spark's executors keep theirs: start "
            "Spark with fewer executor cores than the cluster has CPUs, or read in another cluster."
        )
    return dataset


class StateDatasource(Datasource):  # type: ignore[misc]
    """Some rows and columns of a source for Ray Data. Raises ``RequestError`` as ``selected`` does."""

    def __init__(
        self, source: StateSource, columns: Sequence[str] | None = None, where: Sequence[WhereCondition] | None = None
    ) -> None:
        super().__init__()
        chosen = selected(source, columns, where)
        self._source, self._packed = chosen.split()
        self._schema = chosen.schema

    def get_name(self) -> str:
        """Return the name that Ray shows."""
        return "RayStatestore"

    def estimate_inmemory_data_size(self) -> int | None:
        """Return None: storage does not know the size of the rows."""
        return None

    def get_read_tasks(self, parallelism: int, *args: Any, **kwargs: Any) -> list[ReadTask]:
        """Return a task for each partition that can have such rows; if none can, one task without rows."""
        metadata = BlockMetadata(num_rows=None, size_bytes=None, input_files=None, exec_stats=None)
        reads: list[Callable[[], Iterator[pa.Table]]] = [
            partial(_blocks, self._source, packed) for packed in self._packed
        ]
        nothing = partial(_no_rows, self._schema)
        return [ReadTask(read, metadata, schema=self._schema) for read in reads or [nothing]]


def _blocks(source: StateSource, packed: bytes) -> Iterator[pa.Table]:
    """Yield the rows of one partition, in a task of Ray; Ray puts small tables together to blocks."""
    is_empty = True
    for batch in source.packed_batches(packed):
        is_empty = False
        yield pa.Table.from_batches([batch])
    if is_empty:
        yield from _no_rows(source.schema)


def _no_rows(schema: pa.Schema) -> Iterator[pa.Table]:
    yield schema.empty_table()
