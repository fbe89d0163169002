"""Asks the running query whether Spark is at a batch, for no event tells of a batch that has begun."""

from __future__ import annotations

import logging
from typing import Any

from py4j.protocol import Py4JError

log = logging.getLogger(__name__)


def is_at_work(execution: Any) -> bool:
    """Return whether Spark has rows for a batch, and has not committed it. ``execution`` is Java's ``StreamingQuery``.

    A stream that only looks for rows is not at work. False where Java does not answer, as when its session ends.
    """
    try:
        status = execution.status()
        return bool(status.isTriggerActive() and status.isDataAvailable())
    except (Py4JError, OSError) as error:
        log.info("Spark does not say whether it is at a batch: %s", error)
        return False
