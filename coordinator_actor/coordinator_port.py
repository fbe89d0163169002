"""All messages (RPCs) to the coordinator. Each message is declared here, once.

To add a message: declare it in ``CoordinatorPort`` with its concurrency group and its strings, and give one class of
``handlers/`` a method of the same name and signature. The coordinator finds that method by its name. The port of hosts,
drivers and clients, and the port of the simulation inherit the declared method; the Ray actor has a coroutine for each.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import wraps
from inspect import signature
from itertools import zip_longest
from typing import Any, TypeVar, cast

from msgspec import structs

from backends.background_loop import FailingLoop
from backends.conf import StateStoreProviderId
from backends.formats.manifest import Lineage, PartitionEntry
from coordinator_actor.access_tokens import ALL, IssuedToken, Scope
from coordinator_actor.exceptions import InvalidRequestError
from coordinator_actor.feature_views import FeatureView
from coordinator_actor.messages import (
    Acknowledge,
    Acknowledged,
    BatchGrant,
    Completed,
    HandOver,
    HeldQuery,
    HostInfo,
    HostOrders,
    HostReport,
    InputPace,
    KvStateLocationOracle,
    LocatedView,
    LookedUp,
    OpenBatch,
    OpenGrant,
    OperatorLocation,
    QueryRegistration,
    Refused,
    RegisteredQuery,
    RunningOperator,
    RunningView,
    SavepointExported,
    SavepointStatus,
    SnapshotUploaded,
)

# mypy: disable-error-code="empty-body"


MessageMethod = TypeVar("MessageMethod", bound=Callable[..., Any])


class Group(Enum):
    """A concurrency group: messages that the same threads answer (``threads.py``).

    Only messages of the group ``QUERIES`` may wait for storage, or for a lock that is held over storage.
    """

    LEASES = "leases"
    REGISTRATIONS = "registrations"
    LOCATIONS = "locations"
    QUERIES = "queries"


Converter = Callable[[Any, str], Any]
"""Converts the ids in an argument to strings. The second argument names the argument in error messages."""


def _string(value: Any, where: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, uuid.UUID):
        return str(value)
    raise InvalidRequestError(f"The {where} must be a string or a uuid.UUID, not {value!r} ({type(value).__name__}).")


def optional_string(value: Any, where: str) -> str | None:
    """Convert an argument that may be None."""
    return None if value is None else _string(value, where)


def several_strings(value: Any, where: str) -> tuple[str, ...]:
    """Convert a sequence of ids."""
    if isinstance(value, str | uuid.UUID):
        raise InvalidRequestError(f"The {where} must be several values, not {value!r} alone.")
    return tuple(_string(one, where) for one in value)


def string_keys(value: Any, where: str) -> dict[str, Any] | None:
    """Convert the keys of a mapping, which may be None."""
    return None if value is None else {_string(key, where): content for key, content in value.items()}


def fields(*names: str) -> Converter:
    """Return the converter of records with these ids."""

    def convert(record: Any, where: str) -> Any:
        values = {name: getattr(record, name) for name in names}
        ids = {name: _string(v, f"{name} in {where}") for name, v in values.items() if type(v) is not str}
        return structs.replace(record, **ids) if ids else record

    return convert


MESSAGES: list[str] = []
"""The names of all messages."""
GROUPS: dict[str, Group] = {}
"""The concurrency group of each message."""
PARAMETERS: dict[str, tuple[str, ...]] = {}
"""The names of each message's parameters."""
_CONVERTERS: dict[str, dict[str, Converter]] = {}


