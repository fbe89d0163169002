"""What the demo's processes tell each other: options down as one JSON argument, events up as JSON lines."""

from __future__ import annotations

import os
import threading

import msgspec

from backends.decoders import json_decoder


class StreamOptions(msgspec.Struct, frozen=True):
    """What the stream process is to do. ``directory`` holds the flights and Spark's checkpoint."""

    events_fd: int
    directory: str
    ray_directory: str
    batches: int
    stop_after: int | None
    kill_host: bool
    partitions: int
    backend: str


class LookupOptions(msgspec.Struct, frozen=True):
    """How the lookup process finds the cluster, and how long it rests between two lookups."""

    events_fd: int
    ray_address: str
    pause_s: float


class Progress(msgspec.Struct, frozen=True, tag=True):
    """A step on the way to the first batch, in words."""

    text: str


class Started(msgspec.Struct, frozen=True, tag=True):
    """The query runs. ``done`` batches were committed by earlier runs; ``target`` is the goal of this one."""

    ray_address: str
    done: int
    target: int


class Batch(msgspec.Struct, frozen=True, tag=True):
    """One committed micro-batch. ``state_ms`` is the time of the task that spent longest on state work."""

    number: int
    rows: int
    rows_per_second: float
    touched_keys: int | None
    total_keys: int | None
    checkpoint: int
    batch_ms: float
    state_ms: float | None


class HostKilled(msgspec.Struct, frozen=True, tag=True):
    """A host process got SIGKILL while batch ``number`` ran."""

    pid: int
    number: int


class Lookup(msgspec.Struct, frozen=True, tag=True):
    """One answer of a query client: what it says about ``key`` (None: not in the state yet)."""

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
    """The child gives up."""

    message: str


Event = Progress | Started | Batch | HostKilled | Lookup | Verified | Failed
"""Everything that a child may say."""


def decode_event(line: bytes) -> Event:
    """One line of a child's pipe. Raises msgspec.DecodeError for anything else."""
    event: Event = json_decoder(Event).decode(line)
    return event


class EventPipe:
    """The writing end of a child's pipe; usable from several threads."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()
        os.set_inheritable(fd, False)  # or the end of the pipe would never be seen while a grandchild lives

    def send(self, event: Event) -> None:
        """Write one event as a line. Raises BrokenPipeError when the parent is gone."""
        line = msgspec.json.encode(event) + b"\n"
        with self._lock:
            while line:
                line = line[os.write(self._fd, line) :]
