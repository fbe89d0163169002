"""The record of the last run of all comparisons in one go, which stands at the top of ``RESULTS.md``."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from pathlib import Path

FILE = "whole-run.json"


@dataclass(frozen=True)
class WholeRun:
    """A run of all comparisons: its begin, commit and seconds, and the comparisons measured again afterwards.

    ``again`` has names of comparisons with their environments, such as ``throughput on Spark 3.5``.
    """

    began: str
    commit: str
    seconds: float
    again: tuple[str, ...] = ()

    def sentence(self) -> str:
        """Return what ``RESULTS.md`` says of the run."""
        minutes = round(self.seconds / 60)
        took = f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"
        again = f" Measured again since: {', '.join(self.again)}; each part has its date and commit." * bool(self.again)
        return f"Made in one go on {self.began} (UTC), commit {self.commit}, in {took}.{again}"


def load(directory: Path) -> WholeRun | None:
    """Return the record; None if the kept results were not made in one go."""
    path = directory / FILE
    if not path.exists():
        return None
    data = json.loads(path.read_text())
    return WholeRun(**{**data, "again": tuple(data["again"])})


def save(directory: Path, run: WholeRun) -> None:
    """Write the record."""
    (directory / FILE).write_text(json.dumps(asdict(run), indent=1) + "\n")


def forget(directory: Path) -> None:
    """Remove the record, as another run begins."""
    (directory / FILE).unlink(missing_ok=True)


def note_again(directory: Path, parts: Collection[str]) -> None:
    """Note in the record, if there is one, which parts have been measured again."""
    if (run := load(directory)) is not None:
        save(directory, replace(run, again=tuple(dict.fromkeys((*run.again, *parts)))))
