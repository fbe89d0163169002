"""Requests to an object store under the scheduler: the real sender with its pace and its second requests.

The simulated cluster stores files in a dict, whose calls fail as ``CheckpointStorage`` says that they may. This module
tests that promise: real ``CheckpointStorage`` objects of several processes over a service that refuses requests above a
rate, is late now and then, breaks connections, and loses answers to requests that it has carried out.
"""

from __future__ import annotations

import random
import types
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from obstore.exceptions import AlreadyExistsError, GenericError

from backends.exceptions import FileExistsInStorageError, MissingFileError, StorageError
from backends.storage.checkpoint_storage import CheckpointStorage
from backends.storage.failures import Hedges
from backends.storage.requests import AdaptiveRateLimit, BucketTraffic, Traffic
from tests.simulation import scheduler as scheduling
from tests.simulation.scheduler import Process, Scheduler, Violation
from tests.simulation.threads import Pool, installed

OPTIONS = {"fs.s3a.endpoint": "http://127.0.0.1:1", "fs.s3a.access.key": "any", "fs.s3a.secret.key": "any"}
SLOW_DOWN = "Client error with status code: 503 <Code>SlowDown</Code>"
BROKEN = "connection closed before message completed"


@dataclass
class Service:
    """An object store. More than ``limit`` requests a second are refused; the rest are probabilities."""

    limit: int = 1 << 30
    late: float = 0.0
    breaks: float = 0.0
    loses: float = 0.0
    files: dict[str, bytes] = field(default_factory=dict)
    seen: Counter[str] = field(default_factory=Counter)
    _second: int = -1
    _in_second: int = 0

    def put(self, store: Any, key: str, data: bytes, *, mode: str = "overwrite") -> None:
        """Create a file; of several writers one succeeds. Raises what obstore raises."""

        def write() -> None:
            if key in self.files:
                raise AlreadyExistsError(f"{key} is there")
            self.files[key] = bytes(data)

        assert mode == "create"
        self._ask("put", write)

    def get(self, store: Any, key: str) -> Any:
        """Return an object whose ``bytes`` are the file's. Raises what obstore raises."""

        def read() -> bytes:
            if key not in self.files:
                raise FileNotFoundError(key)
            return self.files[key]

        data = self._ask("get", read)
        return types.SimpleNamespace(bytes=lambda: data)

    def _ask(self, kind: str, effect: Callable[[], Any]) -> Any:
        s = scheduling.active
        draw = s.random.random
        self.seen[kind] += 1
        s.sleep(0.005 + draw() * 0.01)
        if int(s.now) != self._second:
            self._second, self._in_second = int(s.now), 0
        self._in_second += 1
        if self._in_second > self.limit:
            self.seen["refused"] += 1
            raise GenericError(SLOW_DOWN)
        if draw() < self.breaks:
            raise GenericError(BROKEN)
        answer = effect()
        if draw() < self.late:
            s.sleep(0.5 + draw() * 2.0)
        s.sleep(0.005 + draw() * 0.01)
        if draw() < self.loses:
            raise GenericError(BROKEN)
        return answer


class BucketsOfProcess(BucketTraffic):
    """State that the requests of one simulated process share."""

    def __init__(self, seed: int) -> None:
        s = scheduling.active
        pace = AdaptiveRateLimit("bucket", lambda: s.now, random.Random(seed).random)
        self.traffic = Traffic(pace, Hedges(_first_done))

    def of(self, bucket: str, *, with_hedges: bool) -> Traffic:
        """Return the traffic of the one bucket that there is."""
        return self.traffic


def _first_done(calls: Collection[Future[Any]], seconds: float | None) -> Collection[Future[Any]]:
    s = scheduling.active
    until = None if seconds is None else s.now + seconds
    while True:
        done = [call for call in calls if call.done()]
        if done or (until is not None and s.now >= until):
            return done
        s.sleep(0.002)


