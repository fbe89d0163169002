"""Switching tracing on: valid settings, refused ones, and that nothing is imported while it is off."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from backends.exceptions import InvalidStateStoreArgument
from backends.tracing import checked_setting, setting_of_environment

ROOT = Path(__file__).parents[2]


def in_a_process(program: str, **variables: str) -> str:
    """Return the output of a new process: a process cannot change its setting."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**{k: v for k, v in os.environ.items() if not k.startswith("OTEL_")}, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_nothing_of_opentelemetry_is_imported_while_tracing_is_off() -> None:
    """By the modules of driver, tasks, hosts and coordinator, as far as these need neither Ray nor Spark."""
    program = """
import sys
from backends import spans
from backends import spans as trace_ids
from backends.tracing import set_up, setting_of_environment
import coordinator_actor.coordinator, spark_bridge.host.host, spark_bridge.flight_server
import spark_bridge.task.state_task, spark_bridge.session.progress
set_up(setting_of_environment(), {"role": "host"})
with spans.span("task", trace_ids.batch("run", 1)), spans.step("task.open"):
    assert spans.headers() == ()
spans.finished("batch", trace_ids.batch("run", 1), spans.now(), is_root=True)
print(spans.is_on(), sorted(m for m in sys.modules if m.startswith("opentelemetry")))
"""
    assert in_a_process(program) == "False []"


@pytest.mark.parametrize("setting", ["otlp", "http://c:4318", "https://c/otel", "mine:set_up", "my.own_1:begin"])
def test_settings(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STATESTORE_TRACING", setting)
    assert setting_of_environment() == setting


def test_no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STATESTORE_TRACING", "")
    assert setting_of_environment() is None


@pytest.mark.parametrize("setting", ["on", "jaeger:4318", "http://", "http://me:secret@c:4318", "a:b:c", "a b:c", ":f"])
def test_settings_that_there_are_not(setting: str) -> None:
    with pytest.raises(InvalidStateStoreArgument, match="is not valid: give the address of a collector"):
        checked_setting(setting)


FUNCTION = """
import sys, types
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from backends.exceptions import InvalidStateStoreArgument
from backends import spans
from backends.tracing import set_up, try_set_up
mine = types.ModuleType("mine")
calls = []
mine.set_up = lambda: (calls.append(1), trace.set_tracer_provider(TracerProvider()))
mine.idle = lambda: None
mine.number = 7
sys.modules["mine"] = mine
"""
LOGGED = f"{FUNCTION}import logging\nlogging.basicConfig(stream=sys.stdout)\n"


def test_a_function_sets_the_provider_once() -> None:
    program = "set_up('mine:set_up', {}), set_up('mine:set_up', {}), set_up('mine:idle', {}), set_up(None, {})"
    assert in_a_process(f"{FUNCTION}{program}; print(spans.is_on(), calls)") == "True [1]"


def test_a_provider_that_is_there_stays() -> None:
    program = "trace.set_tracer_provider(TracerProvider()); set_up('mine:set_up', {})"
    assert in_a_process(f"{FUNCTION}{program}; print(spans.is_on(), calls)") == "True []"


REFUSED = {
    "mine:idle": "has set no provider",
    "mine:number": "which is not a function",
    "mine:nothing": "names no function of this process: module 'mine' has no attribute",
    "not_there:set_up": "No module named 'not_there'",
}


def test_a_function_that_is_not_there_is_refused_and_fails_no_task() -> None:
    """Each case has its own fork, because a process logs only once that tracing is off."""
    program = f"""{LOGGED}import os
for setting in {list(REFUSED)}:
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        for _ in range(2):
            try:
                set_up(setting, {{}})
            except InvalidStateStoreArgument as error:
                print("refused:", error)
        print("in tasks:")
        try_set_up(setting, {{}})
        try_set_up(setting, {{}})
        print(spans.is_on(), end="\\0", flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""
    *said, end = in_a_process(program).split("\0")
    assert len(said) == len(REFUSED) and end == ""
    for words, one in zip(REFUSED.values(), said, strict=True):
        refused, in_tasks = one.split("in tasks:")
        assert refused.count("refused:") == refused.count(words) == 2, "a second attempt is refused again"
        assert in_tasks.endswith("False")
        assert in_tasks.count("is off in this process") == 1, "not for each task of a worker"


def test_opentelemetry_that_is_not_installed_is_named() -> None:
    program = f"{LOGGED}sys.modules['opentelemetry'] = None\ntry_set_up('otlp', {{}}); print(spans.is_on())"
    done = in_a_process(program)
    assert done.endswith("False")
    assert "pip install 'ray-statestore[tracing]' on every machine" in done


def test_the_variable_of_the_sdk_switches_off() -> None:
    program = "set_up('mine:set_up', {}); print(spans.is_on())"
    assert in_a_process(FUNCTION + program, OTEL_SDK_DISABLED="true") == "False"
