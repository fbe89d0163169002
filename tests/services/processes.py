"""Java services as processes that tests start, kill and start again."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.patience import PATIENCE


def free_port() -> int:
    """Return a port of loopback that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class JavaService:
    """A Java program that runs until it is stopped or killed; ``log`` has its output."""

    def __init__(self, arguments: Sequence[str], log: Path, heap: str = "256m") -> None:
        self.log = log
        self._command = ["java", f"-Xmx{heap}", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", *arguments]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_running(self) -> bool:
        """Whether the process has started and not ended."""
        return self._process is not None and self._process.poll() is None

    def start(self, is_ready: Callable[[], bool]) -> None:
        """Start the process and wait until it is ready.

        Raises ``RuntimeError`` with the end of the log if the process ends or is not ready in time.
        """
        with self.log.open("ab") as out:
            self._process = subprocess.Popen(
                self._command,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={k: v for k, v in os.environ.items() if k != "JAVA_TOOL_OPTIONS"},
            )
        deadline = time.monotonic() + PATIENCE
        while not is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"{self._command} did not start:\n{self.log.read_text(errors='replace')[-4000:]}")
            time.sleep(0.1)

    def stop(self) -> None:
        """End the process regularly and wait for its end."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End the process at once, as a crash does."""
        self._end(signal.SIGKILL)

    def hang(self) -> None:
        """Stop the process where it is, until ``resume``: its connections stay, and nothing answers."""
        self.send(signal.SIGSTOP)

    def resume(self) -> None:
        """Let the process continue after ``hang``."""
        self.send(signal.SIGCONT)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process, which must be running."""
        assert self._process is not None
        self._process.send_signal(number)

    def _end(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            try:
                self._process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
