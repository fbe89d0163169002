"""A model on Ray Serve that reads its features from a running stream: how unusual is a purchase for this user now?

    python examples/serve_features.py [directory]

The stream keeps number, mean and deviation of each user's purchases of the last day, and a feature view names them for
the model. The model asks for the features of all users of a request at once, as of the moment, in the cluster in which
both run. Nothing is copied to a feature store, and a score follows the last committed batch.
"""

import json
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from fastapi import FastAPI
from pydantic import BaseModel
from ray import serve

from ray_statestore import (
    AsyncQueryableStateClient,
    Feature,
    FeatureView,
    aggregate,
    declare_feature_view,
    init_spark,
    stop_spark,
)
from ray_statestore import functions as S

USERS, ROWS = 1_000, 50_000
VIEW = FeatureView(
    "unusual_purchases",
    entity="user",
    features=[
        Feature("recently", "spending", column="n_10m", default=0),
        Feature("mean", "spending", column="mean_24h"),
        Feature("deviation", "spending", column="deviation_24h"),
    ],
    owner="pricing@example.com",
    description="How often a user has bought in the last minutes, and what the user spends on a day.",
    max_age="1 hour",
)
app = FastAPI(title="Unusual purchases")


class Purchase(BaseModel):
    """A purchase to score."""

    user: int
    amount: float


def score_of(amount: float, mean: float | None, deviation: float | None) -> float | None:
    """Return the score of a purchase."""
    return None if mean is None or not deviation else float(round((amount - mean) / deviation, 2))


# Serve copies the class and its routes as they are here: what they use stands before them, and types are types (no
# "from __future__ import annotations").
# Lookups take next to no CPU, which is left to the executors.
@serve.deployment(num_replicas=1, max_ongoing_requests=200, ray_actor_options={"num_cpus": 0})
@serve.ingress(app)
class Unusual:
    """Scores purchases by how many standard deviations they are from what the user usually spends."""

    async def __init__(self) -> None:  # type: ignore[misc]  # Serve awaits it
        self.client = await AsyncQueryableStateClient.connect()

    @app.post("/score")
    async def score(self, purchases: list[Purchase]) -> list[dict[str, Any]]:
        """Return the score of each purchase; null for a user with too few purchases."""
        rows = await self.client.features(VIEW.name, [purchase.user for purchase in purchases])
        of = rows.to_dict()
        return [
            {"user": p.user, "amount": p.amount, "score": score_of(p.amount, mean, deviation), "recently": n}
            for p, n, mean, deviation in zip(purchases, of["recently"], of["mean"], of["deviation"], strict=True)
        ]


def write_purchases(directory: Path, usual: float) -> None:
    """Add a file of purchases of the last hour around an amount."""
    directory.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng()
    amount = rng.normal(usual, 5, ROWS).round(2)
    ts = pd.Timestamp.now("UTC") - pd.to_timedelta(rng.integers(0, 3_600_000, ROWS), unit="ms")
    times = ts.astype("datetime64[us, UTC]")
    purchases = pd.DataFrame({"user": rng.integers(0, USERS, ROWS), "amount": amount, "ts": times})
    purchases.to_parquet(directory / f"purchases-{time.time_ns()}.parquet", index=False)


def ask(*purchases: dict[str, float]) -> None:
    """Ask the model for scores, as any program can."""
    request = urllib.request.Request(
        "http://127.0.0.1:8000/score", json.dumps(purchases).encode(), {"Content-Type": "application/json"}
    )
    begun = time.perf_counter()
    with urllib.request.urlopen(request, timeout=60) as answer:
        scores = json.load(answer)
    print(f"{(time.perf_counter() - begun) * 1000:.1f} ms", *scores, sep="\n  ")


def main(directory: Path) -> None:
    """Stream the purchases into features per user, and score by these features while the stream goes on."""
    write_purchases(directory / "purchases", usual=50)
    spark = init_spark("features", num_executors=2, executor_cores=1, executor_memory="1g")
    try:
        purchases = spark.readStream.schema("user long, amount double, ts timestamp")
        features = aggregate(
            purchases.parquet(str(directory / "purchases")).withWatermark("ts", "1 hour"),
            by="user",
            operator="spending",
            event_time="ts",
            n=S.count().rolling("10 minutes"),
            mean=S.mean("amount").rolling("24 hours"),
            deviation=S.stddev("amount").rolling("24 hours"),
        )
        query = (
            features.writeStream.outputMode("update")
            .option("checkpointLocation", str(directory / "checkpoint"))
            .format("noop")
            .start()
        )
        declare_feature_view(VIEW)
        query.processAllAvailable()
        serve.run(Unusual.bind())  # type: ignore[attr-defined]

        at_hand = [{"user": 42, "amount": 52.0}, {"user": 42, "amount": 99.0}, {"user": 99_999, "amount": 1.0}]
        ask(*at_hand)
        write_purchases(directory / "purchases", usual=90)
        query.processAllAvailable()
        time.sleep(2)  # hosts are told of a batch within about a second after Spark has committed it
        ask(*at_hand)  # 99 is not so unusual any more
        query.stop()
    finally:
        serve.shutdown()
        stop_spark()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]).absolute())
    else:
        with tempfile.TemporaryDirectory(prefix="features-") as temporary:
            main(Path(temporary))
