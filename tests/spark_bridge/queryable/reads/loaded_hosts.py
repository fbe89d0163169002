"""A host with some versions, as tests of its reads begin."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from spark_bridge.queryable.protocol import At, ScanRequest
from tests.spark_bridge.queryable.host_world import HostWorld

KEYS = range(40)


def exactly(version: int, *, held_only: bool = False) -> At:
    return At("version", version, held_only)


def filled(value: int) -> dict[int, int]:
    return dict.fromkeys(KEYS, value)


def table(w: HostWorld, **asked: Any) -> pa.Table:
    answer = w.reads[0].scan(ScanRequest(w.run, "op", **asked))
    return pa.Table.from_batches(list(answer.batches), answer.schema)
