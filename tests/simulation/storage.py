"""Checkpoint storage over a dict: every call takes its time, may fail before or after it has taken effect."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from backends.exceptions import DamagedFileError, FileExistsInStorageError, MissingFileError, StorageError
from backends.load_watch import LoadWatch
from backends.storage.locations import FileRef, digest
from tests.simulation import scheduler as scheduling
from tests.simulation.scheduler import Process

T = TypeVar("T")
LATEST = 30.0
"""Virtual seconds after which a write arrives at most whose caller waits for it no more."""


@dataclass
class Faults:
    """How often what goes wrong; all 0 is a healthy world. Probabilities per call, rates per second."""

    storage_error: float = 0.0
    storage_slow: float = 0.0
    late_write: float = 0.0
    """How often a write is carried out long after its caller has given up, or again after it was answered."""
    paged_listing: float = 0.0
    """How often a listing takes two requests, and time between them: its beginning is stale when its end is read."""
    disk_full: float = 0.0
    """How often an engine finds its local disk full."""
    message_lost: float = 0.0
    message_late: float = 0.0
    message_twice: float = 0.0
    registration_slow: float = 0.0
    wrong_probe: float = 0.0
    """How often a connection to a host shows the coordinator the wrong thing."""

    def heal(self) -> None:
        """Nothing goes wrong any more."""
        for name in self.__dataclass_fields__:
            setattr(self, name, 0.0)


@dataclass
class Disk:
    """The stored files, by location and the first part of the path.

    ``watch`` receives every change and every read, as it happens.
    """

    faults: Faults
    files: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    born: dict[tuple[str, str], float] = field(default_factory=dict)
    """When a file came, by location and path."""
    writer: Process | None = None
    """Who has asked for the write that is just carried out."""
    is_late: bool = False
    """A write is being carried out again, or long after its sender has given up."""
    late: set[tuple[str, str]] = field(default_factory=set)
    """The files that such a write has stored."""
    is_still: bool = False
    """Calls take no time and fail never: for those who only check."""
    watch: Callable[[str, str, str], None] = lambda verb, location, path: None
    hangs_until: dict[str, float] = field(default_factory=dict)
    """By the beginning of locations: until when calls there do nothing."""
    refuses_until: dict[str, float] = field(default_factory=dict)
    """By the beginning of locations: until when calls there fail, as with 403."""

    def wait_while_it_hangs(self, location: str) -> None:
        """Return when this storage answers again."""
        s = scheduling.active
        while any(location.startswith(place) and s.now < until for place, until in self.hangs_until.items()):
            s.sleep(1.0)

    def require_access(self, location: str) -> None:
        """Raise ``StorageError`` if this storage refuses."""
        now = scheduling.active.now
        if any(location.startswith(place) and now < until for place, until in self.refuses_until.items()):
            raise StorageError(f"{location} refuses: simulated.")

    def open(self, location: str, options: Any = None) -> SimulatedStorage:
        """Storage at a location; calls give way to the scheduler."""
        return SimulatedStorage(self, location)

    def directory(self, location: str, path: str) -> dict[str, bytes]:
        """The files that share the first part of their path."""
        tops = self.files.setdefault(location, {})
        return tops.setdefault(path.split("/", 1)[0], {})

    def copy(self, *locations: str) -> Disk:
        """Copy the files at some locations, to be checked while the world continues."""
        held = {at: {top: dict(files) for top, files in self.files.get(at, {}).items()} for at in locations}
        return Disk(Faults(), held, self.born, is_still=True)

    def listed_since(self, location: str, path: str, *, recorded: str) -> float:
        """Return when a file was stored; never, if a late write has brought it back after the file ``recorded``."""
        born = self.born[location, path]
        is_back = (location, path) in self.late and born > self.born[location, recorded]
        return math.inf if is_back else born

    def all_files(self, location: str) -> dict[str, bytes]:
        """Everything below a location."""
        return {p: data for held in self.files.get(location, {}).values() for p, data in held.items()}


def content_of(ref: FileRef, files: dict[str, bytes]) -> bytes | None:
    """Return the content of the file that a reference names; None if it does not exist."""
    held = files.get(ref.stored_in)
    return held if held is None or ref.within is None else held[ref.offset : ref.offset + ref.size]


class SimulatedStorage:
    """The interface of ``backends.storage.checkpoint_storage.CheckpointStorage``. A file is there, whole and
    durable, or not at all.
    """

    is_local = False
    used: dict[str, int] = {}

    def __init__(self, disk: Disk, location: str) -> None:
        self.location = location
        self._disk = disk

    def full_location(self, path: str) -> str:
        """A file's address."""
        return f"{self.location}/{path}"

    def _call(self, verb: str, path: str, effect: Callable[[], T], *, is_write: bool = False) -> T:
        if self._disk.is_still:
            return effect()
        s, faults = scheduling.active, self._disk.faults
        draw = s.random.random
        self._disk.wait_while_it_hangs(self.location)
        self._disk.require_access(self.location)
        slow = faults.storage_slow and draw() < faults.storage_slow
        s.sleep(draw() * (5.0 if slow else 0.005))
        if faults.storage_error and draw() < faults.storage_error:
            if draw() < 0.5:
                s.log("storage failed to", verb, path)
                if is_write:
                    self._later(effect)
            else:
                # It has happened all the same: only the answer was lost.
                effect()
                s.log("storage lost the answer to", verb, path)
                s.sleep(draw() * 0.005)
            raise StorageError(f"Could not {verb} {self.full_location(path)}: simulated.")
        result = effect()
        if is_write:
            self._later(effect)
        if draw() < 0.3:
            s.sleep(draw() * (2.0 if slow else 0.005))
        return result

    def _later(self, effect: Callable[[], Any]) -> None:
        """Have a request arrive late: one that has timed out, or the second one of a hedge, which has lost.

        Spark writes its own files in another way.
        """
        s = scheduling.active
        if not self.location.endswith("/statestore"):
            return
        if self._disk.faults.late_write and s.random.random() < self._disk.faults.late_write:
            s.at(s.random.random() * LATEST, lambda: self._carry_out_late(effect))

    def _carry_out_late(self, effect: Callable[[], Any]) -> None:
        self._disk.is_late = True
        try:
            effect()
        finally:
            self._disk.is_late = False

    def put_new(self, path: str, data: bytes) -> FileRef:
        """Create a file; of several writers one succeeds."""

        writer = scheduling.active.current.process

        def put() -> bool:
            held = self._disk.directory(self.location, path)
            if path in held:
                return False
            self._disk.writer = writer
            held[path] = bytes(data)
            self._disk.born[self.location, path] = scheduling.active.now
            (self._disk.late.add if self._disk.is_late else self._disk.late.discard)((self.location, path))
            scheduling.active.log("stored", path)
            self._disk.watch("put", self.location, path)
            return True

        if not self._call("write", path, put, is_write=True):
            raise FileExistsInStorageError(f"{self.full_location(path)} exists already and is never overwritten.")
        return FileRef(path, len(data), digest(data))

    def replace(self, path: str, data: bytes) -> None:
        """Store a file, whatever is there."""
        self._call("replace", path, lambda: self._disk.directory(self.location, path).update({path: data}))

    def put_unique(self, path: str, data: bytes) -> FileRef:
        """Write a new file, under a name that nothing else uses."""
        return self.put_new(path, data)

    def put_file(self, path: str, source: Path) -> FileRef:
        """Copy a local file into the storage."""
        return self.put_new(path, source.read_bytes())

    def get(self, path: str) -> bytes:
        """A file's content."""

        def read() -> bytes | None:
            self._disk.watch("read", self.location, path)
            return self._disk.directory(self.location, path).get(path)

        data = self._call("read", path, read)
        if data is None:
            raise MissingFileError(f"{self.full_location(path)} does not exist.")
        return data

    def get_range(self, path: str, start: int, length: int) -> bytes:
        """Some bytes of a file."""
        return self.get(path)[start : start + length]

    def read(self, ref: FileRef) -> bytes:
        """A file's content, checked; of a group's object the part."""
        data = self.get(ref.path) if ref.within is None else self.get_range(ref.within, ref.offset, ref.size)
        if len(data) != ref.size or digest(data) != ref.digest:
            raise DamagedFileError(f"{self.full_location(ref.stored_in)} is damaged.")
        return data

    def is_being_shared(self, ref: FileRef) -> bool:
        """Return that no object is read for several loads."""
        return False

    def read_together(self, refs: Sequence[FileRef]) -> dict[str, bytes]:
        """Parts of one object, those that are there and whole."""
        try:
            data = self.get(refs[0].stored_in)
        except MissingFileError:
            return {}
        parts = {ref.path: (data[ref.offset : ref.offset + ref.size], ref.digest) for ref in refs}
        return {path: part for path, (part, written) in parts.items() if digest(part) == written}

    def fetch_turn(self, load: LoadWatch) -> AbstractContextManager[None]:
        """Let every file be fetched at once: the order of fetches has tests of its own."""
        return nullcontext()

    def read_to_file(self, ref: FileRef, target: Path) -> None:
        """Copy a file of the storage to a local one, checked."""
        data = self.read(ref)
        try:
            target.write_bytes(data)
        except FileNotFoundError as error:  # the real one says the same if the local directory has gone
            raise MissingFileError(f"{self.full_location(ref.path)} does not exist.") from error

    def exists(self, path: str) -> bool:
        """Whether there is such a file."""
        return self._call("look up", path, lambda: path in self._disk.directory(self.location, path))

    def unfinished(self, prefix: str) -> list[str]:
        """None: an object store has no such files."""
        return []

    def list(self, prefix: str = "", *, after: str | None = None) -> list[tuple[str, int]]:
        """Path and size of every file in a directory and below, sorted by path; those behind ``after``."""
        stem = prefix.strip("/")

        def listed(first: str) -> list[tuple[str, int]]:
            held = self._disk.directory(self.location, stem) if stem else self._disk.all_files(self.location)
            below = f"{stem}/" if "/" in stem else ""
            return sorted((p, len(data)) for p, data in held.items() if p.startswith(below) and p > first)

        found = self._call("list", prefix, lambda: listed(after or ""))
        s, faults = scheduling.active, self._disk.faults
        if len(found) > 1 and faults.paged_listing and s.random.random() < faults.paged_listing:
            page = found[: s.random.randrange(1, len(found))]
            s.sleep(s.random.random() * s.random.choice((0.1, 5.0)))
            found = page + self._call("list", prefix, lambda: listed(page[-1][0]))
        return found

    def delete(self, path: str) -> None:
        """Remove a file, if it exists."""
        self._call("delete", path, lambda: self._remove([path]))

    def delete_all(self, paths: Sequence[str]) -> None:
        """Remove files in two requests: the caller may die between them."""
        for some in (paths[: len(paths) // 2], paths[len(paths) // 2 :]):
            if some:
                self._call("delete", some[0], partial(self._remove, some))

    def _remove(self, paths: Sequence[str]) -> None:
        for path in paths:
            if self._disk.directory(self.location, path).pop(path, None) is not None:
                scheduling.active.log("deleted", path)
                self._disk.watch("delete", self.location, path)
