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
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa

from backends.lazy_names import import_optional
from spark_bridge import exceptions
from spark_bridge.queryable.client import kafka_topic
from spark_bridge.queryable.client.client import QueryableStateClient
from spark_bridge.queryable.client.discovery import KnownOperator
from spark_bridge.queryable.client.json_values import json_bytes, rows_to_json
from spark_bridge.queryable.client.watch import StateWatch, without_last_columns
from spark_bridge.state_format.layouts import LIST
from spark_bridge.state_format.stored_changes import EMIT_ROWS, VariableChanges
from spark_bridge.state_format.stored_rows import DELETE, INSERT, UPDATE, VariableRows

Encoder = Callable[[pa.RecordBatch], Sequence[bytes]]
"""Returns a record's key, or its value, for each row of columns."""
log = logging.getLogger(__name__)

ON_GAP = ("stop", "resend")
STATE_TRANSACTION_ROWS = 100_000
STATE_TRANSACTION_BYTES = 64 << 20
"""The whole state is written in transactions of about this many rows, or of this many bytes of rows if that is less:
the rows of a transaction are in memory.
"""
QUIET_COMMIT_SECONDS = 10.0
"""Versions that changed nothing move the position in the topic at most this often."""


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
            raise exceptions.RequestError(f"on_gap={on_gap!r} must be one of {', '.join(map(repr, ON_GAP))}.")
        self._kafka = import_optional("confluent_kafka", "KafkaSink", exceptions.EnvironmentProblemError)
        self._client = client
        self._operator = operator
        self._query = query
        self._state = state
        self._name = f"statestore-sink-{topic}"
        self._config = {**(config or {}), "bootstrap.servers": bootstrap}
        self._encoders = {"encode_key": encode_key, "encode_value": encode_value}
        self._on_gap = on_gap
        self._resend = resend
        self._timeout = timeout
        self._progress = progress
        self._closed = threading.Event()
        self._watch: StateWatch | None = None
        self._topic = kafka_topic.SinkTopic(self._kafka, topic, self._name, self._config, timeout, self._closed)
        self.position: kafka_topic.SinkPosition | None = None
        """The position that was committed last; None before the first one."""

    def run(self) -> None:
        """Write changes until the query ends or ``close`` is called."""
        try:
            with self._topic.opened():
                self._run()
        except exceptions.KafkaSinkError:
            if not self._closed.is_set():
                raise
            log.info("Topic %s: closed while the writer waited for the brokers.", self._topic.name)

    def close(self) -> None:
        """End ``run``, within some seconds.

        A ``run`` that writes or compares the whole state first completes that, unless it would have to wait for the
        brokers. Then the next ``run`` writes the whole state again. The topic has all changes of a version, or none.
        """
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
            except exceptions.StateVersionError as error:
                if self._on_gap == "stop" or must_resend:
                    raise self._gap(error) from error
                log.warning("The whole state is written again to topic %r. %s", self._topic.name, error)
                must_resend = True
            else:
                return

    # -- what the topic must be ----------------------------------------------------------------

    def _located(self) -> KnownOperator:
        """Return the operator. Raises ``RequestError`` if its changes are not by key."""
        ref, what = (self._operator, self._query), f"KafkaSink({self._operator!r})"
        target = self._client._access.answer(what, ref, self._client.timeout, lambda target, _: target)
        changes = VariableChanges(self._rows(target))  # raises for rolling aggregates
        if changes.rows.kind == LIST:
            raise exceptions.RequestError(
                f"The state {changes.rows.variable.name!r} of operator {self._operator!r} is a list: its elements have "
                "no keys that the records of a topic could have. Keep them in a map state, or read the changes by "
                "client.watch."
            )
        return target

    def _rows(self, target: KnownOperator) -> VariableRows:
        return VariableRows(target.schema, target.view(self._state).variable)

    def _require_own(self, position: kafka_topic.SinkPosition | None, target: KnownOperator) -> None:
        """Raise ``RequestError`` if the topic has the state of another operator."""
        wanted = (target.location.operator.name, self._rows(target).variable.name)
        if position is None or (position.operator, position.state) == wanted:
            return
        raise exceptions.RequestError(
            f"Topic {self._topic.name!r} has the state {position.state!r} of operator {position.operator!r} up to "
            f"version {position.version}, and not {wanted[1]!r} of {wanted[0]!r}. Give each state its own topic; "
            f"or delete this topic and the consumer group {self._name!r}, which has the position."
        )

    def _require_same(self, position: kafka_topic.SinkPosition, target: KnownOperator) -> None:
        """Raise ``StateVersionError`` if the position is not one of this query and of the topic's partitions."""
        if position.query_id != target.location.query_id:
            raise exceptions.StateVersionError(
                f"Topic {self._topic.name!r} has the state of query {position.query_id} up to version "
                f"{position.version}, and operator {self._operator!r} is of query {target.location.query_id} now, "
                "which began with another checkpoint."
            )
        if position.partitions != self._topic.partitions:
            raise exceptions.StateVersionError(
                f"Topic {self._topic.name!r} had {position.partitions} partitions at version {position.version}, and "
                f"has {self._topic.partitions} now: records of a key would no longer be in one partition."
            )

    def _gap(self, error: exceptions.StateVersionError) -> exceptions.StateVersionError:
        if self.position is None:
            return error
        return exceptions.StateVersionError(
            f"{error} Topic {self._topic.name!r} has the changes up to version {self.position.version}. Write the "
            "whole state again with on_gap='resend' (statestore changes --on-gap resend), which also removes the keys "
            "that are gone. If the writer was too slow or down for too long, let the query keep more versions "
            "(min_versions_to_retain)."
        )

    # -- the whole state -----------------------------------------------------------------------

    def _send_state(self, before: kafka_topic.SinkPosition | None) -> kafka_topic.SinkPosition:
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
            what = f"the state of {self._operator} at version {version}, generation {generation}"
            self._progress(f"Topic {topic.name}: writing {what}.")
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

    def _remove(self, keys: set[bytes], headers: list[tuple[str, bytes]], partition: int = kafka_topic.BY_KEY) -> None:
        all_keys = sorted(keys)
        for at in range(0, len(all_keys), STATE_TRANSACTION_ROWS):
            part = all_keys[at : at + STATE_TRANSACTION_ROWS]

            def write(part: list[bytes] = part) -> None:
                self._topic.produce(part, [None] * len(part), [headers] * len(part), partition)

            self._topic.transaction(write)

    # -- the changes ---------------------------------------------------------------------------

    def _follow(self, begin: kafka_topic.SinkPosition) -> None:
        """Write the changes after a position, until the query ends or ``close`` is called."""
        what = f"the changes of {self._operator} after version {begin.version}"
        self._progress(f"Topic {self._topic.name}: writing {what}.")
        options: dict[str, Any] = {"state": self._state, "query": self._query, "timeout": self._timeout}
        options |= {"from_version": begin.version, "from_run": begin.run_id, "every_version": True}
        self._watch = watch = self._client.watch(self._operator, **options)
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

    def _position(self, target: KnownOperator, version: int, run_id: str, generation: int) -> kafka_topic.SinkPosition:
        query_id, operator = target.location.query_id, target.location.operator.name
        of_state = (query_id, operator, self._rows(target).variable.name)
        return kafka_topic.SinkPosition(version, run_id, generation, self._topic.partitions, *of_state)

    def _headers(self, at: kafka_topic.SinkPosition, kind: str) -> list[tuple[str, bytes]]:
        headers = {
            kafka_topic.RECORD_VERSION: str(at.version),
            kafka_topic.RECORD_GENERATION: str(at.generation),
            kafka_topic.RECORD_KIND: kind,
            kafka_topic.RECORD_QUERY: at.query_id,
            kafka_topic.RECORD_RUN: at.run_id,
            kafka_topic.RECORD_OPERATOR: at.operator,
            kafka_topic.RECORD_STATE: at.state,
        }
        return [(name, value.encode()) for name, value in headers.items()]

    def _write(self, rows: VariableRows, parts: list[pa.RecordBatch], at: kafka_topic.SinkPosition) -> set[bytes]:
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
        kinds = changes.column(1).to_pylist()
        num_keys = len(rows.key) + len(rows.inner)
        keys = self._encoded("encode_key", changes.select(list(range(2, 2 + num_keys))))
        is_there = [kind != DELETE for kind in kinds]
        encoded: Iterator[bytes] = itertools.repeat(b"{}")
        if len(rows.value):
            after = changes.columns[-1].filter(pa.array(is_there))
            encoded = iter(self._encoded("encode_value", pa.RecordBatch.from_struct_array(after)))
        return _Records(keys, [next(encoded) if there else None for there in is_there], kinds)

    def _encoded(self, name: str, rows: pa.RecordBatch) -> Sequence[bytes]:
        """Return what an encoder makes of rows. Raises ``RequestError`` unless it returns one value for each row."""
        encoded = self._encoders[name](rows)
        if len(encoded) != rows.num_rows:
            raise exceptions.RequestError(
                f"{name} returned {len(encoded)} values for {rows.num_rows} rows: return one for each row, in their "
                "order."
            )
        return encoded


class _Records(NamedTuple):
    keys: Sequence[bytes]
    values: list[bytes | None]
    kinds: list[str]


def _transactions(batches: Iterable[pa.RecordBatch]) -> Iterator[list[pa.RecordBatch]]:
    """Yield batches, in lists of about ``STATE_TRANSACTION_ROWS`` rows or ``STATE_TRANSACTION_BYTES`` bytes."""
    pending: list[pa.RecordBatch] = []
    num_rows = num_bytes = 0
    for batch in batches:
        pending.append(batch)
        num_rows += batch.num_rows
        num_bytes += batch.nbytes
        if num_rows >= STATE_TRANSACTION_ROWS or num_bytes >= STATE_TRANSACTION_BYTES:
            yield pending
            pending, num_rows, num_bytes = [], 0, 0
    if pending:
        yield pending
