"""The lab itself: its machines are machines to each other, and nothing of it is left behind.

The commands of ``make lab``: each command at the prompt changes the machines.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.lab.__main__ import COMMAND
from tests.lab.cable import Direction
from tests.lab.commands import HELP, Commands, CommandServer
from tests.lab.lab import ROOT, Lab
from tests.patience import PATIENCE

pytestmark = [pytest.mark.cluster, pytest.mark.ray, pytest.mark.slow]
PORT = 7000
TALK = [sys.executable, "-m", "tests.cluster.conversations"]
SILENCE = 0.5
"""So many seconds nothing is heard over a cable that is cut; an answer takes a millisecond."""


class Talk:
    """A process on a machine, and the lines that it says."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line.strip())

    def line(self) -> str:
        return self._lines.get(timeout=PATIENCE)

    def is_silent(self) -> bool:
        try:
            self._lines.get(timeout=SILENCE)
        except queue.Empty:
            return True
        return False

    def ask(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        assert self.line() == "asked"

    def __enter__(self) -> Talk:
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)  # with the processes that it has started on the machine
        self._reader.join()
        with self._process:
            pass


def talk(lab: Lab, k: int, argv: list[str]) -> Talk:
    pipe = subprocess.PIPE
    return Talk(lab.popen(k, argv, stdin=pipe, stdout=pipe, start_new_session=True))


@contextmanager
def conversation(lab: Lab, count: int) -> Iterator[Talk]:
    """Machine 0 asks machine 1, by its name."""
    with talk(lab, 1, [*TALK, "answer", str(PORT)]) as answers:
        assert answers.line() == "listening"
        with talk(lab, 0, [*TALK, "ask", "machine1", str(PORT), str(count)]) as asks:
            assert asks.line() == "connected"
            yield asks


def processes_in(namespace: str) -> list[int]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str((process / "ns" / "pid").readlink()) == namespace:
                found.append(int(process.name))
        except OSError:
            continue  # the process has ended
    return found


def namespaces_of(lab: Lab, k: int) -> str:
    return str(Path(f"/proc/{lab.machine(k).pid}/ns/pid").readlink())


def wait_until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def test_machines_have_names_addresses_and_files_of_their_own_and_share_a_directory(
    make_lab: Callable[[int], Lab],
) -> None:
    lab, other = make_lab(2), make_lab(2)
    for k in range(2):
        assert lab.run(k, ["hostname"]).stdout.strip() == f"machine{k}"
        lab.run(k, ["sh", "-c", f"echo {k} > /tmp/own; echo {k} > /dev/shm/own; echo {k} > {lab.shared}/{k}"])
    read = ["sh", "-c", f"cat /tmp/own /dev/shm/own {lab.shared}/1; ls /proc | grep -c '^[0-9]'"]
    assert lab.run(0, read).stdout.split()[:3] == ["0", "0", "1"]
    assert int(lab.run(0, read).stdout.split()[3]) < 10, "processes of others are seen"
    assert (lab.shared / "1").read_text() == "1\n"
    assert other.addresses == lab.addresses, "labs with the same addresses run side by side"
    assert not other.shared.joinpath("1").exists()


def test_machines_talk_and_a_cable_that_is_cut_resets_nothing(make_lab: Callable[[int], Lab]) -> None:
    lab = make_lab(2)
    directions: list[tuple[int, Direction | None]] = [(1, None), (1, "in"), (0, "out")]
    with conversation(lab, 1 + len(directions)) as asks:
        asks.ask()
        assert float(asks.line()) < 1000 * PATIENCE
        for k, direction in directions:
            lab.cut(k, direction)
            asks.ask()
            assert asks.is_silent(), f"heard over a cable that is cut: {direction}"
            lab.mend(k)
            assert float(asks.line()) >= 1000 * SILENCE, "the connection has lived on"


def test_only_one_direction_is_cut(make_lab: Callable[[int], Lab]) -> None:
    """What machine 1 sends still comes, while nothing reaches machine 1."""
    lab = make_lab(2)
    hear = "import socket; s = socket.socket(type=2); s.bind(('', 7)); print('bound', flush=True); print(s.recv(9))"
    say = "import socket; socket.socket(type=2).sendto(b'hello', (%r, 7))"
    for cut_off in (0, 1):
        # Who is cut off on its way in knows its neighbour's hardware address, as after a talk.
        lab.run(1 - cut_off, [sys.executable, "-c", say % lab.names[cut_off]])
        lab.run(cut_off, [sys.executable, "-c", say % lab.names[1 - cut_off]])
        lab.cut(cut_off, "in")
        with talk(lab, 1 - cut_off, [sys.executable, "-c", hear]) as hears:
            assert hears.line() == "bound"
            lab.run(cut_off, [sys.executable, "-c", say % lab.names[1 - cut_off]])
            assert hears.line() == "b'hello'"
        with talk(lab, cut_off, [sys.executable, "-c", hear]) as hears:
            assert hears.line() == "bound"
            lab.run(1 - cut_off, [sys.executable, "-c", say % lab.names[cut_off]])
            assert hears.is_silent()
        lab.mend(cut_off)


def test_a_slow_cable_delays_both_directions_and_loses_packets(make_lab: Callable[[int], Lab]) -> None:
    lab = make_lab(2)
    with conversation(lab, 6) as asks:
        times = []
        for milliseconds in (40, 40, 80):
            lab.delay(1, milliseconds)
            asks.ask()
            times.append(float(asks.line()))
        assert times[1] >= 80 and times[2] >= 160
        lab.delay(1, 0, loss=1.0)
        asks.ask()
        assert asks.is_silent()
        lab.mend(1)
        asks.line()
        fast = []
        for _ in range(2):
            asks.ask()
            fast.append(float(asks.line()))
        assert min(fast) < 80, "mended cables are fast again"


