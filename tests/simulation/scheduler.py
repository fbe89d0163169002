"""One seeded scheduler: virtual time, processes that can be killed or paused, and the tasks that run in them.

A task is synchronous code. It yields where it waits (a message, a storage call, a lock, a sleep). There another task
runs, or its process dies, or all of it stalls for a while. Tasks are OS threads, and exactly one of them runs at a
time: the waiting thread picks the next event and passes the baton on, so that a step costs one switch at most, and none
if it is the same task's turn. After FoundationDB's simulation (Zhou et al., SIGMOD 2021) and SlateDB's ``slatedb-dst``.
"""

from __future__ import annotations

import random
import threading
import zlib
from collections import Counter, deque
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

KEPT_EVENTS = 50
"""So many of the last events are shown where a run fails."""
active: Scheduler
"""The scheduler of the run under way: simulated locks and clocks belong to it."""


class Killed(BaseException):
    """Ends a task of a process that has died. No code may catch it; whatever it still tries raises it again."""


class Violation(Exception):
    """A rule is broken: the run fails with this message."""


class Process:
    """What dies as one: tasks, and the objects and locks in its memory. ``clock_offset`` is how wrong its clock is.

    Ray has given up a process that ``is_cut_off``. Until ``severed_until`` none of its messages arrives.
    """

    __slots__ = ("clock_offset", "is_cut_off", "memory", "name", "on_death", "paused_until", "severed_until", "tasks")

    def __init__(self, name: str) -> None:
        self.name = name
        self.tasks: dict[Task, None] | None = {}
        self.memory: dict[Any, Any] = {}
        self.clock_offset = 0.0
        self.paused_until = 0.0
        self.severed_until = 0.0
        self.is_cut_off = False
        self.on_death: list[Callable[[], None]] = []

    @property
    def is_alive(self) -> bool:
        """Whether it has not been killed."""
        return self.tasks is not None


class Task:
    """One thread of control. ``on_end`` is called when it has ended, however: it must not wait."""

    __slots__ = (
        "error",
        "function",
        "is_done",
        "is_killed",
        "is_woken",
        "joining",
        "name",
        "on_end",
        "process",
        "result",
        "ticket",
        "worker",
    )

    def __init__(self, process: Process, function: Callable[[], Any], name: str) -> None:
        self.process = process
        self.function = function
        self.name = name
        self.worker: _Worker | None = None
        self.ticket = 0
        self.is_woken = False
        self.is_done = False
        self.is_killed = False
        self.result: Any = None
        self.error: BaseException | None = None
        self.on_end: Callable[[Task], None] | None = None
        self.joining: list[Task] = []


class _Worker:
    """An OS thread that runs tasks, one after the other; it waits for its baton."""

    __slots__ = ("baton", "task", "thread")

    def __init__(self) -> None:
        self.baton = threading.Lock()
        self.baton.acquire()
        self.task: Task | None = None
        self.thread: threading.Thread | None = None


