"""A Spark driver and its tasks, as far as the state store sees them.

It plans batch N into ``offsets/N``, runs a task per partition with retries and speculation, now and then the whole
plan twice (``foreachBatch``), and writes ``commits/N`` when all are done (Spark's ``MicroBatchExecution``).
Tasks use the real ``spark_bridge.task.task_store.TaskStore``.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterable
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from backends.conf import DEFAULT_FAMILY
from backends.exceptions import FileExistsInStorageError, StorageError
from backends.formats.changelog import Changes
from coordinator_actor.exceptions import StaleBatchError
from coordinator_actor.messages import Acknowledged, OperatorFigures, OperatorSpec, QueryRegistration
from spark_bridge.exceptions import HostUnavailableError
from spark_bridge.flight_server import changes_of
from spark_bridge.task.executor import Endpoints
from spark_bridge.task.task_store import TaskStore
from spark_bridge.transport.protocol import CommitCommand, GetCommand, OpenReply, TaskIdentity
from tests.simulation import model
from tests.simulation import scheduler as scheduling
from tests.simulation.cluster import Session
from tests.simulation.model import Plan, Stream
from tests.simulation.network import STATESTORE_ERRORS, UnreachableError
from tests.simulation.scheduler import Killed, Task, Violation

if TYPE_CHECKING:
    from tests.simulation.world import World

ANSWERED_ON = 20.0
"""An ended query is answered on for so many seconds at most."""


HIDDEN_SECONDS = 0.5
"""A task tries for so many seconds to connect to a host that it cannot reach."""


class HostClient:
    """``spark_bridge.transport.flight_client.HostClient`` over the simulated network."""

    def __init__(self, world: World, address: str) -> None:
        self.address = address
        self._world = world

    def _call(self, name: str, *args: Any) -> Any:
        return self._run(name, lambda host: getattr(host, name)(*args))

    def _run(self, name: str, work: Callable[[Any], Any]) -> Any:
        """Handle one call as the Flight server does."""
        process, s = self._world.addresses.get(self.address), self._world.scheduler
        if process is not None and process.memory.get("hidden_until", 0.0) > s.now:
            s.sleep(HIDDEN_SECONDS)
            raise HostUnavailableError(f"{self.address}: no connection")
        try:
            return self._world.network.call(
                process,
                name,
                lambda: work(process.memory["host"]),  # type: ignore[union-attr]
                self._world.constants.recovery_timeout,
                through_ray=False,
            )
        except UnreachableError as error:
            raise HostUnavailableError(f"{self.address}: {error}") from error

    def open(self, task: TaskIdentity) -> OpenReply:
        """Open a task's partition."""
        opened: OpenReply = self._call("open", task)
        return opened

    def get_many(self, command: GetCommand, keys: pa.BinaryArray) -> pa.BinaryArray:
        """Values of keys."""
        return self._run("get_many", lambda host: host.reads.get_many(command, keys))

    def open_and_get(
        self, task: TaskIdentity, keys: pa.BinaryArray, column_family: str
    ) -> tuple[OpenReply, pa.BinaryArray]:
        """Open a task's partition and give values of keys."""

        def work(host: Any) -> tuple[OpenReply, pa.BinaryArray]:
            opened: OpenReply = host.open(task)
            if not opened.is_open:
                return opened, pa.nulls(0, pa.binary())
            command = GetCommand(task.run_id, task.operator, task.partition, task.batch_id, column_family)
            return opened, host.reads.get_many(command, keys)

        answer: tuple[OpenReply, pa.BinaryArray] = self._run("open_and_get", work)
        return answer

    def commit(self, command: CommitCommand, changes: Iterable[tuple[str, pa.RecordBatch]]) -> Acknowledged:
        """Commit a task's changes."""
        batches = [batch for _, batch in changes]
        given = Changes({DEFAULT_FAMILY: changes_of(batches)})
        answer: Acknowledged = self._call("commit", command.task, given, command.timings)
        return answer


class QueryFailedError(Exception):
    """The run is over; Spark tells the user why."""


