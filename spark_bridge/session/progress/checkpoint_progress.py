"""The cost of a batch's checkpoint: time, bytes, requests to storage and what those cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from json import dumps
from typing import TYPE_CHECKING, Any

from backends.storage.sending.prices import Prices
from backends.storage.sending.request_counts import KINDS, RECEIVED, SENT
from spark_bridge.session.current import current_cluster
from spark_bridge.session.spark_settings import STORAGE_PRICES_CONF

if TYPE_CHECKING:
    from pyspark.sql.streaming import StreamingQuery

    from spark_bridge.session.hosts.state_cluster import StateCluster


@dataclass(frozen=True)
class CheckpointProgress:
    """The checkpoint of one batch, of all operators.

    ``duration_ms`` is from the first open to the durable manifest, None if no coordinator has seen both. ``requests``
    are those of hosts and coordinator to storage since the checkpoint before, by kind (put, get, head, list, delete);
    ``sent_bytes`` and ``received_bytes`` are the bytes of their files. ``dollars`` is what they cost by the setting
    ``spark.statestore.storagePrices``.
    """

    batch_id: int
    duration_ms: int | None
    delta_bytes: int
    requests: dict[str, int] = field(default_factory=dict)
    sent_bytes: int = 0
    received_bytes: int = 0
    dollars: float = 0.0

    @property
    def json(self) -> str:
        """The figures as JSON."""
        return dumps(asdict(self), separators=(",", ":"))


def checkpoint_progress(query: StreamingQuery) -> CheckpointProgress | None:
    """Return the newest completed checkpoint of a query; None before the first."""
    prices = prices_of(query._jsq.sparkSession().conf())
    return newest_checkpoint(current_cluster(), str(query.runId), prices)


def newest_checkpoint(cluster: StateCluster, run_id: str, prices: Prices) -> CheckpointProgress | None:
    """Return the newest completed checkpoint of a run; None before the first."""
    run = next((q for q in cluster.coordinator.describe()["queries"] if q["run_id"] == run_id), None)
    record = None if run is None else run["last_checkpoint"]
    return None if record is None else progress_of_record(record, prices)


def progress_of_record(record: Mapping[str, Any], prices: Prices) -> CheckpointProgress:
    """Return the progress that a ``CheckpointRecord``, as plain data, tells of."""
    used = record["storage"]
    return CheckpointProgress(
        batch_id=record["version"] - 1,
        duration_ms=record["duration_ms"],
        delta_bytes=record["delta_bytes"],
        requests={kind: used.get(kind, 0) for kind in KINDS.values()},
        sent_bytes=used.get(SENT, 0),
        received_bytes=used.get(RECEIVED, 0),
        dollars=prices.dollars(used),
    )


def prices_of(conf: Any) -> Prices:
    """Return the prices that the settings of a session give, of PySpark or of the JVM.

    Raises ``InvalidStateStoreArgument`` for a setting that is none.
    """
    return Prices.parse(str(conf.get(STORAGE_PRICES_CONF, "") or ""))
