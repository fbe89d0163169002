"""The bank without Ray and Spark (``tests.lab.bare``) on the machines of a lab."""

from __future__ import annotations

from tests.cluster.program_on_lab import ProgramOnLab
from tests.lab.lab import Lab


class BareBank:
    """The bank on machine 0, and a host on each of ``machines``.

    A host is lost after ``host_seconds`` without a heartbeat, and sends one each ``beat_seconds``.
    """

    def __init__(self, lab: Lab, machines: tuple[int, ...], host_seconds: float, beat_seconds: float) -> None:
        self._lab = lab
        self._beat_seconds = beat_seconds
        self._starts = 0
        self.checkpoint = str(lab.shared / "ck")
        self._hosts: dict[int, ProgramOnLab] = {}
        addresses = [lab.addresses[k] for k in machines]
        self.bank = ProgramOnLab(lab, "bare.bank", self.checkpoint, lab.addresses[0], str(host_seconds), *addresses)
        self.bank.wait_for_more("ready", 1)
        for k in machines:
            self.start_host(k)

    def start_host(self, k: int) -> None:
        """Start a host on a machine where none runs."""
        self._starts += 1
        places = (self._lab.addresses[0], self._lab.addresses[k], str(self._starts), f"{self.checkpoint}/hosts")
        self._hosts[k] = ProgramOnLab(self._lab, "bare.host", *places, str(self._beat_seconds), machine=k)

    def signal_host(self, k: int, number: int) -> None:
        """Send a signal to the process of a host."""
        self._hosts[k].signal(number)

    def end_host(self, k: int) -> None:
        """End a host, or clean up after one that has ended with its machine."""
        self._hosts.pop(k).end()

    def log(self) -> str:
        return "\n".join(program.log()[-3000:] for program in (self.bank, *self._hosts.values()))

    def end(self) -> None:
        """End all of it."""
        for program in (self.bank, *self._hosts.values()):
            program.end()
