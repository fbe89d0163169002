"""Fencing: of two coordinators that take the same query for theirs, only one can complete a version.

After SlateDB. Every coordinator claims an epoch, a number that only grows, before it reads the manifests. After each
write, and before it answers, it checks whether a higher epoch was claimed. The coordinator with the lower epoch then
gives up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct, field

from backends.exceptions import FileExistsInStorageError
from backends.formats.manifest_chain import Layout
from coordinator_actor.durable.record_files import RecordFiles, numbered_path
from coordinator_actor.exceptions import FencedError

EPOCHS = "epochs"


class EpochFile(Struct, frozen=True):
    """``epochs/<epoch>.json``: a coordinator has claimed an epoch for a run.

    ``layouts`` and ``schema_ids`` (by operator) are those with which the run keeps its operators.
    """

    epoch: int
    coordinator_id: str
    run_id: str
    layouts: tuple[Layout, ...] = ()
    schema_ids: dict[str, str] = field(default_factory=dict)


def epoch_path(epoch: int) -> str:
    """Return the path of the claim of an epoch."""
    return numbered_path(EPOCHS, epoch)


class Epochs:
    """The claimed epochs of one query, as one coordinator sees and extends them.

    ``current`` is the epoch that this coordinator has claimed, 0 before the first claim.
    """

    def __init__(self, files: RecordFiles, coordinator_id: str) -> None:
        self.current = 0
        self._files = files
        self._coordinator_id = coordinator_id

    def claim(self, run_id: str, layouts: Iterable[Layout] = (), schema_ids: Mapping[str, str] | None = None) -> None:
        """Claim the next epoch for a run."""
        while True:
            epoch = max(self._files.numbers(EPOCHS), default=0) + 1
            claim = EpochFile(epoch, self._coordinator_id, run_id, tuple(layouts), dict(schema_ids or {}))
            try:
                self._files.create(epoch_path(epoch), claim)
            except FileExistsInStorageError:
                continue
            self.current = epoch
            return

    def check(self) -> None:
        """Raise ``FencedError`` if a higher epoch is claimed. Epochs are claimed one by one, so one look is enough."""
        if self._files.storage.exists(epoch_path(self.current + 1)):
            raise FencedError(
                f"The state at {self._files.storage.location} has been taken over by another coordinator (epoch "
                f"{self.current + 1}; this one has {self.current}). Only one Ray cluster may run a query at a time."
            )

    def newest(self) -> EpochFile | None:
        """Return the highest claim, or None if there is none."""
        epochs = self._files.numbers(EPOCHS)
        return self._files.read(epoch_path(epochs[-1]), EpochFile) if epochs else None

    def is_newest(self, run_id: str) -> bool:
        """Return whether the last claim was made for the run."""
        newest = self.newest()
        return newest is not None and newest.run_id == run_id

    def is_superseded(self, run_id: str) -> bool:
        """Return whether the run has claimed an epoch and another run has claimed a later one."""
        newest = self.newest()
        return newest is not None and newest.run_id != run_id and run_id in self.runs()

    def runs(self) -> dict[str, EpochFile]:
        """Return the last claim of every run that has claimed an epoch. The last run comes first."""
        claims = self._files.read_all([epoch_path(k) for k in self._files.numbers(EPOCHS)], EpochFile)
        found: dict[str, EpochFile] = {}
        for claim in reversed(claims):
            found.setdefault(claim.run_id, claim)
        return found
