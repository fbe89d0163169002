"""The driver's StreamingQueryListener: registers queries, and sends their tasks the hosts' addresses.

Spark calls ``onQueryStarted`` synchronously, before the first task; local properties set there reach every task of the
query. A refused query is ended there (``end_with``). The refusal is a property as well: if the query cannot be ended,
its first tasks raise it.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, partial
from typing import Any

import msgspec
from py4j.protocol import Py4JError
from pyspark.sql import SparkSession
from pyspark.sql.streaming.listener import (
    JStreamingQueryListener,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)

from backends import spans
from backends.exceptions import InvalidStateStoreArgument
from backends.storage.checkpoint_storage import CheckpointStorage
from coordinator_actor.actor import RayMetrics
from coordinator_actor.durable.spark_commits import SparkCommits
from coordinator_actor.messages import WIRE_VERSION, OperatorSpec, QueryRegistration
from spark_bridge.exceptions import STATESTORE_ERRORS
from spark_bridge.operators import map_in_arrow
from spark_bridge.session import settings
from spark_bridge.session.ended_queries import DriverHeartbeats, EndedQueries, failure_text
from spark_bridge.session.progress import (
    BatchTraces,
    StreamMetrics,
    has_listeners,
    newest_checkpoint,
    newest_progress,
    prices_of,
    progress_of_batch,
    tell_listeners,
)
from spark_bridge.session.state_cluster import StateCluster
from spark_bridge.task import executor as properties

# Ends a refused query before its first batch, with an error of ours for its user.
#
# A listener cannot stop a query by raising an error, and ``stop()`` ends it without one. So the listener sets the
# query's error, and marks the query as ended, while Spark's thread waits for the listener. That thread then finds that
# the query was ended, and runs nothing: neither sources nor the checkpoint's offsets are touched.


RATE = "rate"
"""Spark's name for the sources that make batches on a quiet stream."""


def end_with(jvm: Any, execution: Any, message: str) -> None:
    """End a query (a JVM ``StreamExecution``) that has not begun; ``query.exception()`` then has the message.

    Call it in ``onQueryStarted``. For a query that has begun, call ``query.stop()`` afterwards. Raises ``Py4JError`` if
    Spark's classes differ from those of 3.5 and 4.2.
    """
    kind = execution.getClass()
    # State and its cases are in the package of StreamExecution, which has another name since Spark 4.1.
    package = kind.getPackage().getName()
    ended = kind.getClassLoader().loadClass(f"{package}.TERMINATED$").getField("MODULE$").get(None)
    parameters = jvm.java.util.HashMap()
    for name, value in (("id", execution.id()), ("runId", execution.runId()), ("message", message)):
        parameters.put(name, str(value))
    cause = jvm.java.lang.IllegalStateException(message)
    words = jvm.PythonUtils.toScalaMap(parameters)
    error = jvm.org.apache.spark.sql.streaming.StreamingQueryException("", cause, "", "", "STREAM_FAILED", words)
    getattr(execution, "streamDeathCause_$eq")(error)
    execution.state().set(ended)


def sources_refusal(execution: Any, checkpoint: CheckpointStorage, operators: str) -> str | None:
    """Return why a query cannot continue from its checkpoint with its current sources, or None if it can.

    Spark identifies a source by its position in the query. If the number of sources differs, Spark fails with an
    assertion that does not name the cause. If their order differs, a source gets the offset of another one. Reads the
    names of ``offsets/``, the last file there, and a file for each ``rate`` source.
    """
    if (stored := SparkCommits(checkpoint).sources()) is None:
        return None
    nodes = map_in_arrow.nodes(execution.analyzedPlan())
    here = [node for node in nodes if node.nodeName().startswith("StreamingRelation")]
    rates = {place for place, node in enumerate(here) if node.sourceName() == RATE}
    has_as_many = stored.num_sources in (None, len(here))
    if has_as_many and stored.rates <= rates <= stored.numbered:
        return None
    if has_as_many:
        differs = (
            f"sources that make batches without input at {_places(rates)} among its sources now, and the "
            f"checkpoint {checkpoint.location} has them at {_places(stored.rates)}"
        )
    else:
        differs = f"{len(here)} sources now, and the checkpoint {checkpoint.location} has {stored.num_sources}"
    return (
        f"[STATE_STORE_INVALID_CONFIG_AFTER_RESTART] The query has {differs}. Operators with a time mode "
        '(processingTime, eventTime), and aggregates with output_mode="append" and a watermark, add a source of their '
        f"own, which makes batches while no input comes ({operators}). Use the same sources, time modes and output "
        "modes as before, or a new checkpoint location."
    )


