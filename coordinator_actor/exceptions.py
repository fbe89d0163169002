"""Errors of the coordinator. Each is rebuilt from class name and message when it crosses the network."""

from __future__ import annotations


class CoordinatorError(Exception):
    """Base of all errors that the coordinator raises on purpose."""


class CoordinatorStoppedError(CoordinatorError):
    """The coordinator has been stopped, or there is none."""


class UnknownHostError(CoordinatorError):
    """The coordinator does not know the host (any more): it must register again."""


class UnknownRunError(CoordinatorError):
    """The coordinator does not know the run (any more): driver or host must register it again."""


class RetiredRunError(CoordinatorError):
    """A newer run of the same query has taken over; this one may change nothing."""


class StaleOwnerError(CoordinatorError):
    """An acknowledgement came from a host, or an incarnation of it, that does not own the partition."""


class StaleBatchError(CoordinatorError):
    """A task works on a batch that is not the newest one of its run."""


class IncompleteBatchError(CoordinatorError):
    """Spark has committed a batch of which some partitions never ran."""


class LineageError(CoordinatorError):
    """Changes were made on top of another state than the one that the manifests name."""


class FencedError(CoordinatorError):
    """Another coordinator has taken over the checkpoint."""


class UnknownOperatorError(CoordinatorError):
    """No running query has the operator, or several have it."""


class InvalidRequestError(CoordinatorError):
    """A message names a partition or version that cannot be."""


def error_from(name: str, message: str) -> CoordinatorError:
    """The error of that class name, or a ``CoordinatorError`` naming it."""
    kind = globals().get(name)
    if isinstance(kind, type) and issubclass(kind, CoordinatorError):
        return kind(message)
    return CoordinatorError(f"{name}: {message}")
