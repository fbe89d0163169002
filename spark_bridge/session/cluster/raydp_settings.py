"""Settings of RayDP for a session that outlives its machines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coordinator_actor.coordinator_conf import HEAD_NODE

INSTANCES = "spark.executor.instances"
MASTER_RESOURCES = "spark.ray.raydp_spark_master.actor.resource."
SHUFFLE = {
    # A machine that is cut off sends no reset. Spark would wait two minutes for its part of a shuffle.
    "spark.shuffle.io.connectionTimeout": "5s",
    "spark.shuffle.io.connectionCreationTimeout": "3s",
    # A machine that stands still for half a minute is waited for all the same.
    "spark.shuffle.io.retryWait": "1s",
    "spark.shuffle.io.maxRetries": "8",
}
"""How long tasks wait for a machine from which they fetch what a shuffle has written. Where the driver knows that an
executor is lost, they try no more.
"""


def master_on_head(given: Mapping[str, str]) -> dict[str, str]:
    """Return settings that put RayDP's two master actors beside Ray's head, unless the user has said where.

    They ask for nothing otherwise, and Ray puts them on any node. Executors that are lost do not come back without
    them, so the loss of one machine would end the session with some bad luck.
    """
    if any(name.startswith(("spark.ray.raydp_spark_master.resource.", MASTER_RESOURCES)) for name in given):
        return {}
    return {f"{MASTER_RESOURCES}CPU": "0", f"{MASTER_RESOURCES}{HEAD_NODE}": "0.001"}


class MasterSettings(dict[str, str]):
    """Settings of a session, which reach RayDP's master without the number of executors.

    The master starts no executor where ``INSTANCES`` of them are registered or were ever started again by Ray: it
    never takes one of the latter off. A session of N executors that has lost N of them over time, and whose driver then
    asks for one in the place of another that is lost, would not get it. Without the setting the master starts what the
    driver asks for. RayDP hands its master a pickled copy, and adds the number to this object itself.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, ({name: value for name, value in self.items() if name != INSTANCES},)
