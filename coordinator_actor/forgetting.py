"""Forgets keys: replaces the files of a query's kept versions with ones without the rows of the keys.

No file that a version needs is touched before the new files count. They count from one manifest on, which is written
under the fencing of all manifests. If the query does not run, the process that forgets writes the manifest, and claims
an epoch for that. If the query runs, its coordinator does so between two batches. A crash before that manifest leaves
everything as it was, and files that are removed when their versions are no longer kept. A crash after that manifest
leaves old files: forgetting the same keys again removes them.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from msgspec import Struct, structs

from backends.background_loop import BackgroundLoop
from backends.encoding.operator_schema import OperatorSchema
from backends.exceptions import StorageError, VersionNotFoundError
from backends.formats.changelog import GROUPS_DIRECTORY
from backends.storage.checkpoint_storage import CheckpointStorage, OpenStorage
from coordinator_actor.checkpoints.pending_checkpoint import CheckpointIDCounter
from coordinator_actor.coordinator_port import CoordinatorPort
from coordinator_actor.durable.manifests import ManifestLog, RewrittenFiles, new_path
from coordinator_actor.durable.records import AuditRecord, append_audit_record, caller
from coordinator_actor.durable.spark_commits import SparkCommits
from coordinator_actor.exceptions import InvalidRequestError, LapsedHoldError, UnknownQueryError
from coordinator_actor.messages import HeldQuery
from coordinator_actor.reading.stored_files import stored_files
from coordinator_actor.reading.stored_versions import StatePlace, StateVersions
from coordinator_actor.rewriting import ForgottenKeys, Rewriting
from coordinator_actor.run.recovery import stored_changes
from coordinator_actor.run.versions import QueryVersions

log = logging.getLogger(__name__)

FORGET_KEYS = "forget_keys"
HOLD_SECONDS = 20.0
"""Batches wait this many seconds for the holder of a hold that is not renewed."""
HOLD_RENEW_SECONDS = 5.0
MAX_HELD_SECONDS = 60.0
"""Batches wait this many seconds for a writer whose storage hangs: then they continue, and the work starts over."""
FORGET_POLL_SECONDS = 0.05
UNKNOWN_QUERY_SECONDS = 15.0
"""A query that a coordinator has not known for this many seconds has ended."""
FORGET_ATTEMPTS = 3
"""At most this many attempts: the query may advance in between, or the hold may lapse."""
KeysOf = Callable[[OperatorSchema, int], ForgottenKeys]
"""Makes the keys to forget from the operator's schema and the number of key groups."""


class ForgottenReport(Struct, frozen=True):
    """The report of ``forget_keys``: no file below ``state_location`` has a row of the keys any more.

    ``version`` is the newest rewritten version, ``files`` the number of removed files. ``rows`` is the number of
    removed rows: a row counts once for each changelog and snapshot that had it.
    """

    state_location: str
    operator: str
    version: int
    keys: int
    rows: int
    files: int


@dataclass(frozen=True)
class ForgetRequest:
    """The keys to forget, and the way to forget them. ``reference`` goes into the audit log."""

    operator: str
    keys_of: KeysOf
    reference: str | None = None
    say: Callable[[str], None] = log.info
    clock: Callable[[], float] = time.time
    open_storage: OpenStorage = CheckpointStorage.open


def forget_in_storage(place: StatePlace, request: ForgetRequest) -> ForgottenReport:
    """Forget keys in the state of a query that does not run.

    If the query does run, in another cluster, this call fences it off: its next commit raises ``FencedError``, and the
    query must be started again. Spark may still commit the batch of a prepared version, so that version stays and is
    rewritten as well. Raises ``VersionNotFoundError`` if the newest version can only be recovered by starting the
    query, and the errors of reading and writing.
    """
    work = _Work(place, request)
    work.look()
    manifests = ManifestLog(work.storage, f"{FORGET_KEYS}-{uuid.uuid4().hex}")
    newest = manifests.epochs.newest()
    if newest is None:
        manifests.claim(f"{FORGET_KEYS}-{uuid.uuid4().hex}")
    else:
        # Under the name of the last run, so that clients keep reading its state. If it does run, it may not continue at
        # a restarted coordinator: changelogs of its batch are about to be removed.
        manifests.claim(newest.run_id, newest.layouts, newest.schema_ids, ends_run=True)
    # From here on no coordinator can prepare another version.
    versions = work.look()
    path, listed = work.write(versions, manifests)
    _exchange(manifests, max(versions.chain), path)
    return work.finish(versions, path, listed)


