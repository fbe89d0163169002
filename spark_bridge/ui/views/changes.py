"""The hottest keys of an operator: those that the last versions have changed most often."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from starlette.responses import Response

from backends.encoding.given_values import python_values
from spark_bridge.exceptions import RequestError
from spark_bridge.ui.lookups import PAGE_READ_SECONDS
from spark_bridge.ui.requests import PageCall
from spark_bridge.ui.typed_values import text_of

SHOWN_VERSIONS = 10
"""At most this many of the last versions are looked at."""
MOST_CHANGES = 200_000
"""At most this many changes are counted."""
SHOWN = 20


def hottest(call: PageCall) -> Response:
    """Count the changes of the last versions by key."""
    table = call.table()
    if table is None:
        raise RequestError("table= must name the state whose keys are counted.")
    newest = table.versions.stop - 1
    since = max(table.versions.start, newest - SHOWN_VERSIONS)
    counts: Counter[tuple[object, ...]] = Counter()
    deadline, is_cut = time.monotonic() + PAGE_READ_SECONDS, False
    for change in call.system.recent_changes(table, since, newest) if since < newest else ():
        columns = [python_values(change.batch.column(name)) for name in table.key]
        counts.update(_hashable(key) for key in zip(*columns, strict=True))
        is_cut = counts.total() > MOST_CHANGES or time.monotonic() > deadline
        if is_cut:
            break
    return call.render(
        "hottest.html",
        table=table,
        since=since,
        until=newest,
        is_cut=is_cut,
        changes=counts.total(),
        keys=len(counts),
        look_up=lambda key: call.url("keys", table=table.id, **_parameters(table.key, key)),
        hottest=counts.most_common(SHOWN),
    )


def _hashable(key: tuple[object, ...]) -> tuple[object, ...]:
    return tuple(part if part.__hash__ is not None else str(part) for part in key)


def _parameters(names: Sequence[str], key: tuple[object, ...]) -> dict[str, str]:
    """Return a key as the form of a lookup sends it."""
    parts = zip(names, key, strict=True)
    return {f"null.{n}" if v is None else f"key.{n}": "1" if v is None else text_of(v) for n, v in parts}
