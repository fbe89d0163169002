"""One partition of a processor's state over a real provider in this process, batch by batch.

Steps of a processor's state, and their reads and writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from backends import FileStateStoreProvider, StateStoreConf, StateStoreId
from backends.encoding.keys import decode_keys, encode_keys
from backends.encoding.operator_schema import OperatorSchema
from coordinator_actor.messages import BatchTimes, OperatorFigures
from spark_bridge.stateful.process_task import ProcessorState
from spark_bridge.stateful.testing import LocalStateAccess

KEY_SCHEMA = pa.schema([pa.field("user", pa.string()), pa.field("n", pa.int32())])
KEY_GROUPS = (3, 11)


class LocalPartition:
    """Keys are (user, n). ``init`` declares the state variables, and keeps them where the test finds them."""

    def __init__(
        self,
        directory: Path,
        init: Callable[[Any], None],
        time_mode: str = "none",
        schema: OperatorSchema | None = None,
    ) -> None:
        self.init = init
        self.time_mode = time_mode
        if schema is None:
            driver = ProcessorState(KEY_SCHEMA, time_mode, None)
            init(driver.handle)
            schema = OperatorSchema(driver.declare(), tuple(KEY_SCHEMA.names))
        # As a task gets it: through the schema file.
        self.schema = OperatorSchema.from_json(schema.to_json())
        conf = StateStoreConf(fsync=False, compression="none")
        self.provider = FileStateStoreProvider(StateStoreId(str(directory), "op", 0), conf)
        self.figures: dict[str, float] = {}

    @contextmanager
    def batch(self, timestamp_ms: int = 0, watermark_ms: int = 0) -> Iterator[ProcessorState]:
        """The next batch; commits at the end."""
        store = LocalStateAccess(
            self.provider, self.schema, BatchTimes(timestamp_ms, watermark_ms), KEY_GROUPS, KEY_GROUPS[1]
        )
        state = ProcessorState(KEY_SCHEMA, self.time_mode, store)
        self.init(state.handle)
        yield state
        state.finish()
        store.commit(OperatorFigures())
        figures = state.figures
        self.figures = {"updated": figures.num_rows_updated, "removed": figures.num_rows_removed, **figures.custom}

    def handle(
        self, keys: Sequence[tuple[str | None, int]], work: Callable[[tuple[str | None, int]], None], **times: int
    ) -> None:
        """Run a batch of one step that calls ``work`` for each of the keys."""
        with self.batch(**times) as state:
            for step in steps(keys, len(keys)):
                run_step(state, step, work)

    def rows(self, family: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """All stored rows of a family: key columns and value columns."""
        version = self.provider.latest_version()
        store = self.provider.get_read_store(version)
        if not version:
            return []
        schema = self.schema.families[family]
        found = []
        for batch in store.scan(b"", None, family):
            keys = decode_keys(batch.column(0), schema.key).to_pylist()
            values = schema.decode_values(batch.column(1)).to_pylist()
            found += [(tuple(k.values()), v) for k, v in zip(keys, values, strict=True)]
        store.abort()
        return found


def encoded(keys: Sequence[tuple[str | None, int]]) -> pa.BinaryArray:
    """Stored keys, in the order given; a key's group depends on its number."""
    columns = [pa.array([k[i] for k in keys], f.type) for i, f in enumerate(KEY_SCHEMA)]
    groups = np.array([KEY_GROUPS[0] + k[1] % (KEY_GROUPS[1] - KEY_GROUPS[0]) for k in keys], np.int64)
    return encode_keys(pa.RecordBatch.from_arrays(columns, schema=KEY_SCHEMA), groups)


def steps(keys: Sequence[tuple[str | None, int]], *sizes: int) -> list[list[tuple[str | None, int]]]:
    """The keys in stored order, in steps of these sizes; the last one again and again."""
    ordered = [key for _, key in sorted(zip(encoded(keys).to_pylist(), keys, strict=True), key=lambda pair: pair[0])]
    made = []
    pending = list(sizes)
    while ordered:
        size = max(1, pending.pop(0) if len(pending) > 1 else pending[0])
        made.append(ordered[:size])
        ordered = ordered[size:]
    return made


def run_step(
    state: ProcessorState, keys: Sequence[tuple[str | None, int]], work: Callable[[tuple[str | None, int]], None]
) -> None:
    """One step: ``work`` is called for each key, while it is the current one."""
    columns = [pa.array([k[i] for k in keys], f.type) for i, f in enumerate(KEY_SCHEMA)]
    state.begin(encoded(keys), pa.RecordBatch.from_arrays(columns, schema=KEY_SCHEMA))
    for i, key in enumerate(keys):
        state.set_key(i)
        work(key)
    state.end()


KEYS: list[tuple[str | None, int]] = [("a", 1), ("a\x00b", 1), (None, 2), ("", 11), ("z", 18), ("q", -1)]


class Variables:
    """One variable of each kind."""

    def __init__(self, ttls: tuple[int | None, int | None, int | None]) -> None:
        self.ttls = ttls

    def init(self, handle: Any) -> None:
        value_ttl, list_ttl, map_ttl = self.ttls
        self.handle = handle
        self.value = handle.getValueState("value", "count BIGINT, tag STRING", value_ttl)
        self.list = handle.getListState("list", "x INT, text STRING", list_ttl)
        self.map = handle.getMapState("map", "user INT, part STRING", "v DOUBLE", map_ttl)


KEY = ("a", 1)


OTHER = ("b", -1)  # in the last key group, and its stored key ends with 0xFF


def partition_of(directory: Path, declare: Callable[[Any], Any], time_mode: str = "none") -> tuple[LocalPartition, Any]:
    """A partition with one state variable, and a holder of it in ``.state``."""

    class Holder:
        state: Any
        handle: Any

    def init(handle: Any) -> None:
        Holder.handle, Holder.state = handle, declare(handle)

    return LocalPartition(directory, init, time_mode), Holder


def check(what: bool) -> None:
    assert what