def _exchange(manifests: ManifestLog, version: int, path: str) -> None:
    """Write the manifest of a version with the record at ``path``. Versions above it are given up."""
    manifests.epochs.check()  # a run that has claimed the state since may have made versions that are unknown here
    chain = manifests.chain()
    counter = CheckpointIDCounter()
    counter.ensure_above(manifests.last_id())
    newest = chain[max(chain)]
    current = manifests.record(path).of(chain[version])
    manifests.append(
        structs.replace(
            current,
            id=counter.get_and_increment(),
            oldest=max(current.oldest, newest.oldest if newest.oldest <= version else 0),
            chain_from=max(current.chain_from, min(chain)),
            rewritten=(path,),
        ),
        counter,
    )


def forget_in_running(port: CoordinatorPort, query: str, request: ForgetRequest) -> ForgottenReport:
    """Forget keys in the state of a running query, by its name, query id or run id.

    Most files are rewritten while the stream runs. Then the next batch waits for the last ones and for the exchange.
    Only an unbroken hold protects the new files from retention. If the hold lapses, the work starts from scratch, at
    most ``FORGET_ATTEMPTS`` times. Raises as ``forget_in_storage`` does, and ``InvalidRequestError`` if the query stops
    with a savepoint.
    """
    for attempt in range(FORGET_ATTEMPTS):
        try:
            with _Holding(port, query) as holding:
                report = _forget_held(port, holding, request)
            break
        except LapsedHoldError as error:
            if attempt + 1 == FORGET_ATTEMPTS:
                raise
            request.say(f"starts again: {error}")
    await_hosts(port, query, request.say)
    return report


def _forget_held(port: CoordinatorPort, holding: _Holding, request: ForgetRequest) -> ForgottenReport:
    """Forget keys under one hold. Raises ``LapsedHoldError``: then no file written so far may be used again."""
    registration = holding.held.registration
    options = dict(registration.storage_options)
    work = _Work(StatePlace(registration.checkpoint_location, registration.state_location, options), request)
    work.rewrite(work.look(holds_prepared=False))
    for attempt in range(FORGET_ATTEMPTS):
        query = holding.hold_batches(request.say)
        versions = work.look(holds_prepared=False)
        path, listed = work.write(versions, ManifestLog(work.storage, "reader"))
        try:
            work.adopted(port, query, path)
            break
        except LapsedHoldError:
            raise
        except InvalidRequestError as error:
            if attempt + 1 == FORGET_ATTEMPTS:
                raise
            request.say(f"waits for the query again: {error}")
    return work.finish(versions, path, listed)


def await_hosts(port: CoordinatorPort, query: str, say: Callable[[str], None] = log.info) -> None:
    """Wait until no host answers from the old files any more; a silent host loses its lease."""
    reported: tuple[str, ...] = ()
    unknown_since: float | None = None
    while True:
        try:
            untold = port.hold_query(query, FORGET_KEYS, 0).untold
            unknown_since = None
        except UnknownQueryError:
            # The query has ended, and no host answers for it; or the coordinator was restarted and does not know it
            # yet.
            unknown_since = time.monotonic() if unknown_since is None else unknown_since
            if time.monotonic() > unknown_since + UNKNOWN_QUERY_SECONDS:
                return
            time.sleep(FORGET_POLL_SECONDS)
            continue
        if not untold:
            return
        if untold != reported:
            say(f"waits for {len(untold)} hosts to load what has changed")
        reported = untold
        time.sleep(FORGET_POLL_SECONDS)