def message(group: Group, *strings: str, **others: Converter) -> Callable[[MessageMethod], MessageMethod]:
    """Make a method of ``CoordinatorPort`` send itself: the name and the arguments go to ``call``.

    ``strings`` are the parameters that are strings, ``others`` the converters of parameters that contain strings. A
    caller may hold an id as a ``uuid.UUID``, which the coordinator's dicts, whose keys are strings, would not find.
    """

    def declare(declared: MessageMethod) -> MessageMethod:
        name = declared.__name__
        MESSAGES.append(name)
        GROUPS[name] = group
        PARAMETERS[name] = tuple(signature(declared).parameters)[1:]  # without ``self``
        _CONVERTERS[name] = {**dict.fromkeys(strings, _string), **others}

        @wraps(declared)
        def send_message(self: CoordinatorPort, *args: Any, **kwargs: Any) -> Any:
            return self.call(name, *args, **kwargs)

        return cast(MessageMethod, send_message)

    return declare


def with_string_ids(method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a message with ids as strings. Raises ``InvalidRequestError`` for invalid ids.

    Too many arguments and unknown ones are left as they are, for the handler to reject.
    """
    converters = _CONVERTERS[method]

    def converted(name: str, value: Any) -> Any:
        convert = converters.get(name)
        return value if convert is None else convert(value, f"{name} of {method}")

    by_place = zip_longest(PARAMETERS[method][: len(args)], args)
    return [converted(name, arg) for name, arg in by_place], {n: converted(n, arg) for n, arg in kwargs.items()}


def query_of(method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return the run or query name that a message is about; the message's own name if it is about none."""
    arguments = {**dict(zip(PARAMETERS[method], args, strict=False)), **kwargs}
    for name in ("run_id", "query"):
        if arguments.get(name) is not None:
            return str(arguments[name])
    record = next((arguments[name] for name in ("registration", "request", "message") if name in arguments), None)
    return method if record is None else str(record.run_id)


class CoordinatorPort:
    """The messages that the coordinator answers.

    A subclass implements ``call``, which sends a message to the coordinator.

    Every message may raise a ``CoordinatorError`` or a ``StateStoreError``, in addition to the errors that it names.
    Messages may arrive twice.
    """

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Send one message and return the answer."""
        raise NotImplementedError

    # -- hosts ---------------------------------------------------------------------------------

    @message(Group.REGISTRATIONS, info=fields("host_id", "session_id"))
    def register_host(self, info: HostInfo, report: HostReport) -> None:
        """Register a host for the first time or again, and report its runs and acknowledgements of running batches.

        The host is registered at once. Its report is processed within a second. If the storage of a query hangs, that
        query's part is processed when the storage recovers. If the storage fails, the answers to heartbeats ask the
        host to report the query again.
        """

    @message(Group.REGISTRATIONS, "host_id", "incarnation")
    def report_runs(self, host_id: str, incarnation: str, report: HostReport) -> None:
        """Report again all that a host holds of some runs (``HostOrders.unknown_runs``).

        The report is processed as one of ``register_host``. Raises ``UnknownHostError`` if the host is not registered.
        """

    @message(Group.LEASES, "host_id", "incarnation", held=string_keys)
    def heartbeat_host(
        self, host_id: str, incarnation: str, held: Mapping[str, int] | None = None, hand_over: HandOver | None = None
    ) -> HostOrders:
        """Renew the lease of a host. Return the orders to the host about the runs that it holds.

        ``held`` is the lowest version that the host has of each run, ``hand_over`` is its progress with partitions that
        are to move. The answer depends on these alone, so it does not matter whether an earlier answer arrived. Waits
        for the storage of no query.
        """

    @message(Group.LEASES, "address")
    def suspect_host(self, address: str) -> None:
        """Report that the host with this address, for tasks or for clients, takes no connection.

        The coordinator connects to the host itself and gives it up if it refuses, or if its machine stays silent. Does
        not wait for that; the sender repeats the message while the host does not answer. Nothing happens for an address
        of a host that is lost.
        """

    @message(Group.LEASES, "session_id")
    def unregister_session(self, session_id: str) -> bool:
        """End a driver's session: its hosts are gone. Return whether other hosts are left."""

    @message(Group.LEASES, "session_id", leaving=several_strings)
    def place_session(self, session_id: str, problems: Sequence[str], leaving: Sequence[str] = ()) -> tuple[str, ...]:
        """Report hosts of a driver's session that are not placed as they should be, for ``describe``.

        The hosts ``leaving`` are to go: their partitions move to the others. The driver repeats the message until the
        answer names them: it has the leaving hosts that own nothing any more.
        """

    @message(Group.LEASES, "session_id", "process")
    def report_failing_loops(self, session_id: str, process: str, failing: Sequence[FailingLoop]) -> None:
        """Report the background loops of a driver's process that fail now, for ``describe``; empty if none fails.

        ``process`` names the process for people. The driver repeats the message while a loop fails.
        """

    @message(Group.LEASES, "host_id", "incarnation", run_ids=several_strings)
    def verify_instances(
        self, host_id: str, incarnation: str, run_ids: Sequence[str]
    ) -> dict[str, dict[str, list[int]]]:
        """Return the partitions of runs that a host owns: run id to operator to partitions. The host unloads everything
        else.

        Runs without known owners (yet) are left out.
        """

    # -- queries -------------------------------------------------------------------------------

    @message(Group.QUERIES, registration=fields("run_id", "query_id", "session_id"))
    def register_query(
        self, registration: QueryRegistration, initial: Mapping[str, Mapping[int, PartitionEntry]] | None = None
    ) -> RegisteredQuery:
        """Register a run that starts, or that is reported again. A newer run of the same state replaces the older one.

        ``initial`` names the files of version 0, by operator and partition, of a query that begins with state.
        """

    @message(Group.LEASES, run_ids=several_strings)
    def renew_leases(self, run_ids: Sequence[str]) -> list[str]:
        """Renew the leases of a driver's runs. Return the runs that are not known.

        Waits for the storage of no query, and for no other message.
        """

    @message(Group.QUERIES, "run_id")
    def driver_heartbeat(
        self, run_id: str, *, is_stopping: bool = False, is_at_work: bool = False, pace: InputPace | None = None
    ) -> bool:
        """Renew the lease of a run, and complete its version if Spark has committed the batch without a message.

        False asks the driver to register the run again. ``is_stopping``: the driver makes a savepoint, to stop the
        query with it. ``is_at_work``: Spark has rows for a batch, and has not committed it. ``pace`` is that of the
        last batch. May wait for the storage of the query; the lease is renewed before.
        """

    @message(Group.QUERIES, "run_id")
    def batch_committed(self, run_id: str, batch_id: int, *, by_driver: bool = False) -> bool:
        """Report that Spark has committed batch N, so that version N + 1 is completed. False if that was known.

        ``by_driver``: the run's own driver has seen its Spark commit. Any other caller has only seen ``commits/N``, and
        cannot tell which run wrote it. For such a caller the message raises ``FencedError`` if another coordinator has
        taken over. The hosts learn of the completed version with their next heartbeat.
        """

    @message(Group.QUERIES, "run_id", "host_id")
    def see_commit(self, run_id: str, batch_id: int, host_id: str) -> Completed:
        """Report that a host has seen Spark's commit of batch N; return what ``completed`` returns to that host.

        Raises the errors of ``batch_committed`` and ``completed``.
        """

    @message(Group.QUERIES, "run_id")
    def deactivate_instances(self, run_id: str) -> bool:
        """End a run: its instances are inactive, and hosts unload them."""

    @message(Group.QUERIES, "failure", registration=fields("run_id", "query_id", "session_id"))
    def serve_ended(self, registration: QueryRegistration, failure: str = "") -> RegisteredQuery:
        """Report that the query of a run has ended. Hosts continue to answer from its last completed version.

        ``failure`` is the error that ended the query, for people. Hosts answer as long as its driver renews the lease,
        until ``deactivate_instances``, or until the query runs again. A coordinator that does not know the run reads
        its manifests, and writes nothing. The answer has a refusal if the run was replaced, or if its state no longer
        exists.
        """

    @message(Group.QUERIES, "run_id")
    def take_up_versions(self, run_id: str, behind: float | None = None) -> RegisteredQuery:
        """Load the versions that a query, which runs elsewhere, has completed since its run was loaded here.

        A follower, which polls, passes how many seconds ago its last successful look began (``behind``): answers report
        it when that becomes long.

        The run must be one of ``serve_ended``. The answer has the last version, or a refusal if another run has claimed
        the state since.
        """

    # -- batches -------------------------------------------------------------------------------

    @message(Group.QUERIES, request=fields("run_id", "host_id"))
    def open_batch(self, request: OpenBatch) -> BatchGrant:
        """Open the partitions of a host for batch N, at version N. Return the owners and the state of the partitions.

        The first task of the batch on a host requests this for all tasks there. Raises ``BatchHeldError`` while the
        batch must wait.
        """

    @message(Group.LOCATIONS, "run_id", "operator")
    def open_for_read(self, run_id: str, operator: str, partition: int) -> OpenGrant:
        """Return the owner of a partition and its last completed state. Changes nothing."""

    @message(Group.QUERIES, "run_id", "host_id", "incarnation")
    def acknowledge_many(
        self, run_id: str, host_id: str, incarnation: str, messages: Sequence[Acknowledge]
    ) -> tuple[Acknowledged | Refused, ...]:
        """Report the durable changes of several tasks of one host. Return an answer for each.

        The answer to the last changes of a version also waits until its manifest is durable. Raises an error only if it
        would reject all messages.
        """

    @message(Group.LOCATIONS, "run_id", "host_id")
    def completed(self, run_id: str, host_id: str) -> Completed:
        """Return the last completed version of a run, with the heads of the host's own partitions.

        This is for a host that cannot wait for its next heartbeat. Partitions that the host was given after the version
        was completed have no heads. Waits for the storage of no query.
        """

    @message(Group.QUERIES, "run_id", "operator", "use")
    def lineage(self, run_id: str, operator: str, partition: int, version: int, use: str = "") -> Lineage:
        """Return the files that lead to a version of a partition. They stay while the partition is loaded.

        They stay for ``BUSY_SECONDS``, for longer if ``renew_files`` is called, or until the load is over. ``use``
        names the load: the owner's has the host id, and ends with the first changes; any other one ends with
        ``release_files``. Raises ``VersionNotFoundError`` for a version that is no longer kept.
        """

    @message(Group.QUERIES, "run_id", "operator", "use")
    def renew_files(self, run_id: str, operator: str, partition: int, use: str) -> bool:
        """Report that a load is still under way: its files stay, even if their version is otherwise no longer kept.

        False if the coordinator does not (or no longer) know the load; then ask for the lineage again.
        """

    @message(Group.QUERIES, "run_id", "operator", "use")
    def release_files(self, run_id: str, operator: str, partition: int, use: str) -> None:
        """Report that a load is over."""

    @message(Group.QUERIES, message=fields("run_id", "host_id"))
    def snapshot_uploaded(self, message: SnapshotUploaded) -> bool:
        """Report that the owner of a partition has uploaded a snapshot.

        True if the snapshot counts: the next manifest names it.
        """

    @message(Group.QUERIES, query=optional_string)
    def rebalance(self, query: str | None = None) -> dict[str, int]:
        """Give every host its share of the partitions. Return how many partitions moved, by run.

        ``query`` is a name, query id or run id; None means all queries. A run with a batch under way moves its
        partitions when the next batch begins, as usual, and counts as 0.
        """

    # -- savepoints ----------------------------------------------------------------------------

    @message(Group.QUERIES, "request_id", "query", path=optional_string)
    def trigger_savepoint(
        self, request_id: str, query: str, path: str | None = None, *, stop: bool = False
    ) -> SavepointStatus:
        """Begin a savepoint of a running query (its name, query id or run id) below the directory ``path``.

        The caller chooses ``request_id``. A repeated request with the same id is a no-op. Without ``path`` the
        savepoint goes below the state's own location. With ``stop`` the next batch is held until the query is stopped.
        Raises ``UnknownQueryError``, ``InvalidRequestError``.
        """

    @message(Group.LOCATIONS, "request_id")
    def savepoint_status(self, request_id: str) -> SavepointStatus:
        """Return the status of a requested savepoint."""

    @message(Group.QUERIES, message=fields("run_id", "host_id"))
    def savepoint_exported(self, message: SavepointExported) -> None:
        """Report that a host has exported a partition, or cannot export it."""

    # -- rewriting files --------------------------------------------------------------------------

    @message(Group.QUERIES, "query", "holder", "hold")
    def hold_query(
        self, query: str, holder: str, seconds: float, *, batches: bool | None = None, hold: str = ""
    ) -> HeldQuery:
        """Keep the files of a running query (its name, query id or run id) unchanged for ``seconds``.

        Without ``hold`` the message begins a hold for ``holder`` (any string), which the answer identifies. With that
        identity it renews the hold. During the hold, no snapshot is uploaded, and no file is removed. With ``batches``
        the next batch and all later ones wait, too, as soon as nothing copies the state any more; the answer says what
        is still under way. False releases the batches. 0 seconds end the holder's hold. Raises ``LapsedHoldError`` if
        that hold is over, ``InvalidRequestError`` if another holder holds the query, or it stops with a savepoint,
        ``UnknownQueryError``.
        """

    @message(Group.QUERIES, "run_id", "hold", "path")
    def adopt_rewritten(self, run_id: str, hold: str, epoch: int, path: str) -> None:
        """Exchange the files that the record at ``path`` names, under the hold with that identity.

        The hold must have lasted, and nothing must have been under way, since before these files were read, in this
        ``epoch``. Hosts then reload their partitions of the run. Raises ``LapsedHoldError`` if the hold is over, and
        ``InvalidRequestError`` if the run has advanced: then nothing was changed.
        """

    # -- query clients -------------------------------------------------------------------------

    @message(Group.LOCATIONS, "operator", query=optional_string)
    def locate(self, operator: str, query: str | None = None, version: int | None = None) -> OperatorLocation:
        """Return the owners of an operator's partitions, and their addresses.

        ``query`` is a name, query id or run id, needed if several queries have the operator. ``made_by`` of the answer
        is of ``version``, or of the completed version. Raises ``QueryEndedError`` if the query that had the operator
        has ended, ``UnknownOperatorError``, and ``UnknownRunError`` from a coordinator that was just started and may
        not know the query yet.
        """

    @message(Group.LOCATIONS)
    def operators(self) -> tuple[RunningOperator, ...]:
        """Return the operators of all queries that run, or have ended and are still read.

        If several ended queries have an operator of one name, the last one's is included, unless a running query has
        it.
        """

    @message(Group.LOCATIONS, "job_id")
    def get_kv_state_location_oracle(self, job_id: str) -> KvStateLocationOracle | None:
        """Return who owns which key groups of a query. None if the query neither runs nor is still read.

        ``job_id`` is the query id, the id of its run, or the state location. A copy of a checkpoint has the query id of
        the original, but another state location.
        """

    @message(Group.QUERIES, "operator", "query", "by")
    def look_up(self, operator: str, query: str, by: str, batch_id: int) -> LookedUp:
        """Return which version a batch of the query ``by`` looks up in an operator of ``query``, and where it is.

        The first task of the batch that asks has the completed version recorded; all others, including those of a
        repeated batch, get the same one. It is kept until the query that looks up has come two batches further. Raises
        ``VersionNotFoundError`` if it no longer exists as it was, and the errors of ``locate``.
        """

    # -- feature views -------------------------------------------------------------------------

    @message(Group.QUERIES, "run_id", view=fields("name"))
    def declare_view(self, run_id: str, view: FeatureView) -> None:
        """Keep a feature view durably with the state of a running query, in place of an earlier one of its name.

        The caller has checked it against the operators' schemas. Raises ``InvalidRequestError`` if another query has
        a view of that name.
        """

    @message(Group.QUERIES, "run_id", "view")
    def drop_view(self, run_id: str, view: str) -> bool:
        """Drop a feature view durably. Return whether the query had it."""

    @message(Group.LOCATIONS)
    def feature_views(self) -> tuple[RunningView, ...]:
        """Return the feature views of all queries that run, or have ended and are still read."""

    @message(Group.LOCATIONS, "view")
    def locate_view(self, view: str) -> LocatedView:
        """Return a feature view and the locations of its operators.

        Raises ``UnknownFeatureViewError``, and the errors of ``locate`` for an operator.
        """

    # -- Spark's instances ---------------------------------------------------------------------

    @message(Group.LOCATIONS, "host", "executor_id")
    def report_active_instance(
        self,
        provider_id: StateStoreProviderId,
        host: str,
        executor_id: str,
        other_provider_ids: Sequence[StateStoreProviderId] = (),
    ) -> list[StateStoreProviderId]:
        """Make an instance active at an executor. Return those of the other instances that are active elsewhere."""

    @message(Group.LOCATIONS, "executor_id")
    def verify_if_instance_active(self, provider_id: StateStoreProviderId, executor_id: str) -> bool:
        """Return whether that executor has the active instance."""

    @message(Group.LOCATIONS)
    def get_location(self, provider_id: StateStoreProviderId) -> str | None:
        """Return ``executor_<host>_<executor id>`` of the active instance, or None."""

    @message(Group.LOCATIONS)
    def get_locations(self, provider_ids: Sequence[StateStoreProviderId]) -> list[str | None]:
        """Return ``get_location`` of many instances, in the order asked."""

    # -- tokens --------------------------------------------------------------------------------

    @message(Group.LOCATIONS)
    def token(self) -> str:
        """Return the secret that tasks and clients present to hosts.

        Every process that can ask the coordinator may know the secret.
        """

    @message(Group.LOCATIONS)
    def wire_version(self) -> int:
        """Return the version of the messages that this coordinator speaks (``WIRE_VERSION``)."""

    @message(Group.QUERIES, "name")
    def issue_token(
        self, name: str, expires_in: float | None = None, *, admin: bool = False, scope: Scope = ALL
    ) -> str:
        """Issue a token and return it. It is shown only now. ``expires_in`` is in seconds; None is never.

        It is read-only; with ``admin`` it may act on the page. It is for all of the cluster, or for the ``scope``.

        Raises ``InvalidRequestError`` if a valid token has that name, or for an invalid name, time or scope.
        """

    @message(Group.QUERIES)
    def list_tokens(self) -> tuple[IssuedToken, ...]:
        """Return all tokens, also those that were revoked or have expired, the oldest first."""

    @message(Group.QUERIES, "id_or_name")
    def revoke_token(self, id_or_name: str) -> IssuedToken:
        """Revoke a token permanently. Revoking it again is a no-op. All hosts learn of it with their next heartbeat.

        Raises ``InvalidRequestError`` with the names of the valid tokens.
        """

    # -- figures -------------------------------------------------------------------------------

    @message(Group.LOCATIONS)
    def describe(self) -> dict[str, Any]:
        """Return the hosts, queries and instances as they are now."""

    @message(Group.LOCATIONS, "query", "history_since")
    def checkpoint_stats(self, query: str, history_since: str = "") -> dict[str, Any]:
        """Return figures of a running query's micro-batches and savepoints: counts, durations, sizes, percentiles.

        ``history`` has the last checkpoints of all its runs, as ``CheckpointRecord`` defines. With the ``history_mark``
        of an earlier answer as ``history_since`` it has those that were added or changed since; ``history_first`` is
        then the oldest that is still kept. ``history_is_all`` says that all are included, for example from a new
        coordinator.
        """
