"""Feature views of running streams: declared next to them, and read while they run, restart and end."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace
from pyspark.sql import DataFrame

from ray_statestore import Feature, FeatureView
from spark_bridge import (
    CheckpointClient,
    QueryableStateClient,
    aggregate,
    declare_feature_view,
    drop_feature_view,
)
from spark_bridge import functions as S
from spark_bridge.cli.main import app
from spark_bridge.exceptions import RequestError, UnknownFeatureViewError, UnknownOperatorError
from spark_bridge.queryable.client.features import FeatureRows
from tests.command_line import CliRunner
from tests.patience import PATIENCE
from tests.spark_bridge.conftest import Stream, settle
from tests.spark_bridge.queryable.memory_reads import eventually

pytestmark = pytest.mark.spark

VIEW = FeatureView(
    "card",
    entity="k",
    features=[
        Feature("n", "counts", default=0),
        Feature("total", "sums"),
        Feature("largest", "sums", column="most", default=-1.0),
    ],
    owner="fraud",
    max_age="1 hour",
)


@pytest.mark.spark42
def test_a_view_over_two_queries(make_stream: Callable[..., Stream]) -> None:
    counts, sums = make_stream(), make_stream()

    def begin(stream: Stream, frame: DataFrame, name: str) -> Any:
        writer = frame.writeStream.outputMode("update").option("checkpointLocation", stream.checkpoint).format("noop")
        return writer.queryName(name).start()

    def counting() -> Any:
        return begin(counts, aggregate(counts.read(), by="k", operator="counts", n=S.count()), "counting")

    with pytest.raises(UnknownOperatorError, match="'counts'"):
        declare_feature_view(VIEW)
    summing = aggregate(sums.read(), by="k", operator="sums", total=S.sum("v"), most=S.max("v"))
    queries = [counting(), begin(sums, summing, "summing")]
    for wrong in (Feature("x", "counts"), Feature("n", "counts", default="none")):
        with pytest.raises(RequestError, match=r"'counts' has no column 'x'|default='none'"):
            declare_feature_view(replace(VIEW, features=[wrong]))
    declare_feature_view(VIEW)
    for step in range(3):
        for stream in (counts, sums):
            stream.add([(key, float(step)) for key in range(5)])
    settle(queries[0])
    settle(queries[1])
    with QueryableStateClient.connect() as client:

        def features(**options: Any) -> FeatureRows:
            return client.features("card", [3, 99], **options)

        wanted = {"k": [3, 99], "n": [3, 0], "total": [3.0, None], "largest": [2.0, -1.0]}
        assert features().to_dict() == wanted
        assert features().versions == {"counting": 3, "summing": 3}
        assert all(age is not None and 0 <= age < PATIENCE for age in features().ages.values())
        assert features(versions={"counting": 1, "summing": 2}).to_dict()["n"] == [1, 0]
        queries[0].stop()
        queries[0] = counting()
        counts.add([(3, 9.0)])
        settle(queries[0])
        assert features().to_dict()["n"] == [4, 0]
        listed = CliRunner().invoke(app, ["features", "--checkpoint", counts.checkpoint, "--json"])
        (view,) = json.loads(listed.stdout)
        assert (view["view"], view["owner"]) == ("card", "fraud")
        assert "has no operator 'sums'" in view["problem"]
        declare_feature_view(replace(VIEW, features=[Feature("n", "counts")]))
        eventually(lambda: features().to_dict().keys() == {"k", "n"})
        for query in queries:
            query.stop()
        assert features().to_dict()["n"] == [4, None]
        with CheckpointClient.open(counts.checkpoint) as stored:
            assert stored.features("card", [3, 99]).to_dict() == {"k": [3, 99], "n": [4, None]}
        queries[0] = counting()
        drop_feature_view("card")
        with pytest.raises(UnknownFeatureViewError, match="there is nothing to drop"):
            drop_feature_view("card")
        queries[0].stop()
