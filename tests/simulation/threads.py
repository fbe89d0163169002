"""What stands for ``threading`` and thread pools inside the simulation, and putting it in their place for a run.

Locks give way to the scheduler where they are taken, now and then, and always where they are held: so
orders of events that need two threads come about. Pools run their work as tasks of the process that uses them.
"""

from __future__ import annotations

import dataclasses
import random
import sys
import threading
import types
import uuid as real_uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from backends import spans
from tests.simulation import scheduler as scheduling
from tests.simulation.scheduler import Killed, Task

PREEMPTED = 0.03
"""How often another task runs just before a lock is taken."""


class Lock:
    """``threading.Lock``, and with ``is_reentrant`` an ``RLock``."""

    is_reentrant = False
    __slots__ = ("_count", "_owner", "_waiting")

    def __init__(self) -> None:
        self._owner: Task | None = None
        self._count = 0
        self._waiting: deque[Task] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """As ``threading.Lock.acquire``."""
        s = scheduling.active
        me = s.current
        if me.is_killed or me.process.tasks is None:
            raise Killed
        if self._owner is me and self.is_reentrant:
            self._count += 1
            return True
        if s.random.random() < PREEMPTED and me is not s._main:
            s.sleep(s.random.random() * 0.01)
        if self._owner is None:
            self._owner = me
            self._count = 1
            return True
        if not blocking:
            return False
        self._waiting.append(me)
        if not s.park(None if timeout < 0 else timeout):
            if self._owner is me:
                return True
            self._waiting.remove(me)
            return False
        return True

    def release(self) -> None:
        """As ``threading.Lock.release``."""
        s = scheduling.active
        me = s.current
        if me.is_killed or me.process.tasks is None:
            return  # the lock has died with its process, or goes with the task below
        if self._owner is None or (self.is_reentrant and self._owner is not me):
            raise RuntimeError("A lock is released that is not held.")
        self._count -= 1
        if self._count:
            return
        self._owner = None
        while self._waiting:
            i = s.random.randrange(len(self._waiting)) if len(self._waiting) > 1 else 0
            task = self._waiting[i]
            del self._waiting[i]
            if not task.is_done and not task.is_killed:
                self._owner = task
                self._count = 1
                s.wake(task)
                return

    def locked(self) -> bool:
        """Return whether a task holds it."""
        return self._owner is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


class RLock(Lock):
    """``threading.RLock``."""

    is_reentrant = True
    __slots__ = ()


class Semaphore:
    """``threading.Semaphore``."""

    def __init__(self, value: int = 1) -> None:
        self._left = value
        self._changed = Condition(Lock())

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        """As ``threading.Semaphore.acquire``."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._left > 0, timeout if blocking else 0.0):
                return False
            self._left -= 1
            return True

    def release(self) -> None:
        """As ``threading.Semaphore.release``."""
        with self._changed:
            self._left += 1
            self._changed.notify()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


class Condition:
    """``threading.Condition``."""

    def __init__(self, lock: Lock | None = None) -> None:
        self._lock = lock or RLock()
        self._waiting: list[Task] = []
        self.acquire = self._lock.acquire
        self.release = self._lock.release

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        """As ``threading.Condition.wait``."""
        s = scheduling.active
        me = s.current
        self._waiting.append(me)
        held, self._lock._count = self._lock._count, 1
        self._lock.release()
        told = s.park(timeout)
        if not told and me in self._waiting:
            self._waiting.remove(me)
        self._lock.acquire()
        self._lock._count = held
        return told

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        """As ``threading.Condition.wait_for``."""
        s = scheduling.active
        deadline = None if timeout is None else s.now + timeout
        while not (met := predicate()):
            left = None if deadline is None else deadline - s.now
            if left is not None and left <= 0:
                return met
            self.wait(left)
        return met

    def notify(self, n: int = 1) -> None:
        """As ``threading.Condition.notify``."""
        for _ in range(min(n, len(self._waiting))):
            scheduling.active.wake(self._waiting.pop(0))

    def notify_all(self) -> None:
        """As ``threading.Condition.notify_all``."""
        self.notify(len(self._waiting))


class Event:
    """``threading.Event``."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiting: list[Task] = []

    def is_set(self) -> bool:
        """As ``threading.Event.is_set``."""
        return self._is_set

    def set(self) -> None:
        """As ``threading.Event.set``."""
        self._is_set = True
        waiting, self._waiting = self._waiting, []
        for task in waiting:
            scheduling.active.wake(task)

    def clear(self) -> None:
        """As ``threading.Event.clear``."""
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        """As ``threading.Event.wait``."""
        s = scheduling.active
        if not self._is_set:
            self._waiting.append(s.current)
            if not s.park(timeout) and s.current in self._waiting:
                self._waiting.remove(s.current)
        return self._is_set


