"""A bank without Ray and Spark on machines that are killed and cut off: no answer is ever wrong, and no money is lost.

What ``test_losses.py`` shows with Ray and Spark, in seconds: the real coordinator, hosts, tasks' way to the hosts,
client and storage. ``STATESTORE_LOSSES_SEED`` repeats a run's draws, ``STATESTORE_LOSSES`` makes more or fewer of them.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable

import numpy as np
import pytest

from spark_bridge import state_table
from tests.cluster.bare_bank import BareBank
from tests.effort import effort
from tests.lab.accounts import ACCOUNTS, OPERATOR, postings
from tests.lab.auditor import committed
from tests.lab.cable import Direction
from tests.lab.lab import Lab
from tests.spark_bridge.conftest import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.ray, pytest.mark.spark42_only, pytest.mark.slow]
HOSTS = (1, 2)
HOST_SECONDS, BEAT_SECONDS = 2.0, 0.2
LOSSES = int(os.environ.get("STATESTORE_LOSSES") or effort(5, 276))
"""A thorough run makes 300: these, and 12 on each line of Spark in ``test_losses.py``."""
KINDS = ("killed", "without power", "cut off", "cut off in", "cut off out")
AWAY_SECONDS = 2 * HOST_SECONDS
"""A machine is away for up to so long: about as often shorter as longer than the coordinator waits for a host."""


def lose(lab: Lab, bank: BareBank, k: int, kind: str, seconds: float) -> None:
    """Take a machine away, and bring it back after some seconds."""
    directions: dict[str, Direction] = {"cut off in": "in", "cut off out": "out"}
    if kind != "killed":
        lab.cut(k, directions.get(kind))
    if kind in ("killed", "without power"):
        lab.kill(k)
        bank.end_host(k)
    time.sleep(seconds)  # the length of the loss, which nothing waits for
    if kind.startswith("cut off"):
        lab.mend(k)
    else:
        lab.start(k)
        bank.start_host(k)


def test_no_money_is_lost_with_machines(make_lab: Callable[[int], Lab]) -> None:
    seed = int(os.environ.get("STATESTORE_LOSSES_SEED") or random.SystemRandom().randrange(1 << 32))
    print(f"STATESTORE_LOSSES_SEED={seed}", file=sys.stderr)
    draws = random.Random(seed)
    lab = make_lab(1 + len(HOSTS))
    bank = BareBank(lab, HOSTS, HOST_SECONDS, BEAT_SECONDS)
    try:
        bank.bank.wait_for_more("answer", 2)
        kinds: list[str] = []
        for i in range(LOSSES):
            kinds = kinds or draws.sample(KINDS, len(KINDS))
            loss = (draws.choice(HOSTS), kinds.pop(), draws.uniform(0, AWAY_SECONDS))
            before = len(bank.bank.lines("batch")), len(bank.bank.lines("answer"))
            begun = time.monotonic()
            lose(lab, bank, *loss)

            def goes_on(before: tuple[int, int] = before) -> bool:
                said = len(bank.bank.lines("batch")), len(bank.bank.lines("answer"))
                return said[0] >= before[0] + 2 and said[1] >= before[1] + 2

            try:
                wait_until(goes_on)
                assert bank.bank.lines("wrong") == []
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, {i}: {loss}\n{bank.log()}") from error
            assert bank.bank.lines("stale"), "no copy was asked"
            print(f"{i}: {loss}, recovered after {time.monotonic() - begun - loss[2]:.1f} s", file=sys.stderr)
    finally:
        bank.end()
    version = committed(bank.checkpoint)
    table = state_table(bank.checkpoint, OPERATOR, version=version)
    money, count = np.zeros(ACCOUNTS, np.int64), np.zeros(ACCOUNTS, np.int64)
    keys = table.column("k").to_numpy()
    money[keys], count[keys] = table.column("money").to_numpy(), table.column("n").to_numpy()
    assert (money == postings(version)[0]).all() and (count == postings(version)[1]).all(), f"seed {seed}"
