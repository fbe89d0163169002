"""Ending a query that may not run before its first batch, with our words as the error that its user sees.

A listener cannot stop a query by raising an error, and ``stop()`` ends it without one. So the query is given its error,
and is marked as ended, while Spark's thread waits for the listener. That thread then looks whether the query was ended,
finds it so, and runs nothing: neither sources nor the checkpoint's offsets are touched.
"""

from __future__ import annotations

from typing import Any

from backends.storage.checkpoint_storage import CheckpointStorage
from coordinator_actor.durable.spark_commits import SparkCommits
from spark_bridge.operators.declared_operators import nodes


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

    Spark has one line for each source in the checkpoint, and takes no other number. It says so in an assertion that
    does not name the cause. Reads the names of ``offsets/`` and the last file there.
    """
    there = SparkCommits(checkpoint).num_sources()
    here = sum(node.nodeName().startswith("StreamingRelation") for node in nodes(execution.analyzedPlan()))
    if there is None or there == here:
        return None
    return (
        f"[STATE_STORE_INVALID_CONFIG_AFTER_RESTART] The query has {here} sources now, and the checkpoint "
        f"{checkpoint.location} goes on with {there}. Operators with a time mode (processingTime, eventTime), and "
        'aggregates with output_mode="append" and a watermark, have one source of their own, which makes batches while '
        f"nothing comes ({operators}). Give these operators the time mode and the output mode that they had, and the "
        "query the sources that it had, or use a new checkpoint location."
    )