@dataclass
class Requests:
    """Some processes that ask one service. ``longest`` is how long a call has taken at most, in seconds."""

    scheduler: Scheduler
    service: Service
    longest: float = 0.0
    done: int = 0

    def process(self, name: str) -> tuple[Process, CheckpointStorage]:
        """Return a new process and its storage."""
        s = self.scheduler
        storage = CheckpointStorage.open(
            "s3://bucket/ck",
            OPTIONS,
            clock=lambda: s.now,
            sleep=s.sleep,
            retry_seconds=60.0,
            buckets=BucketsOfProcess(s.random.getrandbits(32)),
        )
        return s.process(name), storage

    def timed(self, call: Callable[[], Any]) -> Any:
        """Make a call and record its duration."""
        began = self.scheduler.now
        try:
            return call()
        finally:
            self.longest = max(self.longest, self.scheduler.now - began)
            self.done += 1


@contextmanager
def requests(seed: int, service: Service) -> Iterator[Requests]:
    """Have storage ask a simulated service, and its sender use simulated threads and time, while the block lasts."""
    s = scheduling.active = Scheduler(seed)
    replaced: dict[tuple[str, str], Any] = {
        ("backends.storage.object_files", "obstore"): service,
        ("backends.storage.failures", "ThreadPoolExecutor"): Pool,
        ("backends.storage.requests", "random"): types.SimpleNamespace(uniform=s.random.uniform),
    }
    try:
        with installed(replaced):
            yield Requests(s, service)
    finally:
        s.close()


def rivals(seed: int, *, processes: int = 3, threads: int = 4, names: int = 60) -> Counter[str]:
    """Let writers of several processes create the same files on a troubled service, and read them.

    Raises ``Violation`` unless all writers end and, for each file, at most one writer learned that it created it, the
    file has that writer's content, and each writer that got the answer "taken" finds another writer's file there.
    Returns the events that the service has seen.
    """
    rng = random.Random(seed)
    share = rng.choice((0.0, 0.02, 0.2))
    service = Service(rng.choice((40, 200, 1 << 30)), late=rng.choice((0.0, 0.02)), breaks=share, loses=share)
    told: dict[str, list[str]] = {}
    with requests(seed, service) as world:
        s = world.scheduler

        def write(storage: CheckpointStorage, me: str) -> None:
            for path in [f"claims/{i}" for i in range(names)]:
                try:
                    world.timed(partial(storage.put_new, path, me.encode()))
                    told.setdefault(path, []).append(me)
                except FileExistsInStorageError:
                    if service.files.get(f"ck/{path}") in (None, me.encode()):
                        raise Violation(f"{path} belongs to {me}, but the service says it is another's") from None
                except StorageError:
                    pass  # it may be there, or not
                try:
                    if storage.get(path) != service.files[f"ck/{path}"]:
                        raise Violation(f"{path} was read with a content that it never had")
                except MissingFileError:
                    if f"ck/{path}" in service.files:
                        raise Violation(f"{path} is there, and was not found") from None
                except StorageError:
                    pass

        writers = []
        for p in range(processes):
            process, storage = world.process(f"p{p}")
            for t in range(threads):
                me = f"p{p}-t{t}"
                writers.append(s.spawn(process, partial(write, storage, me), me))
        _ended(s, writers)
    for path, creators in told.items():
        if len(creators) > 1 or service.files[f"ck/{path}"] != creators[0].encode():
            raise Violation(
                f"{path} is of {service.files[f'ck/{path}']!r}; each of {creators} got the answer that it created it"
            )
    return service.seen


def readers(seed: int, service: Service, *, threads: int, each: int) -> Requests:
    """Let threads of one process read the same file so many times each."""
    with requests(seed, service) as world:
        service.files["ck/x"] = b"x"
        process, storage = world.process("reader")

        def read() -> None:
            for _ in range(each):
                world.timed(lambda: storage.get("x"))

        _ended(world.scheduler, [world.scheduler.spawn(process, read, f"t{t}") for t in range(threads)])
    return world


def _ended(s: Scheduler, tasks: list[scheduling.Task]) -> None:
    """Run until all tasks have ended; raise what has gone wrong in one."""

    def watch() -> None:
        for task in tasks:
            s.join(task)
        s.stop()

    s.spawn(s.process("watch"), watch, "watch")
    s.run(2_000_000)
    if s.failure is not None:
        raise s.failure
    for task in tasks:
        if task.error is not None:
            raise task.error
        if not task.is_done:
            raise Violation(f"{task.name} has not ended after {s.now:.0f} s")
