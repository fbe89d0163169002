"""The first process of a machine: gives the machine its files and its name, and ends everything on it at its own end.

``python init.py SETUP`` with the JSON of ``machine.Setup``, in its own namespaces. Its standard input is a pipe from
the process that made the lab. When that process ends, this process ends too, and the kernel then ends all others of the
machine. It needs only the standard library.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
from pathlib import Path


def mount(*options: str) -> None:
    """Mount something for this machine alone."""
    subprocess.run(["mount", *options], check=True)


def main(name: str, directory: str, hosts: str, visible: list[str]) -> None:
    """Set the machine up, print the process id that it has outside, and wait for the machine's end.

    ``directory`` on the disk of the computer is the machine's ``/tmp``. The directories ``visible`` are those below
    ``/tmp`` that all machines share.
    """
    outside = Path("/proc/self").readlink()
    tmp = Path(directory)
    tmp.chmod(0o1777)
    for path in visible:
        place = tmp / Path(path).relative_to("/tmp")
        place.mkdir(parents=True, exist_ok=True)
        mount("--rbind", path, str(place))
    (tmp / "resolv.conf").touch()
    mount("--bind", str(tmp / "resolv.conf"), "/etc/resolv.conf")  # no name server: names are those of ``hosts``
    mount("--bind", hosts, "/etc/hosts")
    mount("--rbind", directory, "/tmp")
    mount("-t", "tmpfs", "shm", "/dev/shm")
    mount("-t", "proc", "proc", "/proc")
    socket.sethostname(name)
    print(outside, flush=True)
    while True:
        ready, _, _ = select.select([sys.stdin], [], [], 0.5)
        if ready and not os.read(sys.stdin.fileno(), 1):
            return
        reap()


def reap() -> None:
    """Take the processes that have ended and whose parents are gone."""
    try:
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
    except ChildProcessError:
        pass


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
