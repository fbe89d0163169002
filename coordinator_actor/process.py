"""The processes of coordinator and hosts: their logs and their scheduling priority.

A log has one line per event, as text in the order of Spark's, or as JSON.

Text is ``time LEVEL logger: message``. Line breaks in a message are shown as ``\n``; a traceback follows below its
event, as in Spark's logs. With ``json`` an event with its traceback is one line, an object with ``time`` (ISO 8601,
UTC), ``level``, ``logger``, ``message``, ``exception`` if there is one, and the process: ``role``, ``namespace``,
``node_ip`` and, of a host, ``host``.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path

LOG_FORMAT_VARIABLE = "STATESTORE_LOG_FORMAT"
TEXT, JSON_LINES = "text", "json"
OURS = ("backends", "coordinator_actor", "spark_bridge")
"""The packages that log from INFO on; all others log from WARNING on."""


def format_of_environment() -> str:
    """Return the format that ``STATESTORE_LOG_FORMAT`` names, by default text. Raises ``ValueError``."""
    return checked_format(os.environ.get(LOG_FORMAT_VARIABLE) or TEXT)


def checked_format(form: str) -> str:
    """Return the format. Raises ``ValueError`` for an unknown one."""
    if form not in (TEXT, JSON_LINES):
        raise ValueError(f"log_format={form!r} is unknown: it is {TEXT!r} or {JSON_LINES!r} ({LOG_FORMAT_VARIABLE}).")
    return form


def set_up_logging(form: str, who: Mapping[str, str]) -> None:
    """Log to the standard error of this process, which is an actor's, from now on. ``who`` is added to JSON."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines(who) if form == JSON_LINES else TextLines())
    # Keep a plain-text format that Ray's LoggingConfig has set up.
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=form == JSON_LINES)
    for name in OURS:
        logging.getLogger(name).setLevel(logging.INFO)


class TextLines(logging.Formatter):
    """Formats an event as one line, and its traceback below."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        return super().formatMessage(record).replace("\r", "\\r").replace("\n", "\\n")


class JsonLines(logging.Formatter):
    """Formats an event with its traceback as one line of JSON."""

    def __init__(self, who: Mapping[str, str]) -> None:
        super().__init__()
        self._who = dict(who)

    def format(self, record: logging.LogRecord) -> str:
        event = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **self._who,
        }
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        return json.dumps(event, ensure_ascii=False)


# The scheduling priority of hosts and coordinator.
#
# Ray starts its workers with niceness 15 (``RAY_worker_niceness``). On busy processors, such a process gets a thirtieth
# of the time of an ordinary process. That suits tasks, which must not slow down the node's own services. Hosts and the
# coordinator are services: tasks and clients wait for them.


log = logging.getLogger(__name__)

_PASSES = 3


def take_ordinary_priority() -> bool:
    """Give all threads of this process niceness 0 if the system allows it. Return whether they have it now.

    That requires root, CAP_SYS_NICE or a limit on niceness (``ulimit -e``). Without one of them, set Ray's own option.
    """
    # Each thread has its own niceness, and a new thread inherits that of its creator, which may not have been changed
    # yet.
    for _ in range(_PASSES):
        for thread in [int(path.name) for path in Path("/proc/self/task").glob("*")]:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                if os.getpriority(os.PRIO_PROCESS, thread) <= 0:
                    continue
                try:
                    os.setpriority(os.PRIO_PROCESS, thread, 0)
                except PermissionError:
                    log.info(
                        "This process keeps the niceness %d that Ray has given it, and is slow if processors are busy: "
                        "set RAY_worker_niceness=0 where Ray is started",
                        os.getpriority(os.PRIO_PROCESS, thread),
                    )
                    return False
    return True
