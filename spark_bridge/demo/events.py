"""The messages between the demo's processes: options to children as one JSON argument, events back as JSON lines."""

from __future__ import annotations

import os
import threading

import msgspec

from backends.decoders import json_decoder


class DemoError(Exception):
    """The demo cannot go on; the message is for its user."""


class StreamOptions(msgspec.Struct, frozen=True):
    """The options of the stream process. ``directory`` holds the flights and Spark's checkpoint.

    ``machines`` are those of the running Ray cluster that the demo takes; None: one of its own in ``ray_directory``.
    """

    events_fd: int
    directory: str
    ray_directory: str
    batches: int
    stop_after: int | None
    kill_host: bool
    partitions: int
    backend: str
    machines: int | None = None


class LookupOptions(msgspec.Struct, frozen=True):
    """The options of the lookup process: where the cluster is, and how long to rest between two lookups."""

    events_fd: int
    ray_address: str
    pause_s: float


class Progress(msgspec.Struct, frozen=True, tag=True):
    """A step before the first batch, in words."""

    text: str


class Started(msgspec.Struct, frozen=True, tag=True):
    """The query runs. Earlier runs have committed ``done`` batches; this run ends after batch ``target``."""

    ray_address: str
    done: int
    target: int


class BatchCommitted(msgspec.Struct, frozen=True, tag=True):
    """One committed micro-batch. ``state_ms`` is the time of the task that worked longest on state."""

    number: int
    rows: int
    rows_per_second: float
    touched_keys: int | None
    total_keys: int | None
    checkpoint: int
    batch_ms: float
    state_ms: float | None


class HostsPlaced(msgspec.Struct, frozen=True, tag=True):
    """The number of state hosts on each machine, by its address: at first, and whenever a number has changed."""

    by_machine: dict[str, int]


class HostKilled(msgspec.Struct, frozen=True, tag=True):
    """A host process got SIGKILL while batch ``number`` ran."""

    pid: int
    number: int


class LookupAnswered(msgspec.Struct, frozen=True, tag=True):
    """One answer of a query client: the figures of ``key`` in words (None: not in the state yet)."""

    key: str
    answer: str | None
    milliseconds: float


class Verified(msgspec.Struct, frozen=True, tag=True):
    """The whole state was read back and is what pandas computes."""

    keys: int
    flights: int
    unknown_keys: int
    read_ms: float


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A child has failed, and ends."""

    message: str


DemoEvent = Progress | Started | BatchCommitted | HostsPlaced | HostKilled | LookupAnswered | Verified | Failed
"""Every message that a child may send."""


def decode_event(line: bytes) -> DemoEvent:
    """Return the event in one line of a child's pipe. Raises ``msgspec.DecodeError`` for any other line."""
    event: DemoEvent = json_decoder(DemoEvent).decode(line)
    return event


class EventPipe:
    """The writing end of a child's pipe. Thread-safe."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()
        os.set_inheritable(fd, False)  # else the parent would not see the pipe's end while a grandchild lives

    def send(self, event: DemoEvent) -> None:
        """Write one event as a line. Raises ``BrokenPipeError`` when the parent is gone."""
        line = msgspec.json.encode(event) + b"\n"
        with self._lock:
            while line:
                line = line[os.write(self._fd, line) :]
