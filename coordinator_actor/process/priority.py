"""The scheduling priority of hosts and coordinator.

Ray starts its workers with niceness 15 (``RAY_worker_niceness``). Where processors are busy, such a process gets a
thirtieth of the time of an ordinary process. That suits tasks, which must not slow down the node's own services. Hosts
and the coordinator are services: tasks and clients wait for them.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

log = logging.getLogger(__name__)

_PASSES = 3


def take_ordinary_priority() -> bool:
    """Give all threads of this process niceness 0 if the system allows it. Return whether they have it now.

    That takes root, CAP_SYS_NICE or a limit on niceness (``ulimit -e``). Without one of them, set Ray's own option.
    """
    # Each thread has its own niceness, and a new thread takes that of its creator: maybe one that was not reached yet.
    for _ in range(_PASSES):
        for thread in [int(path.name) for path in Path("/proc/self/task").glob("*")]:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                if os.getpriority(os.PRIO_PROCESS, thread) <= 0:
                    continue
                try:
                    os.setpriority(os.PRIO_PROCESS, thread, 0)
                except PermissionError:
                    log.info(
                        "This process keeps the niceness %d that Ray has given it, and is slow where processors are "
                        "busy: "
                        "set RAY_worker_niceness=0 where Ray is started",
                        os.getpriority(os.PRIO_PROCESS, thread),
                    )
                    return False
    return True
