"""The process that has the network with the switch of a lab, and removes the lab's directory at the end.

``python keeper.py DIRECTORY``, in its own network namespace. Its standard input is a pipe from the process that
made the lab. When that process is gone, however it ended, the machines of the lab end too. The keeper needs nothing
but the standard library.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path


def main(directory: Path, ip: str) -> None:
    """Make the switch, wait for the end of the lab, remove its directory."""
    for command in ("link set lo up", "link add switch type bridge", "link set switch up"):
        subprocess.run([ip, *command.split()], check=True)
    print("ready", flush=True)
    sys.stdin.read()
    # The last processes of the machines may still write while they end. Nothing else uses the directory.
    for _ in range(600):
        shutil.rmtree(directory, ignore_errors=True)
        if not directory.exists():
            return
        time.sleep(0.1)
    sys.exit(f"{directory} could not be removed; is something mounted there?")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
