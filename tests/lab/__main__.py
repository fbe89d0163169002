"""``python -m tests.lab``: machines, a stream over them, and a prompt on machine 0. All is gone at the end.

``make lab`` runs it. Commands may also come through a pipe instead of a prompt.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from tests.lab.commands import HELP, Commands, CommandServer
from tests.lab.lab import Lab
from tests.lab.namespaces import missing
from tests.lab.ray_nodes import ray_address, ray_environment, start_ray, start_ray_on

COMMAND = Path(__file__).with_name("command.py")
SHELL_NAME = "lab"


def main(arguments: Sequence[str]) -> int:
    """Make the lab, run the shell on it, take it down; return the status of the shell."""
    parser = argparse.ArgumentParser(prog="python -m tests.lab", description="Machines, a stream, a prompt.")
    parser.add_argument("--machines", type=int, default=4, help="how many (default: 4); an executor on each but one")
    parser.add_argument("--no-stream", action="store_true", help="no stream, but a slot on each for one of your own")
    given = parser.parse_args(arguments)
    reason = missing()
    if reason is not None:
        print(f"make lab: {reason}", file=sys.stderr)
        return 2
    if not 2 <= given.machines <= 250:
        parser.error("there must be 2 to 250 machines")
    print(f"Starting {given.machines} machines and Ray on each; this takes about half a minute ...", flush=True)
    with Lab(given.machines) as lab:
        cpus = [1 if given.no_stream else 0, *[1] * (given.machines - 1)]
        start_ray(lab, cpus)
        server = CommandServer(lab.shared / "commands", Commands(lab, lambda k: start_ray_on(lab, k, cpus[k])))
        try:
            return _shell(lab, _without_stream(lab)) if given.no_stream else _with_stream(lab, given.machines - 1)
        finally:
            server.close()


def _with_stream(lab: Lab, executors: int) -> int:
    checkpoint, log = lab.shared / "checkpoint", lab.shared / "stream.log"
    environment = ray_environment() | {"RAY_ADDRESS": ray_address(lab)}
    with log.open("w") as err:
        argv = [sys.executable, "-m", "tests.lab.stream", ray_address(lab), str(checkpoint), str(executors)]
        stream = lab.popen(0, argv, environment, stdout=subprocess.PIPE, stderr=err, start_new_session=True)
        assert stream.stdout is not None
        if not any(line.startswith("batch") for line in stream.stdout):
            print(f"The stream has ended with status {stream.wait()}:\n{log.read_text()}", file=sys.stderr)
            return 1
        copied = threading.Thread(target=_copy, args=(stream, log), daemon=True)
        copied.start()
        try:
            return _shell(lab, f"The stream runs; its log is {log}, its checkpoint {checkpoint}.")
        finally:
            os.killpg(stream.pid, 9)  # the machines end next
            copied.join()
            stream.wait()


def _copy(stream: subprocess.Popen[str], log: Path) -> None:
    assert stream.stdout is not None
    with log.open("a") as out, stream.stdout:
        for line in stream.stdout:
            out.write(line)
            out.flush()


def _without_stream(lab: Lab) -> str:
    machines = len(lab.names)
    return f"Try: statestore demo --machines {machines} --partitions {2 * machines} --checkpoint {lab.shared}/demo"


def _shell(lab: Lab, told: str) -> int:
    programs = lab.shared / "bin"
    programs.mkdir()
    command = programs / SHELL_NAME
    call = shlex.join([sys.executable, "-ISE", str(COMMAND), str(lab.shared / "commands")])
    command.write_text(f'#!/bin/sh\nexec {call} "$@"\n')
    command.chmod(0o755)
    profile = lab.shared / "profile"
    profile.write_text("PS1='machine0$ '\n")
    environment = ray_environment() | {"RAY_ADDRESS": ray_address(lab)}
    environment["PATH"] = f"{programs}{os.pathsep}{environment['PATH']}"
    print(
        f"\n{told}\n"
        f"This is a shell on machine 0. `statestore status` shows the state; `exit` ends all machines.\n\n{HELP}\n",
        flush=True,
    )
    argv = ["bash", "--noprofile", "--rcfile", str(profile), "-i"] if sys.stdin.isatty() else ["bash"]
    return lab.popen(0, argv, environment).wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
