"""A comparison that fails, hangs or dies has a part that says so, and leaves no process behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from comparisons import COMPARISONS
from rich.console import Console
from suite import runner
from suite.model import VENV, VENV42, VENV43

from tests.patience import HANG, PATIENCE

QUIET = Console(quiet=True)
PROVIDER = COMPARISONS["provider"]


def call(code: str, seconds: float = PATIENCE) -> int:
    return runner.call([sys.executable, "-c", code], seconds, dict(os.environ))


def test_a_child_has_a_status() -> None:
    assert call("import sys; sys.exit(3)") == 3
    assert call("import os; os.abort()") == -6


def test_each_turn_begins_with_another_contestant() -> None:
    assert list(runner.Steps(QUIET).turns("a scan", {"ours": 1, "redis": 2, "none": 3}, 2)) == [
        *("ours", "redis", "none"),
        *("redis", "none", "ours"),
    ]


def test_the_memory_of_the_processes_is_known_by_role(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(runner, "LOOK_EVERY", 0.05)
    by_role, path = runner.memory_by_role, tmp_path / "seen"

    def look(child: int, processes: list[psutil.Process]) -> dict[str, float]:
        memory = by_role(child, processes)
        if memory.get("hosts", 0.0) > 200:
            path.write_text("seen")
        return memory

    monkeypatch.setattr(runner, "memory_by_role", look)
    host = "import time; held = bytes(range(256)) * (200 << 12); time.sleep(1e6)"
    code = (
        "import os, subprocess, sys, time\n"
        f"host = subprocess.Popen([sys.executable, '-c', {host!r}, 'ray::StateStoreHost'])\n"
        f"while not os.path.exists({str(path)!r}): time.sleep(0.01)\n"
        "host.kill()"
    )
    memory: dict[str, float] = {}
    assert runner.call([sys.executable, "-c", code], PATIENCE, dict(os.environ), memory) == 0
    assert 200 < memory["hosts"] < 400 and 1 < memory["driver or client"] < 100


def gone(pid: int) -> bool:
    end = time.monotonic() + PATIENCE  # it would sleep for longer
    while time.monotonic() < end:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False


FAMILY = f"""
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep({HANG})"], start_new_session=True)
open({{path!r}}, "w").write(str(child.pid))
"""


@pytest.mark.long
def test_a_child_that_hangs_is_ended_with_all_its_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "pid"

    def monotonic() -> float:
        """No time passes before the child has started its own."""
        return PATIENCE if path.exists() and path.read_text() else 0.0

    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=monotonic))
    monkeypatch.setattr(runner, "LOOK_EVERY", 0.05)
    monkeypatch.setattr(runner, "LEAVE", 0.1)
    with pytest.raises(TimeoutError):
        call(FAMILY.format(path=str(path)) + f"time.sleep({HANG})", seconds=1.5)
    assert gone(int(path.read_text()))


@pytest.mark.long
def test_processes_that_a_child_leaves_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "LOOK_EVERY", 0.2)
    monkeypatch.setattr(runner, "LEAVE", 0.1)
    path, seen = tmp_path / "pid", tmp_path / "seen"
    look = runner._descendants

    def noting(pid: int) -> list[psutil.Process]:
        found = look(pid)
        if found:
            seen.touch()
        return found

    monkeypatch.setattr(runner, "_descendants", noting)
    until_seen = f"while not os.path.exists({str(seen)!r}): time.sleep(0.05)"
    assert call(FAMILY.format(path=str(path)) + until_seen) == 0
    assert gone(int(path.read_text()))


@pytest.mark.thorough  # otherwise: test_a_child_that_dies_is_in_the_part
@pytest.mark.long
def test_a_failure_is_in_the_part() -> None:
    part = runner.run(PROVIDER, VENV, "smoke", {"keys": "many", "turns": 1}, QUIET)
    assert part.failure is not None and part.failure.startswith(("TypeError: ", "ValueError: "))
    assert part.cases == () and part.size == {"keys": "many", "turns": 1}


@pytest.mark.thorough  # otherwise: test_a_child_that_hangs_is_ended_with_all_its_processes
@pytest.mark.long
def test_a_comparison_that_takes_too_long_is_in_the_part() -> None:
    hasty = replace(PROVIDER, minutes={"smoke": 0.005, "full": 1})
    part = runner.run(hasty, VENV, "smoke", hasty.size("smoke", {}), QUIET)
    assert part.failure == "It was not through after 0.005 minutes."


def test_a_child_that_dies_is_in_the_part(monkeypatch: pytest.MonkeyPatch) -> None:
    whole: Callable[..., int] = runner.call
    monkeypatch.setattr(
        runner, "call", lambda command, *rest: whole([command[0], "-c", "import os; os.kill(os.getpid(), 9)"], *rest)
    )
    part = runner.run(PROVIDER, VENV, "smoke", {}, QUIET)
    assert part.failure is not None and "ended with status -9 and gave no result" in part.failure


def test_only_smoke_runs_do_without_the_second_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    given = dict[str, str]()

    def call(command: list[str], seconds: float, environment: dict[str, str], memory: dict[str, float]) -> int:
        given[command[command.index("--kind") + 1]] = environment["JAVA_TOOL_OPTIONS"]
        return 0

    monkeypatch.setattr(runner, "call", call)
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", "-Dmine=1")
    for kind in ("smoke", "full"):
        runner.run(PROVIDER, VENV, kind, {}, QUIET)
    assert given == {"smoke": f"-Dmine=1 {runner.SMOKE_JVM}", "full": "-Dmine=1"}


def test_an_environment_that_is_not_there_is_in_the_part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STATESTORE_VENV42", str(tmp_path))
    part = runner.run(COMPARISONS["throughput"], VENV42, "smoke", {}, QUIET)
    assert part.failure == f"STATESTORE_VENV42={tmp_path} has no bin/python."


def test_an_environment_that_cannot_be_made_is_in_the_part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    given = list[Sequence[str]]()

    def run(command: Sequence[str], cwd: Path, check: bool) -> subprocess.CompletedProcess[bytes]:
        given.append(command)
        return subprocess.CompletedProcess(command, 3 if len(given) == 1 else 0)

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(runner.EnvironmentMissingError, match="--only-make ended with status 3 and did not make"):
        runner.interpreter(VENV43)
    assert given[0][1:] == ["-m", "tests.matrix", "--cells", "spark-4.3", "--only-make"]
    with pytest.raises(runner.EnvironmentMissingError, match="ended with status 0 and did not make"):
        runner.interpreter(VENV43)
    python = tmp_path / ".venvs" / "spark-4.3" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    assert runner.interpreter(VENV43) == python and len(given) == 2
