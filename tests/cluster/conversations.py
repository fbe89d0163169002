"""Two programs for the machines of a lab that talk over TCP and measure their answers.

``python -m tests.cluster.conversations answer PORT`` echoes each line of each connection.
``... ask ADDRESS PORT COUNT`` sends lines and prints the milliseconds to each answer.
"""

from __future__ import annotations

import socket
import sys
import threading
import time


def answer(port: int) -> None:
    with socket.create_server(("", port)) as server:
        print("listening", flush=True)
        while True:
            connection, _ = server.accept()
            threading.Thread(target=_echo, args=(connection,), daemon=True).start()


def _echo(connection: socket.socket) -> None:
    with connection, connection.makefile("rwb", buffering=0) as lines:
        for line in lines:
            lines.write(line)


def ask(address: str, port: int, count: int) -> None:
    """Print ``connected``, then the time of each answer; a line of standard input asks for the next one."""
    with socket.create_connection((address, port)) as connection, connection.makefile("rwb", buffering=0) as lines:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        print("connected", flush=True)
        for i in range(count):
            sys.stdin.readline()
            begun = time.perf_counter()
            print("asked", flush=True)
            try:
                lines.write(b"%d\n" % i)
                heard = lines.readline()
            except OSError as error:
                print(type(error).__name__, flush=True)
                return
            print(f"{(time.perf_counter() - begun) * 1000:.1f}" if heard else "closed", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "answer":
        answer(int(sys.argv[2]))
    else:
        ask(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
