"""The contents of ``tests/fixtures/format-1``, and copies for tests that continue from it."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.spark_bridge.state_data.format_program import State, processing_times

BACKENDS = ("rocksdb", "file")
INPUTS_THEN = "file:///var/tmp/format-1/in"
FORMAT_1 = Path(__file__).parents[2] / "fixtures" / "format-1"


@dataclass(frozen=True)
class Stored:
    """The files that one backend stored: a checkpoint, a savepoint of it, and the expected contents of both."""

    backend: str

    @property
    def checkpoint(self) -> str:
        return str(FORMAT_1 / self.backend / "checkpoint")

    @property
    def savepoint(self) -> str:
        return str(FORMAT_1 / self.backend / "savepoint")

    def expected(self) -> dict[str, Any]:
        """Return the recorded contents: the version, the times of its batches, and each variable's columns and rows."""
        facts: dict[str, Any] = json.loads((FORMAT_1 / self.backend / "expected.json").read_text())
        return facts

    def state(self) -> State:
        """The state at the version stored."""
        state: State = self.expected()["state"]
        return state


def copied(checkpoint: str, target: Path) -> str:
    """Copy a checkpoint, so that a query can continue from the copy."""
    shutil.copytree(checkpoint, target)
    return str(target)


def moved(checkpoint: str, inputs: Path, now_ms: int) -> None:
    """Make Spark's own logs of the sources of a copy true of this machine and this moment.

    The file source notes the full names of the files it has read. It looks for the last of them in its directory, which
    is ``inputs`` now. A rate source has a row for each second since it began, so it would make rows for all the time
    since the fixtures were made. Its beginning is moved, as if the query's last batch had been at ``now_ms``.
    """
    late_by = now_ms - processing_times(checkpoint)[-1]
    for file in Path(checkpoint, "sources").glob("*/[0-9]*"):
        text = file.read_text().replace(INPUTS_THEN, inputs.as_uri())
        if began := re.fullmatch(r"v1\n(\d+)", text):
            text = f"v1\n{int(began[1]) + late_by}"
        file.write_text(text)
