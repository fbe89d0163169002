"""Fencing: of two coordinators that claim the same query, only one can complete a version.

After SlateDB. Every coordinator claims an epoch, a number that only grows. Under its epoch it numbers its manifests
from 1 on, without a gap: each is written create-if-absent at the one path that follows its last. A coordinator that has
claimed an epoch closes all lower ones before it reads the manifests: it puts a *fence* at the path of the next manifest
of the epoch. So a manifest of a lower epoch was there before the fence, and is read; or its writer meets the fence, and
gives up. Writing a manifest takes one request and no check after the request.

A fence is never removed: the process that the fence must stop may be suspended for days.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from msgspec import Struct, field

from backends.exceptions import DamagedFileError, FileExistsInStorageError, MissingFileError
from backends.formats.manifest import seal, unseal
from backends.formats.manifest_chain import Layout
from backends.spans import Pool
from backends.storage.checkpoint_storage import CheckpointStorage
from coordinator_actor.exceptions import FencedError

# Sealed JSON records below the state location of a query. Many of them are numbered by their file names.


log = logging.getLogger(__name__)

T = TypeVar("T", bound=Struct)
READERS = 16
"""The number of threads that read several records at once."""


def numbered_path(directory: str, number: int) -> str:
    """Return the path of a numbered record. Paths sort by number."""
    return f"{directory}/{number:020d}.json"


def numbers_of(paths: Iterable[str]) -> list[int]:
    """Return the numbers of those of some paths that are numbered records, ascending."""
    names = [path.rsplit("/", 1)[-1] for path in paths]
    return sorted(int(n.removesuffix(".json")) for n in names if n.endswith(".json") and n[:-5].isdigit())


class RecordFiles:
    """Writes and reads the records of one query."""

    def __init__(self, storage: CheckpointStorage) -> None:
        self.storage = storage

    def numbers(self, directory: str) -> list[int]:
        """Return the numbers of the records in a directory, ascending."""
        return numbers_of(path for path, _ in self.storage.list(f"{directory}/"))

    def create(self, path: str, record: Struct) -> None:
        """Write a record durably. Raises ``FileExistsInStorageError`` if the path is taken."""
        self.storage.put_new(path, seal(record))

    def append(self, directory: str, record: Struct) -> None:
        """Write a record durably after the last one of a directory. Raises ``StorageError``."""
        number = max(self.numbers(directory), default=0)
        while True:
            number += 1
            with suppress(FileExistsInStorageError):  # another process has just written it
                self.create(numbered_path(directory, number), record)
                return

    def newest(self, directory: str, numbers: Sequence[int], kind: type[T], lost: str) -> T | None:
        """Read the last of some numbered records that is not damaged; None if there is none.

        ``lost`` says to people what each damaged one costs.
        """
        for number in reversed(numbers):
            try:
                record = self.read_or_none(numbered_path(directory, number), kind)
            except DamagedFileError as error:
                log.warning("%s: %s", lost, error)
                continue
            if record is not None:
                return record
        return None

    def ensure(self, path: str, content: bytes) -> None:
        """Write a file unless the path is taken. The path must determine the content."""
        with suppress(FileExistsInStorageError):
            self.storage.put_new(path, content)

    def read(self, path: str, kind: type[T]) -> T:
        """Read a record. Raises ``MissingFileError`` or ``DamagedFileError``."""
        return unseal(self.storage.get(path), kind, self.storage.full_location(path))

    def read_or_none(self, path: str, kind: type[T]) -> T | None:
        """Read a record, or return None if it does not exist. Raises ``DamagedFileError``."""
        try:
            return self.read(path, kind)
        except MissingFileError:
            return None

    def read_all(self, paths: list[str], kind: type[T], damages: dict[str, DamagedFileError] | None = None) -> list[T]:
        """Read several records, except those that do not exist.

        Raises ``DamagedFileError``, unless there are ``damages``: they get the errors by path.
        """

        def read(path: str) -> T | None:
            try:
                return self.read_or_none(path, kind)
            except DamagedFileError as error:
                if damages is None:
                    raise
                damages[path] = error
                return None

        if len(paths) < 2:
            records = [read(path) for path in paths]
        else:
            with Pool(READERS) as pool:
                records = list(pool.map(read, paths))
        return [record for record in records if record is not None]


EPOCHS = "epochs"
MANIFESTS = "manifests"
FENCE = b"fence\n"
"""The content of every fence. In a listing its size distinguishes it from a manifest: no manifest has that size."""
REMEMBERED_RUNS = 1000
KEPT_CLAIMS = 32
"""At least this many claims are kept: a recent run may have made a version that no manifest names."""


class EpochFile(Struct, frozen=True):
    """``epochs/<epoch>.json``: a coordinator has claimed an epoch for a run.

    ``layouts`` and ``schema_ids`` (by operator) are those of the run's operators. ``earlier_runs`` are the last
    ``REMEMBERED_RUNS`` runs before it; None in claims of releases that did not write them. ``ends_run``: a process
    other than a coordinator has taken the state over under the name of its last run, which may not claim it again.
    """

    epoch: int
    coordinator_id: str
    run_id: str
    layouts: tuple[Layout, ...] = ()
    schema_ids: dict[str, str] = field(default_factory=dict)
    earlier_runs: tuple[str, ...] | None = None
    ends_run: bool = False

    def ends(self, run_id: str) -> bool:
        """Return whether this claim keeps a run from continuing."""
        return self.ends_run and self.run_id == run_id


def epoch_path(epoch: int) -> str:
    """Return the path of the claim of an epoch."""
    return numbered_path(EPOCHS, epoch)


def place_path(epoch: int, sequence: int) -> str:
    """Return the path of a manifest of an epoch, or of the fence that closes the epoch. Paths sort by both."""
    return f"{MANIFESTS}/{epoch:020d}-{sequence:020d}.json"


def place_in(path: str) -> tuple[int, int] | None:
    """Return epoch and sequence of a path; None for a path that has none, as those of earlier releases."""
    epoch, _, sequence = path.rpartition("/")[2].removesuffix(".json").partition("-")
    return (int(epoch), int(sequence)) if epoch.isdecimal() and sequence.isdecimal() else None


class Epochs:
    """The claimed epochs of one query, as one coordinator sees and extends them.

    ``current`` is the epoch that this coordinator has claimed, 0 before the first claim. ``_looked`` is the result of
    the last look, for the claim that follows: the epochs, and the newest claim.
    """

    def __init__(self, files: RecordFiles, coordinator_id: str) -> None:
        self.current = 0
        self._looked: tuple[list[int], EpochFile | None] | None = None
        self._files = files
        self._coordinator_id = coordinator_id

    def claim(
        self,
        run_id: str,
        layouts: Iterable[Layout] = (),
        schema_ids: Mapping[str, str] | None = None,
        *,
        ends_run: bool = False,
    ) -> list[str]:
        """Claim the next epoch for a run, and close all lower ones: none of them gets another manifest.

        Return the paths of all manifests, except new ones of an epoch that is not closed here and advances during the
        call. Raises ``FencedError`` if a higher epoch is claimed: this process may have been suspended while others
        claimed, and removed old claims. Another reason is that the newest claim ends the run.
        """
        unlisted: set[int] = set()  # epochs that a stale listing may leave out
        while True:
            numbers, before = self._look() if self._looked is None else self._looked
            self._looked = None
            earlier = sorted({*numbers, *unlisted})
            if unlisted:
                before = self._read(earlier[-1])
            if before is not None and before.ends(run_id) and not ends_run:
                raise self.fenced(epoch_path(before.epoch))
            epoch = max(earlier, default=0) + 1
            runs = self._runs_until(before, run_id)
            claim = EpochFile(
                epoch, self._coordinator_id, run_id, tuple(layouts), dict(schema_ids or {}), runs, ends_run
            )
            try:
                self._files.create(epoch_path(epoch), claim)
            except FileExistsInStorageError:
                unlisted.add(epoch)
                continue
            self.current = epoch
            with Pool(READERS) as pool:
                checked = pool.submit(self.check)
                paths = self._close(earlier, pool)
                checked.result()
            return paths

    def _close(self, epochs: Iterable[int], pool: ThreadPoolExecutor) -> list[str]:
        """Put a fence after the last manifest of each epoch. Writers may still be active.

        Return the paths of all manifests, including those that the listing leaves out.
        """
        closed: set[int] = set()
        last: dict[int, int] = {}
        paths: list[str] = []
        for path, size in self._files.storage.list(f"{MANIFESTS}/"):
            place = place_in(path)
            if place is not None:
                last[place[0]] = max(place[1], last.get(place[0], 0))
            if size != len(FENCE):
                paths.append(path)
            elif place is not None:
                closed.add(place[0])
        listed = [(epoch, last.get(epoch, 0)) for epoch in epochs if epoch not in closed]
        for (epoch, first), end in zip(listed, pool.map(self._fence, listed), strict=True):
            paths += [place_path(epoch, sequence) for sequence in range(first, end + 1) if sequence]
        return paths

    def _fence(self, last: tuple[int, int]) -> int:
        """Put a fence at the first place after ``last`` without a manifest. Return the sequence before it.

        Manifests that were written since the listing are found at their places, and so are those that a stale listing
        leaves out.
        """
        epoch, sequence = last[0], last[1] + 1
        while True:
            path = place_path(epoch, sequence)
            try:
                self._files.storage.put_new(path, FENCE)
            except FileExistsInStorageError:
                if not self._is_fence(path):
                    sequence += 1
                    continue
            return sequence - 1

    def _is_fence(self, path: str) -> bool:
        try:
            return self._files.storage.get(path) == FENCE
        except MissingFileError:
            return False  # a manifest that was removed since: fences never are

    def check(self) -> None:
        """Raise ``FencedError`` if a higher epoch is claimed."""
        higher = self._files.storage.list(f"{EPOCHS}/", after=epoch_path(self.current))
        if higher:
            raise self.fenced(higher[-1][0])

    def fenced(self, by: str) -> FencedError:
        """Return the error of a coordinator that has met ``by``, the path of a claim or a fence."""
        return FencedError(
            f"The state at {self._files.storage.location} has been taken over by another coordinator ({by}; this one "
            f"has epoch {self.current}). Only one Ray cluster may run a query at a time."
        )

    def newest(self) -> EpochFile | None:
        """Return the highest claim, or None if there is none."""
        self._looked = self._look()
        return self._looked[1]

    def _look(self) -> tuple[list[int], EpochFile | None]:
        epochs = self._files.numbers(EPOCHS)
        return epochs, self._read(epochs[-1]) if epochs else None

    def is_superseded(self, newest: EpochFile | None, run_id: str) -> bool:
        """Return whether a run has claimed an epoch before the ``newest`` claim, which is another run's."""
        if newest is None or newest.run_id == run_id:
            return False
        return run_id in (self.runs() if newest.earlier_runs is None else newest.earlier_runs)

    def _runs_until(self, newest: EpochFile | None, run_id: str) -> tuple[str, ...]:
        """Return the last runs until the ``newest`` claim, the newest run last, without ``run_id``."""
        if newest is None:
            return ()
        before = reversed(self.runs()) if newest.earlier_runs is None else (*newest.earlier_runs, newest.run_id)
        runs = list(dict.fromkeys(reversed([run for run in before if run != run_id])))
        return tuple(reversed(runs[:REMEMBERED_RUNS]))

    def _read(self, epoch: int) -> EpochFile:
        return self._files.read(epoch_path(epoch), EpochFile)

    def obsolete(self) -> list[str]:
        """Return the paths of the claims that are no longer needed. The fences of their epochs stay."""
        return [epoch_path(epoch) for epoch in self._files.numbers(EPOCHS) if epoch <= self.current - KEPT_CLAIMS]

    def runs(self) -> dict[str, EpochFile]:
        """Return the last claim of every run that has claimed an epoch. The last run comes first."""
        claims = self._files.read_all([epoch_path(k) for k in self._files.numbers(EPOCHS)], EpochFile)
        last_claims: dict[str, EpochFile] = {}
        for claim in reversed(claims):
            last_claims.setdefault(claim.run_id, claim)
        return last_claims
