"""Commands in the namespaces of another process."""

from __future__ import annotations

import subprocess

from tests.lab.requirements import tool


def in_network(pid: int, *argv: str) -> list[str]:
    """Return the command line that runs ``ip`` or ``tc`` in the network of a process."""
    return [tool("nsenter"), "--target", str(pid), "--net", tool(argv[0]), *argv[1:]]


def network_command(pid: int, *argv: str) -> str:
    """Run ``ip`` or ``tc`` in the network of a process; return what it prints. Raises ``RuntimeError`` if it fails."""
    done = subprocess.run(in_network(pid, *argv), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)} ended with status {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def ip_commands(pid: int, lines: list[str]) -> None:
    """Run several commands of ``ip``, one after the other, in the network of a process."""
    done = subprocess.run(
        in_network(pid, "ip", "-batch", "-"), input="\n".join(lines), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"ip ended with status {done.returncode}: {done.stderr.strip()}; commands: {lines}")
