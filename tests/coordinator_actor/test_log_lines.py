"""Logs of the actors: one line an event, as text or as JSON."""

from __future__ import annotations

import json
import logging
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
