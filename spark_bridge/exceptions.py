"""Errors of ``spark_bridge``. Each is rebuilt from class name and message when it crosses the network."""

from __future__ import annotations

import numpy as np

from backends import exceptions as backend_errors
from coordinator_actor import exceptions as coordinator_errors

# Errors that the coordinator, or its port, raises, too: each has one class.
SparkBridgeError = coordinator_errors.SparkBridgeError
HostUnavailableError = coordinator_errors.HostUnavailableError
QueryableStateError = coordinator_errors.QueryableStateError
UnknownLocationError = coordinator_errors.UnknownLocationError
UnknownOperatorError = coordinator_errors.UnknownOperatorError
WrongOperatorError = coordinator_errors.WrongOperatorError
UnknownFeatureViewError = coordinator_errors.UnknownFeatureViewError
QueryEndedError = coordinator_errors.QueryEndedError

STATESTORE_ERRORS = (coordinator_errors.CoordinatorError, SparkBridgeError, backend_errors.StateStoreError)
"""The errors that this project raises on purpose; any other error is a defect, or comes from a user's function."""


class EnvironmentProblemError(SparkBridgeError):
    """Java, Ray, RayDP or PySpark is missing, or their versions do not fit together."""


class SessionError(SparkBridgeError):
    """A Spark session is not, or already, joined to a state store."""


class InvalidOperatorError(SparkBridgeError, ValueError):
    """A stateful operator was declared wrongly; raised while the DataFrame is built."""


class StateStoreRefusedError(SparkBridgeError):
    """A query may not run: it ends with this before its first batch, or its first tasks raise it.

    No state is touched.
    """


class PartitionMismatchError(SparkBridgeError):
    """A state task does not run on its own shuffle partition."""


def other_key_groups(operator: str, of_rows: int, of_query: int) -> PartitionMismatchError:
    """Return the error for rows that were shuffled by another number of key groups than their query has."""
    return PartitionMismatchError(
        f"The rows of operator {operator!r} are shuffled by {of_rows} key groups, and its query has {of_query}: "
        "spark.statestore.keyGroups was changed between the DataFrame and the start of the query. Make the DataFrame "
        "again. No state was touched."
    )


class NotOwnerError(SparkBridgeError):
    """A host was asked for a partition that it does not own or has not opened; ask for the owner again."""


def not_open(host_id: str, run_id: str, operator: str, partition: int, version: int | None) -> NotOwnerError:
    """Return the error for a partition that is not open at a version in the host that was asked."""
    return NotOwnerError(
        f"Partition {partition} of operator {operator!r} (run {run_id}) is not open at version {version} in host "
        f"{host_id}; open it again."
    )


class RequestError(SparkBridgeError, ValueError):
    """A request to a host was malformed."""


class UnknownKvStateKeyGroupLocationError(UnknownLocationError):
    """A key group has no owner at the moment (Flink has the same)."""


class UnknownKvStateIdError(QueryableStateError):
    """The operator has no such state variable, or several and none is named (Flink: ``UnknownKvStateIdException``)."""


class UnknownKeyOrNamespaceError(QueryableStateError, ValueError):
    """A key or window has other types or columns than the state (Flink: ``UnknownKeyOrNamespaceException``).

    A key of the right types that the state does not have is not an error.
    """


class StateVersionError(QueryableStateError):
    """The version asked for is not retained, or not completed yet."""


class StaleFeatureError(QueryableStateError):
    """The version that answers is older than the ``max_age`` of the feature view."""


