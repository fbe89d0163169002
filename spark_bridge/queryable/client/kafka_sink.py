"""``KafkaSink``: the changes of an operator's state in a topic of Kafka, a record per changed key.

As a changelog of Kafka Streams or a table of Flink's upsert-kafka: the last record of a key has its value, and a
tombstone removes it. One transaction of Kafka has all changes of a version, so the newest record of the topic says
which versions it has. The committed offset of a consumer group says the same, and also counts versions that changed
nothing. A writer that was killed at any point continues after the later one of both. Of two writers, the transactions
of the first one are refused.

The offset is committed after the transaction and not in it: ``send_offsets_to_transaction`` of librdkafka does not
return if the broker restarts during the call (its issues 5456 and 5511).

A topic begins with the whole state at one version. The same happens again if the next changes are gone (``on_gap``):
the writer reads the topic, and writes a tombstone for each key that the state no longer has. Each such beginning is
another generation, since its version may be lower than those before: after a rollback, or of another query.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import msgspec
import pyarrow as pa

from backends.decoders import json_decoder
from backends.lazy_names import import_optional
from spark_bridge.exceptions import (
    EnvironmentProblemError,
    KafkaSinkError,
    QueryableStateError,
    RequestError,
    StateVersionError,
)
from spark_bridge.queryable.client.client import QueryableStateClient
from spark_bridge.queryable.client.discovery import KnownOperator
from spark_bridge.queryable.client.json_values import json_bytes, rows_to_json
from spark_bridge.queryable.client.watch import StateWatch, without_last_columns
from spark_bridge.state_format.layouts import LIST
from spark_bridge.state_format.stored_changes import EMIT_ROWS, VariableChanges
from spark_bridge.state_format.stored_rows import DELETE, INSERT, UPDATE, VariableRows

T = TypeVar("T")
Encoder = Callable[[pa.RecordBatch], Sequence[bytes]]
"""Returns a record's key, or its value, for each row of columns."""
log = logging.getLogger(__name__)

ON_GAP = ("stop", "resend")
STATE_TRANSACTION_ROWS = 100_000
"""The whole state is written in transactions of about this many rows."""
QUIET_COMMIT_SECONDS = 10.0
"""Versions that changed nothing move the position in the topic at most this often."""
CALL_SECONDS = 5.0
"""A call waits this long for the broker, and is then repeated until the timeout."""
READ_RECORDS = 10_000
LAST_RECORDS = 64
"""The last record of a partition is looked for among so many offsets, then among as many times more."""
BY_KEY = -1
"""The partition of a record whose key decides it."""
RECORD_GENERATION, RECORD_VERSION = "statestore-generation", "statestore-version"
RECORD_QUERY, RECORD_RUN, RECORD_OPERATOR = "statestore-query", "statestore-run", "statestore-operator"
RECORD_STATE, RECORD_KIND = "statestore-state", "statestore-kind"
TRANSIENT = (
    *("_ALL_BROKERS_DOWN", "_MSG_TIMED_OUT", "_PURGE_INFLIGHT", "_PURGE_QUEUE", "_RESOLVE", "_TIMED_OUT"),
    *("_TRANSPORT", "_WAIT_COORD", "BROKER_NOT_AVAILABLE", "CONCURRENT_TRANSACTIONS", "COORDINATOR_LOAD_IN_PROGRESS"),
    *("COORDINATOR_NOT_AVAILABLE", "LEADER_NOT_AVAILABLE", "NETWORK_EXCEPTION", "NOT_COORDINATOR"),
    *("NOT_ENOUGH_REPLICAS", "NOT_ENOUGH_REPLICAS_AFTER_APPEND", "NOT_LEADER_FOR_PARTITION", "REQUEST_TIMED_OUT"),
    "UNSTABLE_OFFSET_COMMIT",
)
"""The errors of Kafka that pass, though its client calls not all of them retriable."""
PRODUCER_DEFAULTS = {
    "enable.idempotence": True,
    "compression.type": "lz4",  # the headers of records are alike: twice as fast to a broker on the same machine
    "partitioner": "murmur2_random",  # a key's partition is the one that Java's producers choose
    "queue.buffering.max.kbytes": 65_536,
    "transaction.timeout.ms": 300_000,
    "socket.timeout.ms": 10_000,  # some calls wait as long for an answer, whatever their own timeout
    "delivery.report.only.error": True,
}
CONSUMER_DEFAULTS = {
    "socket.timeout.ms": 10_000,
    "session.timeout.ms": 10_000,  # a commit waits as long for a coordinator that is away
}
"""Settings that ``config`` may replace."""


