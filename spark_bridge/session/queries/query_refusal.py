"""Ending a query that may not run before its first batch, with our words as the error that its user sees.

A listener cannot stop a query by raising an error, and ``stop()`` ends it without one. So the query is given its error,
and is marked as ended, while Spark's thread waits for the listener. That thread then looks whether the query was ended,
finds it so, and runs nothing: neither sources nor the checkpoint's offsets are touched.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from backends.storage.checkpoint_storage import CheckpointStorage
from coordinator_actor.durable.spark_commits import SparkCommits
from spark_bridge.operators.declared_operators import nodes

RATE = "rate"
"""Spark's name for the sources that make batches on a quiet stream."""


def end_with(jvm: Any, execution: Any, message: str) -> None:
    """End a query (a JVM ``StreamExecution``) that has not begun; ``query.exception()`` then has the message.

    To be called in ``onQueryStarted``; of a query that runs already, ``query.stop()`` must follow. Raises
    ``Py4JError`` where Spark's classes are not as those of 3.5 and 4.2.
    """
    kind = execution.getClass()
    # State and its cases stand beside StreamExecution, whose package is another one since Spark 4.1.
    package = kind.getPackage().getName()
    ended = kind.getClassLoader().loadClass(f"{package}.TERMINATED$").getField("MODULE$").get(None)
    parameters = jvm.java.util.HashMap()
    for name, value in (("id", execution.id()), ("runId", execution.runId()), ("message", message)):
        parameters.put(name, str(value))
    cause = jvm.java.lang.IllegalStateException(message)
    words = jvm.PythonUtils.toScalaMap(parameters)
    error = jvm.org.apache.spark.sql.streaming.StreamingQueryException("", cause, "", "", "STREAM_FAILED", words)
    getattr(execution, "streamDeathCause_$eq")(error)
    execution.state().set(ended)


def sources_refusal(execution: Any, checkpoint: CheckpointStorage, operators: str) -> str | None:
    """Return why a query cannot go on from its checkpoint with the sources that it has now, or None if it can.

    Spark tells sources apart by their places. It takes no other number of them, which it says in an assertion that does
    not name the cause, and it gives the offset of a source to whichever source has the place now. Reads the names of
    ``offsets/``, the last file there, and a file for each ``rate`` source.
    """
    there = SparkCommits(checkpoint).sources()
    if there is None:
        return None
    here = [node for node in nodes(execution.analyzedPlan()) if node.nodeName().startswith("StreamingRelation")]
    rates = {place for place, node in enumerate(here) if node.sourceName() == RATE}
    has_as_many = there.num_sources in (None, len(here))
    if has_as_many and there.rates <= rates <= there.numbered:
        return None
    if has_as_many:
        differs = (
            f"sources that make batches while nothing comes at {_places(rates)} among its sources now, and the "
            f"checkpoint {checkpoint.location} goes on with {_places(there.rates)}"
        )
    else:
        differs = f"{len(here)} sources now, and the checkpoint {checkpoint.location} goes on with {there.num_sources}"
    return (
        f"[STATE_STORE_INVALID_CONFIG_AFTER_RESTART] The query has {differs}. Operators with a time mode "
        '(processingTime, eventTime), and aggregates with output_mode="append" and a watermark, have one source of '
        f"their own, which makes batches while nothing comes ({operators}). Give these operators the time mode and the "
        "output mode that they had, and the query the sources that it had, or use a new checkpoint location."
    )


def _places(places: Collection[int]) -> str:
    return ", ".join(f"place {place + 1}" for place in sorted(places)) or "no place"
