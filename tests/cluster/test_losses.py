"""A bank survives machines that are killed, lose power, are cut off in one or both directions, and come back.

The head is also killed or loses power. The application ends with the head, because it needs the head's driver and Ray;
after a restart, it resumes after the last committed version.
Every version that a query returns conserves money: it has exactly the accounts that follow from its batches.
``STATESTORE_LOSSES_SEED`` repeats a run's draws, ``STATESTORE_LOSSES`` makes more or fewer of them.

``statestore run`` on a machine that stays, while the head loses power: the stream recovers by itself, exact.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest

from spark_bridge import state_table
from tests.cluster.program_on_lab import START_SECONDS, ProgramOnLab
from tests.lab import bank
from tests.lab.accounts import ACCOUNTS, OPERATOR, postings
from tests.lab.auditor import committed
from tests.lab.cable import Direction
from tests.lab.lab import ROOT, Lab
from tests.lab.ray_nodes import JOBS_PORT, RAY, WITH_JOBS, ray_address, ray_environment, start_ray, start_ray_on
from tests.spark_bridge.conftest import wait_until

# Otherwise: test_bare_losses.py without Ray and Spark, tests/simulation, and what tests/spark_bridge/streams kills.
pytestmark = [pytest.mark.cluster, pytest.mark.ray, pytest.mark.spark, pytest.mark.thorough]
LOSSES = int(os.environ.get("STATESTORE_LOSSES", "12"))
"""On each line of Spark: with those of ``test_bare_losses.py``, 300 of a thorough run."""
TOGETHER = 6
"""So many losses at most between two looks: those of a machine follow one another, two machines lose side by side."""
CPUS = [0, 2, 2, 2]
KINDS = ("killed", "without power", "cut off", "cut off in", "cut off out")
HEAD = 0
HEADS_SHARE = 0.2
"""The share of rounds behind the first one, which always does, that end with the loss of the head.

Everything starts again then, which takes a minute.
"""
SHORT, LONG = 10.0, 40.0
"""Seconds that a machine is away: mostly less than Ray takes to notice, and in a fifth of the losses up to more."""


@dataclass(frozen=True)
class Loss:
    """What happens to a machine, and for how many seconds."""

    machine: int
    kind: str
    seconds: float


Round = list[list[Loss]]
"""Losses between two looks, by machine; those of the head, where there is one, begin when the others are over."""


def drawn(seed: int, count: int) -> list[Round]:
    """Return rounds with so many losses in all that follow from a seed; all kinds come in turn, in its order."""
    draws = random.Random(seed)
    kinds: list[str] = []
    rounds: list[Round] = []
    while count > 0:
        lost = draws.sample(range(1, len(CPUS)), 2)  # one machine stays, so that an executor can always start
        lanes: dict[int, list[Loss]] = {k: [] for k in lost}
        with_head = count > 1 and (not rounds or draws.random() < HEADS_SHARE)
        for _ in range(min(count - with_head, draws.randint(2, TOGETHER))):
            kinds = kinds or draws.sample(KINDS, len(KINDS))
            k, away = draws.choice(lost), LONG if draws.random() < 0.2 else SHORT
            lanes[k].append(Loss(k, kinds.pop(), draws.uniform(0, away)))
            count -= 1
        rounds.append([lane for lane in lanes.values() if lane])
        if with_head:
            rounds[-1].append([Loss(HEAD, draws.choice(KINDS[:2]), draws.uniform(0, SHORT))])
            count -= 1
    return rounds


class MachinesUnderLoss:
    """The machines of a lab. Who looks after them starts Ray where it has ended."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab

    def lose_each(self, lane: Sequence[Loss]) -> None:
        """Take a machine away and bring it back, with Ray on it, as often as there are losses."""
        for loss in lane:
            self.lose(loss)
            if loss.machine != HEAD:
                self.start_ray_on(loss.machine)

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
            self.start_ray_on(k)

    def start_ray_on(self, k: int) -> None:
        """Start Ray on a machine if it does not run there."""
        if self._lab.run(k, ["pgrep", "-x", "raylet"], check=False).returncode:
            self._lab.run(k, [RAY, "stop", "--force"], ray_environment(), check=False)
            start_ray_on(self._lab, k, CPUS[k])

    def start_cluster_again(self) -> None:
        """Restart Ray on all machines: a head that has lost its state does not know the old head's nodes."""
        for k in range(1, len(CPUS)):
            self._lab.run(k, [RAY, "stop", "--force"], ray_environment(), check=False)
        start_ray(self._lab, CPUS)


