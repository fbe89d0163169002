"""Processes of the actors: each event is one line of their logs, as text or as JSON; they have ordinary priority."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import pytest

from coordinator_actor.coordinator_conf import CoordinatorConf
from coordinator_actor.process import LOG_FORMAT_VARIABLE, JsonLines, TextLines


def record(message: str, *, failed: bool = False) -> logging.LogRecord:
    exc_info = None
    if failed:
        try:
            raise ValueError("two\nlines")
        except ValueError:
            exc_info = sys.exc_info()
    return logging.LogRecord("coordinator_actor.x", logging.WARNING, "x.py", 1, message, ("r-1",), exc_info)


def test_text_is_one_line_and_a_traceback_below() -> None:
    line = TextLines().format(record("Run %s\nis gone"))
    assert line.endswith("WARNING coordinator_actor.x: Run r-1\\nis gone") and "\n" not in line
    assert "ValueError: two" in TextLines().format(record("Run %s", failed=True)).split("\n", 1)[1]


def test_json_is_one_line_with_everything() -> None:
    line = JsonLines({"role": "host", "host": "h-1"}).format(record("Run %s\nis gone", failed=True))
    assert "\n" not in line
    event = json.loads(line)
    assert event["time"].endswith("+00:00") and "ValueError: two\nlines" in event["exception"]
    assert {k: event[k] for k in ("level", "logger", "message", "role", "host")} == {
        "level": "WARNING",
        "logger": "coordinator_actor.x",
        "message": "Run r-1\nis gone",
        "role": "host",
        "host": "h-1",
    }


def test_the_environment_says_which_format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LOG_FORMAT_VARIABLE, raising=False)
    assert CoordinatorConf().log_format == "text"
    monkeypatch.setenv(LOG_FORMAT_VARIABLE, "json")
    assert CoordinatorConf().log_format == "json"
    monkeypatch.setenv(LOG_FORMAT_VARIABLE, "xml")
    with pytest.raises(ValueError, match="log_format='xml' is unknown: it is 'text' or 'json'"):
        CoordinatorConf()


THREADS_AFTER = """
import os, threading
from coordinator_actor.process import take_ordinary_priority
os.setpriority(os.PRIO_PROCESS, 0, 15)
stop = threading.Event()
threading.Thread(target=stop.wait).start()
{limit}
taken = take_ordinary_priority()
print(taken, sorted({{os.getpriority(os.PRIO_PROCESS, int(t)) for t in os.listdir("/proc/self/task")}}))
stop.set()
"""


def _run(limit: str) -> str:
    script = THREADS_AFTER.format(limit=limit)
    return subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout.strip()


def test_all_threads_take_ordinary_priority() -> None:
    found = _run("")
    if found.startswith("False"):
        pytest.skip("this user may not raise a priority")
    assert found == "True [0]"


def test_where_it_is_not_allowed_the_process_continues_as_it_is() -> None:
    no_rights = (
        "import resource; resource.setrlimit(resource.RLIMIT_NICE, (0, 0)); "
        "os.setuid(65534) if os.getuid() == 0 else None"
    )
    assert _run(no_rights) == "False [15]"
