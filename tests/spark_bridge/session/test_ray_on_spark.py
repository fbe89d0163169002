"""What Ray on Spark is refused for before anything is started; ``streams/test_spark_clusters.py`` has a real one."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from spark_bridge.exceptions import EnvironmentProblemError
from spark_bridge.session import ray_cluster
from spark_bridge.session.ray_cluster import AUTH_MODE, CoreUse, require_no_token, too_few_cores


@pytest.mark.parametrize("mode", [None, "token", "TOKEN"])
def test_token_is_rejected_with_the_setting_to_use(mode: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(AUTH_MODE, raising=False)
    if mode is not None:
        monkeypatch.setenv(AUTH_MODE, mode)
    with pytest.raises(EnvironmentProblemError, match=rf"InvalidAuthToken.*{AUTH_MODE}=disabled"):
        require_no_token()
    monkeypatch.setenv(AUTH_MODE, "disabled")
    require_no_token()


@pytest.mark.parametrize(
    ("use", "more", "task_cpus", "refused"),
    [
        (CoreUse(4, 0), 0, 1, False),  # no Ray on this Spark: its cores are not checked
        (CoreUse(0, 0), 0, 1, False),  # no executor has come yet
        (CoreUse(4, 2), 0, 1, False),
        (CoreUse(4, 4), 0, 1, True),
        (CoreUse(4, 0), 4, 1, True),
        (CoreUse(4, 0), 3, 1, False),
        (CoreUse(4, 3), 0, 2, True),
    ],
)
def test_stream_needs_a_core_in_addition_to_rays_workers(
    use: CoreUse, more: int, task_cpus: int, refused: bool
) -> None:
    problem = too_few_cores(use, more, task_cpus)
    assert (problem is not None) == refused
    if problem:
        # "Give Ray fewer workers or fewer CPUs each, or Spark more executors."
        assert too_few_cores(CoreUse(use.all, 0 if more else use.all - task_cpus), 0, task_cpus) is None
        assert too_few_cores(CoreUse(use.all + task_cpus, use.of_ray), more, task_cpus) is None
        assert f"take {use.of_ray + more} of the {use.all} cores" in problem and "wait for ever" in problem


def test_missing_ray_executable_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(AUTH_MODE, "disabled")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(EnvironmentProblemError, match=r"starts Ray's nodes, is not on the PATH \(/nowhere\)") as told:
        ray_cluster.setup_ray_on_spark(object(), 1)  # type: ignore[arg-type]
    named = re.search(r"Add the directory of the environment, probably (\S+), on", str(told.value))
    assert named is not None
    monkeypatch.setenv("PATH", named[1])
    started: list[dict[str, object]] = []
    monkeypatch.setattr("ray.util.spark.setup_ray_cluster", lambda **options: started.append(options))
    monkeypatch.setattr(ray_cluster, "core_use", lambda spark: CoreUse(2, 0))
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    spark = SimpleNamespace(sparkContext=Context())
    assert ray_cluster.setup_ray_on_spark(spark, 1) == "10.0.0.1:6379"  # type: ignore[arg-type]
    assert started[0]["max_worker_nodes"] == 1


class Context:
    """A Spark context on a cluster."""

    _jsc = SimpleNamespace(sc=lambda: SimpleNamespace(isLocal=lambda: False))

    def getConf(self) -> dict[str, str]:
        return {}
