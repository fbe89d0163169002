"""The listener that Spark's JVM calls at each event of its queries. It reads only the needed figures of a progress.

PySpark's own class copies each progress whole, of every query of the session. That takes a hundred calls into the JVM,
and each of its maps ends with an exception, whose class PySpark finds out by looking for packages in all jar files of
Spark. In short batches this was the largest part of the driver's time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pyspark.sql.streaming.listener import JStreamingQueryListener, StreamingQueryListener

BatchCommittedCallback = Callable[[str, int, Callable[[], str]], None]
"""Takes a run, the batch that Spark has committed, and what gives all figures of its progress, as JSON."""


class EventsInJava(JStreamingQueryListener):  # type: ignore[misc]
    """Hands events of the JVM to a listener: of a progress the run and the batch, and its JSON if it is asked for."""

    def __init__(self, listener: StreamingQueryListener, batch_committed: BatchCommittedCallback) -> None:
        super().__init__(listener)
        self._batch_committed = batch_committed

    def onQueryProgress(self, jevent: Any) -> None:
        """Tell which batch of which run Spark has committed."""
        progress = jevent.progress()
        run_id, batch_id = str(progress.runId().toString()), int(progress.batchId())
        self._batch_committed(run_id, batch_id, lambda: str(progress.json()))

    def onQueryIdle(self, jevent: Any) -> None:
        """Do nothing: an idle query has no new version."""