class Scheduler:
    """Runs tasks and callbacks in the order of virtual time; everything random in a run comes from ``random``.

    ``now`` is in seconds. A step is one event that is carried out.
    """

    def __init__(self, seed: int, *, traced: bool = False) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.steps = 0
        self.failure: BaseException | None = None
        self.current: Task = Task(Process("outside"), lambda: None, "outside")
        self.events: deque[tuple[Any, ...]] = deque(maxlen=KEPT_EVENTS)
        self.on_death_of_any: Callable[[Process], None] = lambda process: None
        self.reached: Counter[str] = Counter()
        """How often each of ``sometimes.MUST_BE_REACHED`` came about."""
        self.trace = 0
        self._traced = traced
        self._heap: list[tuple[float, int, Any, int]] = []
        self._sequence = 0
        self._main = self.current
        self._main.worker = _Worker()
        self._idle: list[_Worker] = []
        self._workers: list[_Worker] = []
        self._processes: dict[Process, None] = {}
        self._is_stopping = False
        self._unwinding: list[Task] | None = None

    # -- what tasks and callbacks use ----------------------------------------------------------

    def process(self, name: str) -> Process:
        """A new process, without tasks."""
        made = Process(name)
        self._processes[made] = None
        return made

    def spawn(self, process: Process, function: Callable[[], Any], name: str = "", delay: float = 0.0) -> Task:
        """Start a task in a process, which may have died: then it never runs, and has ended already."""
        task = Task(process, function, name)
        if process.tasks is None:
            task.is_done = True
            task.error = Killed()
            return task
        process.tasks[task] = None
        self._push(self.now + delay, task, 0)
        return task

    def at(self, delay: float, callback: Callable[[], None]) -> None:
        """Call something later, in no process; it must not wait."""
        self._push(self.now + delay, callback, -1)

    def sleep(self, seconds: float) -> None:
        """Let others run; raises ``Killed`` if the process has died while it slept."""
        me = self.current
        if me.is_killed or me.process.tasks is None:
            raise Killed
        self._push(self.now + seconds, me, me.ticket)
        self._wait(me)

    def park(self, timeout: float | None = None) -> bool:
        """Wait until another task calls ``wake``; False if the time has passed first."""
        me = self.current
        if me.is_killed or me.process.tasks is None:
            raise Killed
        me.is_woken = False
        if timeout is not None:
            self._push(self.now + timeout, me, me.ticket)
        self._wait(me)
        return me.is_woken

    def wake(self, task: Task) -> None:
        """Resume a parked task."""
        if not task.is_done:
            task.is_woken = True
            self._push(self.now, task, task.ticket)

    def join(self, task: Task, timeout: float | None = None) -> bool:
        """Wait for a task's end; whether it has ended."""
        if not task.is_done:
            task.joining.append(self.current)
            if not self.park(timeout) and self.current in task.joining:
                task.joining.remove(self.current)
        return task.is_done

    def kill_task(self, task: Task) -> None:
        """End one task at the place where it waits."""
        if not task.is_done:
            task.is_killed = True
            self.wake(task)

    def kill(self, process: Process) -> None:
        """End a process: its tasks never resume, and its locks are gone with it."""
        tasks = process.tasks
        if tasks is None:
            return
        process.tasks = None
        process.paused_until = 0.0
        self._processes.pop(process, None)
        for task in tasks:
            self.wake(task)
        for callback in process.on_death:
            callback()
        self.on_death_of_any(process)
        self.log("KILLED", process.name)
        if self.current.process is process:
            raise Killed

    def pause(self, process: Process, seconds: float) -> None:
        """Nothing in the process happens for a while, as if its machine slept."""
        process.paused_until = self.now + seconds
        self.log("PAUSED", process.name, seconds)

    def log(self, *words: Any) -> None:
        """Remember an event; the last ones are shown where a run fails."""
        self.events.append((self.steps, self.now, *words))
        if self._traced:
            self.trace = zlib.crc32(f"{self.steps} {self.now} {words}".encode(), self.trace)

    def fail(self, error: BaseException) -> None:
        """A rule is broken: the run ends with the next event."""
        if self.failure is None:
            self.failure = error
        self._is_stopping = True

    def stop(self) -> None:
        """End the run."""
        self._is_stopping = True

    # -- the run -------------------------------------------------------------------------------

    def run(self, max_steps: int | None = None) -> None:
        """Carry out events until a task stops the run, a rule is broken, or so many steps are done."""
        self._limit = max_steps if max_steps is not None else 1 << 62
        self._is_stopping = False
        following = self._next()
        if following is not self._main:
            assert self._main.worker is not None
            self._hand(following)
            self._main.worker.baton.acquire()
        self.current = self._main

    def close(self) -> None:
        """End all tasks and the threads that ran them."""
        unwinding = []
        for process in list(self._processes):
            for task in process.tasks or ():
                task.is_killed = True
                if task.worker is not None:
                    unwinding.append(task)
            process.tasks = None
        # Tasks of processes that died in the very last step wait as well.
        waiting = {w.task for w in self._workers if w.task is not None and not w.task.is_done}
        self._unwinding = [*unwinding, *(t for t in waiting if t not in unwinding)]
        self._heap.clear()
        self.run()
        for worker in self._idle:
            worker.task = None
            worker.baton.release()
        for worker in self._workers:
            assert worker.thread is not None
            worker.thread.join(timeout=10)

    def _push(self, when: float, what: Any, ticket: int) -> None:
        self._sequence = n = self._sequence + 1
        heappush(self._heap, (when, n, what, ticket))

    def _next(self) -> Task:
        """The task whose turn it is, after all callbacks before it; the main task where the run ends."""
        if self._unwinding is not None:
            return self._unwinding.pop() if self._unwinding else self._main
        heap = self._heap
        while not self._is_stopping and self.steps < self._limit:
            if not heap:
                self.fail(Violation("Nothing is left to happen: all tasks wait for each other."))
                break
            when, n, what, ticket = heappop(heap)
            if ticket >= 0:
                if what.ticket != ticket or what.is_done:
                    continue
                paused_until = what.process.paused_until
                if paused_until > when:
                    heappush(heap, (paused_until, n, what, ticket))
                    continue
            self.now = when
            self.steps += 1
            if ticket >= 0:
                what.ticket = ticket + 1
                return what  # type: ignore[no-any-return]
            self.current = self._main
            try:
                what()
            except Exception as error:  # noqa: BLE001 - whatever it is, it ends the run
                self.fail(error)
        return self._main

    def _hand(self, task: Task) -> None:
        worker = task.worker
        if worker is None:
            if self._idle:
                worker = self._idle.pop()
            else:
                worker = _Worker()
                self._workers.append(worker)
                worker.thread = threading.Thread(target=self._work, args=(worker,), daemon=True)
                worker.thread.start()
            task.worker = worker
            worker.task = task
        worker.baton.release()

    def _wait(self, me: Task) -> None:
        following = self._next()
        if following is not me:
            worker = me.worker
            assert worker is not None
            self._hand(following)
            worker.baton.acquire()
        self.current = me
        if me.is_killed or me.process.tasks is None:
            raise Killed

    def _work(self, worker: _Worker) -> None:
        while True:
            worker.baton.acquire()
            if worker.task is None:
                return
            while True:
                task = worker.task
                self.current = task
                try:
                    if task.is_killed or task.process.tasks is None:
                        raise Killed
                    task.result = task.function()
                except Killed as error:
                    task.error = error
                except BaseException as error:  # noqa: BLE001 - whatever it is, it ends the run
                    task.error = error
                    if task.on_end is None:
                        self.fail(error)
                self._end(task)
                following = self._next()
                if following.worker is None:
                    following.worker = worker
                    worker.task = following
                    continue
                worker.task = None
                if self._unwinding is None or following is not self._main:
                    self._idle.append(worker)
                    self._hand(following)
                else:
                    self._idle.append(worker)
                    self._hand(following)
                break
            # An idle worker gets a task, or None at the end, with its baton.

    def _end(self, task: Task) -> None:
        task.is_done = True
        task.worker = None
        if task.process.tasks is not None:
            task.process.tasks.pop(task, None)
        if self._unwinding is not None:
            return
        for waiting in task.joining:
            self.wake(waiting)
        if task.on_end is not None:
            try:
                task.on_end(task)
            except Exception as error:  # noqa: BLE001 - whatever it is, it ends the run
                self.fail(error)