class Query:
    """One run of the streaming query in a driver."""

    def __init__(self, session: Session, stream: Stream, run_id: str) -> None:
        self.world = session.world
        self.session = session
        self.stream = stream
        self.run_id = run_id
        self.port = session.cluster.port()
        self.spark = self.world.disk.open(stream.checkpoint)
        self._last: Plan | None = None
        self._stage = 0
        self.num_partitions, self.backend = stream.layout_of_run[run_id]
        self.registration = QueryRegistration(
            query_id=stream.name,
            run_id=run_id,
            name=stream.name,
            session_id=session.session_id,
            checkpoint_location=stream.checkpoint,
            state_location=stream.state,
            operators=tuple(
                OperatorSpec(o, self.num_partitions, self.world.schema, backend=self.backend)
                for o in stream.model.operators
            ),
            key_groups=model.KEY_GROUPS,
            min_versions_to_retain=stream.keep,
            min_seconds_to_retain=stream.keep_seconds,
            maintenance_interval=self.world.constants.maintenance_interval,
            standby_replicas=self.world.standby_replicas,
        )

    def run(self) -> None:
        """From ``onQueryStarted`` to ``onQueryTerminated``."""
        s = self.world.scheduler
        try:
            answer = self.port.register_query(self.registration)
        except STATESTORE_ERRORS as error:
            self.world.judge(error, self.run_id, "registration")
            raise QueryFailedError(f"not registered: {error}") from error
        if answer.refusal is not None:
            self.world.judge_refusal(answer.refusal, self.run_id)
            raise QueryFailedError(answer.refusal)
        self.stream.newest_run = self.run_id
        heartbeat = s.spawn(self.session.driver, self._heartbeat, "driver heartbeat")
        leases = s.spawn(self.session.driver, self._renew_lease, "leases")
        try:
            self._run_batches()
        except StorageError as error:
            raise QueryFailedError(f"Spark's own log: {error}") from error
        finally:
            s.kill_task(heartbeat)
            s.kill_task(leases)
            if (
                self.session.is_alive
                and not s.current.is_killed
                and (self.world.healed_at is not None or s.random.random() < 0.8)
            ):
                s.spawn(self.session.driver, self._terminated, "terminated")

    def _terminated(self) -> None:
        random = self.world.scheduler.random
        try:
            if random.random() < 0.5:
                self._answer_on(random.random() * ANSWERED_ON)
            self.port.deactivate_instances(self.run_id)
        except STATESTORE_ERRORS as error:
            self.world.scheduler.log("the end of", self.run_id, "was not reported:", str(error))

    def _answer_on(self, seconds: float) -> None:
        """Have hosts answer from the last version for a while, or until the query runs again."""
        s = self.world.scheduler
        until, is_told = s.now + seconds, False
        while s.now < until and self.stream.newest_run == self.run_id:
            try:
                if self.run_id in self.port.renew_leases([self.run_id]) or not is_told:
                    answer = self.port.serve_ended(self.registration)
                    if answer.refusal is not None:
                        s.log("run", self.run_id, "is not read on:", answer.refusal)
                        return
                    is_told = True
            except STATESTORE_ERRORS as error:
                self.world.judge(error, self.run_id, "lease of an ended query")
            s.sleep(self.world.slowness)

    def _renew_lease(self) -> None:
        s = self.world.scheduler
        while True:
            s.sleep(self.world.slowness)
            try:
                self.port.renew_leases([self.run_id])
            except STATESTORE_ERRORS as error:
                self.world.judge(error, self.run_id, "lease")

    def _heartbeat(self) -> None:
        s = self.world.scheduler
        while True:
            s.sleep(self.world.slowness)
            try:
                if not self.port.driver_heartbeat(self.run_id):
                    self.port.register_query(self.registration)
            except STATESTORE_ERRORS as error:
                self.world.judge(error, self.run_id, "driver heartbeat")

    def _run_batches(self) -> None:
        batch = self._first_batch()
        while True:
            if not self.session.is_wanted:
                raise QueryFailedError("stopped by its user")
            begun = self.world.scheduler.now
            plan = self._plan(batch)
            self._last = plan
            self._run_job(plan)
            if self.world.scheduler.random.random() < self.world.repeated:
                # ``write`` and ``count`` run all tasks again, ``take`` runs some.
                self._run_job(plan, self.world.scheduler.random.choice((1.0, 0.4)))
            self._commit(plan)
            self._check_time(plan, self.world.scheduler.now - begun)
            batch += 1
            self.world.scheduler.sleep(self.world.scheduler.random.random() * self.world.pace)

    def _check_time(self, plan: Plan, seconds: float) -> None:
        most = self.stream.most_seconds
        if most is not None and seconds > most:
            raise Violation(f"Batch {plan.token} of {self.stream.name} took {seconds:.1f} s, and nothing ails it.")

    def _names(self, directory: str) -> list[int]:
        return [int(path.rsplit("/", 1)[-1]) for path, _ in self.spark.list(f"{directory}/")]

    def _first_batch(self) -> int:
        """``MicroBatchExecution.populateStartOffsets``."""
        begun, done = max(self._names("offsets"), default=None), max(self._names("commits"), default=None)
        if begun is None:
            return 0
        return begun + 1 if done is not None and done >= begun else begun

    def _plan(self, batch: int) -> Plan:
        path = f"offsets/{batch}"
        held = self.world.disk.directory(self.stream.checkpoint, path).get(path)
        if held is not None:
            return self.stream.model.plans[held.decode()]
        parent = self._last  # another driver may have removed it, but this one still knows it
        if parent is None and batch > 0:
            below = f"offsets/{batch - 1}"
            log = self.world.disk.directory(self.stream.checkpoint, below)
            if below not in log:
                raise QueryFailedError(f"{below} is not there any more")
            parent = self.stream.model.plans[log[below].decode()]
        s = self.world.scheduler
        plan = self.stream.model.plan(f"{batch}@{self.run_id}", batch, parent)
        try:
            self.spark.put_new(path, plan.token.encode())
        except FileExistsInStorageError as error:
            raise QueryFailedError("another query writes the same checkpoint") from error
        s.log("SPARK plans", plan.token)
        return plan

    def _commit(self, plan: Plan) -> None:
        s = self.world.scheduler
        try:
            self.spark.put_new(f"commits/{plan.batch}", f"{self.run_id} {plan.token}".encode())
        except FileExistsInStorageError as error:
            raise QueryFailedError("another query writes the same checkpoint") from error
        s.log("SPARK has committed", plan.token)
        s.spawn(self.session.driver, lambda: self._progress(plan.batch), "progress")
        for directory in ("offsets", "commits"):
            for old in [n for n in self._names(directory) if n < plan.batch - self.stream.keep]:
                self.spark.delete(f"{directory}/{old}")
        self.stream.batches += 1

    def _progress(self, batch: int) -> None:
        try:
            is_news = self.port.batch_committed(self.run_id, batch, by_driver=True)
        except STATESTORE_ERRORS as error:
            self.world.judge(error, self.run_id, "progress")
            return
        if is_news:
            self.session.tell_hosts()

    # -- jobs ----------------------------------------------------------------------------------

    def _run_job(self, plan: Plan, part: float = 1.0) -> None:
        """Run the tasks of a plan, or about that part of them."""
        s = self.world.scheduler
        self._stage += 1
        parts = [
            s.spawn(self.session.driver, lambda o=o, p=p: self._run_partition(plan, o, p), f"{o}/{p}")  # type: ignore[misc]
            for o in self.stream.model.operators
            for p in range(self.num_partitions)
            if part == 1.0 or s.random.random() < part
        ]
        for one in parts:
            one.on_end = lambda task: None
        for one in parts:
            s.join(one)
        errors = [one.error for one in parts if one.error is not None]
        for error in errors:
            if isinstance(error, QueryFailedError):
                raise error
            s.fail(error)
            raise error

    def _run_partition(self, plan: Plan, operator: str, partition: int) -> None:
        """One task with its attempts, as Spark's scheduler runs it: four failures end the query."""
        s = self.world.scheduler
        failures = 0
        running: list[Task] = []
        while True:
            if not running:
                running.append(self._attempt(plan, operator, partition))
            first = running[0]
            if len(running) == 1 and s.random.random() < self.world.speculated:
                s.join(first, s.random.random() * 0.05)
                if not first.is_done:
                    running.append(self._attempt(plan, operator, partition))
            while not any(t.is_done for t in running):
                me = s.current
                for task in running:
                    task.joining.append(me)
                s.park()
                for task in running:
                    if me in task.joining:
                        task.joining.remove(me)
            done = next(t for t in running if t.is_done)
            running.remove(done)
            if done.error is None:
                for task in running:
                    if s.random.random() < 0.7:
                        s.kill_task(task)
                return
            if isinstance(done.error, Killed):
                s.sleep(0.01)  # lost with its executor: it does not count
                continue
            if not isinstance(done.error, STATESTORE_ERRORS):
                raise done.error
            failures += 1
            self._check_late(plan, done.error)
            self.world.judge(done.error, self.run_id, f"task {operator}/{partition} of {plan.token}")
            if failures == 4:
                raise QueryFailedError(f"task {operator}/{partition}: {type(done.error).__name__}: {done.error}")

    def _check_late(self, plan: Plan, error: BaseException) -> None:
        """No task of the newest run is too late for a batch that Spark has not committed."""
        path = f"commits/{plan.batch}"
        is_done = path in self.world.disk.directory(self.stream.checkpoint, path)
        if isinstance(error, StaleBatchError) and self.stream.is_newest(self.run_id) and not is_done:
            raise Violation(f"A task of batch {plan.token} is too late, but Spark has not committed it: {error}")

    def _attempt(self, plan: Plan, operator: str, partition: int) -> Task:
        s, world = self.world.scheduler, self.world
        world.attempts += 1
        attempt = f"t{world.attempts}"
        self.stream.model.plan_of_attempt[attempt] = plan
        task = TaskIdentity(self.run_id, operator, partition, plan.batch, attempt, f"i{world.attempts}", self._stage)
        patience = world.constants.recovery_timeout
        endpoints = Endpoints(tuple(self.session.addresses()), "token", self.session.session_id, patience)
        made = s.spawn(
            self.session.executor(),
            lambda: self._work(task, endpoints, plan),
            f"task {attempt}",
            delay=s.random.random() * 0.01,
        )
        made.on_end = lambda task: None
        return made

    def _work(self, task: TaskIdentity, endpoints: Endpoints, plan: Plan) -> None:
        """``StateTask.run`` with the operator's logic."""
        operator = task.operator
        store = TaskStore(task, self.num_partitions, model.KEY_GROUPS, endpoints)
        # Some operators need the times of the batch before they read.
        if task.partition % 2 or not store.knows_owner:
            store.open()
        keys = [k for k in plan.keys if model.partition_of(k, self.num_partitions) == task.partition]
        values = store.get_many(model.to_array(keys)).to_pylist()
        self.stream.model.check_task_read(plan, operator, keys, values, self.stream.is_newest(self.run_id))
        made = [
            model.stored(model.new_value(operator, plan.token, k, model.value_in(v)), task.attempt)
            for k, v in zip(keys, values, strict=True)
        ]
        store.stage(model.to_array(keys), pa.array(made, pa.binary()))
        store.commit(OperatorFigures())


class PerProcess:
    """A module's global dict, with a separate copy for every simulated process."""

    def _mine(self) -> dict[Any, Any]:
        held: dict[Any, Any] = scheduling.active.current.process.memory.setdefault("owners", {})
        return held

    def get(self, key: Any) -> Any:
        """As a dict's."""
        return self._mine().get(key)

    def pop(self, key: Any, default: Any) -> Any:
        """As a dict's."""
        return self._mine().pop(key, default)

    def items(self) -> ItemsView[Any, Any]:
        """As a dict's."""
        return self._mine().items()

    def __contains__(self, key: Any) -> bool:
        return key in self._mine()

    def __getitem__(self, key: Any) -> Any:
        return self._mine()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._mine()[key] = value


__all__ = ["Query", "QueryFailedError", "Violation"]