class BankUnderLoss:
    """The bank and its auditor on the head, where they are started again after the head was lost."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self.checkpoint = str(lab.shared / "ck")
        self._programs: dict[str, ProgramOnLab] = {}

    def start(self) -> None:
        """Start both, and wait until batches are committed and answers right."""
        self.end()
        arguments = {"bank": (ray_address(self._lab), self.checkpoint, str(len(CPUS) - 1))}
        for name, word in (("bank", "batch"), ("auditor", "answer")):
            program = ProgramOnLab(self._lab, name, *arguments.get(name, (self.checkpoint,)))
            self._programs[name] = program
            program.wait_for_more(word, 2)

    def seen(self) -> tuple[int, int]:
        """How many batches and answers there were."""
        return len(self._programs["bank"].lines("batch")), len(self._programs["auditor"].lines("answer"))

    def wrong(self) -> list[list[str]]:
        return self._programs["auditor"].lines("wrong")

    def log(self) -> str:
        return "\n".join(program.log()[-5000:] for program in self._programs.values())

    def end(self) -> None:
        """End both, wherever they have come to."""
        while self._programs:
            self._programs.popitem()[1].end()


def lose_side_by_side(machines: MachinesUnderLoss, bank: BankUnderLoss, lanes: Round) -> None:
    """Lose machines side by side; the head behind the others, and the bank is started again then."""
    with ThreadPoolExecutor(len(lanes)) as threads:
        for lost in [threads.submit(machines.lose_each, lane) for lane in lanes if lane[0].machine != HEAD]:
            lost.result()
    for lane in (lane for lane in lanes if lane[0].machine == HEAD):
        machines.lose_each(lane)
        machines.start_cluster_again()
        bank.start()


def test_no_money_is_lost_with_machines(make_lab: Callable[[int], Lab]) -> None:
    seed = int(os.environ.get("STATESTORE_LOSSES_SEED") or random.SystemRandom().randrange(1 << 32))
    print(f"STATESTORE_LOSSES_SEED={seed}", file=sys.stderr)
    lab = make_lab(len(CPUS))
    start_ray(lab, CPUS)
    machines, bank = MachinesUnderLoss(lab), BankUnderLoss(lab)
    try:
        bank.start()
        seen = 0
        for i, lanes in enumerate(drawn(seed, LOSSES)):
            seen += sum(map(len, lanes))
            print(f"round {i}, {seen} of {LOSSES} losses: {lanes}", file=sys.stderr)
            before = committed(bank.checkpoint)
            try:
                lose_side_by_side(machines, bank, lanes)
                batches, answers = bank.seen()

                def goes_on(batches: int = batches + 2, answers: int = answers + 2) -> bool:
                    machines.start_ray_again()
                    seen = bank.seen()
                    return seen[0] >= batches and seen[1] >= answers

                wait_until(goes_on, timeout=START_SECONDS)
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, round {i}: {lanes}\n{bank.log()}") from error
            assert bank.wrong() == [], f"seed {seed}, round {i}: {lanes}"
            assert committed(bank.checkpoint) > before, f"seed {seed}, round {i}: {lanes}: committed batches are gone"
    finally:
        bank.end()
    version = committed(bank.checkpoint)
    table = state_table(bank.checkpoint, OPERATOR, version=version)
    money, count = np.zeros(ACCOUNTS, np.int64), np.zeros(ACCOUNTS, np.int64)
    keys = table.column("k").to_numpy()
    money[keys], count[keys] = table.column("money").to_numpy(), table.column("n").to_numpy()
    assert money.sum() == 0
    assert (money == postings(version)[0]).all() and (count == postings(version)[1]).all(), f"seed {seed}"


# Otherwise: tests/spark_bridge/cli/test_supervision.py, and test_run.py there on one machine.
SUPERVISED_CPUS = [0, 2, 2]
SUPERVISOR = 1


def test_a_stream_survives_a_power_loss_of_the_head(make_lab: Callable[[int], Lab]) -> None:
    lab = make_lab(len(SUPERVISED_CPUS))
    start_ray(lab, SUPERVISED_CPUS, head=WITH_JOBS)
    checkpoint = str(lab.shared / "ck")
    options = ("--name", "bank", "--address", f"http://{lab.addresses[0]}:{JOBS_PORT}", "--env", f"PYTHONPATH={ROOT}")
    program = (str(bank.__file__), *options, "--", ray_address(lab), checkpoint, "2")
    run = ProgramOnLab(lab, "cli", "run", *program, machine=SUPERVISOR, package="spark_bridge")
    programs = [run]
    try:
        run.wait_for_more("batch", 3)
        before = committed(checkpoint)
        lab.cut(0)
        lab.kill(0)
        wait_until(lambda: "No cluster answers" in run.log(), timeout=START_SECONDS)

        lab.start(0)
        for k in range(1, len(SUPERVISED_CPUS)):  # the new head does not know the nodes of the old one
            lab.run(k, [RAY, "stop", "--force"], ray_environment(), check=False)
        start_ray(lab, SUPERVISED_CPUS, head=WITH_JOBS)
        run.wait_for_more("batch", 3)
        assert "bank-1 is started" in run.log() and "the head of the cluster has died" in run.log()
        assert committed(checkpoint) > before, "committed batches are gone"
        programs.append(auditor := ProgramOnLab(lab, "auditor", checkpoint))
        auditor.wait_for_more("answer", 3)
        assert auditor.lines("wrong") == []
    except AssertionError as error:
        raise AssertionError("\n".join(program.log()[-5000:] for program in programs)) from error
    finally:
        for each in programs:
            each.end()
