"""The changes of a task's commit, as they arrive over Arrow Flight; they are counted in the host's memory meanwhile."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from backends.encoding.columns import aligned_batch
from backends.encoding.sorted_pairs import SortedPairs
from backends.formats.changelog import Changes
from backends.host_memory import REQUESTS, HostMemory
from backends.ids import DEFAULT_FAMILY, check_name
from spark_bridge.exceptions import RequestError, StateTooLargeError
from spark_bridge.transport.protocol import END_OF_CHANGES, TaskIdentity


def received_changes(reader: Any, task: TaskIdentity, memory: HostMemory) -> Changes:
    """Return the changes of a stream of batches, each with its column family as its metadata.

    What has come is counted with each batch. Raises ``RequestError`` if the stream breaks off, and as ``changes_of``
    does.
    """
    received: dict[str, list[pa.RecordBatch]] = {DEFAULT_FAMILY: []}
    is_complete = False
    nbytes, held = 0, memory.note(REQUESTS, 0)
    for chunk in reader:
        metadata = None if chunk.app_metadata is None else chunk.app_metadata.to_pybytes()
        is_complete = chunk.data is None and metadata == END_OF_CHANGES
        if chunk.data is not None:
            family = DEFAULT_FAMILY if metadata is None else metadata.decode(errors="replace")
            received.setdefault(check_name("a column family", family), []).append(aligned_batch(chunk.data))
            nbytes += chunk.data.nbytes
            memory.resize(held, nbytes)
    if not is_complete:
        # Flight ends the stream of a client that was killed in the same way as a complete stream.
        raise RequestError(
            f"The changes of partition {task.partition} of operator {task.operator!r} (attempt {task.attempt}) "
            "broke off; nothing is committed."
        )
    # The batches of a family go when they have become one.
    families = {}
    for family in list(received):
        copied = sum(batch.nbytes for batch in received[family])
        memory.resize(held, nbytes + copied)
        families[family] = changes_of(received.pop(family))
        memory.resize(held, nbytes)
    return Changes(families)


def changes_of(batches: list[pa.RecordBatch]) -> SortedPairs:
    """Return the changes of one column family from its batches, in the order in which they came.

    Of a key that came several times the last change counts. Raises ``StateTooLargeError`` for more than 2 GiB,
    ``RequestError`` for null keys.
    """
    if not batches:
        return SortedPairs.empty()
    if len(batches) == 1:
        keys, values = batches[0].columns
    else:
        try:
            keys, values = (pa.concat_arrays([b.column(i) for b in batches]) for i in range(2))
        except pa.ArrowInvalid as error:
            raise StateTooLargeError(
                f"The changes of one partition and batch have more than 2 GiB in one column family ({error}): use more "
                "partitions (num_partitions=), or smaller batches."
            ) from error
    if keys.null_count:
        raise RequestError(f"{keys.null_count} of {len(keys)} changed keys are null.")
    return SortedPairs.last_wins(keys, values)
