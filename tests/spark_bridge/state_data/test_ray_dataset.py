"""State as a Ray ``Dataset``, read by the tasks of a real Ray."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from spark_bridge import read_state_dataset, state_table
from spark_bridge.exceptions import RequestError
from tests.spark_bridge.conftest import wait_until
from tests.spark_bridge.own_head import ray_of_its_own
from tests.spark_bridge.queryable.client_world import Cluster

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    with ray_of_its_own():
        yield


@pytest.mark.thorough  # otherwise: docs/how-to/state-as-data.md, which tests/spark_bridge/test_pages.py runs
def test_tasks_read_the_requested_rows(tmp_path: Path, local_ray: None) -> None:
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


def test_reader_is_warned_if_no_cpu_is_free(tmp_path: Path, local_ray: None, caplog: pytest.LogCaptureFixture) -> None:
    @ray.remote
    class Executor:
        def is_there(self) -> bool:
            return True

    def said() -> list[str]:
        ours = (record for record in caplog.records if record.name.startswith("spark_bridge"))
        return [record.getMessage() for record in ours if record.levelname == "WARNING"]

    cluster = Cluster(tmp_path)
    try:
        cluster.batch({1: (1, "a")})
        location = str(cluster.world.root / "ck")
        assert read_state_dataset(location, "totals").count() == 1
        wait_until(lambda: ray.available_resources().get("CPU"))
        caplog.clear()
        read_state_dataset(location, "totals")
        assert not said()
        executor = Executor.options(num_cpus=ray.cluster_resources()["CPU"]).remote()
        assert ray.get(executor.is_there.remote())
        wait_until(lambda: not ray.available_resources().get("CPU"))  # Ray tells a moment later
        read_state_dataset(location, "totals")
        assert ["No CPU of the Ray cluster is free" in warning for warning in said()] == [True]
        ray.kill(executor)
    finally:
        cluster.close()
