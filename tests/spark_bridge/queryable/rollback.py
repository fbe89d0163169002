"""A query that is started again from an older version."""

from __future__ import annotations

from tests.spark_bridge.queryable.client_world import Cluster


def go_back(c: Cluster, version: int, run: str) -> None:
    """The query is started again from an older version."""
    for batch in range(version, c.version):
        (c.world.root / f"ck/offsets/{batch}").unlink()
        (c.world.root / f"ck/commits/{batch}").unlink()
    c.start(run)
    assert c.version == version
