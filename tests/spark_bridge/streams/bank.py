"""Transfers between accounts whose sum never changes, and tellers that ask for all balances while everything is being
killed.

    python -m tests.spark_bridge.streams.bank --answers 100000 --seed 7
    python -m tests.spark_bridge.streams.bank --answers 100000 --seed 7 --pause 2    fewer blows, more versions

Each micro-batch moves money between accounts of all partitions. So an answer that mixes versions has another sum, or
balances that there never were. A teller compares every answer with the balances of all versions, and must never see an
older version than it has seen.

Tellers also record each answer with its times. After the run, ``check_history`` compares the whole history with Spark's
commits and the sink's rows: each answer is linearizable at the completed versions, and sink and state agree.
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
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
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
CLOCK_SECONDS = 0.05
"""By so much the times of files may be behind the clock: the kernel takes them from its last tick."""


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
        """Return rows of account and amount; the first batch opens the accounts.

        The balances are recorded before the batch can run.
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
        self._records: list[str] = []
        self.answers = 0
        self.seen = 0

    def record(self, asked: float, **answer: int | None) -> None:
        """Note an answer for ``check_history``: a version, or an account and its balance."""
        self._records.append(json.dumps({"asked": asked, "answered": time.time(), **answer}) + "\n")

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
        """Write the number of answers, atomically because it is read concurrently."""
        with (self._directory / f"records-{self._seed}.jsonl").open("a") as file:
            file.writelines(self._records)
        self._records.clear()
        draft = self._directory / f"draft-{self._seed}"
        draft.write_text(f"{self.answers} {self.seen}")
        draft.replace(self._directory / f"answers-{self._seed}")

    def ask(self, client: Any) -> None:
        """One answer."""
        way, asked = self._random.random(), time.time()
        if way < 0.2:
            account = self._random.randrange(ACCOUNTS)
            row = client.get(OPERATOR, account, timeout=PATIENCE)
            self.record(asked, account=account, balance=None if row is None else row["balance"])
            self.answers += 1
            return
        if way < 0.9:
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
        self.record(asked, version=self.seen)


def teller(directory: Path, seed: int) -> None:
    """Run a teller process that sends requests until there is a file "stop"."""
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
    """Start teller processes; each writes its verdict to stderr."""
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


def write_sink(directory: Path, batch: Any, number: int) -> None:
    """Keep the rows that a micro-batch has emitted; a batch that runs again writes its file again."""
    rows = {row["account"]: row["balance"] for row in batch.collect()}
    draft = directory / f"draft-sink-{number}"
    draft.write_text(json.dumps(rows))
    draft.replace(directory / f"sink-{number}.json")


def commit_times(checkpoint: str) -> dict[int, float]:
    """Return when Spark has committed each batch that is still in ``commits/``: a rename sets a file's change time."""
    commits = [p for p in Path(checkpoint, "commits").iterdir() if p.name.isdecimal()]
    return {int(p.name): p.stat().st_ctime for p in commits}


def check_history(directory: Path, committed: dict[int, float]) -> int:
    """Raise ``AssertionError`` unless all answers are linearizable at completed versions, and sink and state agree.

    A version is completed when Spark commits its batch. An answer is no older than the newest version that was
    completed before the client asked, and no newer than the newest one when it was answered. The versions that
    one client sees never decrease. Returns the number of answers.
    """
    balances = [[0] * ACCOUNTS, *map(json.loads, (directory / "history.jsonl").read_text().splitlines())]
    times = [committed[batch] for batch in sorted(committed)]
    assert sorted(committed) == list(range(len(times))) and times == sorted(times)
    num_answers = 0
    for path in directory.glob("records-*.jsonl"):
        seen = 0
        for line in path.read_text().splitlines():
            record = json.loads(line)
            oldest = bisect_right(times, record["asked"] - CLOCK_SECONDS)
            newest = bisect_right(times, record["answered"] + CLOCK_SECONDS)
            possible = range(max(oldest, seen), newest + 1)
            if "version" in record:
                fitting = [v for v in possible if v == record["version"]]
            else:
                balance = record["balance"] or 0
                fitting = [v for v in possible if balances[v][record["account"]] == balance]
            assert fitting, f"{line}: completed were {oldest} to {newest}, and {seen} was seen before"
            seen, num_answers = fitting[0], num_answers + 1
    for batch in committed:
        emitted = json.loads((directory / f"sink-{batch}.json").read_text())
        before, after = balances[batch], balances[batch + 1]
        assert {int(a): b for a, b in emitted.items()}.items() <= dict(enumerate(after)).items(), batch
        changed = {a for a in range(ACCOUNTS) if before[a] != after[a]}
        assert changed <= {int(a) for a in emitted}, f"the sink lacks accounts of batch {batch}"
    return num_answers


