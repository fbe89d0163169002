"""A bank goes on while machines are killed, lose their power, are cut off in both directions or one, and come back.

Money is conserved in every version that is answered: each has exactly the accounts that follow from its batches.
``STATESTORE_LOSSES_SEED`` repeats a run's draws, ``STATESTORE_LOSSES`` makes more or fewer of them.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from spark_bridge import state_table
from tests.cluster.program_on_lab import START_SECONDS, ProgramOnLab
from tests.effort import effort
from tests.lab.auditor import committed
from tests.lab.bank import ACCOUNTS, OPERATOR, postings
from tests.lab.cable import Direction
from tests.lab.lab import Lab
from tests.lab.ray_nodes import RAY, ray_address, ray_environment, start_ray, start_ray_on
from tests.spark_bridge.conftest import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.ray, pytest.mark.spark]
LOSSES = int(os.environ.get("STATESTORE_LOSSES", effort(2, 300)))
CPUS = [0, 2, 2, 2]
KINDS = ("killed", "without power", "cut off", "cut off in", "cut off out")
SHORT, LONG = 15.0, 90.0
"""Seconds that a machine is away: mostly less than Ray takes to notice, and at times more."""


@dataclass(frozen=True)
class Loss:
    """What happens to a machine, and for how many seconds."""

    machine: int
    kind: str
    seconds: float


def drawn(seed: int, count: int) -> list[Loss]:
    """Return losses that follow from a seed; all kinds come in turn, in an order of the seed's."""
    draws = random.Random(seed)
    kinds: list[str] = []
    losses = []
    for _ in range(count):
        kinds = kinds or draws.sample(KINDS, len(KINDS))
        away = effort(SHORT, LONG) if draws.random() < 0.25 else SHORT
        losses.append(Loss(draws.randrange(1, len(CPUS)), kinds.pop(), draws.uniform(0, away)))
    return losses


class MachinesUnderLoss:
    """The machines of a lab, one of which is lost at a time. Who looks after them starts Ray where it has ended."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab

    def lose(self, loss: Loss) -> None:
        """Take a machine away, and bring it back after the seconds of the loss."""
        lab, k = self._lab, loss.machine
        match loss.kind:
            case "killed":
                lab.kill(k)
            case "without power":
                lab.cut(k)
                lab.kill(k)
            case _:
                direction: dict[str, Direction] = {"cut off in": "in", "cut off out": "out"}
                lab.cut(k, direction.get(loss.kind))
        time.sleep(loss.seconds)  # the length of the loss, which nothing waits for
        if loss.kind.startswith("cut off"):
            lab.mend(k)
        else:
            lab.start(k)

    def start_ray_again(self) -> None:
        """Start Ray where it does not run, as units of systemd do: a node that was declared dead ends itself."""
        for k in range(1, len(CPUS)):
            if self._lab.run(k, ["pgrep", "-x", "raylet"], check=False).returncode:
                self._lab.run(k, [RAY, "stop", "--force"], ray_environment(), check=False)
                start_ray_on(self._lab, k, CPUS[k])


def test_no_money_is_lost_with_machines(make_lab: Callable[[int], Lab]) -> None:
    seed = int(os.environ.get("STATESTORE_LOSSES_SEED") or random.SystemRandom().randrange(1 << 32))
    print(f"STATESTORE_LOSSES_SEED={seed}", file=sys.stderr)
    lab = make_lab(len(CPUS))
    start_ray(lab, CPUS)
    checkpoint = str(lab.shared / "ck")
    machines = MachinesUnderLoss(lab)
    bank = ProgramOnLab(lab, "bank", ray_address(lab), checkpoint, str(len(CPUS) - 1))
    auditor = None
    try:
        bank.wait_for_more("batch", 2)
        auditor = ProgramOnLab(lab, "auditor", checkpoint)
        auditor.wait_for_more("answer", 2)
        for i, loss in enumerate(drawn(seed, LOSSES)):
            print(f"{i}: {loss}", file=sys.stderr)
            machines.lose(loss)
            goal, answers = len(bank.lines("batch")) + 2, len(auditor.lines("answer")) + 2

            def goes_on(goal: int = goal, answers: int = answers) -> bool:
                machines.start_ray_again()
                return len(bank.lines("batch")) >= goal and len(auditor.lines("answer")) >= answers

            try:
                wait_until(goes_on, timeout=START_SECONDS)
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, {i}: {loss}\n{bank.log()[-5000:]}") from error
            assert auditor.lines("wrong") == [], f"seed {seed}, {i}: {loss}"
        bank.wait_for_more("batch", 1)
    finally:
        for program in (auditor, bank):
            if program is not None:
                program.end()
    version = committed(checkpoint)
    table = state_table(checkpoint, OPERATOR, version=version)
    money, count = np.zeros(ACCOUNTS, np.int64), np.zeros(ACCOUNTS, np.int64)
    keys = table.column("k").to_numpy()
    money[keys], count[keys] = table.column("money").to_numpy(), table.column("n").to_numpy()
    assert money.sum() == 0
    assert (money == postings(version)[0]).all() and (count == postings(version)[1]).all(), f"seed {seed}"
