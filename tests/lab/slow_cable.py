"""Carry packets between two network devices, each after a while, and lose some.

``python slow_cable.py DEVICE DEVICE SECONDS LOSS``. Ends when its standard input does. Each direction holds the packets
of the last ``SECONDS``. A packet of up to 64 KiB passes as a whole, with the kernel's header for its checksum and its
segments (``PACKET_VNET_HDR``), as between two machines on one computer. Needs only the standard library.
"""

from __future__ import annotations

import contextlib
import random
import select
import socket
import sys
import time
from collections import deque

ETH_P_ALL = 3
SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23
LARGEST = 1 << 17


def packet_socket(device: str) -> socket.socket:
    """Return a socket that gets what comes in on a device and sends out on it."""
    opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    opened.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    opened.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
    opened.bind((device, ETH_P_ALL))
    return opened


def main(one: str, other: str, seconds: float, loss: float) -> None:
    """Carry packets until standard input ends."""
    sockets = packet_socket(one), packet_socket(other)
    ways = {sockets[0]: sockets[1], sockets[1]: sockets[0]}
    held: deque[tuple[float, socket.socket, bytes]] = deque()
    drawn = random.Random(0)
    print("ready", flush=True)
    while True:
        wait = None if not held else max(0.0, held[0][0] - time.monotonic())
        ready, _, _ = select.select([sys.stdin, *ways], [], [], wait)
        if sys.stdin in ready:
            return
        for source in (found for found in sockets if found in ready):
            packet = source.recv(LARGEST)
            if drawn.random() >= loss:
                held.append((time.monotonic() + seconds, ways[source], packet))
        while held and held[0][0] <= time.monotonic():
            _, target, packet = held.popleft()
            # A device that is full or goes away loses packets, as a cable does.
            with contextlib.suppress(OSError):
                target.send(packet)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4]))