def _places(places: Collection[int]) -> str:
    return ", ".join(f"place {place + 1}" for place in sorted(places)) or "no place"


# The listener that Spark's JVM calls at each event of its queries. It reads only the needed figures of a progress.
#
# PySpark's own class copies the whole progress of every query of the session. That takes a hundred calls into the JVM.
# Reading each map ends with an exception, and PySpark searches all jar files of Spark for its class. With short batches
# this was the largest part of the driver's time.


BatchCommittedCallback = Callable[[str, int, Callable[[], str]], None]
"""Takes a run, the batch that Spark has committed, and a function that returns its progress as JSON."""


class EventsInJava(JStreamingQueryListener):  # type: ignore[misc]
    """Passes events of the JVM to a listener. A progress is passed as run and batch, its JSON on demand."""

    def __init__(self, listener: StreamingQueryListener, batch_committed: BatchCommittedCallback) -> None:
        super().__init__(listener)
        self._batch_committed = batch_committed

    def onQueryProgress(self, jevent: Any) -> None:
        """Tell listeners which batch of which run Spark has committed."""
        progress = jevent.progress()
        run_id, batch_id = str(progress.runId().toString()), int(progress.batchId())
        self._batch_committed(run_id, batch_id, lambda: str(progress.json()))

    def onQueryIdle(self, jevent: Any) -> None:
        """Do nothing: an idle query has no new version."""


# Asks the running query whether Spark is at a batch, because no event reports the start of a batch.


log = logging.getLogger(__name__)


def is_at_work(execution: Any) -> bool:
    """Return whether Spark has rows for a batch, and has not committed it. ``execution`` is Java's ``StreamingQuery``.

    A stream that only looks for rows is not running a batch. False if Java does not answer, as when its session ends.
    """
    try:
        status = execution.status()
        return bool(status.isTriggerActive() and status.isDataAvailable())
    except (Py4JError, OSError) as error:
        log.info("Cannot determine whether Spark is running a batch: %s", error)
        return False


TEMPORARY_CHECKPOINT = re.compile(r"/temporary-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$")


