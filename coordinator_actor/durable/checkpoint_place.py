"""The record of the checkpoint that a state belongs to, for state that is not in the checkpoint itself.

Such a state is found by the query id, which a copy of a checkpoint shares with the original. So the state says where
its checkpoint is: the newest record counts.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping

from msgspec import Struct

from backends.exceptions import FileExistsInStorageError
from backends.storage.locations import parse_location
from coordinator_actor.durable.record_files import RecordFiles, numbered_path

CHECKPOINTS = "checkpoints"


class CheckpointPlace(Struct, frozen=True):
    """``checkpoints/<number>.json``: the state belongs to the checkpoint at that location, from this record on."""

    number: int
    checkpoint_location: str

    def is_at(self, checkpoint_location: str) -> bool:
        """Return whether that location is this place, whatever it is called: a link leads to the same place."""
        return _canonical(self.checkpoint_location) == _canonical(checkpoint_location)


class CheckpointPlaces:
    """The records of one state."""

    def __init__(self, files: RecordFiles) -> None:
        self._files = files

    def newest(self) -> CheckpointPlace | None:
        """Return the record that counts, None for a state that does not say where its checkpoint is."""
        numbers = self._files.numbers(CHECKPOINTS)
        return self._files.read(numbered_path(CHECKPOINTS, numbers[-1]), CheckpointPlace) if numbers else None

    def record(self, checkpoint_location: str, previous: CheckpointPlace | None) -> CheckpointPlace:
        """Write the record that follows ``previous``; return it, or the one that somebody else has written first."""
        place = CheckpointPlace(1 if previous is None else previous.number + 1, checkpoint_location)
        path = numbered_path(CHECKPOINTS, place.number)
        try:
            self._files.create(path, place)
        except FileExistsInStorageError:
            return self._files.read(path, CheckpointPlace)
        return place


def checkpoint_command(verb: str, checkpoint_location: str, state_base: str, options: Mapping[str, str]) -> str:
    """Return ``statestore checkpoint <verb>`` for a checkpoint, as a user runs it.

    Options of the storage have "..." in the place of their values, which may be secrets.
    """
    words = ["statestore", "checkpoint", verb, checkpoint_location, "--state-location", state_base]
    for name in sorted(options):
        words += ["--storage-option", f"{name}=..."]
    return shlex.join(words)


def values_in_words(options: Mapping[str, str]) -> str:
    """Return what to do about the values that ``checkpoint_command`` leaves out; empty if there are none."""
    if not options:
        return ""
    return (
        "\nPut the values of your program in the place of '...'. Leave secrets to the environment, such as "
        "AWS_SECRET_ACCESS_KEY."
    )


def is_inside(state_location: str, checkpoint_location: str) -> bool:
    """Return whether the state lies in the checkpoint, so that both are copied and moved together."""
    if state_location.startswith(f"{checkpoint_location.rstrip('/')}/"):
        return True  # as it is by default
    return _canonical(state_location).startswith(f"{_canonical(checkpoint_location)}/")


def _canonical(location: str) -> str:
    parsed = parse_location(location)
    return os.path.realpath(parsed.prefix) if parsed.kind == "local" else parsed.text
