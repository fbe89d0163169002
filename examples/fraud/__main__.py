"""Payments in Kafka, features in the stream's state, a model that reads them: ``python -m examples.fraud --help``."""

import argparse
import os
import tempfile
import time
from collections import deque
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyspark
import ray
from confluent_kafka import Producer
from ray import serve
from rich.console import Console

from examples.fraud import features, view
from examples.fraud.model import FraudModel
from examples.fraud.payments import TOPIC, payments
from ray_statestore import declare_feature_view, init_spark, stop_spark
from tests.services.artifacts import connector_jars
from tests.services.kafka import running_kafka

CONNECTOR = f"org.apache.spark:spark-sql-kafka-0-10_2.1{2 + (pyspark.__version__ > '4')}:{pyspark.__version__}"
LABEL_SECONDS = 3.0  # a bank waits weeks


def run(arguments: argparse.Namespace, screen: view.Screen, checkpoint: Path) -> None:
    """Send payments, have each scored, and teach the model by the labels that come later."""
    packages = connector_jars() or [CONNECTOR]
    spark = init_spark("fraud", 2, 1, "1g", packages=packages, configs={"spark.log.level": "OFF"})
    screen.say("Spark and the state store run. The stream and the model start ...")
    query = features.start(spark, arguments.bootstrap, TOPIC, str(checkpoint))
    declare_feature_view(features.CARD_FRAUD)
    query.processAllAvailable()
    model = serve.run(FraudModel.bind(features.CARD_FRAUD.name))  # type: ignore[attr-defined]
    producer = Producer({"bootstrap.servers": arguments.bootstrap, "linger.ms": 5})
    unlabelled, has_killed = deque[tuple[float, Any, Any]](), False
    screen.say("Payments begin. The model knows nothing yet.")
    begun = time.monotonic()
    for batch in islice(payments(arguments.rate), arguments.seconds * 10):
        for payment in batch:
            producer.produce(TOPIC, payment.record(), str(payment.card).encode())
        producer.poll(0)
        asked = time.monotonic()
        scores = model.score.remote([p.card for p in batch], [p.amount for p in batch]).result(timeout_s=60)
        now = time.monotonic()
        screen.add(batch, scores, now - asked)
        unlabelled.append((now, scores.inputs, np.array([p.is_fraud for p in batch])))
        if unlabelled[0][0] < now - 2 * LABEL_SECONDS:
            labelled = [one for one in unlabelled if one[0] < now - LABEL_SECONDS]
            model.learn.remote(np.vstack([one[1] for one in labelled]), np.hstack([one[2] for one in labelled]))
            unlabelled = deque(islice(unlabelled, len(labelled), None))
        if not has_killed and now - begun > arguments.seconds / 2:
            has_killed = True
            host = next(a for a in ray.util.list_named_actors(all_namespaces=True) if "StateStoreHost" in a["name"])
            ray.kill(ray.get_actor(**host), no_restart=False)
            screen.say(f"[b red]{host['name']} is killed.[/] The model keeps asking.")
        time.sleep(max(0.0, asked + 0.1 - time.monotonic()))
    screen.draw()
    producer.flush()
    query.stop()


def main() -> None:
    """Run the example with a new broker, or with yours."""
    parser = argparse.ArgumentParser("python -m examples.fraud", description=__doc__)
    parser.add_argument("--bootstrap", help="host:port of your broker, which has a topic `payments`")
    parser.add_argument("--seconds", type=int, default=60, help="how long payments are made (60)")
    parser.add_argument("--rate", type=int, default=500, help="payments a second (500)")
    parser.add_argument("--picture", type=Path, help="write the last screen to this SVG file")
    arguments = parser.parse_args()
    terminal = os.fdopen(os.dup(1), "w")
    console = Console(file=terminal, record=arguments.picture is not None, width=None if terminal.isatty() else 110)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fraud-")))
        log, name = tempfile.mkstemp(prefix="fraud-", suffix=".log")  # Ray, Spark and Kafka write there
        console.print(f"The output of Kafka, Ray and Spark goes to {name}")
        os.dup2(log, 1)
        os.dup2(log, 2)
        screen = view.Screen(console)
        stack.enter_context(screen.live)
        screen.say("Kafka, Ray and Spark start, which takes half a minute ...")
        if arguments.bootstrap is None:
            broker = stack.enter_context(running_kafka(directory))
            broker.topics.create(TOPIC, partitions=4)
            arguments.bootstrap = broker.address
        stack.callback(stop_spark)  # last, since callbacks run backwards
        stack.callback(serve.shutdown)
        run(arguments, screen, directory / "checkpoint")
    if arguments.picture is not None:
        console.save_svg(str(arguments.picture), title="python -m examples.fraud")


if __name__ == "__main__":
    main()