class Thread:
    """``threading.Thread``: a task of the process that starts it."""

    def __init__(
        self,
        group: None = None,
        target: Callable[..., Any] | None = None,
        name: str | None = None,
        args: Iterable[Any] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self.name = name or "thread"
        self.daemon = daemon
        self._call = lambda: target(*args, **(kwargs or {})) if target is not None else None
        self._task: Task | None = None

    def start(self) -> None:
        """As ``threading.Thread.start``."""
        s = scheduling.active
        self._task = s.spawn(s.current.process, self._call, self.name)

    def is_alive(self) -> bool:
        """As ``threading.Thread.is_alive``."""
        return self._task is not None and not self._task.is_done

    def join(self, timeout: float | None = None) -> None:
        """As ``threading.Thread.join``."""
        assert self._task is not None
        scheduling.active.join(self._task, timeout)


class Timer(Thread):
    """``threading.Timer``."""

    def __init__(self, interval: float, function: Callable[..., Any], args: Any = (), kwargs: Any = None) -> None:
        self._is_cancelled = False

        def call() -> None:
            scheduling.active.sleep(interval)
            if not self._is_cancelled:
                function(*args, **(kwargs or {}))

        super().__init__(target=call, name="timer")

    def cancel(self) -> None:
        """As ``threading.Timer.cancel``."""
        self._is_cancelled = True


class Future:
    """``concurrent.futures.Future``."""

    def __init__(self) -> None:
        self._is_done = Event()
        self._result: Any = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[Any], Any]] = []
        self._is_cancelled = False

    def done(self) -> bool:
        """Whether it has ended."""
        return self._is_done.is_set()

    def running(self) -> bool:
        """Whether it has not ended."""
        return not self.done()

    def cancelled(self) -> bool:
        """Whether it was cancelled."""
        return self._is_cancelled

    def cancel(self) -> bool:
        """Cancel it if it has not ended; work that already runs continues."""
        if self.done():
            return self._is_cancelled
        self._is_cancelled = True
        self.set_exception(CancelledError())
        return True

    def set_running_or_notify_cancel(self) -> bool:
        """As in ``concurrent.futures``."""
        return not self._is_cancelled

    def set_result(self, result: Any) -> None:
        """End it well."""
        if not self.done():
            self._result = result
            self._finish()

    def set_exception(self, error: BaseException) -> None:
        """End it badly."""
        if not self.done():
            self._error = error
            self._finish()

    def _finish(self) -> None:
        self._is_done.set()
        for callback in self._callbacks:
            callback(self)

    def add_done_callback(self, callback: Callable[[Any], Any]) -> None:
        """Call something when it has ended."""
        if self.done():
            callback(self)
        else:
            self._callbacks.append(callback)

    def result(self, timeout: float | None = None) -> Any:
        """Wait for its result."""
        if not self._is_done.wait(timeout):
            raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._result

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for its end."""
        if not self._is_done.wait(timeout):
            raise TimeoutError
        return self._error


@dataclasses.dataclass(frozen=True)
class Waited:
    """What ``wait`` returns: the futures that have ended, and the others."""

    done: set[Future]
    not_done: set[Future]


def wait(futures: Iterable[Future], timeout: float | None = None) -> Waited:
    """As ``concurrent.futures.wait``."""
    s = scheduling.active
    asked = list(futures)
    until = None if timeout is None else s.now + timeout
    for future in asked:
        future._is_done.wait(None if until is None else max(0.0, until - s.now))
    return Waited({f for f in asked if f.done()}, {f for f in asked if not f.done()})


class Pool:
    """``ThreadPoolExecutor``. Work whose result the caller waits for at once is done on the spot."""

    def __init__(self, max_workers: int | None = None, thread_name_prefix: str = "pool", **_: Any) -> None:
        self._max_workers = max_workers or 1
        self._name = thread_name_prefix
        self._queue: deque[tuple[Future, Callable[[], Any]]] = deque()
        self._running = 0

    def submit(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Future:
        """Begin some work."""
        future = Future()
        self._queue.append((future, lambda: function(*args, **kwargs)))
        if self._running < self._max_workers:
            self._running += 1
            s = scheduling.active
            s.spawn(s.current.process, self._work, self._name)
        return future

    def _work(self) -> None:
        while self._queue:
            future, call = self._queue.popleft()
            if not future.cancelled():
                _settle(future, call)
        self._running -= 1

    def map(self, function: Callable[..., Any], *iterables: Iterable[Any]) -> Iterator[Any]:
        """Do it all, one after the other."""
        return iter([function(*args) for args in zip(*iterables, strict=False)])

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Do nothing: idle workers are not tasks."""

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: object) -> None:
        return None


class Background:
    """A pool of the process that is never closed: each piece of work is a task, or is done at once."""

    def submit(self, function: Callable[..., Any], *args: Any) -> Future:
        """Begin some work."""
        s = scheduling.active
        future = Future()
        if s.random.random() < 0.1:
            s.spawn(s.current.process, lambda: _settle(future, lambda: function(*args)), "background")
        else:
            _settle(future, lambda: function(*args))
        return future


