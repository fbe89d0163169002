"""The stream on machines: what its keys should have, and what breaks a limit. The stream itself runs on the lab."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[2]))  # the modules there name each other by their packages

from benchmarks.on_machines import elasticity, recovery
from benchmarks.on_machines.programs import STEP, Shape

SHAPE = Shape(keys=100, rows=7)
KEYS = np.arange(100)


@pytest.mark.parametrize("version", [0, 1, 13, 40])
def test_state_of_keys_follows_from_their_rows(version: int) -> None:
    rows = np.arange(version * SHAPE.rows)
    keys = rows * STEP % SHAPE.keys
    counts, sums = SHAPE.totals(KEYS, version)
    assert (counts == np.bincount(keys, minlength=100)).all()
    assert (sums == np.bincount(keys, weights=rows, minlength=100)).all()


def test_an_answer_is_of_one_version_or_wrong() -> None:
    counts, sums = SHAPE.totals(KEYS, 20)
    assert SHAPE.version_of(KEYS, counts, sums, range(18, 22)) == 20
    assert SHAPE.version_of(KEYS, counts, sums, range(21, 25)) is None, "older than the committed version"
    mixed = np.where(KEYS < 50, counts, SHAPE.totals(KEYS, 21)[0])
    assert SHAPE.version_of(KEYS, mixed, sums, range(18, 25)) is None


def found(**changes: Any) -> dict[str, Any]:
    still = {"count": 9, "median": 0.1, "most": 0.2}
    return {
        "host_seconds": [4.0, 9.0],
        "process_seconds": 1.0,
        "moved": {"2 to 4": 8, "4 to 1": 6},
        "must_move": {"2 to 4": 4, "4 to 1": 6},
        "read_seconds": {"still": still, "2 to 4": still, "4 to 1": {**still, "most": 2.0}},
        "wrong": 0,
        "late": [],
        **changes,
    }


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"host_seconds": [11.0]}, "a host came after 11.0 s"),
        ({"host_seconds": [19.0], "process_seconds": 2.0}, None),  # any process takes twice as long now
        ({"moved": {"2 to 4": 9, "4 to 1": 6}}, "2 to 4: 9 partitions moved, 4 must"),
        ({"read_seconds": {p: {"median": 0.1, "most": 2.2} for p in ("still", "2 to 4", "4 to 1")}}, "waited 2.1 s"),
        ({"wrong": 1}, "1 answers were wrong"),
        ({"late": ["TimeoutError()"]}, "1 late"),
    ],
)
def test_limits_of_planned_moves(changes: dict[str, Any], words: str | None) -> None:
    broken = elasticity.broken_limits(found(**changes))
    assert (broken == []) if words is None else (broken and all(words in one for one in broken))


def test_the_limit_of_a_loss_is_for_runs_with_standbys() -> None:
    losses = [{"kind": "killed", "recovered_seconds": s} for s in (0.5, 6.0, 6.5)]
    runs = [{"standbys": n, "losses": losses, "wrong": n} for n in (0, 1)]
    assert recovery.broken_limits(runs) == [
        "killed: the next batch came 6.5 s after the loss, beyond a batch's own time",
        "1 answers were wrong",
    ]


def test_machines_and_owners_are_drawn_as_steps() -> None:
    drawn = elasticity.pictures(
        {
            "keys": 10,
            "marks": {"four": 1.0, "one": 2.0},
            "batches": [[1.0, 0.5], [3.0, 0.7]],
            "answers": [[1, 0.1], [2, 0.2]],
            "places": [[0.5, 2, 2, 2], [1.5, 4, 2, 2], [2.0, 4, 4, 3]],
        }
    )
    assert set(drawn) == {"elasticity-times", "elasticity-machines"}
    assert "to 4 machines at 1 s" in drawn["elasticity-times"]
    assert ">owning partitions</text>" in drawn["elasticity-machines"]