class SinkPosition(msgspec.Struct, frozen=True):
    """The position of a topic: the changes up to ``version`` are in it.

    ``run_id`` gave them: if another run has remade the version, they no longer hold. Not ``is_whole`` while the whole
    state is being written: if the writer is killed, the next one writes it again.
    """

    version: int
    run_id: str
    generation: int
    partitions: int
    query_id: str
    operator: str
    state: str
    is_whole: bool = True


def json_rows(batch: pa.RecordBatch) -> list[bytes]:
    """Return rows as JSON objects, as the HTTP interface has them."""
    return [json_bytes(row) for row in rows_to_json(batch)]


class KafkaSink:
    """Writes the changes of an operator's state to a topic of Kafka, until the query ends or ``close`` is called.

        client = QueryableStateClient.connect()
        KafkaSink(client, "user_totals", topic="user-totals", bootstrap="broker:9092").run()

    ``client`` is a ``QueryableStateClient`` or a ``CheckpointClient``. The topic must exist, and be the sink's own.
    With ``cleanup.policy=compact`` it keeps the state. ``query`` and ``state`` select as in ``client.watch``.

    ``config`` are settings of librdkafka, such as ``security.protocol``. ``encode_key`` and ``encode_value`` take the
    columns of the key, or of the value, and return bytes for each row; by default JSON. Equal keys must have equal
    bytes. A state without values has the value ``{}``.

    ``on_gap``: what happens if the next changes are gone, because the writer was down for longer than versions are
    kept, because the query was rolled back to a version before the position, or because another query has its name now.
    "stop" raises ``StateVersionError``; "resend" writes the whole state at one version, with tombstones for the keys of
    the topic that it does not have. ``resend`` does so at the beginning, once.

    ``timeout``: the seconds that the query or the broker may be away. Raises ``KafkaSinkError`` if the broker is away
    for longer, or if another writer has the topic, and the errors of ``client.watch``. ``progress`` receives a line
    for people at each beginning. ``close`` is for any thread.
    """

    def __init__(
        self,
        client: QueryableStateClient,
        operator: str,
        *,
        topic: str,
        bootstrap: str,
        query: str | None = None,
        state: str | None = None,
        config: Mapping[str, Any] | None = None,
        encode_key: Encoder = json_rows,
        encode_value: Encoder = json_rows,
        on_gap: str = "stop",
        resend: bool = False,
        timeout: float = 300.0,
        progress: Callable[[str], None] = log.info,
    ) -> None:
        if on_gap not in ON_GAP:
            raise RequestError(f"on_gap={on_gap!r} must be one of {', '.join(map(repr, ON_GAP))}.")
        self._kafka = import_optional("confluent_kafka", "KafkaSink", EnvironmentProblemError)
        self._client = client
        self._operator = operator
        self._query = query
        self._state = state
        self._name = f"statestore-sink-{topic}"
        self._config = {**(config or {}), "bootstrap.servers": bootstrap}
        self._encoders = (encode_key, encode_value)
        self._on_gap = on_gap
        self._resend = resend
        self._timeout = timeout
        self._progress = progress
        self._closed = threading.Event()
        self._watch: StateWatch | None = None
        self._topic = _Topic(self._kafka, topic, self._name, self._config, timeout, self._closed)
        self.position: SinkPosition | None = None
        """The position that was committed last; None before the first one."""

    def run(self) -> None:
        """Write changes until the query ends or ``close`` is called."""
        try:
            with self._topic.opened():
                self._run()
        except KafkaSinkError:
            if not self._closed.is_set():
                raise
            log.info("Topic %s: closed while the writer waited for the brokers.", self._topic.name)

    def close(self) -> None:
        """End ``run``, within some seconds. The topic then has whole versions only."""
        self._closed.set()
        if self._watch is not None:
            self._watch.close()

    def _run(self) -> None:
        target = self._located()
        self._require_own(self._topic.committed(), target)  # before another writer is fenced
        self._topic.fence()
        self.position = self._topic.position(self._operator)
        self._require_own(self.position, target)
        must_resend = self._resend or self.position is None or not self.position.is_whole
        while not self._closed.is_set():
            try:
                if must_resend:
                    self.position = self._send_state(self.position)
                    must_resend = False
                assert self.position is not None
                self._require_same(self.position, self._located())
                self._follow(self.position)
            except StateVersionError as error:
                if self._on_gap == "stop" or must_resend:
                    raise self._gap(error) from error
                log.warning("The whole state is written again to topic %r. %s", self._topic.name, error)
                must_resend = True
            else:
                return

    # -- what the topic must be ----------------------------------------------------------------

    def _located(self) -> KnownOperator:
        """Return the operator. Raises ``RequestError`` if its changes are not by key."""
        target: KnownOperator = self._client._access.answer(
            f"KafkaSink({self._operator!r})",
            (self._operator, self._query),
            self._client.timeout,
            lambda target, deadline: target,
        )
        changes = VariableChanges(self._rows(target))  # raises for rolling aggregates
        if changes.rows.kind == LIST:
            raise RequestError(
                f"The state {changes.rows.variable.name!r} of operator {self._operator!r} is a list: its elements have "
                "no keys that the records of a topic could have. Keep them in a map state, or read the changes by "
                "client.watch."
            )
        return target

    def _rows(self, target: KnownOperator) -> VariableRows:
        return VariableRows(target.schema, target.view(self._state).variable)

    def _require_own(self, position: SinkPosition | None, target: KnownOperator) -> None:
        """Raise ``RequestError`` if the topic has the state of another operator."""
        wanted = (target.location.operator.name, self._rows(target).variable.name)
        if position is None or (position.operator, position.state) == wanted:
            return
        raise RequestError(
            f"Topic {self._topic.name!r} has the state {position.state!r} of operator {position.operator!r} up to "
            f"version {position.version}, and not {wanted[1]!r} of {wanted[0]!r}. Give each state its own topic; "
            f"or delete this topic and the consumer group {self._name!r}, which has the position."
        )

    def _require_same(self, position: SinkPosition, target: KnownOperator) -> None:
        """Raise ``StateVersionError`` if the position is not one of this query and of the topic's partitions."""
        if position.query_id != target.location.query_id:
            raise StateVersionError(
                f"Topic {self._topic.name!r} has the state of query {position.query_id} up to version "
                f"{position.version}, and operator {self._operator!r} is of query {target.location.query_id} now, "
                "which began with another checkpoint."
            )
        if position.partitions != self._topic.partitions:
            raise StateVersionError(
                f"Topic {self._topic.name!r} had {position.partitions} partitions at version {position.version}, and "
                f"has {self._topic.partitions} now: records of a key would no longer be in one partition."
            )

    def _gap(self, error: StateVersionError) -> StateVersionError:
        if self.position is None:
            return error
        return StateVersionError(
            f"{error} Topic {self._topic.name!r} has the changes up to version {self.position.version}. Write the "
            "whole state again with on_gap='resend' (statestore changes --on-gap resend), which also removes the keys "
            "that are gone. If the writer was too slow or down for too long, let the query keep more versions "
            "(min_versions_to_retain)."
        )

    # -- the whole state -----------------------------------------------------------------------

    def _send_state(self, before: SinkPosition | None) -> SinkPosition:
        """Write all rows at one version, and tombstones for the topic's other keys. Return the new position."""
        topic = self._topic
        keys_there, newest_generation = topic.read_back(self._operator)
        generation = max(newest_generation, 0 if before is None else before.generation) + 1
        target = self._located()  # before the scan: the run of the position may not be a later one
        rows, location = self._rows(target), target.location
        changes = VariableChanges(rows)
        kept = self._client.scan(
            self._operator, self._state, columns=rows.output.names, query=self._query, timeout=self._client.timeout
        )
        with kept:
            version = kept.version
            self._progress(
                f"Topic {topic.name}: writing the state of {self._operator} at version {version}, generation "
                f"{generation}."
            )
            partitions = 0 if before is None else before.partitions
            begun = self._position(target, version, location.run_id, generation)
            topic.commit(msgspec.structs.replace(begun, is_whole=False, partitions=partitions))
            if any(keys_there.values()) and partitions != topic.partitions:
                # The topic may have had other partitions, and keys may have been in others: it is emptied first.
                headers = self._headers(begun, DELETE)
                for partition, keys in keys_there.items():
                    self._remove(keys, headers, partition)
                keys_there, generation = {}, generation + 1
            position = self._position(target, version, location.run_id, generation)
            for batches in _transactions(kept):
                rows_as_changes = [without_last_columns([changes.as_inserts(version, batch)]) for batch in batches]
                written = self._write(rows, rows_as_changes, position)
                for keys in keys_there.values():
                    keys.difference_update(written)
        self._remove(set().union(*keys_there.values()), self._headers(position, DELETE))
        topic.commit(position)
        return position

    def _remove(self, keys: set[bytes], headers: list[tuple[str, bytes]], partition: int = BY_KEY) -> None:
        """Write tombstones."""
        all_keys = sorted(keys)
        for at in range(0, len(all_keys), STATE_TRANSACTION_ROWS):
            part = all_keys[at : at + STATE_TRANSACTION_ROWS]

            def write(part: list[bytes] = part) -> None:
                self._topic.produce(part, [None] * len(part), [headers] * len(part), partition)

            self._topic.transaction(write)

    # -- the changes ---------------------------------------------------------------------------

    def _follow(self, begin: SinkPosition) -> None:
        """Write the changes after a position, until the query ends or ``close`` is called."""
        self._progress(
            f"Topic {self._topic.name}: writing the changes of {self._operator} after version {begin.version}."
        )
        watch = self._client.watch(
            self._operator,
            state=self._state,
            query=self._query,
            from_version=begin.version,
            timeout=self._timeout,
            from_run=begin.run_id,
            every_version=True,
        )
        self._watch = watch
        if self._closed.is_set():
            return
        committed_at, quiet = time.monotonic(), None
        target, run_of_target = self._located(), begin.run_id
        with watch:
            for change in watch:
                run_id = watch.run_id
                assert run_id is not None
                if run_id != run_of_target:
                    target, run_of_target = self._located(), run_id  # a restart may bring other columns
                position = self._position(target, change.version, run_id, begin.generation)
                if change.batch.num_rows:
                    self._write(self._rows(target), [change.batch], position)
                elif time.monotonic() - committed_at < QUIET_COMMIT_SECONDS:
                    quiet = position
                    continue
                self._topic.commit(position)
                self.position, committed_at, quiet = position, time.monotonic(), None
        if quiet is not None:
            self._topic.commit(quiet)
            self.position = quiet

    def _position(self, target: KnownOperator, version: int, run_id: str, generation: int) -> SinkPosition:
        location = target.location
        name = self._rows(target).variable.name
        return SinkPosition(
            version, run_id, generation, self._topic.partitions, location.query_id, location.operator.name, name
        )

    def _headers(self, at: SinkPosition, kind: str) -> list[tuple[str, bytes]]:
        headers = {
            RECORD_VERSION: str(at.version),
            RECORD_GENERATION: str(at.generation),
            RECORD_KIND: kind,
            RECORD_QUERY: at.query_id,
            RECORD_RUN: at.run_id,
            RECORD_OPERATOR: at.operator,
            RECORD_STATE: at.state,
        }
        return [(name, value.encode()) for name, value in headers.items()]

    def _write(self, rows: VariableRows, parts: list[pa.RecordBatch], at: SinkPosition) -> set[bytes]:
        """Write changes in one transaction, and return their keys. The columns are those of ``StateChange``."""
        headers = {kind: self._headers(at, kind) for kind in (INSERT, UPDATE, DELETE)}
        written: set[bytes] = set()

        def write() -> None:
            for part in parts:
                for begin in range(0, part.num_rows, EMIT_ROWS):
                    records = self._records(rows, part.slice(begin, EMIT_ROWS))
                    self._topic.produce(records.keys, records.values, [headers[kind] for kind in records.kinds])
                    written.update(records.keys)

        self._topic.transaction(write)
        return written

    def _records(self, rows: VariableRows, changes: pa.RecordBatch) -> _Records:
        encode_key, encode_value = self._encoders
        kinds = changes.column(1).to_pylist()
        num_keys = len(rows.key) + len(rows.inner)
        keys = encode_key(changes.select(list(range(2, 2 + num_keys))))
        is_there = [kind != DELETE for kind in kinds]
        encoded: Iterator[bytes] = itertools.repeat(b"{}")
        if len(rows.value):
            after = changes.columns[-1].filter(pa.array(is_there))
            encoded = iter(encode_value(pa.RecordBatch.from_struct_array(after)))
        return _Records(keys, [next(encoded) if there else None for there in is_there], kinds)