class Chaos:
    """Kills hosts and the coordinator, and restarts the query, chosen by a seed; ``strikes`` are further faults."""

    KINDS = ("host", "coordinator", "hosts", "query", "nothing", "nothing")

    def __init__(self, seed: int, strikes: Mapping[str, Callable[[], object]]) -> None:
        self.random = random.Random(seed)
        self._strikes = strikes
        self.done: dict[str, int] = dict.fromkeys([*self.KINDS, *strikes], 0)

    def choose(self) -> str:
        """Return the next fault; the further ones come first."""
        kind = next((k for k in self._strikes if not self.done[k]), None) or self.random.choice(
            [*self.KINDS, *self._strikes]
        )
        self.done[kind] += 1
        return kind

    def strike(self, kind: str) -> None:
        """Kill processes of this session."""
        from spark_bridge.session.current import current_cluster

        if kind in self._strikes:
            self._strikes[kind]()
            return
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
    strikes: Mapping[str, Callable[[], object]] = MappingProxyType({}),
) -> tuple[int, dict[str, int], int]:
    """Run transfers, tellers and faults until there are ``answers``, or ``seconds`` have passed.

    Returns the number of answers, the faults by kind, and the highest version seen. A fault strikes every ``pause``
    seconds. If ``at_least`` (answers, version) is not reached after ``seconds``, the run continues without faults,
    which may come faster than the processes recover. ``strikes`` are further faults by name: each comes once.

    ``stream`` is a ``Stream`` of ``account long, amount long``. Raises ``AssertionError`` with a teller's finding.
    """
    import ray
    from ray.exceptions import RayError

    from spark_bridge import aggregate
    from spark_bridge import functions as S
    from spark_bridge.exceptions import HostUnavailableError

    bank, chaos = Bank(directory, seed), Chaos(seed, strikes)

    def start() -> Any:
        balances = aggregate(stream.read(), by="account", operator=OPERATOR, balance=S.sum("amount"))
        writer = balances.writeStream.option("checkpointLocation", stream.checkpoint)
        return writer.foreachBatch(lambda batch, number: write_sink(directory, batch, number)).start()

    stream.add(bank.next_batch())
    query = start()
    query.processAllAvailable()
    committed: dict[int, float] = {}
    end = time.monotonic() + HANG
    address = ray.get_runtime_context().gcs_address
    with tellers(directory, [seed * 100 + i for i in range(TELLERS)], address) as processes:
        # A client without an earlier answer fails at once if the query does not exist.
        while len(list(directory.glob("answers-*"))) < TELLERS and all(p.poll() is None for p in processes):
            assert time.monotonic() < end, "the tellers could not begin"
            time.sleep(0.1)
        begun, next_blow = time.monotonic(), 0.0
        while all(p.poll() is None for p in processes):  # a teller ends by itself only if an answer was wrong
            lasting = time.monotonic() - begun
            answered, newest = answers_so_far(directory)
            must_strike = not all(chaos.done[name] for name in strikes)
            is_enough = answered >= at_least[0] and newest >= at_least[1] and not must_strike
            if is_enough and (answered >= answers or lasting > seconds):
                break
            assert lasting < seconds + HANG, f"only {answered} answers and version {newest} after {lasting:.0f} s"
            assert query.exception() is None, query.exception()
            stream.add(bank.next_batch())
            committed |= commit_times(stream.checkpoint)
            time.sleep(chaos.random.uniform(0.05, 0.5))
            if time.monotonic() < next_blow or (lasting > seconds and not must_strike):
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
    committed |= commit_times(stream.checkpoint)
    for process, verdict in zip(processes, verdicts, strict=True):
        assert process.returncode == 0, verdict[-3000:]
    assert check_history(directory, committed) > 0
    total, newest = answers_so_far(directory)
    return total, chaos.done, newest


def main() -> None:
    """Start a long run or, with ``--teller``, one teller of it."""
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
