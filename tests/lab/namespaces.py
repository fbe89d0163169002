"""Requirements of a lab: programs and permissions on its computer; and commands in the namespaces of a process."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache

SYSTEM_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
PACKAGES = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}
"""The programs that a lab runs, and Debian's packages with them."""


@cache
def tool(name: str) -> str:
    """Return the path of a program. Raises ``FileNotFoundError`` with the package that brings it."""
    found = shutil.which(name, path=SYSTEM_PATH)
    if found is None:
        raise FileNotFoundError(f"The program {name!r} is missing: install Debian's package {PACKAGES[name]}.")
    return found


@cache
def missing() -> str | None:
    """Return why this process can make no lab, or None if it can."""
    if os.geteuid() != 0:
        return "a lab of machines needs root, to make network namespaces; run the tests as root"
    try:
        for name in PACKAGES:
            tool(name)
    except FileNotFoundError as error:
        return f"a lab of machines is made with it: {error}"
    tried = subprocess.run(
        [tool("unshare"), "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "true"],
        capture_output=True,
        text=True,
        check=False,
    )
    if tried.returncode:
        return f"this process may not make namespaces, and a lab needs them: {tried.stderr.strip()}"
    return None


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
