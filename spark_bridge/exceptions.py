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


class StatefulProcessorError(SparkBridgeError, RuntimeError):
    """A stateful processor, or its state, was used wrongly; the message begins with Spark's error condition.

    A RuntimeError, as PySpark's ``PySparkRuntimeError``.
    """


class StateDeclarationError(StatefulProcessorError, InvalidOperatorError):
    """A processor declared a state variable wrongly: twice, with an unfit name, schema or TTL."""


class HandleStateError(StatefulProcessorError):
    """A processor used its handle or its state at the wrong moment, such as state variables in ``init``."""


class TimeModeError(StatefulProcessorError, InvalidOperatorError):
    """A processor needs another time mode for what it does: timers without one, TTL without processing time."""


class IllegalStateValueError(StatefulProcessorError, ValueError, TypeError):
    """A value cannot be kept as state: None, an empty list, or one that does not fit its variable's schema.

    Also a TypeError, as which PySpark reports some of these.
    """


class ProcessorTesterError(SparkBridgeError, ValueError):
    """A ``ProcessorTester`` was used wrongly: time that goes backwards, a key of other types, an unknown variable."""
