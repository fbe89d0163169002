"""The stream: payments of a topic become features per card, which a view names for the model."""

from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StreamingQuery

from ray_statestore import Feature, FeatureView, aggregate
from ray_statestore import functions as S

CARD_FRAUD = FeatureView(
    "card_fraud",
    entity="card",
    features=[
        Feature("payments", "cards", column="n_1m", default=0),
        Feature("spent", "cards", column="spent_1m", default=0.0),
        Feature("merchants", "cards", column="merchants_1m", default=0),
        Feature("usual", "cards", column="mean_10m", default=0.0),
    ],
    description="Payments of a card in the last minute, and its usual amount.",
)


def start(spark: SparkSession, bootstrap: str, topic: str, checkpoint: str) -> StreamingQuery:
    """Start the query over a topic of payments as JSON."""
    source = spark.readStream.format("kafka").option("kafka.bootstrap.servers", bootstrap)
    records = source.option("subscribe", topic).option("startingOffsets", "earliest").load()
    payment = F.from_json(F.col("value").cast("string"), "card long, amount double, merchant long, ms long")
    rows = records.select(payment.alias("payment")).select("payment.*")
    features = aggregate(
        rows.withColumn("ts", F.timestamp_millis("ms")).withWatermark("ts", "10 seconds"),
        by="card",
        operator="cards",
        event_time="ts",
        n=S.count().rolling("1 minute"),
        spent=S.sum("amount").rolling("1 minute"),
        merchants=S.approx_count_distinct("merchant").rolling("1 minute"),
        mean=S.mean("amount").rolling("10 minutes"),
    )
    writer = features.writeStream.outputMode("update").option("checkpointLocation", checkpoint)
    return writer.queryName("payments").format("noop").start()
