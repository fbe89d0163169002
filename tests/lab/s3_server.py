"""An S3-protocol server for a machine of a lab: its objects survive the loss of the process that answers for it.

``S3OnLab`` is two processes of one machine. Moto's server keeps the objects, as the disks of a real service do, and
cannot be reached from other machines. The front (``python -m tests.lab.s3_server PORT``) answers for it at ``PORT`` of
this module, and may be killed, stopped for a while, or slowed by the lab's cable.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from tests.backends.storage.s3_faults import FaultProxy
from tests.lab.lab import Lab

OBJECTS = Path(__file__).parents[1] / "backends" / "storage" / "s3_faults.py"
PORT = 9000
BUCKET = "bucket"


class S3OnLab:
    """The server on machine ``k`` of a lab, with an empty bucket. It ends with its machine."""

    def __init__(self, lab: Lab, k: int) -> None:
        self._lab, self._k = lab, k
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._objects = lab.popen(k, [sys.executable, str(OBJECTS)], **pipes)
        assert self._objects.stdout is not None
        self._port_behind = str(json.loads(self._objects.stdout.readline())["port"])
        self._front = self._start_front()

    def settings(self) -> dict[str, str]:
        """Return the Spark settings with the server's address and credentials for the state."""
        return {
            "spark.hadoop.fs.s3a.endpoint": f"http://{self._lab.addresses[self._k]}:{PORT}",
            "spark.hadoop.fs.s3a.path.style.access": "true",
            "spark.hadoop.fs.s3a.access.key": "key",
            "spark.hadoop.fs.s3a.secret.key": "secret",
        }

    def kill(self) -> None:
        """Kill what answers: connections are reset, and new ones refused."""
        self._signal(signal.SIGKILL)
        self._close(self._front)

    def start_again(self) -> None:
        """Answer again, with all objects that were acknowledged."""
        self._front = self._start_front()

    def hang(self) -> None:
        """Take connections and requests, and answer none, until ``go_on``."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Answer what waits."""
        self._signal(signal.SIGCONT)

    def end(self) -> None:
        """End both processes."""
        if self._front.poll() is None:
            self.kill()
        assert self._objects.stdin is not None
        self._objects.stdin.close()
        self._close(self._objects)

    def _start_front(self) -> subprocess.Popen[str]:
        argv = [sys.executable, "-m", "tests.lab.s3_server", self._port_behind]
        front = self._lab.popen(self._k, argv, stdout=subprocess.PIPE, start_new_session=True)
        assert front.stdout is not None
        assert front.stdout.readline(), "the S3 server's front did not start"
        return front

    def _signal(self, number: signal.Signals) -> None:
        os.killpg(self._front.pid, number)

    @staticmethod
    def _close(process: subprocess.Popen[str]) -> None:
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def main(port_behind: int) -> None:
    """Answer for the objects behind a port of this machine, until killed."""
    connection = HTTPConnection("127.0.0.1", port_behind, timeout=30)
    connection.request("PUT", f"/{BUCKET}", headers={"Authorization": "AWS any:any"})
    answer = connection.getresponse()
    # Moto answers 200 for a bucket that its owner has already, as S3 does in us-east-1.
    assert answer.status == 200, answer.read()
    connection.close()
    with FaultProxy(port_behind, "", PORT) as front:
        print("ready", flush=True)
        front.serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]))
