"""The commands of the prompt, ``lab cut 2`` and so on: taken from the prompt's machine, carried out by the lab.

A Unix socket in the shared directory joins the two, since machines are separate in their networks only.
``command.py`` is the program at the prompt.
"""

from __future__ import annotations

import json
import shlex
import socketserver
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.lab.cable import Direction
from tests.lab.lab import Lab

HELP = """\
lab                    show the machines, and these commands
lab kill 2             end everything on machine 2 at once
lab start 2            start machine 2 again, with an empty disk, and Ray on it
lab cut 2 [in|out]     let nothing in or out of machine 2, or only one of these; without any signal
lab delay 2 50 [0.01]  let packets take 50 ms on their way into and out of machine 2; lose 1 % of them
lab mend 2             make the cable of machine 2 whole and fast again
lab run 2 COMMAND ...  run a command on machine 2"""


class Commands:
    """Carries out commands on a lab, one at a time. ``start_ray`` starts Ray on a machine that has started again."""

    def __init__(self, lab: Lab, start_ray: Callable[[int], None]) -> None:
        self._lab = lab
        self._start_ray = start_ray
        self._said: dict[int, str] = {}

    def answer(self, words: Sequence[str]) -> str:
        """Carry out a command and return its output. Raises ``ValueError`` with the reason for a wrong command."""
        match list(words):
            case []:
                return f"{self._machines()}\n\n{HELP}"
            case ["kill", k]:
                self._lab.kill(self._machine(k))
                self._said[int(k)] = "killed"
            case ["start", k]:
                self._lab.start(self._machine(k))
                self._start_ray(int(k))
                self._said.pop(int(k), None)
            case ["cut", k, *rest] if rest in ([], ["in"], ["out"]):
                direction: Direction | None = None if not rest else "in" if rest == ["in"] else "out"
                self._lab.cut(self._machine(k), direction)
                self._said[int(k)] = " ".join(["cut off", *rest])
            case ["delay", k, milliseconds, *rest] if len(rest) < 2:
                loss = float(rest[0]) if rest else 0.0
                self._lab.delay(self._machine(k), float(milliseconds), loss)
                self._said[int(k)] = f"slow: {milliseconds} ms, {loss:.0%} lost"
            case ["mend", k]:
                self._lab.mend(self._machine(k))
                self._said.pop(int(k), None)
            case ["run", k, *argv] if argv:
                done = self._lab.run(self._machine(k), argv, check=False)
                return str(done.stdout).rstrip()
            case _:
                raise ValueError(f"There is no command: lab {shlex.join(words)}\n{HELP}")
        return self._machines()

    def _machine(self, word: str) -> int:
        if not word.isdecimal() or int(word) >= len(self._lab.names):
            raise ValueError(f"There is no machine {word!r}; they are 0 to {len(self._lab.names) - 1}.")
        return int(word)

    def _machines(self) -> str:
        rows = zip(self._lab.names, self._lab.addresses, strict=True)
        return "\n".join(f"{k}  {name}  {at}  {self._said.get(k, '')}".rstrip() for k, (name, at) in enumerate(rows))


class CommandServer:
    """Answers the commands that come over a socket at ``path``, one after the other, until it is closed."""

    def __init__(self, path: Path, commands: Commands) -> None:
        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                words: Any = json.loads(self.rfile.readline())
                try:
                    said = {"out": commands.answer(words)}
                except (ValueError, RuntimeError, OSError) as error:
                    said = {"error": str(error)}
                self.wfile.write(json.dumps(said).encode())

        self._server = socketserver.UnixStreamServer(str(path), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, name="lab-commands", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End with the command that is being carried out."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
