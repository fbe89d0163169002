"""The demo's query client: looks up random aircraft in the running stream's state, one after the other.

Run as ``python -m spark_bridge.demo.lookup <LookupOptions as JSON>`` by ``app``.
"""

from __future__ import annotations

import logging
import random
import sys
import time
from typing import Any

import pandas as pd
import ray

from backends.decoders import json_decoder
from coordinator_actor.coordinator_conf import NAMESPACE
from spark_bridge import QueryableStateClient
from spark_bridge.demo.events import EventPipe, Failed, LookupAnswered, LookupOptions
from spark_bridge.demo.expected import FLIGHT_KEY
from spark_bridge.demo.flights import OPERATOR, find_flights_csv
from spark_bridge.demo.processes import end_with_parent

log = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 120.0
"""The demo kills a host, and a slow machine takes long to start another host."""


def look_up(options: LookupOptions, events: EventPipe) -> None:
    """Look up one random aircraft after the other, until this process is ended."""
    aircraft = pd.read_csv(find_flights_csv(), usecols=[FLIGHT_KEY])[FLIGHT_KEY].dropna().unique().tolist()
    ray.init(address=options.ray_address, namespace=NAMESPACE, log_to_driver=False)
    try:
        with QueryableStateClient.connect(timeout=ANSWER_TIMEOUT_S) as client:
            while True:
                key = random.choice(aircraft)
                started = time.perf_counter()
                value = client.get(OPERATOR, key)
                events.send(LookupAnswered(key, describe_value(value), (time.perf_counter() - started) * 1e3))
                time.sleep(options.pause_s)
    finally:
        ray.shutdown()


def describe_value(value: dict[str, Any] | None) -> str | None:
    """Return an aircraft's figures in words; None if the state has none."""
    if value is None:
        return None
    words = [f"{value['flights']} flights"]
    if value["air_time"] is not None:
        words.append(f"{value['air_time']:,} min in the air")
    if value["mean_delay"] is not None:
        words.append(f"delay {value['mean_delay']:+.1f} min on average, {value['worst_delay']:+d} at worst")
    words.append(f"last to {value['last_dest']} on {value['last_departure']:%Y-%m-%d %H:%M}")
    return ", ".join(words)


def main() -> None:
    """Look up as the options on the command line say; report an error to the parent and exit with 1."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    options = json_decoder(LookupOptions).decode(sys.argv[1])
    events = EventPipe(options.events_fd)
    end_with_parent()
    try:
        look_up(options, events)
    except Exception as error:
        log.exception("the demo's lookups failed")
        events.send(Failed(f"a lookup failed: {type(error).__name__}: {error}"))
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