class StateStoreQueryListener(StreamingQueryListener):  # type: ignore[misc]
    """Joins the queries of one Spark session to one state cluster. ``_lock`` guards the tables of runs."""

    def __init__(self, spark: SparkSession, cluster: StateCluster) -> None:
        self._spark = spark
        self._cluster = cluster
        self._registrations: dict[str, QueryRegistration] = {}
        self._properties: dict[str, Any] = {}
        """By run, the local properties of the thread that runs the query, which its later jobs inherit."""
        self._lags: dict[str, map_in_arrow.Lag] = {}
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._in_java: Any = None
        self._heartbeats = DriverHeartbeats(cluster.leases, cluster.coordinator, cluster.stopping, cluster.shutdown)
        keep_serving = cluster.options.keep_serving
        self._ended = EndedQueries(cluster.leases, cluster.coordinator, keep_serving, cluster.shutdown)
        sink = RayMetrics({"namespace": cluster.options.namespace})
        self._traces = BatchTraces()
        self._metrics = StreamMetrics(sink, lambda run_id: newest_progress(cluster, run_id), cluster.shutdown)

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        """Register a query that has stateful operators, and set the properties of its tasks."""
        refusal, execution = None, None
        try:
            execution = self._spark.streams.get(str(event.id))._jsq.streamingQuery()
            trace = spans.run(str(event.runId))
            with spans.span(trace.kind, trace, is_root=True, query_id=str(event.id), query_name=event.name) as span:
                refusal = self._register(event, execution)
                span.note(refused=refusal is not None)
        except Exception as error:
            log.exception("Registering query %s failed", event.runId)
            refusal = f"Registering the query with the state store failed: {type(error).__name__}: {error}"
        self._set(properties.REFUSAL, refusal)
        if refusal is not None and execution is not None:
            try:
                end_with(self._spark._jvm, execution, f"StateStoreRefusedError: {refusal}")
            except Exception:
                # These are inner classes of Spark. The refusal still works: tasks raise it.
                log.exception("Query %s is refused by its first tasks", event.runId)

    def _register(self, event: QueryStartedEvent, execution: Any) -> str | None:
        if not (declared := map_in_arrow.operators_in_plan(execution.analyzedPlan())):
            return None
        conf, operators = self._cluster.conf, sorted((o.spec for o in declared), key=lambda spec: spec.name)
        if (refusal := self._refuse(execution, operators)) is not None:
            return refusal
        checkpoint = str(execution.resolvedCheckpointRoot())
        state = self._state_location(checkpoint, str(event.id))
        own = f"{checkpoint.rstrip('/')}/statestore"
        options = {**settings.storage_settings(self._spark), **conf.storage_options}
        if state != own and CheckpointStorage.open(own, options).exists("query.json"):
            return (
                f"{checkpoint} already holds state ({own}), but {settings.STATE_LOCATION_CONF} points to {state}: "
                f"the query would begin without it. Unset {settings.STATE_LOCATION_CONF}, or move the state there."
            )
        machines = self._cluster.machines()
        shared = str(self._spark.conf.get(settings.SHARED_FILES_CONF, "false")).lower() == "true"
        for location in (checkpoint, state):
            if len(machines) > 1 and not shared and CheckpointStorage.open(location).is_local:
                return (
                    f"{location} is on a local disk, and this Ray cluster has {len(machines)} machines "
                    f"({', '.join(machines)}): each would see only its own files. Use a checkpoint location on HDFS, "
                    "S3, Google Cloud Storage or Azure, put the state elsewhere with state_location=, or, if all "
                    f"machines share that directory, set {settings.SHARED_FILES_CONF}=true."
                )
        standby_replicas = settings.standby_replicas(self._spark, conf.standby_replicas)
        nodes = {host.node_id for host in self._cluster.placement.hosts}
        if standby_replicas >= len(nodes):
            asked = f"Query {event.name or event.id} asks for {standby_replicas} standby replicas of each partition"
            log.warning(
                f"{asked}, and the hosts of this session are on {len(nodes)} machine(s): a copy is placed on another "
                f"machine only. Its partitions get {len(nodes) - 1} copies until more machines have executors."
            )
        registration = QueryRegistration(
            query_id=str(event.id),
            run_id=str(event.runId),
            name=event.name,
            session_id=self._cluster.session_id,
            checkpoint_location=checkpoint,
            state_location=state,
            operators=tuple(msgspec.structs.replace(o, backend=conf.provider) for o in operators),
            key_groups=map_in_arrow.configured_key_groups(self._spark),
            storage_options=options,
            # A user may go back to any batch that Spark retains, so its state must be there.
            min_versions_to_retain=max(
                conf.min_versions_to_retain, int(self._spark.conf.get(settings.MIN_BATCHES_CONF, "100") or 100)
            ),
            maintenance_interval=conf.maintenance_interval,
            min_seconds_to_retain=conf.min_seconds_to_retain,
            standby_replicas=standby_replicas,
        )
        states = {o.spec.name: o.initial for o in declared if o.initial is not None}
        initial = self._initial_states(registration, states)
        answer = self._cluster.coordinator.register_query(registration, initial)
        if answer.refusal is not None:
            return answer.refusal
        # After the coordinator's answer, which names the modes of processors that have changed.
        names = ", ".join(o.name for o in registration.operators)
        refusal = sources_refusal(execution, CheckpointStorage.open(checkpoint, options), names)
        if refusal is not None:
            self._cluster.coordinator.deactivate_instances(registration.run_id)
            return refusal
        with self._lock:
            self._registrations[registration.run_id] = registration
            self._properties[registration.run_id] = self._spark.sparkContext._jsc.sc().getLocalProperties()
        self._ended.started(registration)
        if (lag := next((o.lag for o in declared if o.lag is not None), None)) is not None:
            lag.start()
            with self._lock:
                self._lags[registration.run_id] = lag
        pace = partial(self._metrics.pace, registration.run_id, lag)
        self._heartbeats.add(registration, partial(is_at_work, execution), pace)
        self._metrics.add(registration.run_id, registration.name or registration.query_id)
        self._traces.add(registration, answer.completed_version)
        self._set(properties.RUN_ID, registration.run_id)
        self.publish_endpoints()
        run = f"query {registration.query_id} (run {registration.run_id})"
        log.info("Registered %s at version %d", run, answer.completed_version)
        return None

    def _initial_states(
        self, registration: QueryRegistration, states: Mapping[str, map_in_arrow.InitialState]
    ) -> map_in_arrow.InitialEntries | None:
        """Make version 0 of a query that has no state yet; return None if it has state, or no initial state."""
        storage = CheckpointStorage.open(registration.state_location, registration.storage_options)
        if not states or next(iter(storage.list("manifests/")), None) is not None:
            return None
        started = time.time()
        log.info("Making the initial state of %s", ", ".join(sorted(states)))
        states_made = map_in_arrow.make_initial_states(registration, states, int(started * 1000), self._cluster.conf)
        log.info("Made the initial state of %s in %.1f s", ", ".join(sorted(states)), time.time() - started)
        return states_made

    def publish_endpoints(self) -> None:
        """Send the hosts' addresses to the jobs that this thread starts."""
        options = self._cluster.options
        self._set(properties.ADDRESSES, json.dumps(self._cluster.addresses()))
        self._set(properties.TOKEN, self._cluster.token)
        self._set(properties.HOST_FILES, self._cluster.host_files)
        self._set(properties.WIRE, str(WIRE_VERSION))
        self._set(properties.TIMEOUT, str(options.recovery_timeout))
        self._set(properties.TRACING, options.tracing)
        self._set(properties.TLS, None if options.tls is None else options.tls.to_json())

    def publish_addresses(self, addresses: Sequence[str]) -> None:
        """Send the hosts' addresses to the jobs that running queries start from now on."""
        with self._lock:
            running = list(self._properties.values())
        for of_query in running:
            of_query.setProperty(properties.ADDRESSES, json.dumps(list(addresses)))

    def _state_location(self, checkpoint: str, query_id: str) -> str:
        base = self._spark.conf.get(settings.STATE_LOCATION_CONF, "") or ""
        return f"{base.rstrip('/')}/{query_id}" if base else f"{checkpoint.rstrip('/')}/statestore"

    def _refuse(self, execution: Any, specs: Sequence[OperatorSpec]) -> str | None:
        """Return why a query may not run, as far as only the running query shows it, or None."""
        names = Counter(spec.name for spec in specs)
        operators = ", ".join(sorted(names))
        if duplicates := [name for name, times in names.items() if times > 1]:  # as on both sides of a union
            names_twice = ", ".join(map(repr, duplicates))
            return f"Operator name {names_twice} is used twice in one query; give each operator a different name."
        kind = str(execution.getClass().getSimpleName())
        trigger = str(execution.trigger().getClass().getSimpleName())
        # Before the check of async progress tracking, which Spark sets itself for a real-time trigger.
        if "RealTime" in trigger:
            return (
                f"Query with state ({operators}) uses a real-time trigger. In this mode Spark hands rows to Python "
                "only when a batch ends, so its answers come no sooner than those of micro-batches; use "
                'trigger(processingTime="0 seconds") for the shortest batches, or processingTime="1 second".'
            )
        if "Continuous" in kind or "Continuous" in trigger:
            return (
                f"Query with state ({operators}) uses {trigger.rstrip('$')}, which has no micro-batches to version "
                "state by; use trigger(processingTime=...) or trigger(availableNow=True)."
            )
        if "Async" in kind:
            return (
                f"Query with state ({operators}) uses async progress tracking, which commits batches out of step with "
                'their state; remove .option("asyncProgressTrackingEnabled", "true").'
            )
        checkpoint = str(execution.resolvedCheckpointRoot())
        if TEMPORARY_CHECKPOINT.search(checkpoint):
            return (
                f"Query with state ({operators}) has no checkpoint location, so its state could not outlive it; set "
                '.option("checkpointLocation", ...) or spark.sql.streaming.checkpointLocation.'
            )
        try:
            prices_of(self._spark.conf)
        except InvalidStateStoreArgument as error:
            return f"{settings.STORAGE_PRICES_CONF}: {error}"
        return settings.unsafe_settings(self._spark)

    def _set(self, key: str, value: str | None) -> None:
        # setLocalProperty(key, None) removes the property.
        self._spark.sparkContext._jsc.sc().setLocalProperty(key, value)

    @property
    def _jlistener(self) -> Any:
        if self._in_java is None:
            events = EventsInJava(self, self.batch_committed)
            self._in_java = self._spark._jvm.PythonStreamingQueryListenerWrapper(events)
        return self._in_java

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        """Report that a batch is done: ``commits/<N>`` is on disk, so the batch's version is completed."""
        self.batch_committed(str(event.progress.runId), int(event.progress.batchId), lambda: str(event.progress.json))

    def batch_committed(self, run_id: str, batch_id: int, progress_json: Callable[[], str]) -> None:
        """Report a batch of any query of the session; those without stateful operators are passed over."""
        with self._lock:
            is_registered = run_id in self._registrations
        if is_registered and not self._stopping.is_set():
            of, progress = f"batch {batch_id} of run {run_id}", cache(progress_json)
            # Before the metrics: clients see the version once the hosts know it. If this fails, the first task of the
            # next batch completes the version.
            is_reported = self._report(f"The end of {of}", lambda: self._complete(run_id, batch_id))
            self._report(f"The metrics of {of}", lambda: self._metrics.batch(run_id, progress()))
            self._report(f"The spans of {of}", lambda: self._traces.batch(run_id, batch_id, progress()))
            if is_reported and has_listeners():
                self._report(f"The progress of {of}", lambda: self._tell_listeners(run_id, batch_id))

    def _report(self, what: str, report: Callable[[], None]) -> bool:
        """Call ``report`` and return whether it succeeded; log its error, whatever it is: the next reports follow."""
        try:
            report()
            return True
        except Exception as error:  # Spark would only log it, and leave out the next reports
            is_unexpected = not isinstance(error, STATESTORE_ERRORS)
            # After ``stop()``, Spark reports the end of a query late.
            level = logging.INFO if self._stopping.is_set() else self._cluster.shutdown.log_level
            log.log(level, "%s could not be reported: %s", what, error, exc_info=is_unexpected)
            return False

    def _complete(self, run_id: str, batch_id: int) -> None:
        with spans.span("driver.committed", spans.batch(run_id, batch_id + 1)):
            self._cluster.batch_committed(run_id, batch_id)

    def _tell_listeners(self, run_id: str, batch_id: int) -> None:
        # Spark reports a batch with a delay: later batches may have been committed since.
        tell_listeners(
            run_id,
            progress_of_batch(self._cluster, run_id, batch_id),
            lambda: newest_checkpoint(self._cluster, run_id, prices_of(self._spark.conf)),
        )

    def onQueryIdle(self, event: Any) -> None:
        """Do nothing: an idle query has no new version."""

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        """Report that a run has ended: hosts answer from its last version for ``keep_serving``."""
        run_id = str(event.runId)
        with self._lock:
            registration = self._registrations.pop(run_id, None)
            self._properties.pop(run_id, None)
            lag = self._lags.pop(run_id, None)
        if lag is not None:
            lag.close()
        self._heartbeats.remove(run_id)
        self._metrics.remove(run_id)
        self._traces.end(run_id, event.exception)
        if registration is not None and not self._stopping.is_set():
            # If this fails, the lease of the run ends by itself.
            failure = failure_text(event.exception)
            self._report(f"The end of run {run_id}", lambda: self._ended.ended(registration, failure))

    def close(self) -> None:
        self._stopping.set()
        with self._lock:
            lags = list(self._lags.values())
        for lag in lags:
            lag.close()
        self._heartbeats.close()
        self._ended.close()
        self._metrics.close()