def test_a_slow_cable_carries_large_packets(make_lab: Callable[[int], Lab]) -> None:
    lab = make_lab(2)
    lab.delay(0, 1)
    receive = (
        "import socket, hashlib; s = socket.create_server(('', 7)); print('listening', flush=True); c, _ = s.accept();"
        "h = hashlib.md5(); n = 0\nwhile b := c.recv(1 << 20): h.update(b); n += len(b)\nprint(n, h.hexdigest())"
    )
    send = (
        "import socket, hashlib, random; b = random.Random(1).randbytes(8 << 20);"
        "socket.create_connection(('machine1', 7)).sendall(b); print(len(b), hashlib.md5(b).hexdigest())"
    )
    with talk(lab, 1, [sys.executable, "-c", receive]) as receives:
        assert receives.line() == "listening"
        sent = lab.run(0, [sys.executable, "-c", send]).stdout.strip()
        assert receives.line() == sent


def test_a_killed_machine_has_no_processes_and_starts_again_empty(make_lab: Callable[[int], Lab]) -> None:
    lab = make_lab(3)
    with conversation(lab, 2) as asks:
        lab.run(1, ["sh", "-c", "echo old > /tmp/own; setsid sleep 1000 >/dev/null 2>&1 &"])
        namespace = namespaces_of(lab, 1)
        assert len(processes_in(namespace)) >= 3
        lab.kill(1)
        wait_until(lambda: not processes_in(namespace))
        asks.ask()
        assert asks.line() in ("closed", "ConnectionResetError", "BrokenPipeError")
    with pytest.raises(ValueError, match=r"Machine 1 does not run; these do: \[0, 2\]"):
        lab.cut(1)
    lab.start(1)
    assert "own" not in lab.run(1, ["ls", "/tmp"]).stdout
    with conversation(lab, 1) as asks:
        asks.ask()
        float(asks.line())


def test_a_machine_that_loses_its_power_says_nothing_to_its_neighbours(make_lab: Callable[[int], Lab]) -> None:
    lab = make_lab(2)
    with conversation(lab, 1) as asks:
        lab.cut(1)
        lab.kill(1)
        asks.ask()
        assert asks.is_silent()


@pytest.mark.parametrize("end", [None, signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left(end: signal.Signals | None) -> None:
    """Whether the lab is taken down, or its process is interrupted, told to end, or killed."""
    program = (
        "import os, sys; from tests.lab.lab import Lab\nwith Lab(2) as lab:\n lab.delay(1, 5); lab.cut(0, 'in')\n"
        " lab.run(0, ['sh', '-c', 'setsid sleep 1000 >/dev/null 2>&1 &'])\n"
        " print(lab.directory, *(os.readlink(f'/proc/{lab.machine(k).pid}/ns/pid') for k in (0, 1)), flush=True)\n"
        " sys.stdin.readline()"
    )
    pipe, argv = subprocess.PIPE, [sys.executable, "-c", program]
    with subprocess.Popen(argv, cwd=ROOT, text=True, stdin=pipe, stdout=pipe) as makes:
        assert makes.stdin is not None and makes.stdout is not None
        directory, *namespaces = makes.stdout.readline().split()
        assert all(processes_in(n) for n in namespaces) and Path(directory).is_dir()
        if end is None:
            makes.stdin.write("\n")
            makes.stdin.flush()
        else:
            makes.send_signal(end)
        makes.wait()

    def all_gone() -> bool:
        named = subprocess.run(["pgrep", "-f", directory], capture_output=True, text=True, check=False).stdout
        mounts = Path("/proc/mounts").read_text()
        is_left = any(processes_in(n) for n in namespaces) or directory in mounts
        return not (named or is_left or Path(directory).exists())

    if end is None:
        assert all_gone(), "processes are left when ``down`` has returned"
    wait_until(all_gone)


def test_commands_reach_the_machines(make_lab: Callable[[int], Lab]) -> None:
    lab = make_lab(2)
    restarted: list[int] = []
    socket = lab.shared / "commands"
    server = CommandServer(socket, Commands(lab, restarted.append))

    def say(*words: str) -> subprocess.CompletedProcess[str]:
        """On machine 0, as at the prompt."""
        argv = [sys.executable, "-ISE", str(COMMAND), str(socket), *words]
        with lab.popen(0, argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            out, err = process.communicate()
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    try:
        assert HELP in say().stdout and "1  machine1  10.77.0.2\n" in say().stdout
        assert say("run", "1", "hostname").stdout == "machine1\n"
        assert "1  machine1  10.77.0.2  cut off in\n" in say("cut", "1", "in").stdout
        assert "1  machine1  10.77.0.2  slow: 5 ms, 1% lost\n" in say("delay", "1", "5", "0.01").stdout
        assert "1  machine1  10.77.0.2\n" in say("mend", "1").stdout
        assert "1  machine1  10.77.0.2  killed\n" in say("kill", "1").stdout
        for words, wrong in ((("cut", "1"), "Machine 1 does not run"), (("kill", "9"), "0 to 1"), (("eat", "1"), HELP)):
            refused = say(*words)
            assert refused.returncode == 1 and wrong in refused.stderr
        assert "1  machine1  10.77.0.2\n" in say("start", "1").stdout
        assert restarted == [1]
        assert say("run", "1", "hostname").stdout == "machine1\n"
    finally:
        server.close()
