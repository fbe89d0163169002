"""What Ray on Spark is refused for before anything is started; ``streams/test_spark_clusters.py`` has a real one."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from spark_bridge.exceptions import EnvironmentProblemError
from spark_bridge.session import ray_cluster
from spark_bridge.session.ray_cluster import START_HOOK, CoreUse, too_few_cores

ROOT = Path(__file__).parents[3]


class UsersHook:
    """The hook of a platform or a user."""

    def custom_environment_variables(self) -> dict[str, str]:
        return {"OWN": "1"}


@pytest.mark.parametrize("users_hook", [None, f"{__name__}.UsersHook"])
def test_nodes_get_the_token_and_the_users_variables(users_hook: str | None, tmp_path: Path) -> None:
    """``streams/test_spark_clusters.py`` starts a real cluster. This process must not have the token afterwards."""
    program = f"""
import os
from ray.util.spark.cluster_init import _create_hook_entry
from spark_bridge.session.ray_cluster import token_for_nodes
with token_for_nodes():
    variables = _create_hook_entry(False).custom_environment_variables()
assert os.environ.get("{START_HOOK}") == {users_hook!r}
print(sorted(variables.items()))
"""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    environment |= {"HOME": str(tmp_path), "PYTHONPATH": str(ROOT)} | ({START_HOOK: users_hook} if users_hook else {})
    for mode in (None, "disabled"):
        given = environment if mode is None else {**environment, "RAY_AUTH_MODE": mode}
        command = [sys.executable, "-c", program]
        ran = subprocess.run(command, env=given, capture_output=True, text=True, check=True, timeout=60)
        variables = ast.literal_eval(ran.stdout.splitlines()[-1])
        expected = [("OWN", "1")] if users_hook else []
        if mode is None:
            token = (tmp_path / ".ray" / "auth_token").read_text()
            expected += [("RAY_AUTH_MODE", "token"), ("RAY_AUTH_TOKEN", token)]
        assert variables == expected


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
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
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
