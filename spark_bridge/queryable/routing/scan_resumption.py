"""The rest of a scan whose stream has broken, partition by partition, from the hosts that own the partitions now.

A host gives its partitions one after the other, in the order in which they were asked for. The rows of a partition at
an exact version always come in the same order. So a stream is resumed by counting: the rows that were given already are
asked for again and dropped. Each partition is asked for by itself, for the partitions may have other owners by now. A
query that was restarted goes on from the version that it had, so its next run is asked for the rest; that run refuses
if it has made the version anew (a rollback). Rows that expire by the clock cannot be counted: a stream that has given
some of those is not resumed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
from msgspec.structs import replace

from coordinator_actor.exceptions import RetiredRunError
from coordinator_actor.messages import OperatorLocation
from spark_bridge.exceptions import ConnectionClosedError
from spark_bridge.queryable.protocol.messages import At, ScanRequest
from spark_bridge.queryable.protocol.request_context import raise_if_cancelled
from spark_bridge.queryable.routing.retries import Attempts, should_locate
from spark_bridge.queryable.routing.scan_sources import PendingScan, ScanSource, scan_source


@dataclass(frozen=True)
class ScanPlan:
    """The request of a scan, and the way to open its streams.

    - ``open_stream(address, request, deadline)`` sends the request without waiting for an answer.
    - ``address_of(location, partition)`` returns the address to ask for a partition.
    - ``relocate(error)`` finds out who owns what now, also if the query has been restarted. It raises
      ``RetiredRunError`` if no other run than that of ``location`` will do. With None, a broken stream is an error.
    - ``timeout``: the seconds that the resumption may take.
    - ``is_stable``: a second scan of a version finds the same rows.
    """

    request: ScanRequest
    location: OperatorLocation
    open_stream: Callable[[str, ScanRequest, float], PendingScan]
    address_of: Callable[[OperatorLocation, int], str]
    relocate: Callable[[Exception], OperatorLocation] | None
    timeout: float
    is_stable: bool = True
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


@dataclass(frozen=True)
class ScanResumption:
    """Reads on at ``version`` where a stream of ``plan`` has broken; ``relocate`` is that of the plan."""

    plan: ScanPlan
    version: int
    relocate: Callable[[Exception], OperatorLocation]

    def rows(self, partitions: Sequence[int], given: int, failure: Exception) -> Iterator[pa.RecordBatch]:
        """Yield the rows of ``partitions`` without the first ``given`` ones, which the broken stream has given.

        ``failure`` is the error of that stream. Raises what ``Attempts.delay`` raises if attempts no longer help.
        """
        plan = self.plan
        error: Exception | None = failure
        location = plan.location
        attempts = self._attempts()
        drop = given
        left = list(partitions)
        while left:
            if error is not None:
                plan.sleep(attempts.delay(error))
                if should_locate(error):
                    try:
                        location = self.relocate(error)
                    except RetiredRunError:
                        raise
                    except Exception as again:  # noqa: BLE001 - delay raises errors that no attempt can help
                        error = again
                        continue
                    self._check_same_rows(location)
            source: ScanSource | None = None
            seen = 0
            try:
                error = None
                source = self._opened(location, left[0])
                while (batch := source.read()) is not None:
                    attempts = self._attempts()
                    seen += batch.num_rows
                    behind = seen - drop
                    if behind <= 0:
                        raise_if_cancelled()
                    else:
                        yield batch.slice(max(0, batch.num_rows - behind))
                drop = max(0, drop - seen)
                del left[0]
            except Exception as again:
                if seen and not plan.is_stable:
                    raise
                drop = max(drop, seen)
                error = again
            finally:
                if source is not None:
                    source.close()

    def _opened(self, location: OperatorLocation, partition: int) -> ScanSource:
        plan = self.plan
        deadline = plan.clock() + plan.timeout
        address = plan.address_of(location, partition)
        request = replace(plan.request, at=At("version", self.version), partitions=[partition])
        if location.run_id != plan.location.run_id:
            request = replace(request, run_id=location.run_id, previous_run=plan.location.run_id)
        source = scan_source(plan.open_stream(address, request, deadline))
        if source.version != self.version:
            source.close()
            raise ConnectionClosedError(f"{address} answered version {source.version}, not {self.version}.")
        return source

    def _check_same_rows(self, location: OperatorLocation) -> None:
        """Raise ``RetiredRunError`` unless each partition has the same rows in the same order as when the scan
        began.
        """
        before = self.plan.location
        if location.query_id == before.query_id and _layout(location) == _layout(before):
            return
        raise RetiredRunError(
            f"Operator {before.operator.name!r} of query {before.query_id} (run {before.run_id}) was scanned, which "
            "then "
            f"ended; run {location.run_id} of query {location.query_id} has the operator now, with other state, "
            "partitions or "
            "columns: scan it again."
        )

    def _attempts(self) -> Attempts:
        plan = self.plan
        what = f"The rest of a scan of operator {plan.location.operator.name!r} at version {self.version}"
        return Attempts(what, plan.clock() + plan.timeout, had_answer=True, clock=plan.clock)


def _layout(location: OperatorLocation) -> tuple[object, ...]:
    """Return the properties that decide which rows a partition has, and how they are read."""
    return (location.operator.name, location.operator.schema, len(location.owners), location.key_groups)
