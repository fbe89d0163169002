"""The commands of ``make lab``: each command at the prompt changes the machines."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.lab.__main__ import COMMAND
from tests.lab.commands import HELP, Commands, CommandServer
from tests.lab.lab import Lab

pytestmark = [pytest.mark.cluster, pytest.mark.ray, pytest.mark.slow]


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