class _Holding:
    """One hold of a query, which a thread renews for as long as a ``with`` lasts.

    ``held.hold`` identifies it: the coordinator does not renew a hold that has lapsed, and exchanges no files for one.
    """

    def __init__(self, port: CoordinatorPort, query: str) -> None:
        self._holder = f"{FORGET_KEYS} of {caller()} ({uuid.uuid4().hex[:8]})"
        self._port = port
        self._query = query
        self._held_since: float | None = None
        self.held = port.hold_query(query, self._holder, HOLD_SECONDS)
        self._renewing = BackgroundLoop(
            self._renew,
            HOLD_RENEW_SECONDS,
            name="statestore-hold",
            what=f"renew the hold of {query}: without it the exchange is rejected with an error",
            most_seconds=HOLD_RENEW_SECONDS,
        )

    def __enter__(self) -> _Holding:
        self._renewing.start()
        return self

    def hold_batches(self, say: Callable[[str], None]) -> HeldQuery:
        """Hold the batches, and return when nothing is under way: copies of the state, then the last batch.

        Raises ``LapsedHoldError``.
        """
        self._held_since, reported = None, None
        while (query := self._renewed(batches=True)).waits_for is not None:
            if query.waits_for != reported:
                say(f"waits for {query.waits_for}")
            reported = query.waits_for
            time.sleep(FORGET_POLL_SECONDS)
        self._held_since = time.monotonic()
        return query

    def _renewed(self, *, batches: bool | None = None) -> HeldQuery:
        return self._port.hold_query(self._query, self._holder, HOLD_SECONDS, batches=batches, hold=self.held.hold)

    def _renew(self) -> None:
        since = self._held_since
        try:
            if since is not None and time.monotonic() > since + MAX_HELD_SECONDS:
                log.warning("The batches of %s were held for %.0f s and continue now", self._query, MAX_HELD_SECONDS)
                self._held_since = None
                self._renewed(batches=False)
            else:
                self._renewed()
        except LapsedHoldError as error:  # the request for the exchange raises the same error
            log.warning("The hold of %s cannot be renewed: %s", self._query, error)
            self._renewing.close()

    def __exit__(self, *error: object) -> None:
        self._renewing.close(timeout=None)
        try:
            self._port.hold_query(self._query, self._holder, 0)
        except Exception:  # it ends by itself
            log.warning("%s continues in %.0f s: its hold was not ended", self._query, HOLD_SECONDS, exc_info=True)


def _require_unfinished(versions: StateVersions) -> None:
    """Raise ``VersionNotFoundError`` if all tasks of the batch above the completed version have finished.

    Spark may still commit that batch. Its changelogs are in storage, but no manifest names them, because two
    coordinators have each acknowledged a part.
    """
    batch_id = versions.completed
    newest = next(iter(versions.log.epochs.runs().values()), None)
    if newest is None:
        return
    known_versions = QueryVersions({layout.operator: layout for layout in newest.layouts}, versions.key_groups)
    known_versions.load(dict(versions.chain), batch_id)
    changes = stored_changes(versions.log, known_versions, newest.run_id, batch_id + 1, {})
    if changes.entries and not changes.missing:
        raise VersionNotFoundError(
            f"All tasks of batch {batch_id} of {versions.place.checkpoint_location} have written their changes, and "
            "Spark may still commit it, but no manifest names them yet. Start the query once and wait for a batch: it "
            "writes the manifest. Then forget the keys again."
        )


