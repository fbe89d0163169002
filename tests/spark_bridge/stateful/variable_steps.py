"""Steps of a processor's state, and their reads and writes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.spark_bridge.host.local_partition import LocalPartition

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
