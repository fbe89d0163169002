"""A small stream for the machines of a lab: counts and sums over 100 keys, as long as it is let run.

``python -m tests.lab.stream ADDRESS CHECKPOINT EXECUTORS``, on machine 0. Prints the addresses of the executors, and
a line for each batch. The sum of a key follows from its count, so that any reader can check the state: key k has seen
k, k + 100, k + 200 and so on.
"""

from __future__ import annotations

import sys

from pyspark.sql import DataFrame
from pyspark.sql.functions import col

from spark_bridge import aggregate, init_spark, stop_spark
from spark_bridge import functions as S
from spark_bridge.session.executors import executor_cores

KEYS = 100
ROWS_PER_SECOND = 1000
OPERATOR = "totals"


def write(rows: DataFrame, batch: int) -> None:
    """Run the batch, and say so."""
    rows.write.format("noop").mode("overwrite").save()
    print(f"batch {batch}", flush=True)


def main(address: str, checkpoint: str, executors: int) -> None:
    """Run the stream until it fails or its process receives a signal to end."""
    configs = {
        "spark.statestore.sharedFileSystem": "true",
        "spark.ui.enabled": "false",
        "spark.log.level": "ERROR",
    }
    spark = init_spark("lab", executors, 1, "512m", ray_address=address, configs=configs)
    try:
        print("executors", *executor_cores(spark), flush=True)
        rows = spark.readStream.format("rate").option("rowsPerSecond", ROWS_PER_SECOND).load()
        keyed = rows.select((col("value") % KEYS).alias("k"), col("value").alias("v"))
        totals = aggregate(keyed, by="k", operator=OPERATOR, n=S.count(), sum=S.sum("v"))
        query = totals.writeStream.queryName("lab").foreachBatch(write).option("checkpointLocation", checkpoint).start()
        query.awaitTermination()
    finally:
        stop_spark()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