class _Work:
    """The steps that are the same whether the query runs or not."""

    def __init__(self, place: StatePlace, request: ForgetRequest) -> None:
        self.storage = request.open_storage(place.state_location, place.options)
        self._place = place
        self._request = request
        self._rewriting: Rewriting | None = None
        self._num_keys = 0

    def look(self, *, holds_prepared: bool = True) -> StateVersions:
        """Return the versions up to the completed one, and the prepared one above it if there is one.

        A coordinator that runs the query prepares that version again if necessary: then it can be left out. Raises the
        errors of ``StateVersions.resolve`` and ``entry``.
        """
        versions = StateVersions.look(self._place, open_storage=self._request.open_storage)
        completed = versions.resolve(None)
        if completed not in versions.chain:
            raise VersionNotFoundError(
                f"No state exists at {self._place.state_location} yet: there are no keys to forget."
            )
        newest = completed
        commits = SparkCommits(self._request.open_storage(self._place.checkpoint_location, self._place.options))
        # Without the plan of that batch, the user has removed Spark's last batches: its version is given up.
        if holds_prepared and commits.has_begun(completed):
            if max(versions.chain) == completed:
                _require_unfinished(versions)
            else:
                newest += 1
        versions = replace(versions, chain={v: manifest for v, manifest in versions.chain.items() if v <= newest})
        entry = versions.entry(self._request.operator, completed)
        if self._rewriting is None:
            forgotten = self._request.keys_of(versions.schema(entry), versions.key_groups)
            self._num_keys = forgotten.num_keys
            self._rewriting = Rewriting(
                self.storage,
                self._request.operator,
                forgotten,
                open_storage=self._request.open_storage,
                say=self._request.say,
            )
        return versions

    def rewrite(self, versions: StateVersions) -> RewrittenFiles:
        """Rewrite files. Skips what an earlier call has written."""
        assert self._rewriting is not None
        self._request.say(f"rewrites {len(versions.chain)} versions of operator {self._request.operator!r}")
        return self._rewriting.run(versions)

    def write(self, versions: StateVersions, manifests: ManifestLog) -> tuple[str, list[str]]:
        """Write the record of the exchange. Return its path, and all files that existed before the exchange.

        The listing of these also shows that every file that the record names exists in full size. Raises
        ``LapsedHoldError`` if one does not: another process has removed it.
        """
        assert self._rewriting is not None
        record = self.rewrite(versions)
        path = new_path(record.version)
        manifests.put_record(path, record)
        self._note(versions, "begun", {})
        sizes = dict(self.storage.list())
        if missing := self._rewriting.missing(sizes):
            if manifests.epoch:
                manifests.epochs.check()  # a program that has claimed the state since may have removed them
            raise LapsedHoldError(
                f"{len(missing)} files that {FORGET_KEYS} has just written are gone, as "
                f"{self.storage.full_location(missing[0])}. Nothing was changed. Does another program remove files?"
            )
        return path, [*sizes, *self.storage.unfinished("operators"), *self.storage.unfinished(GROUPS_DIRECTORY)]

    def adopted(self, port: CoordinatorPort, query: HeldQuery, path: str) -> None:
        """Ask the coordinator to exchange the files; if the answer is lost, look it up in storage."""
        try:
            port.adopt_rewritten(query.registration.run_id, query.hold, query.epoch, path)
        except Exception as error:
            manifests = ManifestLog(self.storage, "reader")
            manifests.refresh()
            newest = manifests.head()
            if newest is None or path not in newest.rewritten:
                raise
            log.info("The files were exchanged, though the answer was %r", error)

    def finish(self, versions: StateVersions, path: str, listed: Sequence[str]) -> ForgottenReport:
        """Remove the old files after the exchange with the record at ``path``. Raises ``StorageError``."""
        assert self._rewriting is not None
        now = StateVersions.look(self._place, open_storage=self._request.open_storage)
        if path not in now.log.rewritten and min(now.chain) <= max(versions.chain):
            raise StorageError(
                f"The newest manifest at {self._place.state_location} does not name the exchange {path}, so no file "
                "was removed. Forget the keys again."
            )
        kept = {f.path for f in stored_files(now, open_storage=self._request.open_storage) if f.kept_by}
        emptied = self._rewriting.emptied
        unneeded = [path for path in listed if path not in kept or path in emptied]
        obsolete = list(self._rewriting.obsolete(unneeded, versions))
        self._request.say(f"removes {len(obsolete)} files")
        self.storage.delete_all(obsolete)
        report = ForgottenReport(
            self._place.state_location,
            self._request.operator,
            max(versions.chain),
            self._num_keys,
            self._rewriting.removed_rows,
            len(obsolete),
        )
        self._note(versions, "done", {"rows": report.rows, "files": report.files})
        return report

    def _note(self, versions: StateVersions, status: str, counts: dict[str, int]) -> None:
        at_ms = round(self._request.clock() * 1000)
        operators = (self._request.operator,)
        counts = {"keys": self._num_keys, **counts}
        reference = self._request.reference
        record = AuditRecord(FORGET_KEYS, status, at_ms, caller(), operators, versions.completed, counts, reference)
        append_audit_record(self.storage, record)
