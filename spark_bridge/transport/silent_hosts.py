"""Gives up hosts that have fallen silent: a machine that is gone or cut off sends no reset, and a call waits in vain.

A call of Arrow Flight cannot be interrupted. gRPC's own pings are no way: pyarrow's server cannot be told to allow
them, and closes connections that ping more than three times in five quiet minutes. So one thread of a process watches
the calls that are under way. When a call takes long, the thread connects to the host's port, which the host's kernel
answers however busy the host is. Where nobody answers, twice, the thread shuts down all connections of this process to
that port, and gRPC fails their calls at once.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import select
import socket
import stat
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from backends.background_loop import BackgroundLoop

log = logging.getLogger(__name__)

SILENT_SECONDS = 2.0
"""A call that has waited this many seconds for its host makes the thread see whether the host is there."""
CALL_WATCH_SECONDS = 1.0
"""Seconds between two looks at the calls under way."""
PROBE_SECONDS = 2.0
"""A host has this many seconds to take a connection."""
FAILED_PROBES = 2
"""After this many probes in a row without an answer a host counts as silent."""

_IPV4_IN_IPV6 = "::ffff:"


class CallUnderWay:
    """A call to the host at ``ip`` and ``port``; ``since`` is when its caller began to wait, by ``time.monotonic``."""

    __slots__ = ("place", "since")

    def __init__(self, place: tuple[str, int]) -> None:
        self.place = place
        self.since = time.monotonic()

    def pause(self) -> None:
        """Take note that the caller waits for nothing: it works on what the host has sent."""
        self.since = math.inf

    def go_on(self) -> None:
        """Take note that the caller waits again."""
        self.since = time.monotonic()


class SilentHosts:
    """Watches the calls of this process. Thread-safe without a lock: calls come and go in single steps.

    The work of a look grows with the calls under way and, for slow ones, with their hosts, which are probed side by
    side. While no call is slow, nothing is sent.
    """

    def __init__(self) -> None:
        self._calls: dict[int, CallUnderWay] = {}
        self._failed: dict[tuple[str, int], int] = {}
        self._loop: BackgroundLoop | None = None

    def begin_anew(self) -> None:
        """Forget calls and loop: this process is the child of a fork, which has neither."""
        self._calls, self._failed, self._loop = {}, {}, None

    @contextmanager
    def watched(self, place: tuple[str, int]) -> Iterator[CallUnderWay]:
        """Watch a call to the host at that IP address and port until the block ends."""
        call = CallUnderWay(place)
        self._calls[id(call)] = call
        if self._loop is None:
            self._loop = BackgroundLoop(
                self.look,
                CALL_WATCH_SECONDS,
                name="statestore-silent-hosts",
                what="probe the hosts of slow calls: calls to a machine that is gone end only when TCP gives up",
                remedy="Look at the log of this process.",
                most_seconds=4 * CALL_WATCH_SECONDS,
            ).start()
        try:
            yield call
        finally:
            self._calls.pop(id(call), None)  # not there after a fork in the midst of the call

    def look(self) -> None:
        """Probe the hosts of slow calls; shut down the connections to those that are silent."""
        before = time.monotonic() - SILENT_SECONDS
        slow = {call.place for call in list(self._calls.values()) if call.since < before}
        silent = silent_places(slow) if slow else set()
        self._failed = {place: self._failed.get(place, 0) + 1 for place in silent}
        for place, times in self._failed.items():
            if times >= FAILED_PROBES:
                log.warning("Nobody answers at %s:%d, and calls there are given up", *place)
                shut_down_connections(place)


def silent_places(
    places: Collection[tuple[str, int]], *, refusals: bool = True, seconds: float = PROBE_SECONDS
) -> set[tuple[str, int]]:
    """Return the places at which nobody takes a connection within ``seconds``.

    Without ``refusals``, those that refuse one are not among them: their machine is there.
    """
    connecting: dict[int, tuple[socket.socket, tuple[str, int]]] = {}
    silent = set(places)
    try:
        poll = select.poll()
        for place in places:
            probe = socket.socket(socket.AF_INET6 if ":" in place[0] else socket.AF_INET, socket.SOCK_STREAM)
            connecting[probe.fileno()] = probe, place
            probe.setblocking(False)
            error = probe.connect_ex(place)
            if error in (0, errno.EINPROGRESS):
                poll.register(probe, select.POLLOUT)
            else:  # such as a network that is not to be reached
                del connecting[probe.fileno()]
                probe.close()
                if error == errno.ECONNREFUSED and not refusals:
                    silent.discard(place)
        deadline = time.monotonic() + seconds
        left = len(connecting)
        while left and (wait := deadline - time.monotonic()) > 0:
            for descriptor, _ in poll.poll(wait * 1e3):
                poll.unregister(descriptor)
                left -= 1
                probe, place = connecting[descriptor]
                error = probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if error == 0 or (error == errno.ECONNREFUSED and not refusals):
                    silent.discard(place)
    finally:
        for probe, _ in connecting.values():
            probe.close()
    return silent


def shut_down_connections(place: tuple[str, int]) -> None:
    """Shut down this process's connections to an IP address and port, whoever in the process has made them."""
    for entry in list(Path("/dev/fd").iterdir()):
        with suppress(OSError):  # closed meanwhile, or a connection that is not made yet
            descriptor = os.dup(int(entry.name))
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                os.close(descriptor)
                continue
            with socket.socket(fileno=descriptor) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    ip, port = connection.getpeername()[:2]
                    if (ip.removeprefix(_IPV4_IN_IPV6), port) == place:
                        connection.shutdown(socket.SHUT_RDWR)


calls = SilentHosts()
"""The calls of this process."""

os.register_at_fork(after_in_child=calls.begin_anew)
