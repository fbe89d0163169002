"""Tasks on a real Ray rewrite and create state; one task dies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
import ray

from backends.exceptions import InvalidStateStoreArgument
from spark_bridge import bootstrap_state, rewrite_state
from tests.patience import PATIENCE
from tests.spark_bridge.own_head import ray_of_its_own
from tests.spark_bridge.state_data.format_fixtures import Stored
from tests.spark_bridge.state_surgery.surgery_steps import GIVEN, PROGRAM, program_of, rows, tree, variables

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    with ray_of_its_own():
        yield


def dying_once(marker: str) -> Callable[[pa.RecordBatch], pa.RecordBatch]:
    """A function that no worker can import, and that ends the first process that calls it."""

    def function(batch: Any) -> Any:
        import os as of_worker
        import pathlib

        if not pathlib.Path(marker).exists():
            pathlib.Path(marker).touch()
            of_worker._exit(1)
        return batch

    return function


def test_tasks_of_ray_rewrite_state(local_ray: None, tmp_path: Path) -> None:
    old, said = Stored("file").checkpoint, list[str]()

    def split(batch: Any) -> Any:
        import pyarrow.compute as of_worker

        named = of_worker.is_valid(batch["k"])
        return {"named": batch.filter(named), "nameless": batch.filter(of_worker.invert(named))}

    def failing(batch: Any) -> Any:
        raise ZeroDivisionError("in the user's function")

    def to_one(batch: Any) -> Any:
        return batch.set_column(0, "k", pa.array(["one"] * batch.num_rows))

    report = rewrite_state(old, "totals", split, str(tmp_path / "split"), progress=said.append)
    both = rows(str(tmp_path / "split"), "named") + rows(str(tmp_path / "split"), "nameless")
    assert sorted(both, key=repr) == rows(old, "totals")
    assert sum(report.rows_written.values()) == len(both)
    assert any("read 2 sources: 13 rows" in line for line in said) and any("built" in line for line in said)
    same = dying_once(str(tmp_path / "died"))
    functions = {name: same for operator, name in variables(old) if operator == "visits"}
    rewrite_state(old, "visits", functions, str(tmp_path / "again"), program=program_of(old))
    assert (tmp_path / "died").exists()
    for operator, state in variables(old):
        assert rows(str(tmp_path / "again"), operator, state) == rows(old, operator, state)
    left = tree(tmp_path)
    with pytest.raises(ZeroDivisionError, match="in the user's function"):
        rewrite_state(old, "totals", failing, str(tmp_path / "failed"), program=program_of(old))
    with pytest.raises(InvalidStateStoreArgument, match="come several times"):
        rewrite_state(old, "totals", to_one, str(tmp_path / "failed"))
    assert tree(tmp_path) == left
    dry = rewrite_state(old, "totals", lambda batch: batch, str(tmp_path / "failed"), dry_run=True)
    assert dry.rows_written == {("totals", "default"): 13} and tree(tmp_path) == left


@pytest.mark.thorough
def test_a_dataset_of_ray_becomes_state(local_ray: None, tmp_path: Path) -> None:
    dataset = ray.data.from_arrow(GIVEN).repartition(3).map_batches(lambda t: t, batch_format="pyarrow")
    bootstrap_state(dataset, str(tmp_path / "ck"), PROGRAM)
    assert rows(str(tmp_path / "ck"), "totals") == sorted(GIVEN.to_pylist(), key=repr)


@pytest.mark.thorough
def test_waiting_for_a_cpu_is_reported(local_ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from spark_bridge.state_surgery import new_state as workers

    monkeypatch.setattr(workers, "WORKER_WAIT_SECONDS", 0.2)

    @ray.remote(num_cpus=2)
    class Holder:
        def ready(self) -> bool:
            return True

    holder = Holder.remote()
    assert ray.get(holder.ready.remote(), timeout=PATIENCE)
    said: list[str] = []

    def note(line: str) -> None:
        said.append(line)
        if "no CPU of the Ray cluster is free" in line:
            ray.kill(holder)

    bootstrap_state(GIVEN, str(tmp_path / "ck"), PROGRAM, progress=note)
    assert any('give ray_remote_args={"num_cpus": 0}' in line for line in said)
    assert len(rows(str(tmp_path / "ck"), "totals")) == pc.count(GIVEN["n.count.count"]).as_py()