class _Records(NamedTuple):
    keys: Sequence[bytes]
    values: list[bytes | None]
    kinds: list[str]


def _transactions(batches: Iterable[pa.RecordBatch]) -> Iterator[list[pa.RecordBatch]]:
    """Yield batches, in lists of about ``STATE_TRANSACTION_ROWS`` rows."""
    pending: list[pa.RecordBatch] = []
    for batch in batches:
        pending.append(batch)
        if sum(b.num_rows for b in pending) >= STATE_TRANSACTION_ROWS:
            yield pending
            pending = []
    if pending:
        yield pending


# The topic: its producer and the position, and its records.


class _Topic:
    """A topic with the producer and the position of its one writer.

    Transient errors are repeated until ``timeout`` seconds have passed or ``closed`` is set. Raises ``KafkaSinkError``.
    """

    def __init__(
        self, kafka: Any, name: str, writer: str, config: Mapping[str, Any], timeout: float, closed: threading.Event
    ) -> None:
        self.name = name
        self.partitions = 0
        self._kafka = kafka
        self._writer = writer
        self._config = dict(config)
        self._timeout = timeout
        self._closed = closed
        self._producer: Any = None
        self._consumer: Any = None
        self._last_error = "no error was reported"
        self._failed_record: Any = None
        errors = kafka.KafkaError
        self._transient = {getattr(errors, name) for name in TRANSIENT}
        self._fenced = {errors._FENCED, errors.PRODUCER_FENCED, errors.INVALID_PRODUCER_EPOCH}

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Connect. Raises ``RequestError`` if the topic does not exist."""
        consumer_config = {
            **CONSUMER_DEFAULTS,
            **self._config,
            "group.id": self._writer,
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "error_cb": self._note_error,
            "logger": log,
        }
        producer_config = {
            **PRODUCER_DEFAULTS,
            **self._config,
            "transactional.id": self._writer,
            "error_cb": self._note_error,
            "on_delivery": self._note_failed,
            "logger": log,
        }
        try:
            self._consumer = self._kafka.Consumer(consumer_config)
            self._producer = self._kafka.Producer(producer_config)
        except self._kafka.KafkaException as error:
            raise KafkaSinkError(f"Kafka's client refuses the settings: {error.args[0].str()}") from error
        try:
            self.partitions = self._num_partitions(self._deadline())
            yield
        except BaseException:
            self._give_up()
            raise
        finally:
            self._consumer.close()
            self._producer = self._consumer = None

    def _give_up(self) -> None:
        """Abort an open transaction, for readers that wait for its end."""
        try:
            self._producer.abort_transaction(CALL_SECONDS)
        except self._kafka.KafkaException as error:
            log.debug("No transaction was aborted: %s", error)

    def _note_error(self, error: Any) -> None:
        self._last_error = error.str()

    def _note_failed(self, error: Any, _: Any) -> None:
        if error is not None and (self._failed_record is None or not self._is_transient(error)):
            self._failed_record = error

    # -- the position --------------------------------------------------------------------------

    def fence(self) -> None:
        """End the transaction of an earlier writer, and refuse its next ones."""
        self._repeated(self._producer.init_transactions, self._deadline())

    def position(self, operator: str) -> SinkPosition | None:
        """Return the position: of the last transaction, if it is after the one that was committed last."""
        committed = self.committed()
        if committed is None:
            return None
        newest = committed
        for record in self._last_records():
            headers = self._own_headers(record, operator)
            version, generation = int(headers[RECORD_VERSION]), int(headers[RECORD_GENERATION])
            if (generation, version) > (newest.generation, newest.version):
                run_id = headers[RECORD_RUN].decode()
                newest = msgspec.structs.replace(newest, version=version, generation=generation, run_id=run_id)
        # A newer generation has begun: an earlier writer that had been fenced has committed its position since.
        return newest if newest.generation == committed.generation else msgspec.structs.replace(newest, is_whole=False)

    def committed(self) -> SinkPosition | None:
        """Return the position that was committed; None if there is none, or if the broker has forgotten it."""
        asked = [self._kafka.TopicPartition(self.name, 0)]
        (stored,) = self._repeated(lambda seconds: self._consumer.committed(asked, seconds), self._deadline())
        if stored.error is not None:
            raise self._problem(stored.error)
        if stored.offset < 0:
            return None
        try:
            return json_decoder(SinkPosition).decode((stored.metadata or "").encode())
        except msgspec.DecodeError as error:
            raise KafkaSinkError(
                f"The consumer group {self._writer!r} has a position that this sink has not written: "
                f"{stored.metadata!r}. Delete the group; the sink then writes the whole state again."
            ) from error

    def commit(self, position: SinkPosition) -> None:
        """Commit a position, whose records are in the topic."""
        metadata = msgspec.json.encode(position).decode()
        offsets = [self._kafka.TopicPartition(self.name, 0, position.version, metadata)]
        self._repeated(lambda _: self._consumer.commit(offsets=offsets, asynchronous=False), self._deadline())

    # -- records -------------------------------------------------------------------------------

    def transaction(self, produce: Callable[[], None]) -> None:
        """Commit what ``produce`` writes. ``produce`` is repeated after a failure."""
        deadline = self._deadline()
        while True:
            self._failed_record = None
            try:
                self._producer.begin_transaction()
                produce()
                self._require_partitions(deadline)
                self._repeated(self._producer.commit_transaction, deadline)
            except self._kafka.KafkaException as error:
                cause, failed = error.args[0], self._failed_record
                if failed is not None and not self._is_transient(failed):
                    raise self._problem(failed) from error
                # Once a record has failed, Kafka's client refuses the next ones as in a wrong state.
                may_abort = cause.txn_requires_abort() or cause.code() == self._kafka.KafkaError._STATE
                if not may_abort or self._is_over(deadline):
                    raise self._problem(failed or cause) from error
                log.warning("A transaction is repeated: %s", cause.str())
                self._aborted(deadline)
            else:
                return

    def _aborted(self, deadline: float) -> None:
        try:
            self._repeated(self._producer.abort_transaction, deadline)
        except self._kafka.KafkaException as error:
            raise self._problem(error.args[0]) from error

    def produce(
        self,
        keys: Sequence[bytes],
        values: Sequence[bytes | None],
        headers: Sequence[list[tuple[str, bytes]]],
        partition: int = BY_KEY,
    ) -> None:
        """Append records to the transaction. Waits while the producer's buffer is full."""
        produce, name = self._producer.produce, self.name
        for key, value, headers_of_record in zip(keys, values, headers, strict=True):
            while True:
                try:
                    produce(name, value, key, partition, headers=headers_of_record)
                    break
                except BufferError:
                    if self._closed.is_set():
                        raise self._away() from None
                    self._producer.poll(0.01)
        self._producer.poll(0)

    def read_back(self, operator: str) -> tuple[dict[int, set[bytes]], int]:
        """Return the keys that the topic has, by partition, and the newest generation of its records.

        Raises ``RequestError`` if there are records that no sink of the operator has written.
        """
        keys_there: dict[int, set[bytes]] = {partition: set() for partition in range(self.partitions)}
        newest_generation = 0
        for record in self._read_from(dict.fromkeys(keys_there, self._kafka.OFFSET_BEGINNING)):
            headers = self._own_headers(record, operator)
            newest_generation = max(newest_generation, int(headers[RECORD_GENERATION]))
            if record.value() is None:
                keys_there[record.partition()].discard(record.key())
            else:
                keys_there[record.partition()].add(record.key())
        return keys_there, newest_generation

    def _last_records(self) -> Iterator[Any]:
        """Yield the last record of each partition that has any."""
        unread, distance = set(range(self.partitions)), LAST_RECORDS
        while unread:
            starts, begins = {}, {}
            for partition in unread:
                begins[partition], end = self._bounds(partition)
                starts[partition] = max(begins[partition], end - distance)
            last = {record.partition(): record for record in self._read_from(starts)}
            yield from last.values()
            # Behind the last record may be any number of markers of transactions, and of records that were aborted.
            unread = {p for p in unread - set(last) if starts[p] > begins[p]}
            distance *= LAST_RECORDS

    def _bounds(self, partition: int) -> tuple[int, int]:
        """Return the first offset of a partition, and the one behind its last record."""
        place = self._kafka.TopicPartition(self.name, partition)
        begin, end = self._repeated(lambda s: self._consumer.get_watermark_offsets(place, s), self._deadline())
        return begin, end

    def _read_from(self, starts: Mapping[int, int]) -> Iterator[Any]:
        """Yield the records of partitions from an offset to the end."""
        unread = set(starts)
        self._consumer.assign([self._kafka.TopicPartition(self.name, p, start) for p, start in starts.items()])
        deadline = self._deadline()
        while unread:
            # The first call waits for one record, the second one takes those that have arrived.
            messages = [*self._consumer.consume(1, CALL_SECONDS), *self._consumer.consume(READ_RECORDS, 0)]
            if not messages and self._is_over(deadline):
                raise self._away()
            for message in messages:
                deadline = self._deadline()
                error = message.error()
                if error is None:
                    yield message
                elif error.code() == self._kafka.KafkaError._PARTITION_EOF:
                    unread.discard(message.partition())
                elif not self._is_transient(error):
                    raise self._problem(error)
        self._consumer.unassign()

    def _own_headers(self, record: Any, operator: str) -> dict[str, bytes]:
        """Return the headers of a record. Raises ``RequestError`` if no sink of the operator has written it."""
        headers = dict(record.headers() or ())
        if record.key() is None or headers.get(RECORD_OPERATOR) != operator.encode():
            raise RequestError(
                f"The record at {self.name}[{record.partition()}]@{record.offset()} was not written by a sink of "
                f"operator {operator!r}. Give the sink its own topic."
            )
        return headers

    # -- partitions and failures ---------------------------------------------------------------

    def _require_partitions(self, deadline: float) -> None:
        """Raise ``StateVersionError`` if the topic has been given more partitions."""
        partitions = self._num_partitions(deadline)
        if partitions == self.partitions:
            return
        before, self.partitions = self.partitions, partitions
        self._aborted(deadline)
        raise StateVersionError(
            f"Topic {self.name!r} had {before} partitions and has {partitions} now: records of a key would no longer "
            "be in one partition."
        )

    def _num_partitions(self, deadline: float) -> int:
        try:
            metadata = self._repeated(lambda seconds: self._producer.list_topics(self.name, seconds), deadline)
        except self._kafka.KafkaException as error:
            raise self._problem(error.args[0]) from error
        described = metadata.topics[self.name]
        if described.error is not None:
            raise RequestError(
                f"Topic {self.name!r} cannot be written to: {described.error.str()} Create it, with "
                "cleanup.policy=compact so that it keeps the last record of each key."
            )
        return len(described.partitions)

    def _repeated(self, call: Callable[[float], T], deadline: float) -> T:
        """Return the result of a call that waits for the broker; repeat it as long as it may succeed."""
        while True:
            try:
                return call(CALL_SECONDS)
            except self._kafka.KafkaException as error:
                cause = error.args[0]
                if cause.txn_requires_abort() or cause.fatal():
                    if cause.fatal():
                        raise self._problem(cause) from error
                    raise
                if not self._is_transient(cause):
                    raise self._problem(cause) from error
                self._producer.poll(0)  # calls ``_note_error``
                if self._is_over(deadline):
                    raise self._away() from error
                self._closed.wait(0.1)

    def _is_transient(self, error: Any) -> bool:
        return bool(error.retriable()) or error.code() in self._transient

    def _deadline(self) -> float:
        return time.monotonic() + self._timeout

    def _is_over(self, deadline: float) -> bool:
        return time.monotonic() > deadline or self._closed.is_set()

    def _away(self) -> KafkaSinkError:
        return KafkaSinkError(
            f"The brokers at {self._config['bootstrap.servers']} have not answered for {self._timeout:g} s: "
            f"{self._last_error}. Start the writer again when they do: it continues from the position in the topic."
        )

    def _problem(self, error: Any) -> QueryableStateError | KafkaSinkError:
        if error.code() in self._fenced:
            return KafkaSinkError(
                f"Another writer writes to topic {self.name!r} now, and this one has ended: a topic has one writer, "
                f"the last one that was started (transactional.id {self._writer!r}). {error.str()}"
            )
        return KafkaSinkError(f"Topic {self.name!r} could not be written to: {error.str()} ({error.name()})")