class StateTimeError(QueryableStateError, ValueError):
    """A rolling aggregate cannot be answered as of a moment: its rows are merged with later ones, or gone."""

    @classmethod
    def in_tile(cls, moment: int, first: int, last: int) -> StateTimeError:
        """Return the error for a moment between two rows of one tile; times are in microseconds since 1970."""
        return cls(
            f"at={_utc(moment)} is between rows of {_utc(first)} and {_utc(last)}, which are merged in one tile. Ask "
            f"as of {_utc(last)} or later, or as of a multiple of the shortest horizon's hop. An operator with "
            "exact_windows=True keeps every row apart. Without at=, the clock of a producer is ahead."
        )

    @classmethod
    def at_start(cls, horizon: str, last: int, us: int) -> StateTimeError:
        """Return the error for a horizon that begins inside a tile, whose last row is of the time ``last``."""
        return cls(
            f"The horizon {horizon} begins between rows that are merged in one tile: a restart has given the operator "
            f"shorter tiles, or exact_windows=True, and these rows are older. Ask as of {_utc(last + us)} or later."
        )

    @classmethod
    def too_old(cls, moment: int, oldest: int) -> StateTimeError:
        """Return the error for a moment before the watermark of the last merge."""
        return cls(
            f"at={_utc(moment)} is older than the retained tiles, which were merged as of the watermark "
            f"{_utc(oldest)}. Ask as of that time or later, or for an older version= (of a view: versions=), which has "
            "the tiles of its time."
        )

    @classmethod
    def lost(cls, moment: int, first: int) -> StateTimeError:
        """Return the error for a moment before ``first``, whose horizons reach back to rows that are gone."""
        return cls(
            f"at={_utc(moment)} is older than the retained rows: a horizon as of that time has rows of keys that the "
            f"watermark has expired, or rows that came too late. Ask as of {_utc(first)} or later, or for an older "
            "version= (of a view: versions=), which has the rows of its time."
        )


class AccessDeniedError(QueryableStateError):
    """The token is missing, wrong or revoked, or does not allow this."""


class OutOfScopeError(AccessDeniedError):
    """The token is valid, but the request is outside of its scope."""


class TlsError(QueryableStateError):
    """TLS is on at one side only, files are missing or do not fit together, or a certificate is refused."""


class RequestLimitError(QueryableStateError, ValueError):
    """A request is larger than the host allows, or would take longer."""


class TooManyRequestsError(QueryableStateError):
    """The host answers as many requests as it may; try again later, as the client does."""


class QueryTimeoutError(QueryableStateError, TimeoutError):
    """The timeout ended without an answer; the message has the last failure."""


class ConnectionClosedError(QueryableStateError):
    """The connection to a host was closed, or a malformed message came over it."""


class KafkaSinkError(SparkBridgeError):
    """Changes of the state cannot be written to a topic of Kafka, or another writer has the topic."""


class StateTooLargeError(SparkBridgeError):
    """One partition's part of a batch does not fit into one Arrow array."""


class StatefulProcessorError(SparkBridgeError, RuntimeError):
    """A stateful processor, or its state, was used wrongly; the message begins with Spark's error condition.

    A RuntimeError, as PySpark's ``PySparkRuntimeError``.
    """


class StateDeclarationError(StatefulProcessorError, InvalidOperatorError):
    """A processor declared a state variable wrongly: twice, with an unfit name, schema or TTL."""


class HandleStateError(StatefulProcessorError):
    """A processor used its handle or its state at the wrong moment, such as state variables in ``init``."""


class TimeModeError(StatefulProcessorError, InvalidOperatorError):
    """A processor uses timers without a time mode, or a TTL without processing time."""


class IllegalStateValueError(StatefulProcessorError, ValueError, TypeError):
    """A value cannot be kept as state: None, an empty list, or one that does not fit its variable's schema.

    Also a TypeError, because PySpark reports some of these as one.
    """


class ProcessorTesterError(SparkBridgeError, ValueError):
    """A ``ProcessorTester`` was used wrongly: time that goes backwards, a key of other types, an unknown variable."""


def _utc(us: int) -> str:
    return str(np.datetime64(us, "us")) + "Z"


# Errors cross the network as class name and message; here they are turned back into the original errors.


def rebuilt_error(name: str, message: str, unknown: type[Exception] = SparkBridgeError) -> Exception:
    """Return the error of that class name: of ``spark_bridge``, ``coordinator_actor`` or ``backends``.

    A name that none of them has becomes an error of the class ``unknown`` whose message names it.
    """
    return coordinator_errors.error_of_class(name, message, unknown, globals())
