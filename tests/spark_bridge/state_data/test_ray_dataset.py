"""State as a Ray ``Dataset``, read by the tasks of a real Ray."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from spark_bridge import read_state_dataset, state_table
from spark_bridge.exceptions import RequestError
from tests.scratch import SCRATCH
from tests.spark_bridge.queryable.client_world import Cluster

pytestmark = pytest.mark.ray


@pytest.fixture
def local_ray() -> Iterator[None]:
    """A Ray of its own."""
    ray_dir = tempfile.mkdtemp(prefix="rs-", dir=SCRATCH)
    ray.init(
        address="local",
        num_cpus=2,
        log_to_driver=False,
        logging_level="WARNING",
        include_dashboard=False,
        _temp_dir=ray_dir,
        object_store_memory=100 << 20,
    )
    yield
    ray.shutdown()
    shutil.rmtree(ray_dir, ignore_errors=True)


def test_tasks_read_what_is_wanted(tmp_path: Path, local_ray: None) -> None:
    cluster = Cluster(tmp_path)
    try:
        cluster.batch({i: (i, f"user {i}") for i in range(2_000)})
        cluster.batch({1: None})
        location = str(cluster.world.root / "ck")
        everything = read_state_dataset(location, "totals")
        expected = state_table(location, "totals")
        assert everything.schema().names == expected.column_names
        assert sorted(map(repr, everything.take_all())) == sorted(map(repr, expected.to_pylist()))
        some = read_state_dataset(
            location, "totals", columns=["user", "n"], where=[("user", ">=", 10), ("user", "<", 13)]
        )
        assert sorted(map(repr, some.take_all())) == [repr({"user": n, "n": n}) for n in (10, 11, 12)]
        one = read_state_dataset(location, "totals", where=[("user", "=", 7)])
        assert one.materialize().num_blocks() == 1 and one.take_all()[0]["n"] == 7
        assert read_state_dataset(location, "totals", where=[("user", "=", 1)]).count() == 0
        assert read_state_dataset(location, "totals", version=1).count() == 2_000
        with pytest.raises(RequestError, match="no column 'x'"):
            read_state_dataset(location, "totals", columns=["x"])
    finally:
        cluster.close()
