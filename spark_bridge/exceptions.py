"""Errors of the bridge between Spark, Ray and the state store."""

from __future__ import annotations


class SparkBridgeError(Exception):
    """Base of all errors raised by ``spark_bridge``."""


class EnvironmentProblemError(SparkBridgeError):
    """Java, Ray, RayDP or PySpark are missing or do not fit together."""


class SessionError(SparkBridgeError):
    """A Spark session is not, or already, joined to a state store."""


class InvalidOperatorError(SparkBridgeError, ValueError):
    """A stateful operator was declared wrongly; raised while the DataFrame is built."""


class StateStoreRefusedError(SparkBridgeError):
    """A query may not run; raised by its first tasks, before they touch state."""


class PartitionMismatchError(SparkBridgeError):
    """A state task runs somewhere else than on its own shuffle partition."""


class HostUnavailableError(SparkBridgeError):
    """No StateStoreHost answered within the time allowed."""


class NotOwnerError(SparkBridgeError):
    """A host was asked for a partition that it does not own or has not opened; ask for the owner again."""


class RequestError(SparkBridgeError, ValueError):
    """A request to a host was malformed."""


class QueryableStateError(SparkBridgeError):
    """A query client's request failed."""


class UnknownOperatorError(QueryableStateError):
    """No running query has the operator asked for, or several have it."""


class StateTooLargeError(SparkBridgeError):
    """One partition's part of a batch does not fit into one Arrow array."""
