"""Addresses of hosts for tasks: those known at the start of the query, and those in files of hosts on a node."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from backends.decoders import json_decoder
from spark_bridge.transport.protocol import HostFile
from spark_bridge.transport.tls import TlsConf


@dataclass(frozen=True)
class Endpoints:
    """Addresses at which a task may find hosts, and ``timeout``, the seconds for which the task waits for a new owner.

    ``addresses`` and ``token`` were known at the start of the query. ``host_files`` is the directory in which hosts
    leave their addresses, on every node.
    """

    addresses: tuple[str, ...]
    token: str
    host_files: str
    timeout: float
    tls: TlsConf | None = None

    def candidates(self) -> list[tuple[str, str]]:
        """Return addresses and tokens to try: first those found on this node, which are newer."""
        found = read_host_files(Path(self.host_files))
        known = [(a, self.token) for a in self.addresses]
        return list(dict.fromkeys([*((f.address, f.token) for f in found), *known]))


def read_host_files(directory: Path) -> list[HostFile]:
    """Return the hosts that have left their address in a directory; unreadable or foreign files are an error."""
    files = []
    for path in sorted(directory.glob("*.json")) if directory.is_dir() else []:
        try:
            files.append(json_decoder(HostFile).decode(path.read_bytes()))
        except FileNotFoundError:
            continue  # the host went away between the listing and the read
    return files
