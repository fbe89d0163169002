"""Processes that serve have ordinary priority."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
