"""The cable between a machine of a lab and the switch: cut, slow, or whole.

A cut drops packets within the machine, without a word to either side, as a switch does that has failed. A slow cable
passes through a process (``slow_cable.py``). That needs none of the kernel's modules; ``tc netem`` is one that kernels
of small virtual machines leave out.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Literal

from tests.lab.namespaces import ip_commands, network_command, tool

SLOW_CABLE = Path(__file__).with_name("slow_cable.py")
Direction = Literal["in", "out"]
"""Of packets, as the machine sees them."""
SIDES: dict[Direction, str] = {"in": "ingress", "out": "egress"}
DROPS = ("pref", "1", "protocol", "all", "u32", "match", "u32", "0", "0")
TO_NOWHERE = ("action", "mirred", "egress", "redirect", "dev", "nowhere")


class Cable:
    """The cable of machine ``index``, whose first process is ``machine``; ``keeper`` has the switch."""

    def __init__(self, index: int, machine: int, keeper: int, address: str) -> None:
        self._machine = machine
        self._keeper = keeper
        self._port, self._near, self._far = f"port{index}", f"near{index}", f"far{index}"
        self._cut: set[Direction] = set()
        self._slow: subprocess.Popen[bytes] | None = None
        # The same after a restart of the machine: its neighbours remember it.
        mac = "02:00:" + ":".join(f"{int(part):02x}" for part in address.split("."))
        ip_commands(
            keeper,
            [
                f"link add {self._port} type veth peer name eth0 address {mac} netns {machine}",
                f"link set {self._port} master switch up",
            ],
        )
        ip_commands(
            machine,
            [
                "link set lo up",
                f"addr add {address}/24 dev eth0",
                "link set eth0 up",
                # No machine has this address. But programs find their own by looking for a route to the outside.
                f"route add default via {address.rpartition('.')[0]}.254",
                # The other end stays down, so that what is sent there is dropped.
                "link add nowhere type veth peer name beyond",
                "link set nowhere up",
            ],
        )
        network_command(machine, "tc", "qdisc", "add", "dev", "eth0", "clsact")

    def cut(self, direction: Direction | None) -> None:
        """Drop all packets, or those of one direction."""
        for side in (direction,) if direction else SIDES:
            if side not in self._cut:
                self._cut.add(side)
                network_command(self._machine, "tc", "filter", "add", "dev", "eth0", SIDES[side], *DROPS, *TO_NOWHERE)

    def mend(self) -> None:
        """Make the cable whole and fast again."""
        for side in sorted(self._cut):
            network_command(self._machine, "tc", "filter", "del", "dev", "eth0", SIDES[side], "pref", "1")
        self._cut.clear()
        if self._slow is not None:
            self._end_slow()
            ip_commands(self._keeper, [f"link del {self._near}", f"link set {self._port} master switch"])

    def delay(self, milliseconds: float, loss: float) -> None:
        """Let each packet take so long on its way in or out, and drop a share ``loss`` of them, 0 to 1."""
        if self._slow is None:
            ip_commands(
                self._keeper,
                [
                    f"link add {self._near} type veth peer name {self._far}",
                    f"link set {self._near} up",
                    f"link set {self._far} master switch up",
                    f"link set {self._port} nomaster",
                ],
            )
        else:
            self._end_slow()
        arguments = [str(SLOW_CABLE), self._port, self._near, str(milliseconds / 1000), str(loss)]
        enter = [tool("nsenter"), "--target", str(self._keeper), "--net"]
        self._slow = subprocess.Popen(
            [*enter, sys.executable, "-ISE", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._slow.stdout is not None
        if not self._slow.stdout.readline():
            raise RuntimeError(f"The slow cable {self._port} did not start: status {self._slow.wait()}")

    def remove(self) -> None:
        """Take the cable away, once its machine has ended."""
        gone = [self._port]
        if self._slow is not None:
            self._end_slow()
            gone.append(self._near)
        there = network_command(self._keeper, "ip", "-brief", "link")
        for name in gone:
            # The system may be removing the machine's end, and this one with it, at the same time.
            if any(line.startswith(f"{name}@") for line in there.splitlines()):
                subprocess.run(
                    [tool("nsenter"), "--target", str(self._keeper), "--net", tool("ip"), "link", "del", name],
                    capture_output=True,
                    check=False,
                )

    def close(self) -> None:
        """End the process of a slow cable."""
        if self._slow is not None:
            self._end_slow()

    def _end_slow(self) -> None:
        assert self._slow is not None and self._slow.stdin is not None and self._slow.stdout is not None
        self._slow.stdin.close()
        self._slow.wait()
        self._slow.stdout.close()
        self._slow = None
