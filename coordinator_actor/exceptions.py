"""Errors of the coordinator, and of its port. Over the network each is sent as class name and message."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches

from backends import exceptions as backend_errors


class CoordinatorError(Exception):
    """Base of all errors that the coordinator raises on purpose."""


class SparkBridgeError(Exception):
    """Base of all errors of ``spark_bridge``, which has this name, too.

    It is defined here with those of its subclasses that the coordinator or its port raises, so that each error has one
    class.
    """


class HostUnavailableError(SparkBridgeError):
    """No StateStoreHost, or no coordinator, answered within the time allowed."""


class QueryableStateError(SparkBridgeError):
    """A query client's request failed. Its subclasses, most of them named after Flink's, say how."""


class UnknownLocationError(QueryableStateError):
    """No host is known to have the requested state (Flink: ``UnknownLocationException``)."""


class CoordinatorStoppedError(CoordinatorError):
    """The coordinator has been stopped, or there is none."""


class UnknownHostError(CoordinatorError):
    """The coordinator does not (or no longer) know the host: the host must register again."""


class ReplacedHostError(UnknownHostError):
    """Another incarnation of the host has replaced it, or its node is dead: this incarnation must end itself."""


class UnknownRunError(CoordinatorError):
    """The coordinator does not (or no longer) know the run: its driver or a host must register it again."""


class RetiredRunError(CoordinatorError):
    """A newer run of the same query has taken over: this run may change nothing."""


class StaleOwnerError(CoordinatorError):
    """An acknowledgement came from a host, or an incarnation of a host, that does not own the partition."""


class StaleBatchError(CoordinatorError):
    """A task works on a batch that is not the newest batch of its run."""


class IncompleteBatchError(CoordinatorError):
    """Spark has committed a batch although some of its partitions never ran."""


class LineageError(CoordinatorError):
    """Changes were made on top of another state than the state that the manifests name."""


class FencedError(CoordinatorError):
    """Another coordinator has taken over the checkpoint."""


class UnknownOperatorError(CoordinatorError, UnknownLocationError):
    """No running query has the operator. The query that had it may be started again."""


class WrongOperatorError(UnknownOperatorError):
    """Several running queries have the operator, or the named query runs without it: a retry does not help."""


class UnknownFeatureViewError(UnknownOperatorError):
    """No running query has the feature view. The query that had it may be started again."""


class QueryEndedError(CoordinatorError, UnknownLocationError):
    """The query that had the operator has ended, and no newer run of it is running."""


class BatchHeldError(CoordinatorError):
    """The tasks of a batch have to wait: the query stops with a savepoint, or its files are being rewritten."""


class QueryBusyError(CoordinatorError):
    """Too many messages about one query wait for an answer, so that no other is accepted: its storage does not answer.

    Tasks and query clients retry until their timeout.
    """


class UnknownQueryError(CoordinatorError):
    """No running query has that name or id, or several have it."""


class InvalidRequestError(CoordinatorError):
    """A message names a partition or version that cannot exist."""


class LapsedHoldError(InvalidRequestError):
    """A hold has lapsed, or its coordinator was replaced: files written under it may be gone. Start from scratch."""


class InvalidTokenError(CoordinatorError):
    """A read-only token is malformed, unknown, revoked or expired."""


class CheckpointNotTriggeredError(CoordinatorError):
    """A checkpoint may not be triggered now, or its tasks could not be notified."""


class CheckpointCoordinatorShutdownError(CoordinatorError):
    """The checkpoint or savepoint coordinator is shut down."""


class SavepointFailedError(CoordinatorError):
    """A savepoint was not made: it could not be triggered or stored, or was cancelled."""


class SavepointExpiredError(SavepointFailedError):
    """A savepoint was not complete within the timeout."""


class SavepointDeclinedError(SavepointFailedError):
    """A task declined a savepoint."""


class SavepointError(CoordinatorError):
    """There is no savepoint at that place, or none can be made or restored there. Nothing was changed."""


class SavepointMismatchError(CoordinatorError):
    """A savepoint does not fit the program; the message lists the differences."""


class CheckpointPlaceError(CoordinatorError):
    """A checkpoint cannot be moved or forked as it is. No relevant file was changed."""


def error_of_class(
    name: str, message: str, unknown: type[Exception] = SparkBridgeError, others: Mapping[str, object] | None = None
) -> Exception:
    """Return the error of a class name and a message, as which it has crossed the network.

    The class is one of ``others``, of this module or of ``backends``, or else ``unknown``, whose message has the name.
    """
    for errors in (others or {}, globals(), vars(backend_errors)):
        kind = errors.get(name)
        if isinstance(kind, type) and issubclass(kind, Exception):
            # Not by its constructor, which may take other arguments than a message.
            rebuilt = kind.__new__(kind)
            rebuilt.args = (message,)
            return rebuilt
    return unknown(f"{name}: {message}")


MAX_LISTED = 10
"""An error about an unknown name lists at most this many names."""


def listed_names(name: str, names: Iterable[str]) -> str:
    """Return the end of an error about an unknown ``name``: the names that exist, and the one that was probably meant.

    ``'sums', 'totals'. Did you mean 'totals'?``, or ``none``.
    """
    ordered = sorted(set(names))
    text = ", ".join(map(repr, ordered[:MAX_LISTED])) or "none"
    if len(ordered) > MAX_LISTED:
        text += f" and {len(ordered) - MAX_LISTED} more"
    near = get_close_matches(name, ordered, n=1)
    return f"{text}. Did you mean {near[0]!r}?" if near else f"{text}."