def _settle(future: Future, call: Callable[[], Any]) -> None:
    try:
        result = call()
    except Exception as error:  # noqa: BLE001 - the waiting task gets it
        future.set_exception(error)
    else:
        future.set_result(result)


def _now() -> float:
    return scheduling.active.now


def _uniform(low: float, high: float) -> float:
    return scheduling.active.random.uniform(low, high)


def _sleep(seconds: float) -> None:
    scheduling.active.sleep(seconds)


class _Uuid:
    """``uuid`` with ids of the run's own random numbers."""

    UUID, NAMESPACE_URL, uuid5 = real_uuid.UUID, real_uuid.NAMESPACE_URL, staticmethod(real_uuid.uuid5)

    @staticmethod
    def uuid4() -> real_uuid.UUID:
        """As ``uuid.uuid4``."""
        return real_uuid.UUID(int=scheduling.active.random.getrandbits(128), version=4)


THREADING = types.SimpleNamespace(
    Lock=Lock,
    RLock=RLock,
    Semaphore=Semaphore,
    Condition=Condition,
    Event=Event,
    Thread=Thread,
    Timer=Timer,
    current_thread=lambda: types.SimpleNamespace(name=scheduling.active.current.name),
    get_ident=lambda: id(scheduling.active.current),
)
TIME = types.SimpleNamespace(
    time=_now,
    monotonic=_now,
    perf_counter=_now,
    thread_time=_now,
    sleep=_sleep,
    time_ns=lambda: int(_now() * 1e9),
)

MODULES = (
    "backends.background_loop",
    "backends.partition.",
    "backends.formats.changelog",
    "backends.formats.snapshot",
    "backends.formats.manifest_chain",
    "backends.formats.manifest_chain",
    "coordinator_actor.",
    "spark_bridge.host.",
    "spark_bridge.queryable.reads.",
    "spark_bridge.queryable.routing.",
    "spark_bridge.task.task_store",
    "spark_bridge.lookups",
    "spark_bridge.serving",
    "spark_bridge.state_data.checkpoint_client",
    "spark_bridge.state_data.looked_up_state",
    "spark_bridge.state_surgery.",
)
"""The modules under test, and beginnings of their names."""
REAL = (
    "coordinator_actor.actor",
    "coordinator_actor.reference",
    "coordinator_actor.reference",
    "spark_bridge.host_actor",
)
_FACTORIES: dict[Any, Any] = {
    threading.Lock: Lock,
    threading.RLock: RLock,
    threading.Condition: Condition,
    threading.Event: Event,
}


def modules_under_test() -> list[types.ModuleType]:
    """Those that are loaded."""
    found = [m for name, m in sorted(sys.modules.items()) if name.startswith(MODULES) and name not in REAL]
    return [m for m in found if isinstance(m, types.ModuleType)]


@contextmanager
def installed(replacements: Mapping[tuple[str, str], Any]) -> Iterator[Callable[[Mapping[tuple[str, str], Any]], None]]:
    """While a run lasts, the modules under test use simulated threads, clocks and ids, and these replacements.

    ``replacements`` has objects by module and name. The function that is given takes more of them. Everything is as
    before afterwards.
    """
    import concurrent.futures as futures
    import time

    by_value: list[tuple[Any, Any]] = [
        (threading, THREADING),
        (ThreadPoolExecutor, Pool),
        (spans.Pool, Pool),
        (futures.Future, Future),
        (futures.wait, wait),
        (real_uuid, _Uuid),
        (time, TIME),
        (random, types.SimpleNamespace(uniform=_uniform)),
    ]
    undo: list[tuple[Any, str, Any]] = []

    def put(target: Any, name: str, value: Any) -> None:
        undo.append((target, name, target.__dict__[name]))
        setattr(target, name, value)

    def replace(objects: Mapping[tuple[str, str], Any]) -> None:
        for (module_name, name), value in objects.items():
            put(sys.modules[module_name], name, value)

    try:
        for module in modules_under_test():
            for name, value in list(vars(module).items()):
                for real, simulated in by_value:
                    if value is real:
                        put(module, name, simulated)
                if isinstance(value, type) and value.__module__ == module.__name__ and dataclasses.is_dataclass(value):
                    locks = {
                        f.name: _FACTORIES[f.default_factory]
                        for f in dataclasses.fields(value)
                        if isinstance(f.default_factory, types.BuiltinFunctionType | type | types.FunctionType)
                        and f.default_factory in _FACTORIES
                    }
                    if locks:
                        put(value, "__init__", _with_locks(value.__init__, locks))
        replace(replacements)
        yield replace
    finally:
        for target, name, value in reversed(undo):
            setattr(target, name, value)


def _with_locks(init: Callable[..., None], locks: dict[str, Callable[[], Any]]) -> Callable[..., None]:
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        for name, factory in locks.items():
            if name not in kwargs:
                kwargs[name] = factory()
        init(self, *args, **kwargs)

    return made
