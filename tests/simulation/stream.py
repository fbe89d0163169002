"""A streaming query over all its runs: where its files are, how it is laid out, and what its state must be."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.simulation.model import Model


@dataclass
class Stream:
    """One query of a world. ``layout_of_run`` gives each run's number of partitions and backend.

    A batch may take ``most_seconds`` (virtual); None where much goes wrong.
    """

    name: str
    model: Model
    num_partitions: int
    backend: str
    most_seconds: float | None = None
    layout_of_run: dict[str, tuple[int, str]] = field(default_factory=dict)
    newest_run: str = ""
    superseded: set[str] = field(default_factory=set)
    """Runs superseded by a client that is not a run: they still work, and cannot know that their work is lost."""
    num_runs: int = 0
    keep: int = 4
    """So many versions and batches are retained."""
    keep_seconds: int = 0
    """Versions that were the newest one within so many seconds are retained, too."""
    batches: int = 0
    committed: dict[str, int] = field(default_factory=dict)
    """By run, the version of the last batch that Spark has committed."""

    def is_newest(self, run_id: str) -> bool:
        """Return whether a run is the last one that has registered, and its epoch has not been ended since."""
        return run_id == self.newest_run and run_id not in self.superseded

    @property
    def checkpoint(self) -> str:
        """Spark's checkpoint location."""
        return f"sim://{self.name}"

    @property
    def state(self) -> str:
        """Where the state is kept."""
        return f"{self.checkpoint}/statestore"
