"""Writes the state of a new checkpoint: both stages, the manifest, Spark's files."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
from msgspec import Struct, field

from backends.conf import StateStoreConf
from backends.encoding.operator_schema import OperatorSchema
from backends.engines.backend import backend_of
from backends.exceptions import InvalidStateStoreArgument
from backends.formats.manifest import OperatorEntry
from backends.storage.checkpoint_storage import CheckpointStorage, OpenStorage
from coordinator_actor.durable.audit_log import AuditLog, AuditRecord, caller
from coordinator_actor.reading.stored_versions import StatePlace
from coordinator_actor.savepoints.export import copy_spark_files, spark_log_files
from coordinator_actor.savepoints.new_checkpoint import NewCheckpoint
from spark_bridge.session.current import current_spark
from spark_bridge.session.spark_settings import STATE_LOCATION_CONF, storage_settings
from spark_bridge.state_surgery.stages.first_stage import OperatorVariable, ReadJob, RowCounts, Target
from spark_bridge.state_surgery.stages.second_stage import CopiedState, NewPartition
from spark_bridge.state_surgery.stages.workers import Workers

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class NewOperator:
    """The new state of an operator: rows of some variables, and families that are copied."""

    name: str
    num_partitions: int
    backend: str
    schema: OperatorSchema
    targets: tuple[Target, ...]
    copied: CopiedState | None = None


class WrittenOperator(Struct, frozen=True):
    """One operator of the new checkpoint. ``pairs`` is the number of stored pairs, which lists and maps share."""

    name: str
    num_partitions: int
    backend: str
    pairs: int


class NewStateReport(Struct, frozen=True):
    """The state written to ``checkpoint_location`` (with ``dry_run``: not written). The query goes on from ``version``.

    ``batch_id`` is the last batch that Spark takes as committed; None if a new query begins with the state. By
    variable, as (operator, variable): ``rows_read``, ``rows_made`` by the function, and ``rows_written``, which are
    fewer where rows were combined; ``samples_before`` and ``samples_after`` are the first rows, as tables.
    """

    checkpoint_location: str
    query_id: str
    version: int
    batch_id: int | None
    operators: tuple[WrittenOperator, ...]
    rows_read: dict[OperatorVariable, int]
    rows_made: dict[OperatorVariable, int]
    rows_written: dict[OperatorVariable, int]
    samples_before: dict[OperatorVariable, pa.Table] = field(default_factory=dict)
    samples_after: dict[OperatorVariable, pa.Table] = field(default_factory=dict)
    dry_run: bool = False


@dataclass(frozen=True)
class NewState:
    """The state to be written at ``new``. ``spark_files`` None: a new query begins with this state.

    ``what`` is the function named in the audit log, ``details`` its note on the source.
    """

    new: NewCheckpoint
    options: Mapping[str, str]
    operators: Sequence[NewOperator]
    jobs: Iterable[ReadJob]
    origin: str
    what: str
    details: Mapping[str, str]
    reference: str | None = None
    spark_files: CheckpointStorage | None = None
    open_storage: OpenStorage = CheckpointStorage.open

    def write(
        self,
        workers: Workers,
        say: Callable[[str], None],
        *,
        dry_run: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> NewStateReport:
        """Run both stages, and write everything unless ``dry_run``. If anything fails, nothing is left at the new
        location.

        Spark's files are copied first of all: the old query may go on meanwhile, and remove its own.
        """
        new, conf = self.new, StateStoreConf(storage_options=dict(self.options))
        for operator in self.operators:
            backend_of(_with(conf, operator.backend))  # raises before anything is written if there is no such backend
        if self.spark_files is not None:
            spark_log_files(self.spark_files, new.version - 1)  # raises as well
        if not dry_run:
            new.claim()
        try:
            if not dry_run:
                new.write_schemas(o.schema for o in self.operators)
                if self.spark_files is not None:
                    copy_spark_files(self.spark_files, new.checkpoint, new.version - 1, below="")
            cut = workers.cut(self.jobs, say)
            place = None if dry_run else StatePlace(new.checkpoint.location, new.state.location, self.options)
            partitions = [p for o in self.operators for p in self._partitions(o, place, conf)]
            built = workers.build(partitions, cut, say)
            written: dict[OperatorVariable, int] = {t.name: 0 for o in self.operators for t in o.targets}
            for one in built:
                for name, rows in one.rows.items():
                    written[name] += rows
            pairs = {o.name: sum(b.pairs for b in built if b.operator == o.name) for o in self.operators}
            report = self._report(cut.counts, written, pairs, dry_run)
            if dry_run:
                return report
            entries = {
                o.name: OperatorEntry.of(
                    o.num_partitions,
                    o.schema.id,
                    o.backend,
                    {b.partition: b.entry for b in built if b.operator == o.name and b.entry is not None},
                )
                for o in self.operators
            }
            now_ms = round(clock() * 1000)
            self._note(report, now_ms)
            new.append(entries, now_ms)
            new.finish()
        except BaseException:
            if not dry_run:
                self._remove(say)
            raise
        log.info("Wrote state to %s as query %s", new.checkpoint.location, new.query_id)
        return report

    def _partitions(self, operator: NewOperator, place: StatePlace | None, conf: StateStoreConf) -> list[NewPartition]:
        n = operator.num_partitions
        return [
            NewPartition(
                self.new.changelog_meta(operator.name, p, n, self.origin),
                tuple(operator.schema.families),
                _with(conf, operator.backend),
                place,
                self.new.key_groups,
                operator.targets,
                operator.copied,
                self.open_storage,
            )
            for p in range(n)
        ]

    def _report(
        self, counts: RowCounts, written: dict[OperatorVariable, int], pairs: Mapping[str, int], dry_run: bool
    ) -> NewStateReport:
        samples = {what: {n: t for (w, n), t in counts.samples.items() if w == what} for what in ("before", "after")}
        return NewStateReport(
            self.new.checkpoint.location,
            self.new.query_id,
            self.new.version,
            None if self.spark_files is None else self.new.version - 1,
            tuple(WrittenOperator(o.name, o.num_partitions, o.backend, pairs[o.name]) for o in self.operators),
            counts.read,
            counts.made,
            written,
            samples["before"],
            samples["after"],
            dry_run,
        )

    def _note(self, report: NewStateReport, now_ms: int) -> None:
        counts = {"rows_read": sum(report.rows_read.values()), "rows_written": sum(report.rows_written.values())}
        names = tuple(sorted({name for name, _ in (*report.rows_read, *report.rows_written)}))
        record = AuditRecord(
            self.what, "done", now_ms, caller(), names, self.new.version, counts, self.reference, dict(self.details)
        )
        AuditLog(self.new.state).append(record)

    def _remove(self, say: Callable[[str], None]) -> None:
        """Remove what this call has written: the place was empty, and nobody else may write there."""
        say(f"removing what was written to {self.new.checkpoint.location}")
        try:
            self.new.remove()
        except Exception:
            log.warning("%s could not be removed; do so by hand", self.new.state.location, exc_info=True)


def new_query_id() -> str:
    """Return an id as Spark gives queries."""
    return str(uuid.uuid4())


def session_options(given: Mapping[str, str] | None) -> dict[str, str]:
    """Return the storage settings of the Spark session, if there is one, with those that were given."""
    spark = current_spark()
    return {**({} if spark is None else storage_settings(spark)), **(given or {})}


def session_state_location() -> str | None:
    """Return ``spark.statestore.location`` of the Spark session, if there is one that has it."""
    spark = current_spark()
    return (spark.conf.get(STATE_LOCATION_CONF, "") or None) if spark is not None else None


def _with(conf: StateStoreConf, backend: str) -> StateStoreConf:
    return StateStoreConf(provider=backend, storage_options=dict(conf.storage_options))


def check_partitions(operator: str, num_partitions: object, key_groups: int) -> int:
    """Return a number of partitions, or raise ``InvalidStateStoreArgument``."""
    if isinstance(num_partitions, bool) or not isinstance(num_partitions, int) or not 1 <= num_partitions <= key_groups:
        raise InvalidStateStoreArgument(
            f"num_partitions={num_partitions!r} for operator {operator!r} must be an int from 1 to {key_groups}, the "
            "number of key groups, which is fixed for the life of the state."
        )
    return num_partitions
