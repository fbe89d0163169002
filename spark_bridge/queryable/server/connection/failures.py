"""Errors on their way to a client."""

from __future__ import annotations

import logging

from backends.exceptions import StateStoreError
from coordinator_actor.exceptions import CoordinatorError
from spark_bridge.exceptions import SparkBridgeError
from spark_bridge.queryable.protocol.messages import Failure

log = logging.getLogger(__name__)

PUBLIC_ERRORS = (SparkBridgeError, CoordinatorError, StateStoreError)
MAX_MESSAGE_CHARS = 8192


def failure_of(error: Exception) -> Failure:
    """Return the ``Failure`` that tells a client of an error.

    The project's own errors cross the network with their text. Of other errors only the class does, because their text
    may disclose too much.
    """
    name = type(error).__name__
    if isinstance(error, PUBLIC_ERRORS):
        message = str(error)
        if len(message) > MAX_MESSAGE_CHARS:
            message = f"{message[:MAX_MESSAGE_CHARS]} ... ({len(message):,} characters)"
        return Failure(name, message)
    log.error("Unexpected error while answering a request", exc_info=error)
    return Failure(name, "The host failed to answer; its log says why.")
