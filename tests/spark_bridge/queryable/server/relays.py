"""A wire between clients and a server that a test can cut."""

from __future__ import annotations

import contextlib
import socket
import threading


class Relay:
    """Passes bytes on to ``address``, and cuts each connection after ``cut_after`` bytes of answers (None: never)."""

    def __init__(self, address: str, cut_after: int | None = None) -> None:
        ip, _, port = address.rpartition(":")
        self.target = (ip, int(port))
        self.cut_after = cut_after
        self.cuts = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(self.target, timeout=10)
            except OSError:
                return
            self._sockets += [client, server]
            threading.Thread(target=self._pass_on, args=(client, server, False), daemon=True).start()
            threading.Thread(target=self._pass_on, args=(server, client, True), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, is_answer: bool) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if is_answer and self.cut_after is not None and passed + len(data) > self.cut_after:
                    target.sendall(data[: self.cut_after - passed])
                    self.cuts += 1
                    break
                target.sendall(data)
                passed += len(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close all connections and refuse new ones."""
        for s in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                s.shutdown(socket.SHUT_RDWR)
            s.close()
