"""A bank for the machines of a lab: each row moves money from one account to another, and no money is made or lost.

``python -m tests.lab.bank ADDRESS CHECKPOINT EXECUTORS [OPTIONS as JSON]``, on machine 0. What every account has at
every version is known without the stream (``accounts``). Prints where executors run, and a line for each batch.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql.functions import array, col, explode, struct

from spark_bridge import aggregate, init_spark, stop_spark
from spark_bridge import functions as S
from spark_bridge.session.executors import executor_cores
from tests.lab.accounts import ACCOUNTS, OPERATOR, TRANSFERS


def write(rows: DataFrame, batch: int) -> None:
    """Run the batch, and say so."""
    rows.write.format("noop").mode("overwrite").save()
    print(f"batch {batch}", flush=True)


def accounts(rows: DataFrame) -> DataFrame:
    """Return a row for each account that a transfer changes, and the state that follows."""
    n = col("value")
    giver, taker = n * 7 % ACCOUNTS, (n * 7 + 1 + n % 503) % ACCOUNTS
    amount = n % 97 + 1
    both = array(struct(giver.alias("k"), (-amount).alias("v")), struct(taker.alias("k"), amount.alias("v")))
    posted = rows.select(explode(both).alias("p")).select("p.k", "p.v")
    return aggregate(posted, by="k", operator=OPERATOR, n=S.count(), money=S.sum("v"))


def main(address: str, checkpoint: str, executors: int, options: dict[str, Any]) -> None:
    """Run the bank until it fails or its process receives a signal to end."""
    configs = {
        "spark.statestore.sharedFileSystem": "true",
        "spark.ui.enabled": "false",
        "spark.log.level": "ERROR",
        "spark.sql.shuffle.partitions": "4",
        **options.pop("configs", {}),
    }
    spark = init_spark("bank", executors, 1, "512m", ray_address=address, configs=configs, **options)
    try:
        print("executors", *executor_cores(spark), flush=True)
        source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", TRANSFERS)
        rows = source.option("startTimestamp", 1_000_000).option("numPartitions", 4).load()
        out = accounts(rows).writeStream.queryName("bank").foreachBatch(write)
        query = out.option("checkpointLocation", checkpoint).start()
        query.awaitTermination()
    finally:
        stop_spark()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4]) if len(sys.argv) > 4 else {})
