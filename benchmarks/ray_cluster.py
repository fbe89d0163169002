"""The Ray cluster of a benchmark, as ``init_spark`` starts one, but without the dashboard, which would use CPU."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def own_ray(cpus: int, object_store_memory: int = 200 << 20) -> Iterator[None]:
    """Start Ray on this machine alone, for ``init_spark`` to join; all of it ends afterwards.

    ``object_store_memory`` is in bytes. A small value is enough, because streams have no objects; Ray's default is 30 %
    of the memory.
    """
    import ray

    directory = tempfile.mkdtemp(prefix="rs-", dir="/tmp")  # short: Ray's sockets live below it
    try:
        ray.init(
            address="local",
            num_cpus=cpus,
            namespace="statestore",
            log_to_driver=False,
            logging_level=logging.WARNING,
            include_dashboard=False,
            object_store_memory=object_store_memory,
            _temp_dir=directory,
            # Executors and hosts run as they do without Ray, not with its niceness of 15.
            _system_config={"worker_niceness": 0},
        )
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(directory, ignore_errors=True)
