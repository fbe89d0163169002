"""Child processes that leave no process behind, however they end.

Ray and Spark start processes in groups of their own, so a kill of the child's group would miss them. Every descendant
inherits a mark in its environment instead, by which it is found.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType

import msgspec
import psutil

from spark_bridge.demo.events import DemoEvent, decode_event

MARK = "STATESTORE_DEMO_MARK"
Ended = tuple[str, int]
"""A child's name and exit code, queued after its last event."""


class Children:
    """The demo's child processes: starts them, gathers their events, and ends them and all their descendants."""

    def __init__(self, log_path: Path, environment: Mapping[str, str]) -> None:
        self.messages: queue.Queue[DemoEvent | Ended] = queue.Queue()
        self._mark = uuid.uuid4().hex
        self._environment = {**os.environ, **environment, MARK: self._mark}
        self._log_path = log_path
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, module: str, options: Callable[[int], msgspec.Struct]) -> None:
        """Run ``python -m module <options as JSON>``; ``options`` gets the file descriptor for its events."""
        read_fd, write_fd = os.pipe()
        try:
            with self._log_path.open("ab") as log_file:
                arguments = msgspec.json.encode(options(write_fd)).decode()
                process = subprocess.Popen(
                    [sys.executable, "-m", module, arguments],
                    stdin=subprocess.PIPE,  # its end tells the child that this process is gone
                    stdout=log_file,
                    stderr=log_file,
                    pass_fds=[write_fd],
                    env=self._environment,
                    start_new_session=True,  # Ctrl-C reaches this process alone, which ends the children in order
                )
        finally:
            os.close(write_fd)
        self._processes[name] = process
        threading.Thread(target=self._read, args=(name, process, read_fd), daemon=True).start()

    def _read(self, name: str, process: subprocess.Popen[bytes], fd: int) -> None:
        with os.fdopen(fd, "rb") as lines:
            for line in lines:
                self.messages.put(decode_event(line))
        self.messages.put((name, process.wait()))

    def stop(self, name: str, patience_s: float) -> None:
        """Ask one child to end (SIGTERM), wait for it, and kill it if it does not end."""
        process = self._processes.get(name)
        if process is None or process.poll() is not None:
            return
        process.terminate()
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def close(self, patience_s: float = 20.0) -> None:
        """End all children, the last one first, then every process that carries the mark."""
        for name in reversed(self._processes):
            self.stop(name, patience_s)
        deadline = time.monotonic() + 10.0
        grace_until = time.monotonic() + 2.0  # Ray's own processes end soon after their driver
        looks_without_one = 0
        while looks_without_one < 2:  # one look may miss a process: /proc shows no environment for a moment after exec
            marked = marked_processes(self._mark)
            looks_without_one = 0 if marked else looks_without_one + 1
            if time.monotonic() > deadline and marked:
                raise RuntimeError(f"these processes do not die: {[process.pid for process in marked]}")
            if time.monotonic() > grace_until:
                for process in marked:
                    kill(process)
            time.sleep(0.1)


def marked_processes(mark: str) -> list[psutil.Process]:
    """Return all living processes of this user, except this one, whose environment carries ``mark``."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(MARK) == mark:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue  # it has ended meanwhile, or is another user's
    return found


def kill(process: psutil.Process) -> None:
    """Send SIGKILL, unless the process has ended meanwhile."""
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return


def end_with_parent() -> None:
    """End this child process by ``SystemExit`` on SIGTERM, and when its parent ends (at the end of standard input)."""

    def leave(_signum: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second signal must not disturb the clean-up
        raise SystemExit(128 + signal.SIGTERM)

    def watch() -> None:
        # Not through sys.stdin: this thread would still hold its lock when the interpreter shuts down.
        while os.read(0, 1024):
            continue
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, leave)
    threading.Thread(target=watch, daemon=True).start()
