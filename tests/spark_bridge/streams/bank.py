"""Transfers between accounts whose sum never changes, and tellers that ask for all balances while everything is being
killed.

    python -m tests.spark_bridge.streams.bank --answers 100000 --seed 7
    python -m tests.spark_bridge.streams.bank --answers 100000 --seed 7 --pause 2    fewer blows, more versions

Each micro-batch moves money between accounts of all partitions, so that an answer whose partitions are not at one
version has another
sum, or, if it has the sum, balances that there never were. Every answer is compared with the balances of all versions
that
there have been, and a teller must never see an older version than it has seen.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.effort import effort
from tests.patience import HANG, PATIENCE

OPERATOR = "balances"
ACCOUNTS = 60
OPENING = 1_000
TRANSFERS = 25
# Few of them see a mixed answer in every second run only; test_routed_versions.py sees what mixes answers in each run.
TELLERS = effort(2, 4)
PAUSE = 0.3
"""Seconds between two blows."""


@dataclass
class Bank:
    """Makes the batches, and knows the balances of every version. ``directory`` is where tellers read them."""

    directory: Path
    seed: int
    balances: list[int] = field(default_factory=lambda: [OPENING] * ACCOUNTS)
    versions: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def next_batch(self) -> list[tuple[int, int]]:
        """Rows of account and amount; the first batch opens the accounts. The balances are noted before the batch
        can run.
        """
        rows = [(account, OPENING) for account in range(ACCOUNTS)] if self.versions == 0 else []
        for _ in range(TRANSFERS if self.versions else 0):
            giver, taker = self._random.sample(range(ACCOUNTS), 2)
            amount = self._random.randint(1, 100)
            self.balances[giver] -= amount
            self.balances[taker] += amount
            rows += [(giver, -amount), (taker, amount)]
        self.versions += 1
        with (self.directory / "history.jsonl").open("a") as file:
            file.write(json.dumps(self.balances) + "\n")
        return rows


class Teller:
    """Asks for all balances, again and again, in every way there is, and checks each answer."""

    def __init__(self, directory: Path, seed: int) -> None:
        self._directory, self._seed = directory, seed
        self._history = directory / "history.jsonl"
        self._known: dict[tuple[int, ...], int] = {}
        self._read = 0
        self._random = random.Random(seed)
        self.answers = 0
        self.seen = 0

    def check(self, balances: dict[int, int]) -> None:
        """Raise unless these are the balances of one version, and not of an older one than has been seen."""
        if not balances:
            assert self.seen == 0, f"no balances, but version {self.seen} was seen"
            return
        given = tuple(balances.get(account, 0) for account in range(ACCOUNTS))
        assert sum(given) == ACCOUNTS * OPENING, f"the sum is {sum(given)}: {given}"
        if given not in self._known:
            with self._history.open() as file:
                for number, line in enumerate(file, 1):
                    if line.endswith("\n"):
                        self._known[tuple(json.loads(line))] = number
        version = self._known.get(given)
        assert version is not None, f"there never were the balances {given}"
        assert version >= self.seen, f"version {version} was seen after {self.seen}"
        self.seen = version
        self.answers += 1

    def report(self) -> None:
        """Say how many answers there were; it is read meanwhile, and so appears as a whole."""
        draft = self._directory / f"draft-{self._seed}"
        draft.write_text(f"{self.answers} {self.seen}")
        draft.replace(self._directory / f"answers-{self._seed}")

    def ask(self, client: Any) -> None:
        """One answer."""
        if self._random.random() < 0.9:
            accounts = list(range(ACCOUNTS))
            self._random.shuffle(accounts)
            found = client.get_many(OPERATOR, accounts, timeout=PATIENCE)
            rows = zip(found.column("account").to_pylist(), found.column("balance").to_pylist(), strict=True)
            self.check({account: balance for account, balance in rows if balance is not None})
        else:
            with client.scan(OPERATOR, timeout=PATIENCE) as scan:
                rows = [row for batch in scan for row in batch.to_pylist()]
            assert len({row["account"] for row in rows}) == len(rows), "an account came twice"
            self.check({row["account"]: row["balance"] for row in rows})


def teller(directory: Path, seed: int) -> None:
    """A process of its own: asks until there is a file "stop"."""
    from spark_bridge import QueryableStateClient

    made = Teller(directory, seed)
    reported = 0.0
    with QueryableStateClient.connect() as client:
        while not (directory / "stop").exists():
            made.ask(client)
            if time.monotonic() > reported + 0.5:
                reported = time.monotonic()
                made.report()
    made.report()


@contextmanager
def tellers(directory: Path, seeds: list[int], ray_address: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Teller processes; what one of them writes to stderr is its verdict."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.spark_bridge.streams.bank", "--teller", str(directory), "--seed", str(seed)],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "RAY_ADDRESS": ray_address},
        )
        for seed in seeds
    ]
    try:
        yield processes
    finally:
        (directory / "stop").touch()
        for process in processes:
            try:
                process.wait(HANG)
            except subprocess.TimeoutExpired:
                process.kill()


def answers_so_far(directory: Path) -> tuple[int, int]:
    """How many answers all tellers have had, and the newest version that any has seen."""
    found = [tuple(map(int, p.read_text().split())) for p in directory.glob("answers-*")]
    return sum(f[0] for f in found), max((f[1] for f in found), default=0)


class Chaos:
    """Kills hosts and the coordinator, and restarts the query, chosen by a seed."""

    KINDS = ("host", "coordinator", "hosts", "query", "nothing", "nothing")

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.done: dict[str, int] = dict.fromkeys(self.KINDS, 0)

    def choose(self) -> str:
        """What is next."""
        kind = self.random.choice(self.KINDS)
        self.done[kind] += 1
        return kind

    def strike(self, kind: str) -> None:
        """Kill processes of this session."""
        from spark_bridge.session.current import current_cluster

        cluster = current_cluster()
        if kind == "coordinator":
            pids = [int(cluster.coordinator.call("describe")["pid"])]
        else:
            pids = [int(h["pid"]) for h in cluster.describe_hosts()]
            pids = [self.random.choice(pids)] if kind == "host" else pids
        for pid in pids:
            os.kill(pid, signal.SIGKILL)


def run_bank(
    stream: Any,
    directory: Path,
    seed: int,
    answers: int,
    seconds: float,
    pause: float = PAUSE,
    at_least: tuple[int, int] = (0, 0),
) -> tuple[int, dict[str, int], int]:
    """Transfers, tellers and blows until there are so many answers, or the time is over; gives answers, blows,
    versions seen.

    Blows come every ``pause`` seconds. Without ``at_least`` so many answers, and so high a version seen, it goes on
    without blows, which may
    come faster than what they have hit recovers.

    ``stream`` is a ``Stream`` of ``account long, amount long``. Raises ``AssertionError`` with what a teller has found.
    """
    import ray
    from ray.exceptions import RayError

    from spark_bridge import aggregate
    from spark_bridge import functions as S
    from spark_bridge.exceptions import HostUnavailableError

    bank, chaos = Bank(directory, seed), Chaos(seed)

    def start() -> Any:
        balances = aggregate(stream.read(), by="account", operator=OPERATOR, balance=S.sum("amount"))
        return balances.writeStream.option("checkpointLocation", stream.checkpoint).format("noop").start()

    stream.add(bank.next_batch())
    query = start()
    query.processAllAvailable()
    end = time.monotonic() + HANG
    address = ray.get_runtime_context().gcs_address
    with tellers(directory, [seed * 100 + i for i in range(TELLERS)], address) as processes:
        # A client that has never had an answer is told at once that a query is not there.
        while len(list(directory.glob("answers-*"))) < TELLERS and all(p.poll() is None for p in processes):
            assert time.monotonic() < end, "the tellers could not begin"
            time.sleep(0.1)
        begun, next_blow = time.monotonic(), 0.0
        while all(p.poll() is None for p in processes):  # a teller ends by itself only if an answer was wrong
            lasting = time.monotonic() - begun
            answered, newest = answers_so_far(directory)
            is_enough = answered >= at_least[0] and newest >= at_least[1]
            if is_enough and (answered >= answers or lasting > seconds):
                break
            assert lasting < seconds + HANG, f"only {answered} answers and version {newest} after {lasting:.0f} s"
            assert query.exception() is None, query.exception()
            stream.add(bank.next_batch())
            time.sleep(chaos.random.uniform(0.05, 0.5))
            if time.monotonic() < next_blow or lasting > seconds:
                continue
            kind = chaos.choose()
            if kind == "query":
                query.stop()
                query = start()
            elif kind != "nothing":
                with suppress(RayError, HostUnavailableError, ProcessLookupError):  # it has just died by another blow
                    chaos.strike(kind)
            next_blow = time.monotonic() + pause
        (directory / "stop").touch()
        verdicts = [p.communicate(timeout=HANG)[1] for p in processes]
    query.stop()
    for process, verdict in zip(processes, verdicts, strict=True):
        assert process.returncode == 0, verdict[-3000:]
    total, newest = answers_so_far(directory)
    return total, chaos.done, newest


def main() -> None:
    """A long run, or (``--teller``) one teller of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=900.0)
    parser.add_argument("--pause", type=float, default=PAUSE, help="seconds between two blows")
    parser.add_argument("--teller", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.teller is not None:
        teller(arguments.teller, arguments.seed)
        # Ray's threads may meet its worker while that is being taken down, and then end the process with an error.
        os._exit(0)
    import tempfile

    from spark_bridge import init_spark, stop_spark
    from tests.spark_bridge.conftest import Stream

    spark = init_spark(
        "bank", num_executors=2, executor_cores=1, configs={"spark.sql.shuffle.partitions": "4"}, recovery_timeout=HANG
    )
    try:
        with tempfile.TemporaryDirectory(prefix="bank-") as root:
            directory = Path(root) / "tellers"
            directory.mkdir()
            stream = Stream(spark, Path(root), "account long, amount long")
            total, blows, newest = run_bank(
                stream, directory, arguments.seed, arguments.answers, arguments.seconds, arguments.pause
            )
        print(f"{total:,} answers, none broken; the newest was of version {newest}; blows: {blows}")
    finally:
        stop_spark()


if __name__ == "__main__":
    main()
