"""The topic of a ``KafkaSink``: its transactions, its records, and the position that its one writer has reached."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec

from backends.decoders import json_decoder
from spark_bridge.exceptions import KafkaSinkError, QueryableStateError, RequestError, StateVersionError

T = TypeVar("T")
log = logging.getLogger(__name__)

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


class SinkTopic:
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
            try:  # for readers that wait for the end of an open transaction
                self._producer.abort_transaction(CALL_SECONDS)
            except self._kafka.KafkaException as error:
                log.debug("No transaction was aborted: %s", error)
            raise
        finally:
            self._consumer.close()
            self._producer = self._consumer = None

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
        """Append records to the transaction. Waits while the producer's buffer is full, at most for the timeout."""
        produce, name = self._producer.produce, self.name
        for key, value, headers_of_record in zip(keys, values, headers, strict=True):
            deadline: float | None = None
            while True:
                try:
                    produce(name, value, key, partition, headers=headers_of_record)
                    break
                except BufferError:
                    deadline = deadline or self._deadline()
                    if self._is_over(deadline):
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
            is_answered = False
            for message in messages:
                error = message.error()
                if error is not None and self._is_transient(error):
                    self._last_error = error.str()
                    continue
                is_answered, deadline = True, self._deadline()
                if error is None:
                    yield message
                elif error.code() == self._kafka.KafkaError._PARTITION_EOF:
                    unread.discard(message.partition())
                else:
                    raise self._problem(error)
            if not is_answered and self._is_over(deadline):
                raise self._away()
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
            described = self._repeated(self._described, deadline)
        except self._kafka.KafkaException as error:
            raise self._problem(error.args[0]) from error
        if described.error is not None:
            raise RequestError(
                f"Topic {self.name!r} cannot be written to: {described.error.str()} Create it, with "
                "cleanup.policy=compact so that it keeps the last record of each key."
            )
        return len(described.partitions)

    def _described(self, seconds: float) -> Any:
        """Return the topic's metadata. Raises a transient error in it, as of an election: so the call is repeated."""
        described = self._producer.list_topics(self.name, seconds).topics[self.name]
        if described.error is not None and self._is_transient(described.error):
            self._last_error = described.error.str()
            raise self._kafka.KafkaException(described.error)
        return described

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
