"""A host process that is killed, and a machine that is cut off: what part of the stall is waiting, without Ray.

    python -m benchmarks.on_machines.detection               three minutes, root; writes results/detection.json
    python -m benchmarks.on_machines.detection --turns 1 --no-write

On the lab of the tests: the bank of ``tests/lab/bare`` in four partitions on two hosts, whose state is so small that
loading it costs nothing. So what a loss costs beyond a batch is the time until the loss is noticed. A host process is
killed by SIGKILL, and then the cable of a machine is cut, in turns; the host or the cable comes back after the next
batches. The timeouts are those of the product.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from typing import Any

import numpy as np

from benchmarks.on_machines.running import finish, parser_of
from coordinator_actor.coordinator_conf import CoordinatorConf
from tests.cluster.bare_bank import BareBank
from tests.lab.lab import Lab

HOSTS = (1, 2)
BEAT_SECONDS = 1.0
LOOK_SECONDS = 0.01
WAIT_SECONDS = 120.0
LIMITS = {"killed process": 1.0, "cut off": 6.0}
"""The most seconds beyond a batch."""


class Watched:
    """The numbers of batches and answers so far; one look takes about a millisecond."""

    def __init__(self, bank: BareBank) -> None:
        self._bank = bank.bank

    def count(self, word: str) -> int:
        return len(self._bank.lines(word))

    def wait_for(self, word: str, count: int) -> float:
        """Wait for so many lines in all, and return the time."""
        deadline = time.monotonic() + WAIT_SECONDS
        while self.count(word) < count:
            if time.monotonic() > deadline:
                raise RuntimeError(f"no {word} number {count} within {WAIT_SECONDS} s:\n{self._bank.log()[-3000:]}")
            time.sleep(LOOK_SECONDS)
        return time.monotonic()


def usual_seconds(watched: Watched) -> float:
    begun = watched.count("batch")
    at = [watched.wait_for("batch", begun + i) for i in range(1, 12)]
    return float(np.median(np.diff(at)))


def one_loss(lab: Lab, bank: BareBank, kind: str, k: int) -> dict[str, Any]:
    watched = Watched(bank)
    usual = usual_seconds(watched)
    time.sleep(random.random() * BEAT_SECONDS)  # losses come at any time between two heartbeats
    batches, answers = watched.count("batch"), watched.count("answer")
    lost = time.monotonic()
    if kind == "cut off":
        lab.cut(k)
    else:
        bank.signal_host(k, signal.SIGKILL)
    # The first batch or answer may have been complete before the loss, so that the second one tells.
    again = watched.wait_for("batch", batches + 2) - lost
    answered = watched.wait_for("answer", answers + 2) - lost
    if kind == "cut off":
        watched.wait_for("batch", batches + 10)
        lab.mend(k)
    bank.end_host(k)
    bank.start_host(k)
    watched.wait_for("batch", watched.count("batch") + 20)
    return {
        "kind": kind,
        "load": round(os.getloadavg()[0], 1),
        "usual_seconds": round(usual, 3),
        "beyond_batch_seconds": round(again - 2 * usual, 2),
        "answer_seconds": round(answered, 2),
    }


def measured(turns: int) -> dict[str, Any]:
    losses = []
    with Lab(1 + len(HOSTS)) as lab:
        bank = BareBank(lab, HOSTS, CoordinatorConf.host_timeout, BEAT_SECONDS)
        try:
            Watched(bank).wait_for("answer", 2)
            for turn in range(turns):
                for kind in LIMITS:
                    losses.append(one_loss(lab, bank, kind, HOSTS[turn % len(HOSTS)]))
                    print(json.dumps({"turn": turn, **losses[-1]}), flush=True)
            wrong = len(bank.bank.lines("wrong"))
        finally:
            bank.end()
    return {"losses": losses, "wrong": wrong}


def broken_limits(figures: dict[str, Any]) -> list[str]:
    broken = [
        f"{loss['kind']}: {loss['beyond_batch_seconds']} s beyond the batch, at most {LIMITS[loss['kind']]} s allowed"
        for loss in figures["losses"]
        if loss["beyond_batch_seconds"] > LIMITS[loss["kind"]]
    ]
    if figures["wrong"]:
        broken.append(f"{figures['wrong']} answers were wrong")
    return broken


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    figures = measured(options.turns)
    return finish(options, "detection", json.dumps(figures, indent=1), broken_limits(figures))


if __name__ == "__main__":
    sys.exit(main())
