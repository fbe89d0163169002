"""A query with a long history starts with few requests: not all claims, savepoint records and manifests are read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from backends.encoding.operator_schema import OperatorSchema
from backends.exceptions import MissingFileError
from backends.formats.manifest import Manifest, OperatorEntry, PartitionEntry
from backends.formats.manifest_chain import Layout
from backends.storage.checkpoint_storage import CheckpointStorage
from backends.storage.locations import FileRef
from backends.storage.requests import RequestCounts
from coordinator_actor.checkpoints.pending_checkpoint import CheckpointIDCounter
from coordinator_actor.coordinator import Coordinator
from coordinator_actor.coordinator_conf import CoordinatorConf
from coordinator_actor.durable import fencing
from coordinator_actor.durable.fencing import EPOCHS, KEPT_CLAIMS, MANIFESTS
from coordinator_actor.durable.manifests import FOLDED, FOLDS, ManifestLog, QueryFile
from coordinator_actor.durable.records import DIRECTORY, KEPT_RECORDS, SavepointRecord
from coordinator_actor.messages import HostInfo, HostReport, OperatorSpec, QueryRegistration
from coordinator_actor.run.retention import tidy_records
from tests.coordinator_actor.coordinator_world import SCHEMA, run_of
from tests.critical_path import CriticalPath

PARTITIONS = 1000
VERSIONS = 115
MAX_REQUESTS = 40
YEAR_OF_SAVEPOINTS = 365 * 24
LONGEST_PATH = 8
"""Spark's logs, manifests, those in no fold; claim, existing epochs, fence; Spark's logs again, a manifest."""


class Store:
    """A checkpoint in memory, which is taken for an object store; its requests are counted."""

    def __init__(self, name: str, partitions: int = 2) -> None:
        self.partitions = partitions
        self.location = f"memory://{name}/ck"
        self.counts = RequestCounts()
        self.coordinator = Coordinator(lambda: 1000.0, self.open, CoordinatorConf(report_timeout=0.0))
        self.state = self.open(f"{self.location}/statestore", {})

    def open(self, location: str, options: Mapping[str, str]) -> CheckpointStorage:
        return CheckpointStorage.open(location, options, requests=self.counts)

    def registration(self, run: str) -> QueryRegistration:
        spec = OperatorSpec("op", self.partitions, SCHEMA)
        return QueryRegistration("q", run, "name", "s", self.location, self.state.location, (spec,))

    def requests(self) -> Counter[str]:
        return Counter(self.counts.read())


def version(log: ManifestLog, number: int, partitions: int) -> Manifest:
    refs = {
        p: FileRef(f"operators/op/{PARTITIONS}/{p}/default/{number}-a.changelog", 1, "d") for p in range(PARTITIONS)
    }
    entries = {p: PartitionEntry("try", ref) for p, ref in refs.items()}
    operator = OperatorEntry.of(PARTITIONS, OperatorSchema.from_json(SCHEMA).id, "rocksdb", entries)
    return Manifest(number, number - 1 or None, number, log.epoch, "run", 0, {"op": operator})


def grown(name: str, runs: int, savepoints: int, partitions: int = 2, *, tidied: bool = True) -> Store:
    """A query that has had so many runs and savepoints, and keeps ``VERSIONS`` versions."""
    store = Store(name, partitions)
    log, counter = ManifestLog(store.state, "earlier"), CheckpointIDCounter(10_000)
    log.ensure_query_file(QueryFile("q", 1024))
    log.ensure_schema(OperatorSchema.from_json(SCHEMA).id, SCHEMA)
    for i in range(runs):
        log.claim(f"run{i}", (Layout("op", partitions, "rocksdb"),))
    for number in range(1, VERSIONS + 1):
        log.append(version(log, number, partitions), counter)
    for i in range(savepoints):
        log.savepoints.create(SavepointRecord(VERSIONS + 1 + i, VERSIONS, "s3://b/s", 0, "run0", False))
    spark = store.open(store.location, {})
    for n in range(VERSIONS):
        spark.put_new(f"offsets/{n}", b"v1\n{}\n{}")
        spark.put_new(f"commits/{n}", b"v1\n{}")
    if tidied:
        log.folds.write(log.folds.due(log.chain()))
        store.state.delete_all([*log.epochs.obsolete(), *log.savepoints.obsolete(None)])
    return store


def test_a_start_of_a_thousand_partitions_takes_few_requests_whatever_the_history() -> None:
    store = grown("long-history", 60, 50, PARTITIONS)
    before = store.requests()
    for i in range(4):
        store.coordinator.register_host(HostInfo(f"h{i}", "a", f"grpc://127.0.0.1:{i}", f"node{i}", "s"), HostReport())
    registered = store.coordinator.register_query(store.registration("new"))
    assert (registered.refusal, registered.epoch, registered.completed_version) == (None, 61, VERSIONS)
    assert store.coordinator.open_for_read("new", "op", PARTITIONS - 1).version == VERSIONS
    made = store.requests() - before
    assert made.total() <= MAX_REQUESTS, made


def test_a_start_waits_for_few_requests_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    store = grown("start-path", 3, 2)
    path = CriticalPath(monkeypatch)
    assert store.coordinator.register_query(store.registration("new")).epoch == 4
    assert path.longest <= LONGEST_PATH


def test_a_start_behind_a_year_of_hourly_savepoints_takes_few_requests() -> None:
    store = grown("a-year", 2, 0)
    log = ManifestLog(store.state, "earlier")
    for i in range(YEAR_OF_SAVEPOINTS):
        log.savepoints.create(SavepointRecord(VERSIONS + 1 + i, VERSIONS, "s3://b/s", 0, "new", False))
        if i % 10 == 9:
            store.state.delete_all(log.savepoints.obsolete(None))
    restarted = Coordinator(lambda: 1000.0, store.open, CoordinatorConf())
    # A restarted coordinator reads the records that are kept: one of them may hold the run.
    for coordinator, most in (store.coordinator, MAX_REQUESTS), (restarted, MAX_REQUESTS + KEPT_RECORDS):
        before = store.requests()
        assert coordinator.register_query(store.registration("new")).completed_version == VERSIONS
        made = store.requests() - before
        assert made.total() <= most, made
        assert run_of(coordinator, "new").manifests.last_id() > VERSIONS + YEAR_OF_SAVEPOINTS


def test_old_claims_and_savepoint_records_go_and_a_replaced_run_is_still_refused() -> None:
    store = grown("old-records", KEPT_CLAIMS + 8, KEPT_RECORDS + 5, tidied=False)
    assert store.coordinator.register_query(store.registration("new")).refusal is None
    run = run_of(store.coordinator, "new")
    run.lifetime.maintained_at(0.0)
    tidy_records(run)
    assert len(store.state.list(EPOCHS)) == KEPT_CLAIMS
    assert len(store.state.list(DIRECTORY)) == KEPT_RECORDS
    assert len(store.state.list(FOLDS)) == VERSIONS // FOLDED
    refusal = store.coordinator.register_query(store.registration("run0")).refusal
    assert refusal is not None and "replaced by a newer one" in refusal
    assert run.manifests.last_id() >= VERSIONS + KEPT_RECORDS + 5, "ids always ascend"


def test_a_fold_that_is_damaged_or_outdated_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    store = grown("damaged-fold", 1, 0)
    whole = ManifestLog(store.state, "reader")
    whole.refresh()
    path, _ = store.state.list(FOLDS)[0]
    data = store.state.get(path)
    store.state.delete(path)
    store.state.put_new(path, data.replace(b'"version":3', b'"version":4'))
    log = ManifestLog(store.state, "reader")
    log.refresh()
    assert log.manifests == whole.manifests and "one by one" in caplog.text
    store.state.delete(path)
    store.state.put_new(path, data)
    gone = [p for p, _ in store.state.list(MANIFESTS)][2]
    store.state.delete(gone)
    log = ManifestLog(store.state, "reader")
    log.refresh()
    assert 3 not in log.manifests, "a removed manifest is missing, whatever a fold says"
    with pytest.raises(MissingFileError):
        log.chain()


def test_folds_go_with_the_last_of_their_manifests() -> None:
    store = grown("outlived-folds", 1, 0)
    log = ManifestLog(store.state, "reader")
    log.refresh()
    assert log.folds.unneeded(set(range(FOLDED, VERSIONS))) == []
    kept = set(range(FOLDED + 1, VERSIONS))
    assert log.folds.unneeded(kept) == [store.state.list(FOLDS)[0][0]]
    log.folds.forget(kept)
    assert log.folds.unneeded(kept) == []


def test_a_claim_of_an_earlier_release_names_no_earlier_runs_and_all_claims_are_read() -> None:
    store = Store("earlier-release")
    log = ManifestLog(store.state, "c")
    for run in ("run1", "run2"):
        log.claim(run)
    for path, _ in store.state.list(EPOCHS):
        claim: Any = log._files.read(path, type(log.epochs.newest()))  # type: ignore[type-var]
        store.state.delete(path)
        log._files.create(path, msgspec.structs.replace(claim, earlier_runs=None))
    newest = log.epochs.newest()
    assert log.epochs.is_superseded(newest, "run1") and not log.epochs.is_superseded(newest, "run2")
    log.claim("run3")
    newest = log.epochs.newest()
    assert newest is not None and newest.earlier_runs == ("run1", "run2")


def test_manifests_are_folded_once() -> None:
    store = grown("folded-once", 1, 0)
    log = ManifestLog(store.state, "reader")
    log.refresh()
    assert log.folds.due(log.chain()) == [], "this process has read the folds of an earlier one"


def test_the_oldest_savepoint_records_go_and_a_record_that_holds_a_run_stays() -> None:
    records = grown("held-record", 1, KEPT_RECORDS + 5, tidied=False)
    log = ManifestLog(records.state, "reader")
    first = VERSIONS + 1
    old = {int(p.rpartition("/")[2].partition(".")[0]) for p in log.savepoints.obsolete(first + 2)}
    assert old == {first, first + 1, first + 3, first + 4}


def test_a_claim_remembers_the_last_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fencing, "REMEMBERED_RUNS", 2)
    log = ManifestLog(Store("last-runs").state, "c")
    for i in range(5):
        log.claim(f"run{i}")
    newest = log.epochs.newest()
    assert newest is not None and newest.earlier_runs == ("run2", "run3")
