"""From a record's append to a topic of Kafka to its value at a client: ours, ``foreachBatch`` into Redis, Quix Streams.

Needs the jars of ``make services`` and Debian's ``redis-server``.
"""

from __future__ import annotations

import shutil
import time
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from suite.machine import directory, own_ray
from suite.model import Case, Comparison, Contestant, Measured, Size, Target
from suite.runner import EnvironmentMissingError, Steps, made_environment

from comparisons.providers import QUIX_ENVIRONMENT, QUIX_REQUIREMENTS, QUIX_VERSION

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kafka_latency import Turn

OURS, IDENTITY, FOREACH_BATCH, QUIX = "aggregate", "identity", "foreach_batch", "quix"
CONTESTANTS = {
    OURS: Contestant("aggregate on RayDP, asked by QueryableStateClient", {"direct": "True"}, True),
    IDENTITY: Contestant("a stateless Python task behind the same shuffle; its batch is committed"),
    FOREACH_BATCH: Contestant("Spark's own count in update mode, by foreachBatch into Redis", {"store": "HDFS-backed"}),
    QUIX: Contestant(f"{QUIX_VERSION}: counts in its RocksDB state, each set in Redis", {"commit_interval": "0.1"}),
}


def run(size: Size, steps: Steps) -> Measured:
    """Give each contestant the same records at the same rate, in turns, and compare all counts before the next."""
    measured = Measured(dict(CONTESTANTS))
    names = list(size["contestants"])
    steps.expect(len(size["rates"]) * len(names) * size["turns"])
    with directory() as root, ExitStack() as stack:
        python = None
        if QUIX in names:
            steps.now(f"making {QUIX_ENVIRONMENT.name} with {QUIX_VERSION}")
            try:
                python = made_environment(QUIX_ENVIRONMENT, QUIX_REQUIREMENTS)
            except EnvironmentMissingError as error:
                measured.notes.append(f"{QUIX} is left out: {error}")
                names.remove(QUIX)
        stand = stack.enter_context(_stand(root, size, python))
        for name in [name for name in names if name != QUIX] * size["warm_turns"]:
            stand.turn(min(size["rates"]), name)
        for rate in size["rates"]:
            what = f"{rate:,} records a second"
            turns = steps.take_turns(what, names, size["turns"], partial(stand.turn, rate))
            for of, unit in (("p50", "ms"), ("p99", "ms"), ("cores", "cores")):
                figures = {name: [[getattr(turn, of)] for turn in its] for name, its in turns.items()}
                measured.cases.append(Case(f"{what}, {of}", unit, figures))
            for name, its in turns.items():
                if not all(turn.is_sustained for turn in its):
                    behind = max(turn.load_behind for turn in its)
                    measured.notes.append(
                        f"{CONTESTANTS[name].label}: {rate:,} records a second were **not sustained** on this machine; "
                        f"latency grew, or the load was up to {behind:.1f} s behind its times."
                    )
    measured.notes.append(
        f"Before the first turn each contestant on Spark ran {size['warm_turns']} times at the lowest rate: JVMs "
        "compile their code in the first minutes. After each turn the counts of all keys were equal to those of the "
        "records that were appended. Broker, load, client and contestant share the cores; cores are the contestant's "
        "own, with its Redis."
    )
    return measured


class _Stand:
    """What all turns share: a broker, Redis, and a Spark session on RayDP."""

    def __init__(self, root: Path, broker: Any, port: int, spark: Any, size: Size, quix: Path | None) -> None:
        self._root, self._broker, self._port, self._spark = root, broker, port, spark
        self._seconds, self._keys, self._quix = size["seconds"], size["keys"], quix
        self._turns = 0

    def turn(self, rate: int, name: str) -> Turn:
        """Run one turn on a new topic. Raises ``AssertionError`` if the counts are wrong at its end."""
        import kafka_latency as contestants

        from tests.services.kafka import Record

        self._turns += 1
        topic, address = f"{name}-{rate}-{self._turns}", self._broker.address
        place = self._root / topic
        place.mkdir()
        self._broker.topics.create(topic, partitions=2)
        self._broker.topics.send(topic, [Record(b"warm-up", b'{"amount": 1}')])
        started: Any = {
            OURS: lambda: contestants.ours(self._spark, address, topic, place),
            IDENTITY: lambda: contestants.identity(self._spark, address, topic, place),
            FOREACH_BATCH: lambda: contestants.foreach_batch(self._spark, address, topic, place, self._port),
            QUIX: lambda: contestants.quix(self._quix or Path(), address, topic, place, self._port),
        }[name]()
        loads = [(min(rate, 1000), 3.0, self._keys, "warm"), (rate, self._seconds, self._keys, "probe")]
        with started as (sees, all_counts):
            contestants.measure(contestants.load_command(address, topic, *loads[0]), sees, 60.0)
            before = _cpu_seconds(name)
            turn = contestants.measure(contestants.load_command(address, topic, *loads[1]), sees, 120.0)
            after = _cpu_seconds(name)
            turn.cores = sum(used - before.get(pid, 0.0) for pid, used in after.items()) / self._seconds
            if all_counts is not None:
                wanted = contestants.expected(*loads[0]) + contestants.expected(*loads[1])
                deadline = time.monotonic() + 60
                while (counts := {k: n for k, n in all_counts().items() if k != "warm-up"}) != wanted:
                    assert time.monotonic() < deadline, f"{name}: {sum(counts.values())} of {wanted.total()}"
                    time.sleep(0.2)
        shutil.rmtree(place, ignore_errors=True)
        return turn


def _cpu_seconds(name: str) -> dict[int, float]:
    """Return the CPU seconds of a contestant's processes, with its Redis, without broker, load and client."""
    used = dict[int, float]()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            command, times = " ".join(process.cmdline()), process.cpu_times()
            is_redis, is_quix = "redis-server" in command, "kafka_latency.py quix" in command
            is_of_others = "kafka.Kafka" in command or "kafka_latency.py load" in command
            if is_redis or is_quix or (name != QUIX and not is_of_others):
                used[process.pid] = times.user + times.system
    return used


@contextmanager
def _stand(root: Path, size: Size, quix: Path | None) -> Iterator[_Stand]:
    from queries import running_redis

    from ray_statestore import init_spark, stop_spark
    from tests.services.artifacts import ROOT, connector_jars
    from tests.services.kafka import running_kafka

    if not connector_jars():
        raise FileNotFoundError(f"{ROOT} has no connector of Kafka: run `make services`, which needs Maven.")
    (root / "kafka").mkdir()
    with ExitStack() as stack:
        broker = stack.enter_context(running_kafka(root / "kafka"))
        port = stack.enter_context(running_redis(0))
        stack.enter_context(own_ray(3))
        stack.callback(stop_spark)
        spark = init_spark("kafka", 2, 1, "2g", packages=connector_jars(), configs={"spark.log.level": "ERROR"})
        yield _Stand(root, broker, port, spark, size, quix)


def _targets(rates: list[int]) -> tuple[Target, ...]:
    sooner = "A value is at a client sooner than by foreachBatch into Redis at {:,} records a second"
    floor = "p50 is at most 1.2 times that of the identity at {:,} records a second"
    return (
        *(
            Target.times(sooner.format(rate), f"{rate:,} records a second, {of}", OURS, 1.0, FOREACH_BATCH)
            for rate in rates
            for of in ("p50", "p99")
        ),
        *(
            Target.times(floor.format(rate), f"{rate:,} records a second, p50", OURS, 1 / 1.2, IDENTITY)
            for rate in rates
        ),
    )


_RATES = [1_000, 10_000, 100_000]
COMPARISONS = (
    Comparison(
        name="kafka",
        title="From a topic of Kafka to a client",
        about="The time from the schedule of a record's append to its value at a client, while records arrive at a "
        "steady rate that does not wait for anything, and the cores that it takes.",
        run=run,
        sizes={
            "full": dict(contestants=list(CONTESTANTS), rates=_RATES, seconds=20, keys=10_000, turns=3, warm_turns=4),
            "smoke": dict(
                contestants=[OURS, IDENTITY, FOREACH_BATCH], rates=[1_000], seconds=5, keys=1_000, turns=1, warm_turns=1
            ),
        },
        minutes={"full": 40, "smoke": 5},
        in_smoke=False,
        targets=_targets(_RATES),
    ),
)
